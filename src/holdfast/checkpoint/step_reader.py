"""Boxes of the arrays of a step, read in any order and in bounded memory."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from contextlib import closing
from itertools import product
from math import prod
from typing import Final, final

import numpy as np

from holdfast.arrays import Bytes1D, dtype, move
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Manifest,
    PartIndex,
    Slice,
    block_range,
    check_block,
    check_size,
    decode_owners,
    num_cells,
    read_index,
    step_folder,
)
from holdfast.storage import Store

Box = tuple[tuple[int, int], ...]
"""[start, stop) in each dimension."""

_CACHED: Final = 8
"""Blocks kept: small arrays share blocks, and boxes rarely end where blocks do."""


@final
class StepReader:
    """Reads boxes of the arrays of one step, every block verified. For one thread at a time."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
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


def _met(points: tuple[int, ...], span: tuple[int, int]) -> range:
    """The numbers of the spans between cut points that [lo, hi) meets."""
    return range(bisect_right(points, span[0]) - 1, bisect_left(points, span[1]))
