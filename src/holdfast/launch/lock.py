"""One launch for one run at a time, and the run's token."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
from pathlib import Path
from typing import Final, Self, final

from holdfast.errors import LeaseError, StorageError

LOCK: Final = "launch.lock"
_TOKEN_BYTES: Final = 32


@final
class RunLock:
    """Held while a run is launched; it goes with the process. Fails: LeaseError, naming who holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._fd = -1
        while self._fd < 0:
            self._fd = self._try()

    def _try(self) -> int:
        """The locked file; -1 if the one before us removed it meanwhile."""
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
            raise LeaseError(
                f"the run in {self._path.parent} is launched already, by {holder}",
                hint="`holdfast status` shows it; stop it first, or give this run another name with --run",
            ) from error
        if not _is_at(fd, self._path):
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


def _is_at(fd: int, path: Path) -> bool:
    try:
        ours, there = os.fstat(fd), path.stat()
    except OSError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def run_token(folder: Path) -> str:
    """The run's token, made on the first launch. Only this user can read the file. Fails: StorageError."""
    path = folder / "coord" / "token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if token := path.read_text(encoding="ascii").strip():
                return token
        new = path.with_name(f"token.{os.getpid()}")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        token = secrets.token_hex(_TOKEN_BYTES)
        with os.fdopen(fd, "w") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        return token
    except OSError as error:
        raise StorageError.from_os(error, doing="make the token", path=str(path)) from error
