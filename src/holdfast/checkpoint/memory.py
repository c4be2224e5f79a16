"""Fresh memory for loaded arrays.

The first touch of a page, not reading or hashing, is what bounds a load into fresh memory, so large arrays
come from huge-page regions. Arrays of middling size share slabs of bounded size: an array that stays alive
holds on to its slab at most. Small ones go to scratch and are copied out, so that a single scalar can never
keep a slab.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final, NamedTuple, final

import numpy as np

from holdfast.arrays import Bytes1D

_ALIGN: Final = 64  # what zero-copy placement asks for
_SMALL: Final = 1 << 20
_SLAB: Final = 64 << 20
_MADV_HUGEPAGE: Final = 14


class Allocation(NamedTuple):
    """Memory for one box; `owned` says that it may be kept by the array made from it."""

    data: Bytes1D
    owned: bool


def region(nbytes: int) -> Bytes1D:
    """Fresh zeroed memory, on huge pages where the system has them; freed with its last view."""
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages serves small ones
        mapping.madvise(_MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


@final
class Allocator:
    """Hands out the memory of one load."""

    def __init__(self) -> None:
        self._slab = region(0)[:0]
        self._scratch = region(0)[:0]

    def allocate(self, nbytes: int) -> Allocation:
        """Aligned memory for `nbytes`."""
        if nbytes >= _SLAB // 2:
            return Allocation(region(nbytes)[:nbytes], owned=True)
        if nbytes >= _SMALL:
            data, self._slab = _carve(self._slab, nbytes)
            return Allocation(data, owned=True)
        data, self._scratch = _carve(self._scratch, nbytes)
        return Allocation(data, owned=False)


def _carve(slab: Bytes1D, nbytes: int) -> tuple[Bytes1D, Bytes1D]:
    """The first `nbytes` of a slab and its aligned rest; a new slab if this one is too small."""
    rounded = -(-nbytes // _ALIGN) * _ALIGN
    if rounded > slab.size:
        slab = region(_SLAB)
    return slab[:nbytes], slab[rounded:]
