"""The system calls that checkpoints are made of, and nothing else.

Everything Holdfast does to a checkpoint folder goes through one `Files` object, so that a test can record
every operation, replay it into a model of a disk, and enumerate what a crash may leave behind
(`holdfast.testing.crash`). Paths are absolute; symbolic links are never followed in the last component.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator

ALIGN = 4096
"""Offset, length and memory alignment that direct I/O is given. A multiple of every block size in use."""

Bytes = bytes | bytearray | memoryview

_DIRECT = getattr(os, "O_DIRECT", 0)


_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


_exclusive: dict[int, os.stat_result] = {}
"""The descriptors of this process that have an exclusive lock, or are about to, and the file of each."""


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _kind(shared: bool) -> int:
    return fcntl.F_RDLCK if shared else fcntl.F_WRLCK


def _in_child() -> None:
    """A forked child has the open files of its parent, and their locks with them: it lets go of those."""
    if not _exclusive:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd, locked in _exclusive.items():
        with contextlib.suppress(OSError):  # closed behind our back, and perhaps another file's by now
            if os.path.samestat(os.fstat(fd), locked):
                os.dup2(null, fd, inheritable=False)  # its number stays taken: the child may yet close it
    os.close(null)
    _exclusive.clear()


os.register_at_fork(after_in_child=_in_child)


class Files:
    """The real file system."""

    def create(self, path: str, *, exclusive: bool = False) -> int:
        """A descriptor to write `path`, created if absent and not truncated; buffered."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_EXCL if exclusive else 0), 0o644)

    def reopen_direct(self, path: str) -> int | None:
        """A second descriptor that bypasses the page cache, or None where the file system refuses."""
        return self._direct(path, os.O_WRONLY)

    def open_read(self, path: str) -> int:
        """A buffered descriptor to read `path`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def open_read_direct(self, path: str) -> int | None:
        """A descriptor to read `path` past the page cache, or None where the file system refuses."""
        return self._direct(path, os.O_RDONLY)

    def _direct(self, path: str, mode: int) -> int | None:
        if not _DIRECT:
            return None
        try:
            return os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | _DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise

    def reserve(self, fd: int, size: int) -> None:
        """Make `fd` exactly `size` bytes long with its space allocated; ENOSPC comes from here."""
        if os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)
        if size:
            os.posix_fallocate(fd, 0, size)

    def write_at(self, fd: int, data: Bytes, offset: int) -> None:
        """Write all of `data` at `offset`."""
        done = 0
        with memoryview(data) as whole:
            while done < whole.nbytes:
                with whole[done:] as left:
                    written = os.pwrite(fd, left, offset + done)
                if written <= 0:
                    raise OSError(errno.EIO, "short write")
                done += written

    def sync(self, fd: int) -> None:
        """Make the file's bytes and size durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor, and end its exclusive lock even where a child has the same open file."""
        if fd in _exclusive:
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))
            _exclusive.pop(fd, None)
        os.close(fd)

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        """Take the advisory lock without waiting; False if somebody else's is in the way.

        The lock belongs to this open descriptor and ends with it, in whatever way the process ends.
        """
        if not shared:
            _exclusive[fd] = os.fstat(fd)  # before it has the lock: a fork may come in between
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(_kind(shared)))
        except OSError as error:
            _exclusive.pop(fd, None)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def locked(self, fd: int, *, shared: bool = False) -> bool:
        """Whether `lock` would be refused. Asks only: probing never gets in a writer's way."""
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(_kind(shared)))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def make_folder(self, path: str) -> bool:
        """Create one folder; False if it is there already."""
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            return False
        return True

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Make the entries of a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, source: str, target: str) -> bool:
        """Give a file a second name; False if `target` exists. Atomic.

        Where the file system has no links, the file is renamed instead, and `source` is gone.
        """
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            return self._rename_new(source, target)
        return True

    def _rename_new(self, source: str, target: str) -> bool:
        paths = os.fsencode(source), os.fsencode(target)
        if not _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_NOREPLACE):
            return True
        failed = ctypes.get_errno()
        if failed == errno.EEXIST:
            return False
        raise OSError(failed, f"neither links nor exclusive renames work here: {os.strerror(failed)}")

    def rename(self, source: str, target: str) -> None:
        """Move `source` over `target`. Atomic."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def names(self, path: str) -> list[str]:
        """The entries of a folder, sorted."""
        return sorted(os.listdir(path))

    def status(self, path: str) -> os.stat_result | None:
        """lstat, or None if there is nothing."""
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_at(self, fd: int, path: str) -> bool:
        """Whether `path` names the very file that is open here."""
        found = self.status(path)
        return found is not None and os.path.samestat(found, os.fstat(fd))

    def is_folder(self, path: str) -> bool:
        """Whether `path` is a folder itself, not a link to one."""
        found = self.status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_file(self, path: str) -> bool:
        """Whether `path` is a regular file itself, not a link to one."""
        found = self.status(path)
        return found is not None and stat.S_ISREG(found.st_mode)

    def read_at(self, fd: int, buffer: bytearray | memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; fewer bytes only at the end of the file."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], offset + done)
            done += got
            # A direct descriptor ends in a partial sector; asking again from there would be unaligned.
            if got == 0 or got % 512:
                break
        return done

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def free_bytes(self, path: str) -> int:
        """Bytes that an ordinary user may still write to the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def opened(self, fd: int) -> Iterator[int]:
        """Close `fd` at the end of the block."""
        try:
            yield fd
        finally:
            self.close(fd)
