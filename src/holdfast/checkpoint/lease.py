"""One live writer per rank and folder: two runs must not share a checkpoint folder unnoticed."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import final

from holdfast.errors import LeaseError, StorageError
from holdfast.storage import LocalStore
from holdfast.vault import WORK


@final
class Lease:
    """The right of this process to write as `rank`; it ends with the process."""

    def __init__(self, store: LocalStore, rank: int) -> None:
        store.make_root()
        store.make_folder(WORK)
        path = store.path(WORK, f"writer-{rank}.lock")
        self._files = store.files
        try:
            self._fd = self._files.create(path)
        except OSError as error:
            raise StorageError.from_os(error, doing="lock", path=path) from error
        if not self._files.lock(self._fd):
            holder = self._holder()
            self._files.close(self._fd)
            raise LeaseError(
                f"{store.root} is being written by {holder}",
                hint="give each run its own folder, or end the other run first",
            )
        with contextlib.suppress(OSError):  # only for the message above, in another process
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _holder(self) -> str:
        text = os.pread(self._fd, 256, 0).decode(errors="replace")
        return text or "another process"

    def close(self) -> None:
        """Give the right back."""
        self._files.close(self._fd)
