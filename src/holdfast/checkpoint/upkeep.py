"""Removing old steps, and what crashes left behind.

A step is removed manifest first: from then on it does not exist, whatever happens to its parts. Files that
belong to no committed step are leftovers, unless a live writer holds their lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from holdfast import faults
from holdfast.checkpoint.steps import PINS
from holdfast.coord import HELLO, Agreement
from holdfast.errors import HoldfastError
from holdfast.format import MANIFEST, parse_file_name, parse_step_folder, read_manifest, step_folder
from holdfast.storage import TEMPORARY, LocalStore
from holdfast.vault import AGREEMENT, WORK, intended, keep_for_recycling


def remove_step(store: LocalStore, step: int, *, recycle: bool = False) -> None:
    """Remove a committed step, durably from the first moment. Fails: StorageError."""
    folder = step_folder(step)
    store.remove(folder, MANIFEST)
    store.sync_folder(folder)  # the step is gone before any of its bytes is
    faults.site("trainer.prune.manifest")
    for name in store.names(folder):
        known = parse_file_name(name) is not None or name.startswith(TEMPORARY)
        if known and not (recycle and keep_for_recycling(store, folder, name)):
            store.remove(folder, name)
    faults.site("trainer.prune.parts")
    store.remove(WORK, PINS, folder)
    if not store.names(folder):  # a file that is not ours stays where its owner put it
        store.remove_folder(folder)
    store.sync_folder()


def leftovers(store: LocalStore) -> list[tuple[str, ...]]:
    """The names of files that belong to no committed step and to no live writer."""
    found: list[tuple[str, ...]] = []
    for name in store.names():
        if name.startswith(TEMPORARY) and not store.is_written(name):
            found.append((name,))
        if parse_step_folder(name) is not None:
            found.extend((name, file) for file in _leftover_files(store, name))
    return found


def _leftover_files(store: LocalStore, folder: str) -> list[str]:
    attempt: str | None = None
    if store.exists(folder, MANIFEST):
        try:
            attempt = read_manifest(store, folder).save.attempt
        except HoldfastError:
            return []  # a damaged step is evidence, not rubbish: it is replaced or pruned, not swept
    names = store.names(folder)
    live = {_attempt(name) for name in names if store.is_written(folder, name)}
    return [
        name
        for name in names
        if name != MANIFEST
        and not store.is_written(folder, name)
        and (
            name.startswith(TEMPORARY)
            or ((of := _attempt(name)) is not None and of != attempt and of not in live)
        )
    ]


def _attempt(name: str) -> str | None:
    parsed = parse_file_name(name)
    return parsed.attempt if parsed is not None and parsed.kind != "manifest" else None


def clean(store: LocalStore, note: Callable[[str, str], None]) -> None:
    """Remove leftovers; `note(path, reason)` is told of each. Errors leave the file for next time."""
    for names in leftovers(store):
        with suppress(HoldfastError):
            if store.remove(*names):
                note("/".join(names), "left by a save that was never committed")
    for name in store.names():
        if parse_step_folder(name) is not None and not store.names(name):
            with suppress(HoldfastError):
                store.remove_folder(name)

    intended(store)  # forgets intents that nobody holds
    _clean_agreement(store)


def clean_topics(store: LocalStore, agreement: Agreement) -> None:
    """Free the ballots of saves that nobody is at work on."""
    live = _live_attempts(store)
    for topic in agreement.topics():
        if topic.partition(".")[2] not in live:
            with suppress(HoldfastError):
                agreement.forget(topic)


def _live_attempts(store: LocalStore) -> set[str | None]:
    """The attempts of saves whose files are being written."""
    return {
        _attempt(name)
        for folder in store.names()
        if parse_step_folder(folder) is not None
        for name in store.names(folder)
        if store.is_written(folder, name)
    }


def _clean_agreement(store: LocalStore) -> None:
    """Remove what earlier launches wrote to find each other, and their ballots of saves that are over.

    Whatever agreement this launch uses: the last one may have had other ranks, or none of them a coordinator.
    """
    live = _live_attempts(store)
    for name in store.names(WORK, AGREEMENT, HELLO):
        with suppress(HoldfastError):
            store.remove(WORK, AGREEMENT, HELLO, name)
    for name in store.names(WORK, AGREEMENT):
        topic, _, what = name.rpartition(".")
        stale = what == "decision" or what.startswith("vote-") or name.startswith(TEMPORARY)
        if stale and topic.partition(".")[2] not in live:
            with suppress(HoldfastError):
                store.remove(WORK, AGREEMENT, name)


def in_flight(store: LocalStore) -> list[int]:
    """The uncommitted steps that live writers are at work on or have accepted, ascending."""
    found = set(intended(store))
    for name in store.names():
        step = parse_step_folder(name)
        if step is not None and any(store.is_written(name, file) for file in store.names(name)):
            found.add(step)
    return sorted(step for step in found if not store.exists(step_folder(step), MANIFEST))
