"""A folder of bundles: found by program, created once, by one process at a time."""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

from holdfast.errors import BundleError, StorageError
from holdfast.xla.bundle import MAX_BUNDLE

_POLL_S: Final = 0.02
_LOCKS: Final = "lock"
# Locks of the kernel are held by a process; its threads exclude each other with this.
_threads: Final = threading.Lock()


@final
class Shelf:
    """The bundles in a folder, which the replicas of a run share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, program: str) -> Path:
        """Where the bundle of a program lies."""
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:80]}-{program[:32]}.bundle"

    def read(self, path: Path) -> bytes | None:
        """The bytes of a bundle, None if there is none. Fails: BundleError if it cannot be one."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BundleError(f"the bundle is refused: cannot open {path}: {error.strerror}") from error
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            if size > MAX_BUNDLE:
                raise BundleError(f"the bundle is refused: {path} has {size:,} bytes")
            return file.read(size)

    def write(self, path: Path, data: bytes) -> None:
        """Put a bundle there, whole or not at all, in place of one that was refused. Fails: StorageError.

        To be called inside `turn`: there is one writer, and what a killed one left is overwritten.
        """
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StorageError.from_os(error, doing="write", path=str(path)) from error

    @contextmanager
    def turn(self, program: str, timeout_s: float) -> Iterator[bool]:
        """Be the only one who makes this program's bundle; gives whether that is so.

        Blocks: until whoever makes it now is done or dead, `timeout_s` at most, then gives False. It gives
        False too where the folder takes no locks, or cannot be made.
        """
        ends = time.monotonic() + timeout_s
        if not _threads.acquire(timeout=timeout_s):
            yield False
            return
        try:
            fd = self._lock(int(program[:12], 16), ends)
            try:
                yield fd is not None
            finally:
                if fd is not None:
                    os.close(fd)
        finally:
            _threads.release()

    def _lock(self, place: int, ends: float) -> int | None:
        """A descriptor that holds the lock on one byte of the shelf's lock file: one byte per program."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / _LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                return fd
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= ends:
                    os.close(fd)
                    return None
                # The kernel has no wait for a lock that ends by itself.
                time.sleep(_POLL_S)
            except OSError:
                os.close(fd)
                return None
