"""Saves that a live writer has accepted, whether or not it has begun to write them.

An intent is a locked file named after its step and attempt. The lock, not the file, is what counts: it ends
with the process, so a file that nobody holds is a leftover of a crash.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, final

from holdfast.errors import StorageError
from holdfast.format import SaveId
from holdfast.storage import LocalStore
from holdfast.vault.recycling import WORK

_PREFIX: Final = "intent-"


@final
class Intent:
    """One accepted save; `close` when it is over."""

    def __init__(self, store: LocalStore, name: str) -> None:
        self._store = store
        self._name = name
        path = store.path(WORK, name)
        try:
            self._fd = store.files.create(path)
            store.files.lock(self._fd)
        except OSError as error:
            raise StorageError.from_os(error, doing="lock", path=path) from error

    def close(self) -> None:
        """The save is committed or given up."""
        with suppress(StorageError):
            self._store.remove(WORK, self._name)
        self._store.files.close(self._fd)


def announce(store: LocalStore, save: SaveId) -> Intent:
    """Tell whoever looks at this folder that `save` is on its way."""
    store.make_folder(WORK)
    return Intent(store, f"{_PREFIX}{save.step}.{save.attempt}")


def intended(store: LocalStore) -> list[int]:
    """The steps that live writers have accepted; intents that nobody holds any more are removed."""
    found = []
    for name in store.names(WORK):
        if not name.startswith(_PREFIX):
            continue
        step = name.removeprefix(_PREFIX).partition(".")[0]
        if store.is_written(WORK, name) and step.isdigit():
            found.append(int(step))
        else:
            with suppress(StorageError):
                store.remove(WORK, name)
    return found
