"""Comparing the values of two arrays on disk, tile by tile.

Both sides are read through verified blocks and cut into tiles of bounded size, so that memory does not grow
with the arrays. The two sides may be sharded differently: a tile is put together from the cells it meets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.arrays import Bytes1D, dtype
from holdfast.checkpoint import StepReader
from holdfast.format import ArrayEntry, cells

TILE: Final = 64 << 20
"""Bytes of one array, on each side, in memory at once."""
_CHUNK: Final = 1 << 18
"""Elements compared at once: the temporaries stay in cache."""

Box = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Tally:
    """How the values of one array differ. NaN equals NaN and 0.0 equals -0.0; bits are counted apart.

    `max_abs` is over elements that differ and are NaN on neither side; None if there are none, or if the
    numbers are no quantities (PRNG keys).
    """

    elements: int
    bits_differ: int = 0
    values_differ: int = 0
    nan_on_one_side: int = 0
    max_abs: float | int | None = None

    def _add(self, a: npt.NDArray[Any], b: npt.NDArray[Any], quantities: bool) -> None:
        """Count pairs whose bits differ."""
        self.bits_differ += a.size
        with np.errstate(invalid="ignore"):  # of signalling NaNs
            a, b = _widened(a), _widened(b)
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        differ = (a != b) & ~(nan_a & nan_b)
        one_sided = nan_a ^ nan_b
        self.values_differ += int(np.count_nonzero(differ))
        self.nan_on_one_side += int(np.count_nonzero(one_sided))
        measured = differ & ~one_sided
        if quantities and measured.any():
            distance = _distance(a[measured], b[measured])
            self.max_abs = distance if self.max_abs is None else max(self.max_abs, distance)


def compared(
    readers: tuple[StepReader, StepReader],
    entries: tuple[ArrayEntry, ArrayEntry],
    *,
    most: int = TILE,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Tally:
    """How the values of two arrays of equal dtype and shape differ, in tiles of `most` bytes.

    `progress` is told the bytes of each tile. Fails: CorruptError, StorageError.
    """
    first, second = entries
    tally = Tally(prod(first.shape))
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-diff") as beside:
        for box in tiles(first, most):
            other = beside.submit(readers[1].read, second, box)
            one = readers[0].read(first, box)
            _tally_tile(tally, one, other.result(), first)
            progress(one.size)
    return tally


def tiles(entry: ArrayEntry, most: int) -> Iterator[Box]:
    """Boxes of at most `most` bytes that make up an array: all of it, its cells, or pieces of cells."""
    if not entry.nbytes:
        return
    itemsize = dtype(entry.dtype).itemsize
    if entry.nbytes <= most:
        yield tuple((0, size) for size in entry.shape)
        return
    for start, stop in cells(entry.cuts):
        yield from _pieces(tuple(zip(start, stop, strict=True)), itemsize, most)


def _pieces(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Pieces of a box that are contiguous in it: cut along the first dimension that can be."""
    nbytes = prod(hi - lo for lo, hi in box) * itemsize
    dim = next((d for d, (lo, hi) in enumerate(box) if hi - lo > 1), None)
    if nbytes <= most or dim is None:
        yield box
        return
    lo, hi = box[dim]
    rows = max(1, most // (nbytes // (hi - lo)))
    for at in range(lo, hi, rows):
        yield from _pieces((*box[:dim], (at, min(at + rows, hi)), *box[dim + 1 :]), itemsize, most)


def _tally_tile(tally: Tally, a: Bytes1D, b: Bytes1D, entry: ArrayEntry) -> None:
    kind = dtype(entry.dtype)
    step = _CHUNK * kind.itemsize
    for at in range(0, a.size, step):
        one, two = a[at : at + step], b[at : at + step]
        if np.array_equal(one, two):
            continue
        differ = (one.reshape(-1, kind.itemsize) != two.reshape(-1, kind.itemsize)).any(axis=1)
        tally._add(one.view(kind.numpy)[differ], two.view(kind.numpy)[differ], entry.kind == "array")


def _widened(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values in a dtype that numpy calculates with, none of them rounded."""
    name = array.dtype.name
    if name.startswith(("complex", "bcomplex")):
        return array.astype(np.complex128)
    if name.startswith(("uint", "bool")):
        return array.astype(np.uint64)
    return array.astype(np.int64 if name.startswith("int") else np.float64)


def _distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float | int:
    """The largest |a - b|; exact for integers."""
    if a.dtype.kind in "iu":
        # Modulo 2**64 the difference of the larger and the smaller is right even where int64 overflows.
        gaps = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
        return int(gaps.max())
    with np.errstate(over="ignore", invalid="ignore"):
        if a.dtype.kind == "c":
            # Per component: inf - inf is no number, but equal infinities are no distance apart.
            return float(np.hypot(_gaps(a.real, b.real), _gaps(a.imag, b.imag)).max())
        return float(_gaps(a, b).max())


def _gaps(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.where(a == b, 0.0, np.abs(a - b))
