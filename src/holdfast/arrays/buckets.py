"""Arrays in flat buffers: where each lies, which buckets they form, and who owns which part. Pure.

    buffer   all arrays of one dtype, experts apart
    bucket   what is sent in one piece: whole arrays up to a size, padded so that it divides evenly
    shard    the equal slice of every bucket that one member of a group owns

    |  a        .|  b  .|  c             .......|  d    ...|       . aligned starts    ... padded ends
    |<------ bucket 0 ------------------------->|< bucket 1>|
    |  shard 0      |  shard 1     |  shard 2   | 0 | 1 | 2 |

Offsets count elements, never packed bytes: two 4-bit elements may share a byte where they are stored, and
what is counted here must not depend on that. The number of shards is part of the layout. A layout made for
one group and used by another leaves the tail of every bucket to nobody: those parameters are never updated
and are missing from every norm (Megatron-LM #6048). So whoever uses one says for how many: `check_group`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, final

from holdfast.arrays.dtypes import dtype as dtype_of
from holdfast.arrays.names import match
from holdfast.errors import LayoutError

_BITS: Final = {"float4_e2m1fn": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "int1": 1, "uint1": 1}
"""Dtypes of which several elements fit into a byte."""


class FlatArray(NamedTuple):
    """An array to be placed."""

    name: str
    dtype: str
    numel: int
    expert: bool = False
    """Whether it belongs to experts, whose group of owners is another one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRules:
    """How arrays are placed."""

    start: int = 64
    """Arrays begin at multiples of so many elements."""
    end: int = 128
    """Buckets end at multiples of so many elements, and of the number of shards."""
    bucket: int = 0
    """A bucket that has so many elements is closed; 0: one bucket for each buffer."""
    num_shards: int = 1
    """How many own a slice of each bucket."""
    num_expert_shards: int = 0
    """The same for the buckets of experts; 0: as many as for the others."""
    alone: tuple[str, ...] = ()
    """Name patterns of arrays that have a bucket of their own, such as embeddings that two stages share."""
    in_bytes: bool = False
    """`start` and `end` count bytes: fewer elements of a wider dtype."""

    def __post_init__(self) -> None:
        least = {"start": 1, "end": 1, "bucket": 0, "num_shards": 1, "num_expert_shards": 0}
        wrong = [f"{name}={getattr(self, name)}" for name, low in least.items() if getattr(self, name) < low]
        if wrong:
            raise LayoutError(f"no layout with {', '.join(wrong)}", hint=f"at least {least}")


class Span(NamedTuple):
    """Elements start..stop-1 of a buffer, in one bucket: where an array lies."""

    start: int
    stop: int
    bucket: int


class Bucket(NamedTuple):
    """Elements start..stop-1 of a buffer; from `filled` on there is padding only."""

    start: int
    filled: int
    stop: int


class Piece(NamedTuple):
    """Elements lo..hi-1 of array number `array`, at element `at` of a stretch of the buffer."""

    array: int
    lo: int
    hi: int
    at: int


class BufferKey(NamedTuple):
    """What the arrays of a buffer have in common."""

    dtype: str
    expert: bool


@final
class Buffer:
    """The arrays of one dtype, one after the other. `arrays` are their numbers in the layout."""

    def __init__(self, key: BufferKey, members: Sequence[tuple[int, FlatArray]], rules: BucketRules) -> None:
        self.key = key
        self.itemsize = dtype_of(key.dtype).itemsize
        self.num_shards = (key.expert and rules.num_expert_shards) or rules.num_shards
        unit = self.itemsize if rules.in_bytes else 1
        start, end = max(1, rules.start // unit), max(1, rules.end // unit)
        self.arrays = tuple(number for number, _ in members)
        self.spans, self.buckets = _placed(
            [array for _, array in members], start, math.lcm(end, self.num_shards), rules
        )
        self._starts = [span.start for span in self.spans]

    @property
    def numel(self) -> int:
        """Elements, with padding."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def used(self) -> int:
        """Elements of arrays."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, where an element has at least one."""
        return self.numel * self.itemsize

    @property
    def packed_nbytes(self) -> int:
        """Bytes where elements of less than a byte are packed."""
        return self.numel * _BITS.get(self.key.dtype, 8 * self.itemsize) // 8

    def check_group(self, size: int, group: str) -> None:
        """Fails: LayoutError, unless a group of `size` members is what this buffer was laid out for."""
        if size != self.num_shards:
            raise LayoutError(
                f"{group} has {size} members, but the {self.key.dtype} buffer is laid out for "
                f"{self.num_shards} shards: some of it would be nobody's",
                hint="make the layout with num_shards= the size of the group that uses it",
            )

    def shard(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Elements start..stop-1 of each bucket that member `rank` owns. Fails: LayoutError."""
        if not 0 <= rank < self.num_shards:
            raise LayoutError(f"there is no shard {rank} of {self.num_shards}")
        found = []
        for bucket in self.buckets:
            size = (bucket.stop - bucket.start) // self.num_shards
            found.append((bucket.start + rank * size, bucket.start + (rank + 1) * size))
        return tuple(found)

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """What of which array lies in elements start..stop-1."""
        found = []
        for at in range(max(0, bisect_right(self._starts, start) - 1), len(self.spans)):
            span = self.spans[at]
            if span.start >= stop:
                break
            lo, hi = max(start, span.start), min(stop, span.stop)
            if lo < hi:
                found.append(Piece(self.arrays[at], lo - span.start, hi - span.start, lo - start))
        return tuple(found)


def _placed(
    members: Sequence[FlatArray], start: int, multiple: int, rules: BucketRules
) -> tuple[tuple[Span, ...], tuple[Bucket, ...]]:
    """Where the arrays of one buffer lie: those of a bucket in order, each bucket padded at its end.

    A full bucket is closed by the next array that has elements: one that has none lies where it is, and
    never begins a bucket that nothing fills.
    """
    spans: list[Span] = []
    buckets: list[Bucket] = []
    base = at = 0
    full = False

    def close() -> int:
        nonlocal base
        if at > base:
            stop = base + -(-(at - base) // multiple) * multiple
            buckets.append(Bucket(base, at, stop))
            base = stop
        return base

    for array in members:
        alone = bool(rules.alone) and match(rules.alone, array.name)
        if array.numel and (full or alone):
            at = close()
        at = base + -(-(at - base) // start) * start
        spans.append(Span(at, at + array.numel, len(buckets)))
        at += array.numel
        if array.numel:
            full = alone or 0 < rules.bucket <= at - base
    close()
    return tuple(spans), tuple(buckets)


@final
class BucketLayout:
    """Where every array lies. Two that are made of the same arrays and rules are equal."""

    def __init__(self, arrays: Sequence[FlatArray], rules: BucketRules) -> None:
        self.arrays = tuple(arrays)
        self.rules = rules
        names = {array.name for array in self.arrays}
        if len(names) != len(self.arrays) or any(array.numel < 0 for array in self.arrays):
            raise LayoutError("arrays of a layout have names of their own and no negative size")
        members: dict[BufferKey, list[tuple[int, FlatArray]]] = {}
        for number, array in enumerate(self.arrays):
            key = BufferKey(dtype_of(array.dtype).name, array.expert)
            members.setdefault(key, []).append((number, array))
        order = sorted(members, key=lambda key: (-dtype_of(key.dtype).itemsize, key.dtype, key.expert))
        self.buffers = tuple(Buffer(key, members[key], rules) for key in order)

    @cached_property
    def param_index_map(self) -> Mapping[str, Span]:
        """Where each array lies in its buffer, in elements, whatever they are packed to."""
        return {
            self.arrays[number].name: span
            for buffer in self.buffers
            for number, span in zip(buffer.arrays, buffer.spans, strict=True)
        }

    def owned(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """The elements lo..hi-1 of each array that member `rank` owns."""
        for buffer in self.buffers:
            for start, stop in buffer.shard(rank):
                for piece in buffer.pieces(start, stop):
                    yield self.arrays[piece.array].name, piece.lo, piece.hi

    @property
    def waste(self) -> float:
        """The share of all elements that is padding."""
        numel = sum(buffer.numel for buffer in self.buffers)
        return 1 - sum(buffer.used for buffer in self.buffers) / numel if numel else 0.0

    def describe(self) -> str:
        """A table of the buckets: arrays, elements, bytes and padding of each."""
        rows: list[tuple[str, ...]] = [
            ("buffer", "bucket", "arrays", "elements", "bytes", "a shard", "padding")
        ]
        for buffer in self.buffers:
            kind = buffer.key.dtype + (" experts" if buffer.key.expert else "")
            for number, bucket in enumerate(buffer.buckets):
                inside = [span for span in buffer.spans if span.bucket == number]
                numel = bucket.stop - bucket.start
                used = sum(span.stop - span.start for span in inside)
                sizes = (numel, numel * buffer.itemsize, numel * buffer.itemsize // buffer.num_shards)
                rows.append(
                    (
                        kind,
                        str(number),
                        str(len(inside)),
                        *(f"{size:,}" for size in sizes),
                        f"{1 - used / numel:.2%}",
                    )
                )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ]
        total = sum(buffer.nbytes for buffer in self.buffers)
        return "\n".join([*lines, f"{total:,} bytes in all, {self.waste:.2%} of them padding"])
