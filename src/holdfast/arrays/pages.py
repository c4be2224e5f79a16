"""Fresh pages of memory: on huge pages where the system has them, faulted in when that is wanted."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Final

import numpy as np

from holdfast.arrays.protocols import Bytes1D

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14

_libc = ctypes.CDLL(
    None, use_errno=True
)  # whose calls release the interpreter's lock; those of `mmap` do not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def region(nbytes: int) -> Bytes1D:
    """Fresh zeroed memory, on huge pages where the system has them; freed with its last view."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages serves small ones
        mapping.madvise(_MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def populate(address: int, nbytes: int) -> int:
    """Fault pages in, so that nobody pays for their first touch; the error number if that failed, else 0.

    A kernel that cannot do it makes them at the first touch instead, which is no failure.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return 0
    failed = ctypes.get_errno()
    return 0 if failed == 22 else failed  # EINVAL: it knows no such advice
