"""How arrays are moved: in which tiles they are read, and how they lie in the part files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, final

from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.foreign.boxes import cut, cuts, is_contiguous
from holdfast.checkpoint.foreign.source import ForeignArray
from holdfast.format import ArrayEntry, Piece, cells, encode_owners, lay_out, num_cells
from holdfast.format.part import PartLayout

FILE_BYTES: Final = 64 << 30
"""About as large as a part file becomes; arrays beyond it are cut into cells."""


@final
@dataclass(frozen=True, slots=True)
class Planned:
    """An array on its way: its name here, how it is cut in the files, and in which tiles it is read."""

    array: ForeignArray
    name: str
    tile: tuple[int, ...]
    entry: ArrayEntry


def planned(array: ForeignArray, name: str, *, tile_bytes: int) -> Planned:
    """How an array is moved. Fails: FormatError where its pieces would be too many."""
    itemsize = dtype_of(array.dtype).itemsize
    tile = cut(array.shape, array.grain, itemsize, tile_bytes)
    cell = cut(array.shape, array.grain, itemsize, FILE_BYTES)
    if not is_contiguous(tile, cell):
        # The tiles do not follow each other in the file, so each becomes a cell of its own: otherwise what a
        # source can only read at once would be read over and over.
        cell = tile
    grid = cuts(array.shape, cell)
    entry = ArrayEntry(
        name=name,
        dtype=array.dtype,
        shape=array.shape,
        kind=array.kind,
        impl=array.impl,
        cuts=grid,
        owners=encode_owners([0] * num_cells(grid)),
    )
    return Planned(array, name, tile, entry)


def part_files(arrays: Sequence[Planned]) -> list[PartLayout]:
    """The part files: cells in the order of the arrays, each file with at most FILE_BYTES of them."""
    groups: list[list[Piece]] = [[]]
    held = 0
    for one in arrays:
        entry = one.entry
        for start, stop in cells(entry.cuts):
            size = prod(b - a for a, b in zip(start, stop, strict=True)) * dtype_of(entry.dtype).itemsize
            if held and held + size > FILE_BYTES:
                groups.append([])
                held = 0
            groups[-1].append(Piece(entry.name, entry.dtype, entry.shape, start, stop))
            held += size
    return [lay_out(0, group, file=number) for number, group in enumerate(groups)]
