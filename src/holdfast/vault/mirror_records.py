"""What is known in a checkpoint folder about its mirrors: where each is, and what was copied there.

    .holdfast/mirrors/<key>/place                   the mirror, as it was given
    .holdfast/mirrors/<key>/step-00001200.<attempt>  this save is whole there, or was when this was written
    .holdfast/mirrors/<key>/rank-0.lock             held by the one that copies

A save with a record is not sent again: the mirror has a retention of its own, and what that removed is meant
to be gone. Records of steps that are gone here go too, but for the newest, which tells how far it came.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Final, final

from holdfast.errors import HoldfastError
from holdfast.format import parse_step_folder, step_folder
from holdfast.storage import Hold, Store
from holdfast.vault.recycling import WORK

MIRRORS: Final = "mirrors"
_PLACE: Final = "place"
_MAX_PLACE: Final = 4096


@final
class Records:
    """The records of one mirror of one folder. Every method fails with StorageError."""

    def __init__(self, store: Store, place: str) -> None:
        self._store = store
        self._key = hashlib.sha256(place.encode()).hexdigest()[:16]
        self._place = place

    def make(self) -> None:
        """Make room for records, and note where the mirror is."""
        for names in ((WORK,), (WORK, MIRRORS), (WORK, MIRRORS, self._key)):
            self._store.make_folder(*names)
        self._store.create(WORK, MIRRORS, self._key, _PLACE, data=self._place.encode())

    def hold(self, rank: int) -> Hold | None:
        """The right to copy this rank's parts; None while another process has it."""
        return self._store.hold(WORK, MIRRORS, self._key, f"rank-{rank}.lock", exclusive=True)

    def sent(self) -> dict[int, str]:
        """The steps that were copied, with the attempt of each."""
        found: dict[int, str] = {}
        for name in self._store.names(WORK, MIRRORS, self._key):
            folder, _, attempt = name.partition(".")
            step = parse_step_folder(folder)
            if step is not None and attempt:
                found[step] = attempt
        return found

    def add(self, step: int, attempt: str) -> None:
        """This save is whole on the mirror."""
        for name in self._names(step):
            if name != _name(step, attempt):
                self._store.remove(WORK, MIRRORS, self._key, name)
        self._store.create(WORK, MIRRORS, self._key, _name(step, attempt), data=b"")

    def trim(self, local: set[int]) -> None:
        """Forget steps that are gone here, but for the newest."""
        sent = self.sent()
        newest = max(sent, default=-1)
        for step in sent:
            if step not in local and step != newest:
                for name in self._names(step):
                    self._store.remove(WORK, MIRRORS, self._key, name)

    def _names(self, step: int) -> list[str]:
        prefix = f"{step_folder(step)}."
        return [name for name in self._store.names(WORK, MIRRORS, self._key) if name.startswith(prefix)]


def _name(step: int, attempt: str) -> str:
    return f"{step_folder(step)}.{attempt}"


def mirrors_of(store: Store) -> list[str]:
    """The mirrors that this folder was ever copied to."""
    found = []
    for key in store.names(WORK, MIRRORS):
        with suppress(HoldfastError, UnicodeDecodeError):  # one that is being made just now
            found.append(store.read(WORK, MIRRORS, key, _PLACE, max_bytes=_MAX_PLACE).decode())
    return sorted(found)
