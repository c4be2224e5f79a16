"""Removing from a mirror what copies that were given up have left there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from holdfast.errors import StorageError
from holdfast.format import MANIFEST, parse_step_folder, step_folder
from holdfast.storage import Store
from holdfast.vault.intents import revoke, sweep_fences
from holdfast.vault.mirror_copy import attempt_of
from holdfast.vault.mirror_plan import rubbish
from holdfast.vault.remains import announced_attempts, attempt_in


def sweep(mirror: Store, local: Collection[int], busy: Collection[int]) -> Iterator[str]:
    """Remove files and uploads that no step there needs and nobody is at; the path of each.

    `local` are the steps that are committed in the folder, `busy` those that are due or under way. Only rank
    0 calls this, on the thread that also commits. Fails: StorageError.
    """
    folders = {step: name for name in mirror.names() if (step := parse_step_folder(name)) is not None}
    committed = set(mirror.having(list(folders.values()), MANIFEST))
    # Of the whole steps only those are looked into that are here too: others may be many, and are not written
    # to. One that cannot be read names no attempt: everything in its folder is evidence.
    whole = {
        step: (attempt_of(mirror, step) or "") if step in local else ""
        for step, name in folders.items()
        if name in committed
    }
    found = {step: mirror.names(name) for step, name in folders.items() if whole.get(step) != ""}
    # After the listing: whoever was at what is listed has announced it by now.
    live = announced_attempts(mirror)
    for step, name in rubbish(found, whole, busy):
        folder, attempt = folders[step], attempt_in(name)
        if attempt in live or (attempt is not None and not revoke(mirror, step, attempt)):
            continue  # another process may commit it yet
        if mirror.is_written(folder, name) or (attempt is not None and _is_step(mirror, step, attempt)):
            continue
        if mirror.remove(folder, name):
            yield mirror.path(folder, name)
            with suppress(StorageError):  # others are in it, or another process was quicker
                if not mirror.names(folder):
                    mirror.remove_folder(folder)
    for upload in mirror.uploads():
        step_of = parse_step_folder(upload.names[0]) if upload.names else None
        ours = step_of is not None and step_of not in busy and step_of <= max(whole, default=-1)
        if ours and attempt_in(upload.names[-1]) not in live:
            mirror.drop_upload(upload)
            yield mirror.path(*upload.names)
    sweep_fences(mirror)


def _is_step(mirror: Store, step: int, attempt: str) -> bool:
    """Whether a step is committed there by now, as far as can be told by this attempt.

    Asked last: who has committed lets go of intent and locks afterwards.
    """
    return mirror.exists(step_folder(step), MANIFEST) and attempt_of(mirror, step) in (attempt, None)
