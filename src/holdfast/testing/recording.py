"""A `Files` that does every operation and writes down, in order, those that change the disk.

The log is what `DiskModel` enumerates crashes from. Inodes are numbered by the recorder, not by the file
system, which reuses numbers; a buffered and a direct descriptor of one file are one inode.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Literal

import msgspec

from holdfast.storage import Files
from holdfast.storage.files import Bytes
from holdfast.testing.memory_disk import ROOT, Image

Kind = Literal[
    "create",
    "allocate",
    "truncate",
    "write",
    "sync",
    "mkdir",
    "rmdir",
    "sync_folder",
    "link",
    "rename",
    "unlink",
    "mark",
]


class Op(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation. `folder` and `name` say where, `to_folder` and `to_name` where to, `ino` which file."""

    kind: Kind
    path: str = ""
    folder: int = -1
    name: str = ""
    to_folder: int = -1
    to_name: str = ""
    ino: int = -1
    offset: int = 0
    size: int = 0
    data: bytes = b""
    note: tuple[str, int, int] | None = None

    def __str__(self) -> str:
        detail = {
            "write": f" [{self.offset}:{self.offset + len(self.data)}]",
            "allocate": f" to {self.size}",
            "truncate": f" to {self.size}",
            "rename": f" -> {self.to_name}",
            "link": f" -> {self.to_name}",
            "mark": f" {self.note}",
        }.get(self.kind, "")
        return f"{self.kind} {self.path}{detail}"


class RecordingFiles(Files):
    """Does everything through `inner` and logs what happens below `base`.

    Operations that change the disk run one at a time, so the log is the order in which they took effect.
    Subclasses override `admit` to leave one out, to fail it or to delay it.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        inner: Files | None = None,
        image: Image | None = None,
    ) -> None:
        self.base = os.path.realpath(os.fspath(base))
        self.log: list[Op] = []
        self._inner = inner or Files()
        self._lock = threading.RLock()
        start = image or Image.empty()
        self._inodes = dict(start.paths())
        self._next = start.next_inode()
        self._open: dict[int, tuple[int, str]] = {}

    def admit(self, kind: Kind, path: str) -> bool:
        """Whether to do an operation, asked before it; it may raise an OSError instead of answering."""
        return True

    def mark(self, what: str, step: int, version: int = 0) -> None:
        """Note in the log what the caller knows at this moment, such as that a step is durable."""
        with self._lock:
            self.log.append(Op("mark", note=(what, step, version)))

    # ---- where things are

    def _relative(self, path: str) -> str:
        inside = os.path.relpath(path, self.base)
        if inside == ".":
            return ""
        assert not inside.startswith(".."), f"{path} is not below {self.base}"
        return inside

    def _watched(self, path: str) -> bool:
        return path == self.base or path.startswith(self.base + "/")

    def _place(self, path: str) -> tuple[int, str]:
        folder, name = os.path.split(self._relative(path))
        return (self._inodes[folder] if folder else ROOT), name

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _append(self, kind: Kind, path: str, *, ino: int = -1, to: str = "") -> None:
        folder, name = self._place(path)
        to_folder, to_name = self._place(to) if to else (-1, "")
        shown = self._relative(path)
        self.log.append(
            Op(kind, shown, folder, name, to_folder=to_folder, to_name=to_name, ino=ino),
        )

    # ---- descriptors

    def _opened(self, fd: int, path: str) -> int:
        if self._watched(path):
            self._open[fd] = (self._inodes[self._relative(path)], self._relative(path))
        return fd

    def create(self, path: str, *, exclusive: bool = False) -> int:
        if self._watched(path) and not self.admit("create", path):
            raise AssertionError("a create cannot be left out")
        with self._lock:
            fd = self._inner.create(path, exclusive=exclusive)
            if self._watched(path) and self._relative(path) not in self._inodes:
                ino = self._inodes[self._relative(path)] = self._number()
                self._append("create", path, ino=ino)
            return self._opened(fd, path)

    def reopen_direct(self, path: str) -> int | None:
        with self._lock:
            fd = self._inner.reopen_direct(path)
            return None if fd is None else self._opened(fd, path)

    def open_read(self, path: str) -> int:
        return self._inner.open_read(path)

    def open_read_direct(self, path: str) -> int | None:
        return self._inner.open_read_direct(path)

    def close(self, fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            self._inner.close(fd)

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        return self._inner.lock(fd, shared=shared)

    def locked(self, fd: int, *, shared: bool = False) -> bool:
        return self._inner.locked(fd, shared=shared)

    # ---- bytes

    def reserve(self, fd: int, size: int) -> None:
        ino, path = self._open.get(fd, (-1, ""))
        if ino >= 0 and not self.admit("allocate", path):
            return
        with self._lock:
            before = self._inner.size(fd)
            self._inner.reserve(fd, size)
            if ino >= 0 and before > size:
                self.log.append(Op("truncate", path, ino=ino, size=size))
            if ino >= 0 and size:
                self.log.append(Op("allocate", path, ino=ino, size=size))

    def write_at(self, fd: int, data: Bytes, offset: int) -> None:
        ino, path = self._open.get(fd, (-1, ""))
        if ino >= 0 and not self.admit("write", path):
            return
        with self._lock:
            self._inner.write_at(fd, data, offset)
            if ino >= 0:
                self.log.append(Op("write", path, ino=ino, offset=offset, data=bytes(data)))

    def sync(self, fd: int) -> None:
        ino, path = self._open.get(fd, (-1, ""))
        if ino >= 0 and not self.admit("sync", path):
            return
        with self._lock:
            self._inner.sync(fd)
            if ino >= 0:
                self.log.append(Op("sync", path, ino=ino))

    # ---- names

    def make_folder(self, path: str) -> bool:
        watched = self._watched(path) and path != self.base
        if watched and not self.admit("mkdir", path):
            raise AssertionError("a mkdir cannot be left out")
        with self._lock:
            made = self._inner.make_folder(path)
            if made and watched:
                ino = self._inodes[self._relative(path)] = self._number()
                self._append("mkdir", path, ino=ino)
            return made

    def remove_folder(self, path: str) -> None:
        if not self.admit("rmdir", path):
            return
        with self._lock:
            self._inner.remove_folder(path)
            self._append("rmdir", path, ino=self._inodes.pop(self._relative(path)))

    def sync_folder(self, path: str) -> None:
        watched = self._watched(path)
        if watched and not self.admit("sync_folder", path):
            return
        with self._lock:
            self._inner.sync_folder(path)
            if watched:
                inside = self._relative(path)
                self.log.append(Op("sync_folder", inside, ino=self._inodes[inside] if inside else ROOT))

    def link(self, source: str, target: str) -> bool:
        if not self.admit("link", target):
            return True
        with self._lock:
            made = self._inner.link(source, target)
            if made:
                ino = self._inodes[self._relative(target)] = self._inodes[self._relative(source)]
                self._append("link", source, ino=ino, to=target)
            return made

    def rename(self, source: str, target: str) -> None:
        if not self.admit("rename", target):
            return
        with self._lock:
            self._inner.rename(source, target)
            ino = self._inodes.pop(self._relative(source))
            self._inodes[self._relative(target)] = ino
            self._append("rename", source, ino=ino, to=target)

    def unlink(self, path: str) -> None:
        if not self.admit("unlink", path):
            return
        with self._lock:
            self._inner.unlink(path)
            self._append("unlink", path, ino=self._inodes.pop(self._relative(path)))

    # ---- looking

    def names(self, path: str) -> list[str]:
        return self._inner.names(path)

    def status(self, path: str) -> os.stat_result | None:
        return self._inner.status(path)

    def is_at(self, fd: int, path: str) -> bool:
        return self._inner.is_at(fd, path)

    def read_at(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:
        return self._inner.read_at(fd, buffer, offset)

    def size(self, fd: int) -> int:
        return self._inner.size(fd)

    def free_bytes(self, path: str) -> int:
        return self._inner.free_bytes(path)


def encode_log(log: Iterable[Op]) -> bytes:
    """A log as JSON, to keep one whose timing cannot be repeated."""
    return msgspec.json.encode(list(log))


def decode_log(data: bytes) -> list[Op]:
    """The log that `encode_log` wrote."""
    return msgspec.json.decode(data, type=list[Op])
