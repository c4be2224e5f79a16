"""One process that has a run, launched or alone, at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Final, Self, final

from holdfast.clock import Deadline
from holdfast.errors import LeaseError, StorageError
from holdfast.storage import Files

LOCK: Final = "launch.lock"
_LOOKED_AT_S: Final = 0.5
"""Whoever looks whether a run is launched takes the lock for a moment; a launch holds it for longer."""


@final
class RunLock:
    """Held while a run is launched or trains alone; it goes with the process.

    Blocks: for a moment, where somebody only looks. Fails: LeaseError, naming who holds it; StorageError.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._fd = -1
        deadline = Deadline(_LOOKED_AT_S)
        while self._fd < 0:
            self._fd = self._try(deadline)

    def _try(self, deadline: Deadline) -> int:
        """The locked file; -1 if the one before us removed it meanwhile, or holds it only for a moment."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError.from_os(error, doing="lock", path=str(self._path)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 256, 0).decode(errors="replace") or "another process"
            os.close(fd)
            if not deadline.expired():
                time.sleep(0.005)
                return -1
            raise LeaseError(
                f"the run in {self._path.parent} is launched already, by {holder}",
                hint="stop that first, or give this run another name: launch --run, train --name",
            ) from error
        if not Files().is_at(fd, str(self._path)):
            os.close(fd)
            return -1
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return fd

    def close(self) -> None:
        """Let go of the run."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
