"""How much of a file lies in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def resident_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache, by mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0.0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = -(-size // mmap.PAGESIZE)
        seen = np.zeros(pages, np.uint8)
        address = ctypes.c_void_p(view.__array_interface__["data"][0])
        wrong = _libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(seen.ctypes.data))
        del view  # the mapping cannot be closed while it is looked at
        if wrong:
            raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    return float((seen & 1).mean())
