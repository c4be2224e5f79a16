"""Saves that a live writer has accepted, and whose they are when it dies.

An intent is a held name made of step, attempt and rank. The hold, not the name, is what counts: it ends with
the process, so a name that nobody holds is a leftover of a crash. Who copies a committed save to a mirror
announces it there in the same way, under a name of its own: cleaning treats both alike, but no load waits for
a copy.

Where there are no locks, a process that was stopped for long looks dead and then goes on. So whoever removes
the files of a save that looks dead *revokes* it first, and whoever commits one *claims* it first: both create
the same name, and the first stands. That record outlives the save by a day, so that the latecomer finds it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple, final

from holdfast.errors import AgreementError, HoldfastError, StorageError
from holdfast.format import SaveId
from holdfast.storage import Hold, Store
from holdfast.vault.recycling import WORK

_PREFIX: Final = "intent-"
_COPY: Final = "copy-"
_FENCES: Final = "fences"
_COMMITS: Final = b"commits"
_REVOKED: Final = b"revoked"
_KEPT_S: Final = 86_400.0
"""How long a fence stays: no process sleeps that long between its last two requests."""


class Accepted(NamedTuple):
    """A save that the live writer of a rank is at work on or will be."""

    step: int
    attempt: str
    rank: int
    copied: bool = False
    """Whether it is committed elsewhere, and this is a mirror of that place."""


@final
class Intent:
    """One accepted save; `close` when it is over."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def close(self) -> None:
        """The save is committed or given up."""
        self._hold.close(remove=True)


def announce(store: Store, save: SaveId, rank: int = 0, *, copied: bool = False) -> Intent:
    """Tell whoever looks at this folder that `save` is on its way. Fails: StorageError."""
    store.make_folder(WORK)
    name = f"{_COPY if copied else _PREFIX}{save.step}.{save.attempt}.{rank}"
    hold = store.hold(WORK, name, exclusive=False)
    if hold is None:
        raise StorageError(f"{store.path(WORK, name)} cannot be held", path=store.path(WORK, name))
    return Intent(hold)


def accepted(store: Store) -> set[Accepted]:
    """The saves that live writers have accepted; intents that nobody holds any more are removed."""
    found = set()
    for name in store.names(WORK):
        prefix = next((one for one in (_PREFIX, _COPY) if name.startswith(one)), None)
        if prefix is None:
            continue
        step, _, rest = name.removeprefix(prefix).partition(".")
        attempt, _, rank = rest.rpartition(".")
        if _is_number(step) and _is_number(rank) and store.is_written(WORK, name):
            found.add(Accepted(int(step), attempt, int(rank), prefix == _COPY))
        else:
            with suppress(HoldfastError):
                _forget(store, name)
    return found


def _forget(store: Store, name: str) -> None:
    if not store.has_locks:
        store.remove(WORK, name)
        return
    # Under its lock: its holder may have made the name just now, and be about to lock it.
    held = store.hold(WORK, name, exclusive=True)
    if held is not None:
        held.close(remove=True)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def claim(store: Store, save: SaveId) -> None:
    """Make it certain that no cleaning takes the parts of this save; call it right before the commit.

    Fails: AgreementError if it was revoked: the writer had given no sign of life for too long.
    """
    if store.has_locks:  # a live writer's files are locked
        return
    if _fenced(store, save.step, save.attempt, _COMMITS) != _COMMITS:
        raise AgreementError(
            f"step {save.step} was not committed: its writer gave no sign of life for too long, and another "
            "process has cleaned up after it",
            hint="earlier steps are untouched; the next save starts afresh",
        )


def revoke(store: Store, step: int, attempt: str) -> bool:
    """Make it certain that a save which looks dead is never committed; False if it may be yet.

    Fails: StorageError.
    """
    if store.has_locks:
        return True
    if _fenced(store, step, attempt, _REVOKED) == _REVOKED:
        return True
    age_s = store.age_s(WORK, _FENCES, _fence(step, attempt))
    return age_s is not None and age_s > _KEPT_S


def sweep_fences(store: Store) -> None:
    """Remove the fences that no latecomer can need any more."""
    for name in [] if store.has_locks else store.names(WORK, _FENCES):
        age_s = store.age_s(WORK, _FENCES, name)
        if age_s is not None and age_s > 2 * _KEPT_S:
            store.remove(WORK, _FENCES, name)


def unfence(store: Store, save: SaveId) -> None:
    """Remove the fence of a save that is over for all its writers. Fails: StorageError."""
    if not store.has_locks:
        store.remove(WORK, _FENCES, _fence(save.step, save.attempt))


def _fenced(store: Store, step: int, attempt: str, wanted: bytes) -> bytes:
    """Which of the two stands for this save."""
    name = _fence(step, attempt)
    if store.create(WORK, _FENCES, name, data=wanted):
        return wanted
    return store.read(WORK, _FENCES, name, max_bytes=64)


def _fence(step: int, attempt: str) -> str:
    return f"{step}.{attempt}"
