"""A tree of arrays as one flat memory. Pure: no array is touched here.

Arrays are sorted by name, so that the order of a dict means nothing, and lie in one segment for each dtype
(a buffer of `holdfast.arrays.BucketLayout`), every array at a multiple of ALIGN. Segments are padded to GRAIN
and cut into blocks at multiples of BLOCK from their start. A block is the unit of adding, checking and
sharing out: which bytes are added in one call depends on the tree alone, never on who adds. That matters:
numpy's vector loop and the scalar loop for what is left over give different NaNs for NaN + NaN, so no call
may have anything left over in one place and not in another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from holdfast.arrays import BucketLayout, BucketRules, FlatArray, Piece
from holdfast.arrays import dtype as dtype_of
from holdfast.errors import TreeError, UsageError

ALIGN: Final = 64
GRAIN: Final = 4096
BLOCK: Final = 256 << 10
"""Operands and result of one addition fit into a core's second-level cache."""
CHUNK: Final = 16
"""Blocks in a chunk: 4 MiB, less than a millisecond of one core."""
_RULES: Final = BucketRules(start=ALIGN, end=GRAIN, in_bytes=True)
_NO_SUM: Final = ("bool",)


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """One array: its name, dtype and shape as the caller has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name or 'the tree'}: {self.dtype}{list(self.shape)}"


class Block(NamedTuple):
    """Bytes lo..hi-1 of the flat memory, all of one dtype."""

    lo: int
    hi: int
    dtype: np.dtype[Any]
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """Blocks that one thread folds at a time; a lane's digest is made of one for each chunk.

    They hold values of the first `num_entries` arrays at most.
    """

    blocks: range
    num_entries: int


@final
class FlatLayout:
    """Where each array lies. Equal for all members, which `digest` proves. Fails: TreeError, UsageError."""

    def __init__(self, entries: Sequence[Entry], wire_dtype: str | None) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: entry.name))
        self.wire_dtype = wire_dtype
        self.wires = tuple(_summed_as(entry, wire_dtype) for entry in self.entries)
        self.starts, self.blocks, self.nbytes = _laid_out(self.entries, self.wires)

    @cached_property
    def digest(self) -> str:
        """Both ends of a link compare it."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((self.entries, self.wire_dtype)))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All blocks, cut in the same places whoever folds them."""
        return tuple(
            Chunk(range(first, first + len(some)), max(_num_entries(block) for block in some))
            for first in range(0, len(self.blocks), CHUNK)
            if (some := self.blocks[first : first + CHUNK])
        )

    def shares(self, num_owners: int) -> list[range]:
        """The blocks of each owner: contiguous, and as even as blocks allow."""
        cuts = [len(self.blocks) * at // num_owners for at in range(num_owners + 1)]
        return [range(lo, hi) for lo, hi in pairwise(cuts)]

    def differences(self, theirs: Sequence[Entry], wire_dtype: str | None, *, there: str) -> list[str]:
        """What other arrays have otherwise, one line each; `there` is the word for where they are."""
        mine = {entry.name: entry for entry in self.entries}
        other = {entry.name: entry for entry in theirs}
        found = [f"{entry}; {there}: none" for name, entry in mine.items() if name not in other]
        found += [f"{entry} ({there}); not here" for name, entry in other.items() if name not in mine]
        found += [
            f"{entry}; {there}: {other[name].dtype}{list(other[name].shape)}"
            for name, entry in mine.items()
            if name in other and other[name] != entry
        ]
        if wire_dtype != self.wire_dtype:
            found.append(f"wire_dtype={self.wire_dtype}; {there}: {wire_dtype}")
        return found


def _num_entries(block: Block) -> int:
    """How many arrays, in the order of their names, must be there for a block."""
    return max((piece.array + 1 for piece in block.pieces), default=0)


def _summed_as(entry: Entry, wire_dtype: str | None) -> np.dtype[Any]:
    """The dtype in which an array is added and sent."""
    own = dtype_of(entry.dtype)
    if own.name in _NO_SUM:
        raise TreeError(f"{entry} has no sum", hint="give counts as integers")
    if wire_dtype is None or not _is_real(own.numpy):
        return own.numpy
    wire = dtype_of(wire_dtype).numpy
    if not _is_real(wire):
        raise UsageError(
            f"wire_dtype={wire_dtype!r} is no floating-point dtype", hint="use bfloat16 or float16"
        )
    return wire if wire.itemsize < own.itemsize else own.numpy


def _is_real(kind: np.dtype[Any]) -> bool:
    # The floating-point types of ml_dtypes are of kind V to numpy.
    return kind.kind == "f" or "float" in kind.name


def _laid_out(
    entries: Sequence[Entry], wires: Sequence[np.dtype[Any]]
) -> tuple[tuple[int, ...], tuple[Block, ...], int]:
    """The first byte of every array, the blocks, and the bytes in all."""
    arrays = [
        FlatArray(entry.name, wire.name, math.prod(entry.shape))
        for entry, wire in zip(entries, wires, strict=True)
    ]
    starts = [0] * len(entries)
    blocks: list[Block] = []
    base = 0
    for segment in BucketLayout(arrays, _RULES).buffers:
        size = segment.itemsize
        for number, span in zip(segment.arrays, segment.spans, strict=True):
            starts[number] = base + span.start * size
        for at in range(0, segment.nbytes, BLOCK):
            stop = min(at + BLOCK, segment.nbytes)
            pieces = segment.pieces(at // size, stop // size)
            blocks.append(Block(base + at, base + stop, dtype_of(segment.key.dtype).numpy, pieces))
        base += segment.nbytes
    return tuple(starts), tuple(blocks), base
