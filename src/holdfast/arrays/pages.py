"""Fresh pages of memory: on huge pages where the system has them, faulted in when that is wanted."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Final

import numpy as np

from holdfast.arrays.copying import address_of
from holdfast.arrays.protocols import Bytes1D

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
HUGE: Final = 2 << 20
"""Bytes of a huge page."""

_libc = ctypes.CDLL(
    None, use_errno=True
)  # whose calls release the interpreter's lock; those of `mmap` do not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


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
