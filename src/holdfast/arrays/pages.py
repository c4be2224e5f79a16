"""Pages of memory, of one process or shared: huge ones where the system has them, faulted in when wanted."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from holdfast.arrays.copying import address_of
from holdfast.arrays.protocols import Bytes1D

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
HUGE: Final = 2 << 20
"""Bytes of a huge page."""

_libc = ctypes.CDLL(
    None, use_errno=True
)  # whose calls release the interpreter's lock; those of `mmap` do not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
]  # fmt: skip
_libc.mmap.restype = ctypes.c_void_p


def region(nbytes: int) -> Bytes1D:
    """Fresh zeroed memory, on huge pages where the system has them; freed with its last view."""
    nbytes = max(nbytes, 1)
    huge = nbytes // HUGE * HUGE
    # Only what begins where a huge page does can lie on them, and not every kernel sees to that. What is
    # mapped beyond `nbytes` is never touched.
    mapping = mmap.mmap(-1, nbytes + (HUGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not huge:
        return np.frombuffer(mapping, np.uint8)
    start = -address_of(np.frombuffer(mapping, np.uint8)) % HUGE
    with suppress(OSError):  # a kernel without huge pages serves small ones
        mapping.madvise(_MADV_HUGEPAGE, start, huge)
    return np.frombuffer(mapping, np.uint8, nbytes, start)


def populate(address: int, nbytes: int) -> int:
    """Fault pages in, so that nobody pays for their first touch; the error number if that failed, else 0.

    A kernel that cannot do it makes them at the first touch instead, which is no failure.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return 0
    failed = ctypes.get_errno()
    return 0 if failed == 22 else failed  # EINVAL: it knows no such advice


SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Of a memfd that others map: made smaller, it would kill them."""
_HOLED: Final[list[mmap.mmap]] = []
"""Mappings that may have a hole, in which somebody else's memory lies by now: never unmapped."""


class Mapped(NamedTuple):
    """Shared memory, from `start` of what `keeper` has mapped; unmapped with the last view of that."""

    keeper: mmap.mmap
    start: int
    nbytes: int

    def array(self) -> Bytes1D:
        """A view of it, another one each time."""
        return np.frombuffer(self.keeper, np.uint8, self.nbytes, self.start)


def mapped(fd: int, nbytes: int, *, writable: bool = True) -> Mapped:
    """The first `nbytes` of a memfd, where huge pages can begin. Fails: OSError, ValueError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    plain = Mapped(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection), 0, nbytes)
    if nbytes < HUGE:
        return plain
    # The kernel puts a memfd anywhere, and one that is not aligned has small pages only. So it goes into the
    # middle of other memory, with which it is unmapped; what lies around it is never touched.
    unit = os.fstat(fd).st_blksize  # a memfd of hugetlb pages is mapped by whole ones of these
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        keeper = mmap.mmap(-1, -(-nbytes // unit) * unit + HUGE, flags=flags, prot=protection)
    except (OSError, ValueError):
        return plain
    address = address_of(np.frombuffer(keeper, np.uint8))
    start = -address % HUGE
    where = _libc.mmap(address + start, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if where == _MAP_FAILED:
        _HOLED.append(keeper)
        return plain
    plain.keeper.close()
    return Mapped(keeper, start, nbytes)


def memfd(name: str, nbytes: int) -> tuple[int, Mapped]:
    """A memfd that is sealed, and its memory, of which all pages are there. Fails: OSError, ValueError.

    To run out of memory later would be a signal, not an error.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mapped(fd, nbytes)
        if failed := populate_shared(address_of(memory.array()), nbytes):
            raise OSError(failed, os.strerror(failed))
        os.posix_fallocate(fd, 0, nbytes)  # a kernel that knows no such advice has made nothing yet
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory


def populate_shared(address: int, nbytes: int) -> int:
    """`populate` for a memfd that nobody has touched: huge pages where the kernel makes them.

    Most systems give none to a memfd of their own accord (`shmem_enabled` is `never`). Since Linux 6.1 they
    can be asked for, where a first page is there. There are fewer faults then, too.
    """
    first, last = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    for head in range(first, last, HUGE):
        if failed := populate(head, mmap.PAGESIZE):
            return failed
    if first < last:
        _libc.madvise(first, last - first, _MADV_COLLAPSE)  # where it fails, small pages are made below
    return populate(address, nbytes)
