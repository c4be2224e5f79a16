"""Byte ranges on a local or shared file system, with create-if-absent as the commit.

`LocalStore` knows folders, small whole files and large part files; what they mean is the format's business.
Names are given component by component, relative to its root, and cannot escape it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self, final

from holdfast.errors import BusyPathError, MissingPathError, OutOfSpaceError, StorageError
from holdfast.storage.files import ALIGN, Files
from holdfast.storage.store import Hold, PartReader, PartWriter, Store, Upload, Version, check_names

_TRIES = 5
"""How often a name is made anew that somebody has removed before it could be locked."""
TEMPORARY = ".tmp-"
"""Prefix of files that are being made; a crash may leave them, cleaning removes them."""


@final
class LocalStore(Store):
    """A folder on a file system."""

    poll_s = 0.005
    at_once = 1
    has_locks = True
    hold_s = 0.0

    def __init__(self, root: str | os.PathLike[str], *, files: Files | None = None) -> None:
        # The root may be reached through links (a user's choice); nothing below it is.
        self.root = os.path.realpath(os.fspath(root))
        self.files = files or Files()

    def path(self, *names: str) -> str:
        """The absolute path of a name below the root."""
        check_names(names)
        return os.path.join(self.root, *names)

    def below(self, *names: str) -> Self:
        return type(self)(self.path(*names), files=self.files)

    def _reached(self, names: Sequence[str]) -> bool:
        """Whether every folder on the way is one itself, not a link to somewhere else."""
        return all(self.files.is_folder(self.path(*names[:at])) for at in range(1, len(names)))

    def _checked(self, names: Sequence[str]) -> str:
        path = self.path(*names)
        if not self._reached(names):
            folder = os.path.dirname(path)
            raise MissingPathError(
                f"cannot read {path}: {folder} is not a folder",
                path=path,
                hint="links inside a checkpoint folder are not followed",
            )
        return path

    # ---- folders

    def make_root(self) -> None:
        """Create the root and its parents, durably."""
        missing = []
        path = self.root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        with self._doing("create", self.root):
            for folder in reversed(missing):
                self.files.make_folder(folder)
                self.files.sync_folder(os.path.dirname(folder))

    def make_folder(self, *names: str) -> None:
        """Create a folder below the root, durably; nothing happens if it is there."""
        path = self.path(*names)
        with self._doing("create", path):
            if self.files.make_folder(path):
                self.files.sync_folder(os.path.dirname(path))
            elif not self.files.is_folder(path):
                raise StorageError(f"{path} is not a folder", path=path, hint="remove it")

    def remove_folder(self, *names: str) -> None:
        """Remove an empty folder."""
        path = self.path(*names)
        with self._doing("remove", path):
            self.files.remove_folder(path)

    def sync_folder(self, *names: str) -> None:
        """Make the entries of a folder durable."""
        path = self.path(*names)
        with self._doing("sync", path):
            self.files.sync_folder(path)

    def names(self, *names: str) -> list[str]:
        """The entries of a folder, sorted; empty if it is missing or a link."""
        path = self.path(*names)
        with self._doing("list", path):
            return self.files.names(path) if self.files.is_folder(path) else []

    def exists(self, *names: str) -> bool:
        """Whether a regular file of that name is there, reached through folders only."""
        return self._reached(names) and self.files.is_file(self.path(*names))

    def size(self, *names: str) -> int | None:
        """The size of a regular file, or None."""
        found = self.files.status(self.path(*names)) if self._reached(names) else None
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def walk(self) -> Iterator[tuple[str, ...]]:
        for name in self.names():
            if self.exists(name):
                yield (name,)
            elif self.files.is_folder(self.path(name)):
                yield from ((name, *rest) for rest in self.below(name).walk())

    def having(self, folders: Sequence[str], name: str) -> list[str]:
        return [folder for folder in folders if self.exists(folder, name)]

    def is_place(self) -> bool:
        return os.path.isdir(self.root)

    # ---- small files

    def read(self, *names: str, max_bytes: int) -> bytes:
        """A whole file; refused before any memory is taken if it is larger than `max_bytes`."""
        path = self._checked(names)
        with self._doing("read", path), self.files.opened(self.files.open_read(path)) as fd:
            size = self.files.size(fd)
            if size > max_bytes:
                raise StorageError(
                    f"{path} has {size:,} bytes, more than the {max_bytes:,} allowed here",
                    path=path,
                )
            data = bytearray(size)
            got = self.files.read_at(fd, data, 0)
            return bytes(data[:got])

    def create(self, *names: str, data: bytes) -> bool:
        """Create a file with `data` if the name is free, durably; False if it is taken. Atomic."""
        path = self.path(*names)
        with self._doing("create", path):
            with self._temporary(path, data) as temporary:
                created = self.files.link(temporary, path)
                with suppress(FileNotFoundError):  # gone where a rename had to serve as the link
                    self.files.unlink(temporary)
            self.files.sync_folder(os.path.dirname(path))
        return created

    def replace(self, *names: str, data: bytes, expected: Version | None = None) -> bool:
        """Put `data` under a name, durably: a reader sees the old file or the new one. Atomic.

        A file system cannot tell versions apart at a rename: writers keep each other out by locks.
        """
        path = self.path(*names)
        with self._doing("replace", path):
            with self._temporary(path, data) as temporary:
                self.files.rename(temporary, path)
            self.files.sync_folder(os.path.dirname(path))
        return True

    def version(self, *names: str) -> Version | None:
        return None

    @contextmanager
    def _temporary(self, path: str, data: bytes) -> Iterator[str]:
        """A durable file with `data` beside `path`, locked so that no cleaning takes it for a leftover."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f"{TEMPORARY}{uuid.uuid4().hex[:12]}-{name}")
        with self.files.opened(self.files.create(temporary, exclusive=True)) as fd:
            try:
                self.files.lock(fd)
                self.files.write_at(fd, data, 0)
                self.files.sync(fd)
            except OSError:
                self.files.unlink(temporary)
                raise
            yield temporary

    def remove(self, *names: str) -> bool:
        """Remove a file; False if it was not there. Not durable until the folder is synced."""
        path = self.path(*names)
        with self._doing("remove", path):
            try:
                self.files.unlink(path)
            except FileNotFoundError:
                return False
        return True

    def remove_all(self, folder: str, names: Sequence[str]) -> None:
        for name in names:
            self.remove(folder, name)

    def move(self, source: Sequence[str], target: Sequence[str]) -> None:
        """Rename a file. Not durable until both folders are synced."""
        path = self.path(*source)
        with self._doing("move", path):
            self.files.rename(path, self.path(*target))

    def hold(self, *names: str, exclusive: bool, holder: str = "") -> Hold | None:
        path = self.path(*names)
        tries = 0
        with self._doing("lock", path):
            while True:
                held = _LocalHold(self, names, self.files.create(path))
                locked = self.files.lock(held.fd)
                if not locked and exclusive:
                    held.close()
                    return None
                tries += 1
                # Whoever cleans up may take the name, for a moment, between its making and the lock on it.
                if tries == _TRIES or (locked and self.files.is_at(held.fd, path)):
                    break
                held.close()
                time.sleep(self.poll_s)
        if holder:
            with contextlib.suppress(OSError):  # only for a message in another process
                os.ftruncate(held.fd, 0)
                os.pwrite(held.fd, holder.encode(), 0)
        return held

    def holder(self, *names: str) -> str:
        with contextlib.suppress(StorageError):
            return self.read(*names, max_bytes=4096).decode(errors="replace")
        return ""

    def age_s(self, *names: str) -> float | None:
        found = self.files.status(self.path(*names)) if self._reached(names) else None
        return None if found is None else max(0.0, time.time() - found.st_mtime)

    def is_written(self, *names: str) -> bool:
        """Whether a live process is writing this file."""
        return self._locked(names, shared=True)

    def is_busy(self, *names: str) -> bool:
        """Whether a live process is writing or reading this file."""
        return self._locked(names, shared=False)

    def _locked(self, names: Sequence[str], *, shared: bool) -> bool:
        try:
            fd = self.files.open_read(self.path(*names))
        except OSError:
            return False
        with self.files.opened(fd):
            return self.files.locked(fd, shared=shared)

    # ---- part files

    def write_part(self, *names: str, size: int, recycled: Sequence[str] | None = None) -> PartWriter:
        """A writer for a file of exactly `size` bytes, its space reserved, locked by this process.

        `recycled` names an old file to be overwritten: its blocks are allocated already, which saves the
        file system most of the work of a fresh file.
        """
        tries = 0
        while True:
            try:
                return self._begin_part(names, size, recycled)
            except MissingPathError:
                tries += 1
                # Whoever cleans up may take the folder while it is empty.
                if tries == _TRIES or (recycled is not None and not self.exists(*recycled)):
                    raise

    def _begin_part(self, names: Sequence[str], size: int, recycled: Sequence[str] | None) -> PartWriter:
        path = self.path(*names)
        if len(names) > 1:
            self.make_folder(*names[:-1])
        if recycled is not None:
            self.move(recycled, names)
        with self._doing("write", path):
            return LocalPartWriter(self, path, size)

    def open_part(self, *names: str, direct: bool = True, ahead: bool = True) -> PartReader:
        """A reader of a part file."""
        path = self._checked(names)
        with self._doing("open", path):
            return _LocalPartReader(self, path, direct=direct)

    def uploads(self) -> list[Upload]:
        return []

    def drop_upload(self, upload: Upload) -> None:
        self.remove(*upload.names)

    @contextmanager
    def _doing(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError.from_os(error, doing=what, path=path) from error


@final
class _LocalHold(Hold):
    """The advisory lock on a file of that name."""

    def __init__(self, store: LocalStore, names: Sequence[str], fd: int) -> None:
        self.fd = fd
        self._store = store
        self._names = names

    def close(self, *, remove: bool = False) -> None:
        if remove:
            with suppress(StorageError):
                self._store.remove(*self._names)
        self._store.files.close(self.fd)


@final
class LocalPartWriter(PartWriter):
    """Writes one part file, its space reserved and locked against cleaning."""

    def __init__(self, store: LocalStore, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self._store = store
        self._files = store.files
        self._fd = self._files.create(path)
        self._direct: int | None = None
        try:
            # Held until close: cleaning leaves the files of a live writer alone.
            if not self._files.lock(self._fd):
                raise BusyPathError(
                    f"{path} is being written by another process",
                    path=path,
                    hint="a vault of an earlier connection may still be at it; the next save starts afresh",
                )
            self._reserve()
            self._direct = self._files.reopen_direct(path)
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        free = self._files.free_bytes(os.path.dirname(self.path)) + self._files.size(self._fd)
        if self.size > free:
            raise OutOfSpaceError(
                f"cannot write {self.path}: {self.size:,} bytes needed, {free:,} free",
                path=self.path,
                hint="free space or keep fewer steps; earlier steps are untouched",
            )
        self._files.reserve(self._fd, self.size)

    def write(self, data: memoryview, offset: int) -> None:
        """Write a range: its aligned part past the page cache, the rest through it."""
        aligned = len(data) // ALIGN * ALIGN if self._direct is not None else 0
        with self._store._doing("write", self.path):
            if aligned and self._direct is not None:
                with data[:aligned] as head:
                    self._files.write_at(self._direct, head, offset)
            if aligned < len(data):
                with data[aligned:] as tail:
                    self._files.write_at(self._fd, tail, offset + aligned)

    def sync(self) -> None:
        """Make every byte written so far durable."""
        with self._store._doing("sync", self.path):
            self._files.sync(self._fd)

    def close(self) -> None:
        """Release the descriptors and the lock."""
        for fd in (self._direct, self._fd):
            if fd is not None and fd >= 0:
                self._files.close(fd)
        self._direct, self._fd = None, -1


@final
class _LocalPartReader(PartReader):
    """Reads ranges of one part file, past the page cache where that is possible."""

    def __init__(self, store: LocalStore, path: str, *, direct: bool) -> None:
        self.path = path
        self._store = store
        self._files = store.files
        self._fd = self._files.open_read(path)
        # A shared lock keeps the file from being recycled under this reader. A writer that has just
        # committed still has its own: then it is asked for again at every read.
        self._held = self._files.lock(self._fd, shared=True)
        self._direct = self._files.open_read_direct(path) if direct else None
        self.size = self._files.size(self._fd)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill an ALIGN-aligned buffer from an ALIGN-aligned offset; fewer bytes only at the end."""
        fd = self._fd if self._direct is None else self._direct
        with self._store._doing("read", self.path):
            self._hold()
            return self._files.read_at(fd, buffer, offset)

    def descriptor(self) -> int | None:
        if type(self._files).read_at is not Files.read_at:
            return None  # reads are recorded, or made up
        with self._store._doing("read", self.path):
            self._hold()
        return self._fd if self._direct is None else self._direct

    def read(self, offset: int, length: int) -> bytes:
        """A small range, through the page cache."""
        data = bytearray(max(0, min(length, self.size - offset)))
        with self._store._doing("read", self.path):
            self._hold()
            return bytes(data[: self._files.read_at(self._fd, data, offset)])

    def _hold(self) -> None:
        if self._held:
            return
        held = self._files.lock(self._fd, shared=True)
        # Another save's bytes may be in it by now, if the step was pruned meanwhile.
        if not self._files.is_at(self._fd, self.path):
            raise MissingPathError(
                f"{self.path} was removed while it was read", path=self.path, hint="load a newer step"
            )
        self._held = held

    def close(self) -> None:
        """Release the descriptors."""
        for fd in (self._direct, self._fd):
            if fd is not None and fd >= 0:
                self._files.close(fd)
        self._direct, self._fd = None, -1
