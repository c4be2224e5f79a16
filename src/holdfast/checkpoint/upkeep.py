"""Removing old steps, and what crashes left behind.

A step is removed manifest first: from then on it does not exist, whatever happens to its parts. Files that
belong to no committed step are leftovers, unless a live writer holds their lock, or announces itself where
there are no locks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from holdfast import faults
from holdfast.checkpoint.steps import PINS
from holdfast.coord import HELLO, Agreement
from holdfast.errors import HoldfastError, MissingPathError, StorageError
from holdfast.format import MANIFEST, parse_step_folder, step_folder
from holdfast.storage import PROBE, TEMPORARY, Store
from holdfast.vault import (
    AGREEMENT,
    WORK,
    accepted,
    announced_attempts,
    attempt_in,
    dead_attempts,
    keep_for_recycling,
    locked_attempts,
    revoke,
    sweep_fences,
)

log = logging.getLogger("holdfast.checkpoint")

_PROBE_S: Final = 3600.0
"""No probe of a store takes longer; what is older was left by a crash."""


def remove_step(store: Store, step: int, *, recycle: bool = False) -> None:
    """Remove a committed step, durably from the first moment; one that is gone is left at that.

    Fails: StorageError.
    """
    folder = step_folder(step)
    store.remove(folder, MANIFEST)
    with suppress(MissingPathError):  # another process removes it too, and was quicker
        store.sync_folder(folder)  # the step is gone before any of its bytes is
    faults.site("trainer.prune.manifest")
    names = store.names(folder)
    # Another save of this step, or a copy of one, may be on its way: its parts are not those of this one.
    dead = dead_attempts(store, folder, names, announced_attempts(store))
    doomed = []
    for name in names:
        if name.startswith(TEMPORARY):
            gone = not (store.has_locks and store.is_written(folder, name))
        else:
            gone = attempt_in(name) in dead
        if gone and not (recycle and keep_for_recycling(store, folder, name)):
            doomed.append(name)
    store.remove_all(folder, doomed)
    faults.site("trainer.prune.parts")
    store.remove(WORK, PINS, folder)
    if not store.names(folder):  # a file that is not ours stays where its owner put it
        with suppress(StorageError):  # another process was quicker, or begins to fill it
            store.remove_folder(folder)
    store.sync_folder()


def leftovers(store: Store) -> list[tuple[str, ...]]:
    """The names of files that belong to no committed step and to no live writer."""
    listed = _listed(store)
    found: list[tuple[str, ...]] = [
        (folder, name) for (folder, _), names in _dead(store, listed).items() for name in names
    ]
    if store.has_locks:
        made: list[tuple[str, ...]] = [(name,) for name in store.names()]
        made += [(folder, name) for folder, names in listed.items() for name in names]
        found += [one for one in made if one[-1].startswith(TEMPORARY) and not store.is_written(*one)]
    return found


def _listed(store: Store) -> dict[str, list[str]]:
    """The names in each step folder."""
    if store.has_locks:  # not all that may lie beside them, however deep
        return {name: store.names(name) for name in store.names() if parse_step_folder(name) is not None}
    found: dict[str, list[str]] = {}
    for names in store.walk():  # where every folder would cost a request
        if len(names) == 2 and parse_step_folder(names[0]) is not None:
            found.setdefault(names[0], []).append(names[1])
    return found


def _dead(store: Store, listed: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], list[str]]:
    """By folder and attempt: the files of saves that are not committed and whose writers look dead."""
    announced = announced_attempts(store)
    dead: dict[tuple[str, str], list[str]] = {}
    for folder, names in listed.items():
        # A manifest beside the files of one attempt is theirs, or the step is damaged, which is evidence.
        if MANIFEST in names and len({attempt_in(name) for name in names} - {None}) == 1:
            continue
        for attempt in dead_attempts(store, folder, names, announced):
            dead[folder, attempt] = [name for name in names if attempt_in(name) == attempt]
    return dead


def clean(store: Store, note: Callable[[str, str], None]) -> None:
    """Remove leftovers; `note(path, reason)` is told of each. Errors leave the file for next time."""
    if not store.has_locks:
        sweep(store, note)
    for names in leftovers(store) if store.has_locks else ():
        with suppress(HoldfastError):
            if store.remove(*names):
                # Whoever is told writes it down; a file system lets in names that are no text.
                path = "/".join(names).encode(errors="replace").decode()
                note(path, "left by a save that was never committed")
    if store.has_locks:
        _remove_empty_folders(store)
    accepted(store)  # forgets intents that nobody holds
    _clean_agreement(store)


def _remove_empty_folders(store: Store) -> None:
    empty = [name for name in store.names() if parse_step_folder(name) is not None and not store.names(name)]
    # After the listing: who made one of them has announced what goes into it by now.
    awaited = {step_folder(one.step) for one in accepted(store)}
    for name in empty:
        if name not in awaited:
            with suppress(HoldfastError):
                store.remove_folder(name)


def sweep(store: Store, note: Callable[[str, str], None]) -> None:
    """Remove what killed or failed writers left on an object store, also beside live ones.

    Each save is revoked before its files go. `note(path, reason)` is told of each file.
    """
    try:
        uploads = store.uploads()
    except HoldfastError as error:
        log.warning("%s", error)
        uploads = []
    for (folder, attempt), names in _dead(store, _listed(store)).items():
        with suppress(HoldfastError):
            step = parse_step_folder(folder)
            if step is None or not revoke(store, step, attempt):
                continue  # it may be committed yet
            store.remove_all(folder, names)
            for name in names:
                note(f"{folder}/{name}", "left by a save that was never committed")
    live = _live_attempts(store)
    for upload in uploads:
        attempt_of = attempt_in(upload.names[-1])
        if len(upload.names) == 2 and attempt_of is not None and attempt_of not in live:
            with suppress(HoldfastError):
                store.drop_upload(upload)
                note("/".join(upload.names), "an upload that was never finished")
    with suppress(HoldfastError):
        sweep_fences(store)
    for name in store.names(WORK):
        if name.startswith(PROBE) and (store.age_s(WORK, name) or 0.0) > _PROBE_S:
            with suppress(HoldfastError):
                store.remove(WORK, name)


def clean_topics(store: Store, agreement: Agreement) -> None:
    """Free the ballots of saves that nobody is at work on."""
    topics = agreement.topics()
    live = _live_attempts(store)  # after the listing: who votes has announced the save before
    for topic in topics:
        if topic.partition(".")[2] not in live:
            with suppress(HoldfastError):
                agreement.forget(topic)


def _live_attempts(store: Store) -> set[str]:
    """The attempts of saves whose files are being written, and the sessions they belong to."""
    live = announced_attempts(store)
    if store.has_locks:
        for folder, names in _listed(store).items():
            live |= locked_attempts(store, folder, names)
    # With their sessions: who has parted from one is asked for as long as a save of it is under way.
    return live | {attempt.rpartition("-")[0] for attempt in live}


def _clean_agreement(store: Store) -> None:
    """Remove what earlier launches wrote to find each other, and their ballots of saves that are over.

    Whatever agreement this launch uses: the last one may have had other ranks, or none of them a coordinator.
    """
    for name in store.names(WORK, AGREEMENT, HELLO):
        with suppress(HoldfastError):
            store.remove(WORK, AGREEMENT, HELLO, name)
    names = store.names(WORK, AGREEMENT)
    live = _live_attempts(store)  # after the listing: who votes has announced the save before
    for name in names:
        topic, _, what = name.rpartition(".")
        if name.startswith(TEMPORARY):
            stale = not store.is_written(WORK, AGREEMENT, name)
        else:
            ballot = what == "decision" or what.startswith("vote-")
            stale = ballot and topic.partition(".")[2] not in live
        if stale:
            with suppress(HoldfastError):
                store.remove(WORK, AGREEMENT, name)


def in_flight(store: Store) -> list[int]:
    """The uncommitted steps that live writers are at work on or have accepted, ascending."""
    found = {one.step for one in accepted(store) if not one.copied}
    if store.has_locks:
        folders = {name: step for name in store.names() if (step := parse_step_folder(name)) is not None}
        # Asking for a lock opens the file: not for every part of every step that is there already.
        for name in folders.keys() - set(store.having(list(folders), MANIFEST)):
            if any(store.is_written(name, file) for file in store.names(name)):
                found.add(folders[name])
    return sorted(step for step in found if not store.exists(step_folder(step), MANIFEST))
