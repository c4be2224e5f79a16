"""A file system in memory: what a crash left behind, for the real code to read and to start on again."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, final

from holdfast.storage import Files
from holdfast.storage.files import Bytes

ROOT: Final = 0
"""The inode of the folder at the top of an image."""
MOUNT: Final = "/holdfast-model-disk"
"""Where an image appears. No such path exists, so nothing can reach the real disk by mistake."""


@final
@dataclass(frozen=True, slots=True)
class Image:
    """Folders and files by inode. Never changed once made."""

    folders: Mapping[int, Mapping[str, int]]
    files: Mapping[int, bytes]

    @staticmethod
    def empty() -> Image:
        """Nothing but the top folder."""
        return Image({ROOT: {}}, {})

    def paths(self) -> Iterator[tuple[str, int]]:
        """Every path below the top, and its inode."""
        waiting = [("", ROOT)]
        while waiting:
            above, folder = waiting.pop()
            for name, ino in self.folders[folder].items():
                path = f"{above}/{name}" if above else name
                yield path, ino
                if ino in self.folders:
                    waiting.append((path, ino))

    def next_inode(self) -> int:
        """A number above every inode."""
        return 1 + max(itertools.chain(self.folders, self.files), default=ROOT)

    def content(self) -> dict[str, bytes | None]:
        """Path to bytes, None for a folder."""
        return {path: self.files.get(ino) for path, ino in self.paths()}


@final
class MemoryFiles(Files):
    """An image, mounted at `MOUNT`; read-only unless asked. It has no direct I/O, like some file systems."""

    def __init__(self, image: Image, *, writable: bool = False) -> None:
        self._folders: dict[int, dict[str, int]] = {ino: dict(names) for ino, names in image.folders.items()}
        self._files: dict[int, bytes | bytearray] = dict(image.files)
        self._writable = writable
        self._lock = threading.RLock()
        self._next = image.next_inode()
        # Far above any real descriptor: one that leaks into a system call is refused, not misused.
        self._fds = itertools.count(1 << 24)
        self._open: dict[int, int] = {}
        self._locks: dict[int, dict[int, bool]] = {}

    def image(self) -> Image:
        """What is on the disk now."""
        with self._lock:
            return Image(
                {ino: dict(names) for ino, names in self._folders.items()},
                {ino: bytes(data) for ino, data in self._files.items()},
            )

    # ---- paths

    def _find(self, path: str) -> int | None:
        if not path.startswith(MOUNT):
            return ROOT if path == "/" else None
        ino = ROOT
        for name in path[len(MOUNT) :].split("/"):
            if not name:
                continue
            inside = self._folders.get(ino)
            if inside is None or name not in inside:
                return None
            ino = inside[name]
        return ino

    def _at(self, path: str) -> int:
        ino = self._find(path)
        if ino is None:
            raise _error(errno.ENOENT, path)
        return ino

    def _parent(self, path: str) -> tuple[dict[str, int], str]:
        if not self._writable:
            raise _error(errno.EROFS, path)
        folder, name = os.path.split(path)
        found = self._folders.get(self._at(folder))
        if found is None:
            raise _error(errno.ENOTDIR, folder)
        return found, name

    def _descriptor(self, ino: int) -> int:
        fd = next(self._fds)
        self._open[fd] = ino
        return fd

    # ---- descriptors

    def create(self, path: str, *, exclusive: bool = False) -> int:
        with self._lock:
            folder, name = self._parent(path)
            if name in folder and exclusive:
                raise _error(errno.EEXIST, path)
            if name not in folder:
                folder[name] = self._next
                self._files[self._next] = b""
                self._next += 1
            return self._descriptor(folder[name])

    def reopen_direct(self, path: str) -> int | None:
        return None

    def open_read(self, path: str) -> int:
        with self._lock:
            ino = self._at(path)
            if ino not in self._files:
                raise _error(errno.EISDIR, path)
            return self._descriptor(ino)

    def open_read_direct(self, path: str) -> int | None:
        return None

    def close(self, fd: int) -> None:
        with self._lock:
            ino = self._open.pop(fd)
            self._locks.get(ino, {}).pop(fd, None)

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        with self._lock:
            if self.locked(fd, shared=shared):
                return False
            self._locks.setdefault(self._open[fd], {})[fd] = shared
            return True

    def locked(self, fd: int, *, shared: bool = False) -> bool:
        with self._lock:
            held = self._locks.get(self._open[fd], {})
            return any(not (shared and theirs) for other, theirs in held.items() if other != fd)

    # ---- bytes

    def _bytes(self, fd: int) -> bytearray:
        if not self._writable:
            raise _error(errno.EBADF, str(fd))
        ino = self._open[fd]
        data = self._files[ino]
        if isinstance(data, bytes):
            data = self._files[ino] = bytearray(data)
        return data

    def reserve(self, fd: int, size: int) -> None:
        with self._lock:
            data = self._bytes(fd)
            del data[size:]
            data.extend(bytes(size - len(data)))

    def write_at(self, fd: int, data: Bytes, offset: int) -> None:
        with self._lock:
            into = self._bytes(fd)
            into.extend(bytes(max(0, offset - len(into))))
            into[offset : offset + len(data)] = data

    def sync(self, fd: int) -> None:
        pass

    def read_at(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:
        with self._lock:
            data = self._files[self._open[fd]]
            view = memoryview(buffer).cast("B")
            got = max(0, min(len(view), len(data) - offset))
            if got:
                view[:got] = data[offset : offset + got]
            return got

    def size(self, fd: int) -> int:
        return len(self._files[self._open[fd]])

    # ---- names

    def make_folder(self, path: str) -> bool:
        with self._lock:
            if self._find(path) is not None:
                return False
            folder, name = self._parent(path)
            folder[name] = self._next
            self._folders[self._next] = {}
            self._next += 1
            return True

    def remove_folder(self, path: str) -> None:
        with self._lock:
            ino = self._at(path)
            if self._folders[ino]:
                raise _error(errno.ENOTEMPTY, path)
            folder, name = self._parent(path)
            del folder[name], self._folders[ino]

    def sync_folder(self, path: str) -> None:
        self._at(path)

    def link(self, source: str, target: str) -> bool:
        with self._lock:
            ino = self._at(source)
            folder, name = self._parent(target)
            if name in folder:
                return False
            folder[name] = ino
            return True

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            ino = self._at(source)
            folder, name = self._parent(target)
            folder[name] = ino
            folder, name = self._parent(source)
            del folder[name]

    def unlink(self, path: str) -> None:
        with self._lock:
            self._at(path)
            folder, name = self._parent(path)
            del folder[name]

    # ---- looking

    def names(self, path: str) -> list[str]:
        with self._lock:
            found = self._folders.get(self._at(path))
            if found is None:
                raise _error(errno.ENOTDIR, path)
            return sorted(found)

    def status(self, path: str) -> os.stat_result | None:
        ino = self._find(path)
        if ino is None:
            return None
        if ino in self._folders:
            return os.stat_result((stat.S_IFDIR | 0o755, ino, 0, 2, 0, 0, 0, 0, 0, 0))
        return os.stat_result((stat.S_IFREG | 0o644, ino, 0, 1, 0, 0, len(self._files[ino]), 0, 0, 0))

    def is_at(self, fd: int, path: str) -> bool:
        with self._lock:
            return self._find(path) == self._open[fd]

    def free_bytes(self, path: str) -> int:
        return 1 << 40


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
