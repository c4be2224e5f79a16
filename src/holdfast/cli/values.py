"""Comparing the values of two arrays on disk, tile by tile.

Both sides are read through verified blocks and cut into tiles of bounded size, so that memory does not grow
with the arrays. The two sides may be sharded differently: a tile is put together from the cells it meets.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.arrays import Bytes1D, dtype, move
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Manifest,
    PartIndex,
    Slice,
    block_range,
    cells,
    check_block,
    check_size,
    decode_owners,
    num_cells,
    read_index,
    step_folder,
)
from holdfast.storage import LocalStore

TILE: Final = 64 << 20
"""Bytes of one array, on each side, in memory at once."""
_CACHED: Final = 8
"""Blocks kept on each side: small arrays share blocks, and tiles rarely end where blocks do."""
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


@final
class StepReader:
    """Reads boxes of the arrays of one step, every block verified. For one thread at a time."""

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store = store
        self._manifest = manifest
        self._folder = step_folder(manifest.save.step)
        self._parts: dict[int, tuple[PartIndex, dict[tuple[str, tuple[int, ...]], Slice]]] = {}
        self._blocks: OrderedDict[tuple[int, int, int], Bytes1D] = OrderedDict()
        self._owners: tuple[str, list[int]] = ("", [])

    def first_byte(self, entry: ArrayEntry) -> tuple[int, int, int]:
        """Where an array begins: part, file, offset. Reading in this order reads each block once."""
        owner = self._owners_of(entry)[0]
        piece = self._part(owner)[1][entry.name, (0,) * len(entry.shape)]
        return owner, piece.file, piece.offset

    def read(self, entry: ArrayEntry, box: Box) -> Bytes1D:
        """The bytes of a box of an array, in C order. Fails: CorruptError, StorageError."""
        itemsize = dtype(entry.dtype).itemsize
        data = np.empty(prod(hi - lo for lo, hi in box) * itemsize, np.uint8)
        owners = self._owners_of(entry)
        counts = [len(points) - 1 for points in entry.cuts]
        for spans in product(*(_met(points, span) for points, span in zip(entry.cuts, box, strict=True))):
            number = 0
            for span, size in zip(spans, counts, strict=True):
                number = number * size + span
            cell: Box = tuple(
                (points[at], points[at + 1]) for points, at in zip(entry.cuts, spans, strict=True)
            )
            self._copy(entry.name, owners[number], cell, box, itemsize, data)
        return data

    def _copy(self, name: str, part: int, cell: Box, box: Box, itemsize: int, into: Bytes1D) -> None:
        piece = self._part(part)[1][name, tuple(lo for lo, _ in cell)]
        low = [max(a, b) for (a, _), (b, _) in zip(cell, box, strict=True)]
        high = [min(a, b) for (_, a), (_, b) in zip(cell, box, strict=True)]
        copy = move(low, high, cell, box, itemsize)
        if copy is None:
            return
        copy = copy.shifted(source=piece.offset)
        for block in copy.blocks(BLOCK).tolist():
            begin = block * BLOCK
            data = self._block(part, piece.file, block)
            for one in copy.clip(begin, begin + data.size):
                one.shifted(source=-begin).apply(data, into)

    def _block(self, part: int, file: int, block: int) -> Bytes1D:
        key = (part, file, block)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        index = self._part(part)[0]
        entry = index.files[file]
        begin, end = block_range(block, entry.size)
        while len(self._blocks) >= _CACHED:
            self._blocks.popitem(last=False)
        buffer = np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8)  # page-aligned, as direct reads need
        with closing(self._store.open_part(self._folder, entry.name)) as reader:
            check_size(entry.name, reader.size, entry.size)
            got = reader.read_into(buffer.data, begin)
        data = buffer[: min(got, end - begin)]
        check_block(index, file, block, data.data)
        self._blocks[key] = data
        return data

    def _part(self, part: int) -> tuple[PartIndex, dict[tuple[str, tuple[int, ...]], Slice]]:
        if part not in self._parts:
            index = read_index(self._store, self._folder, self._manifest, part)
            self._parts[part] = index, {(piece.name, piece.start): piece for piece in index.slices}
        return self._parts[part]

    def _owners_of(self, entry: ArrayEntry) -> list[int]:
        if self._owners[0] != entry.name or not self._owners[1]:
            self._owners = entry.name, decode_owners(entry.owners, num_cells(entry.cuts))
        return self._owners[1]


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


def _met(points: tuple[int, ...], span: tuple[int, int]) -> range:
    """The numbers of the spans between cut points that [lo, hi) meets."""
    return range(bisect_right(points, span[0]) - 1, bisect_left(points, span[1]))


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
