"""Whose the files of a step folder are: a committed save's, a live writer's, or nobody's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.errors import HoldfastError
from holdfast.format import MANIFEST, parse_file_name, read_manifest
from holdfast.storage import Store
from holdfast.vault.intents import accepted


def attempt_in(name: str) -> str | None:
    """The attempt whose part or index a file is by its name."""
    parsed = parse_file_name(name)
    return parsed.attempt if parsed is not None and parsed.kind != "manifest" else None


def announced_attempts(store: Store) -> set[str]:
    """The attempts that live writers have announced."""
    return {one.attempt for one in accepted(store)}


def locked_attempts(store: Store, folder: str, names: Sequence[str]) -> set[str]:
    """The attempts of which a live process has a file locked."""
    found = ((name, attempt_in(name)) for name in names)
    return {attempt for name, attempt in found if attempt is not None and store.is_written(folder, name)}


def dead_attempts(store: Store, folder: str, names: Sequence[str], announced: Collection[str]) -> list[str]:
    """Of the attempts that have files in a folder: those that are not committed and that nobody is at.

    The order matters. What is listed (`names`) was announced before it was written, so a live writer is seen
    afterwards (`announced`), or by its locks; and one that committed meanwhile, and let go of both, has its
    manifest by the time that is looked for. A manifest that cannot be read may be that of any.
    """
    attempts = {attempt for name in names if (attempt := attempt_in(name)) is not None} - {*announced}
    if store.has_locks:
        attempts -= locked_attempts(store, folder, names)
    if attempts and store.exists(folder, MANIFEST):
        try:
            attempts.discard(read_manifest(store, folder).save.attempt)
        except HoldfastError:
            return []
    return sorted(attempts)
