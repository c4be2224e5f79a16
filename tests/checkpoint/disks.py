"""Disks with a will of their own: slow, failing, or without direct I/O."""

from __future__ import annotations

import os
import threading
from typing import Any, final

from holdfast.storage import Files


@final
class Gate(Files):
    """A disk on which no part file can be begun until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Semaphore(0)

    def reserve(self, fd: int, size: int) -> None:
        self.reached.release()
        assert self.open.wait(60.0)
        super().reserve(fd, size)


@final
class Failing(Files):
    """A disk whose operation `operation` fails once with `number`, at its nth call from arming."""

    def __init__(self) -> None:
        self._operation = ""
        self._number = 0
        self._left = 0
        self.failed = False

    def arm(self, operation: str, number: int, nth: int = 1) -> None:
        self._operation, self._number, self._left, self.failed = operation, number, nth, False

    def disarm(self) -> None:
        self._operation = ""

    def _strike(self, operation: str) -> None:
        if operation == self._operation:
            self._left -= 1
            if self._left == 0:
                self.failed = True
                raise OSError(self._number, os.strerror(self._number))

    def create(self, path: str, *, exclusive: bool = False) -> int:
        self._strike("create")
        return super().create(path, exclusive=exclusive)

    def reserve(self, fd: int, size: int) -> None:
        self._strike("reserve")
        super().reserve(fd, size)

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        self._strike("write_at")
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._strike("sync")
        super().sync(fd)

    def link(self, source: str, target: str) -> bool:
        self._strike("link")
        return super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._strike("rename")
        super().rename(source, target)

    def make_folder(self, path: str) -> bool:
        self._strike("make_folder")
        return super().make_folder(path)

    def sync_folder(self, path: str) -> None:
        self._strike("sync_folder")
        super().sync_folder(path)

    def unlink(self, path: str) -> None:
        self._strike("unlink")
        super().unlink(path)


@final
class Buffered(Files):
    """A file system that refuses direct I/O."""

    def reopen_direct(self, path: str) -> int | None:
        return None

    def open_read_direct(self, path: str) -> int | None:
        return None
