"""Moves: strided byte copies between two row-major buffers, without a Python object per row.

A Move is a run of contiguous bytes repeated over nested dims. Every dim *nests* in the source: its
stride is at least the extent of everything inside it, so source offsets rise in lexicographic
order of the indices. `move` only makes such Moves, and `clip`, `shifted` and `coalesce` keep it so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.arrays.copying import address_of
from holdfast.errors import LayoutError, UsageError

Dim = tuple[int, int, int]
"""(count, source stride, target stride) in bytes."""

Box = Sequence[Sequence[int]] | npt.NDArray[np.int64]
"""(start, stop) per dimension."""

_WIDTHS: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

_SHORT_RUN = 64
"""Up to here a run is copied as one opaque element: measured up to 3 times as fast as a loop."""


@dataclass(frozen=True, slots=True)
class Move:
    """A strided copy: `run` bytes at each point of `dims`, outermost first; all in bytes."""

    source: int
    target: int
    run: int
    dims: tuple[Dim, ...] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes are copied."""
        return self.run * math.prod(dim[0] for dim in self.dims)

    def source_span(self) -> tuple[int, int]:
        """The extent [lo, hi) of the source bytes, gaps included."""
        return self.source, self.source + _extent(self.run, self.dims)

    def target_span(self) -> tuple[int, int]:
        """The extent [lo, hi) of the target bytes, gaps included."""
        return self.target, self.target + self.run + sum((n - 1) * t for n, _, t in self.dims)

    def shifted(self, source: int = 0, target: int = 0) -> Move:
        """The same copy with `source` and `target` added to its offsets."""
        return Move(self.source + source, self.target + target, self.run, self.dims)

    def clip(self, lo: int, hi: int) -> list[Move]:
        """The part of this copy whose source bytes lie in [lo, hi), in order of source.

        At most 2 * len(dims) + 1 Moves: the whole iterations in the middle of each dim, and what
        is left of the two iterations that the edges cut.
        """
        first, last = self.source_span()
        if lo <= first and last <= hi:
            return [self]
        if hi <= first or last <= lo or hi <= lo:
            return []
        if not self.dims:
            start, stop = max(lo, first), min(hi, last)
            return [Move(start, self.target + start - first, stop - start)]
        (count, stride, _), inner = self.dims[0], self.dims[1:]
        extent = _extent(self.run, inner)
        begin = min(count, max(0, -((first - lo) // stride)))  # first iteration not cut by lo
        end = max(0, min(count, (hi - first - extent) // stride + 1))  # after the last within hi
        if begin > end:  # both edges cut the same iteration
            return self._iterations(end, end + 1)[0].clip(lo, hi)
        head = self._iterations(begin - 1, begin)[0].clip(lo, hi) if begin > 0 else []
        tail = self._iterations(end, end + 1)[0].clip(lo, hi) if end < count else []
        return [*head, *self._iterations(begin, end), *tail]

    def _iterations(self, begin: int, end: int) -> list[Move]:
        """Iterations [begin, end) of the outermost dim: one Move, or none."""
        (_, from_stride, to_stride), inner = self.dims[0], self.dims[1:]
        source, target = self.source + begin * from_stride, self.target + begin * to_stride
        if end - begin == 1:
            return [Move(source, target, self.run, inner)]
        if end <= begin:
            return []
        return [Move(source, target, self.run, ((end - begin, from_stride, to_stride), *inner))]

    def blocks(self, block: int) -> npt.NDArray[np.int64]:
        """The numbers of the `block`-sized blocks that hold any source byte, ascending."""
        if block <= 0:
            raise UsageError(f"a block has a positive size, got {block}")
        # A gap smaller than a block cannot hide a whole block: such dims count as contiguous.
        run, dims = self.run, list(self.dims)
        while dims and dims[-1][1] - run < block:
            count, stride, _ = dims.pop()
            run += (count - 1) * stride
        starts = np.array([self.source], np.int64)
        for count, stride, _ in dims:
            steps = np.arange(count, dtype=np.int64) * stride
            starts = (starts[:, None] + steps).reshape(-1)
        first, last = starts // block, (starts + (run - 1)) // block
        # Starts ascend, so only the first block of a stretch can repeat the last of the one before.
        np.maximum(first[1:], last[:-1] + 1, out=first[1:])
        return ranges(first, last + 1)

    def apply(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        """Copy between two contiguous 1-d uint8 arrays; one numpy copy, made without the GIL."""
        self._check(source, self.source_span(), "source")
        self._check(target, self.target_span(), "target")
        if not target.flags.writeable:
            raise UsageError("the target buffer is read-only")
        if not self.dims:
            end = self.source + self.run, self.target + self.run
            # Not past the cache: targets are often fresh, and the kernel has just zeroed their lines there.
            np.copyto(target[self.target : end[1]], source[self.source : end[0]])
            return
        width = self._width(address_of(source) + self.source, address_of(target) + self.target)
        counts = tuple(dim[0] for dim in self.dims)
        from_strides = tuple(dim[1] for dim in self.dims)
        to_strides = tuple(dim[2] for dim in self.dims)
        element = _WIDTHS[width]
        if width < self.run <= _SHORT_RUN:
            element = np.dtype(("V", self.run))
        elif width < self.run:
            counts += (self.run // width,)
            from_strides, to_strides = (*from_strides, width), (*to_strides, width)
        # The constructor checks bounds itself and costs a twentieth of as_strided.
        np.copyto(
            np.ndarray(counts, element, target.data, self.target, to_strides),
            np.ndarray(counts, element, source.data, self.source, from_strides),
        )

    def _width(self, source: int, target: int) -> int:
        """The widest element that divides run, strides and both addresses."""
        shared = math.gcd(self.run, source, target, 8)
        for _, from_stride, to_stride in self.dims:
            shared = math.gcd(shared, from_stride, to_stride)
        return shared

    def _check(self, buffer: npt.NDArray[np.uint8], span: tuple[int, int], role: str) -> None:
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise UsageError(
                f"the {role} buffer must be a contiguous 1-d uint8 array, "
                f"got {buffer.dtype} with shape {buffer.shape} and strides {buffer.strides}",
                hint="use array.reshape(-1).view(np.uint8)",
            )
        if span[0] < 0 or span[1] > buffer.size:
            raise LayoutError(
                f"the copy needs {role} bytes {span[0]}..{span[1]}, but the buffer has {buffer.size}"
            )


def _extent(run: int, dims: Iterable[Dim]) -> int:
    return run + sum((count - 1) * stride for count, stride, _ in dims)


def ranges(first: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The concatenation of arange(first[i], stop[i]); empty where stop <= first."""
    lengths: npt.NDArray[np.int64] = np.maximum(stop - first, 0)
    before = np.cumsum(lengths) - lengths
    numbers = np.arange(int(lengths.sum()), dtype=np.int64)
    numbers += np.repeat(first - before, lengths)
    return numbers


def move(
    lo: Sequence[int] | npt.NDArray[np.int64],
    hi: Sequence[int] | npt.NDArray[np.int64],
    source_box: Box,
    target_box: Box,
    itemsize: int,
) -> Move | None:
    """The copy of elements [lo, hi) from a buffer of source_box to one of target_box.

    All coordinates are global; both buffers are row-major and hold exactly their box. None when
    there is nothing to copy.
    """
    source_rows, target_rows = _rows(source_box), _rows(target_box)
    source = target = 0
    from_stride = to_stride = run = itemsize
    dims: list[Dim] = []  # innermost first
    pairs = list(zip(_ints(lo), _ints(hi), source_rows, target_rows, strict=True))
    for start, stop, (a, b), (c, d) in reversed(pairs):
        count = stop - start
        if count <= 0:
            return None
        if start < a or start < c or stop > b or stop > d:
            raise LayoutError(
                f"the slice {pairs} is not inside both boxes",
                hint="each entry is (lo, hi, source (start, stop), target (start, stop))",
            )
        source += (start - a) * from_stride
        target += (start - c) * to_stride
        if count > 1:
            run = _nest(run, dims, (count, from_stride, to_stride))
        from_stride *= b - a
        to_stride *= d - c
    return Move(source, target, run, tuple(reversed(dims)))


def _nest(run: int, dims: list[Dim], dim: Dim) -> int:
    """Put `dim` around `dims` (innermost first), collapsing it if contiguous; the new run."""
    count, from_stride, to_stride = dim
    if not dims:
        if from_stride == run and to_stride == run:
            return run * count
    else:
        inner, inner_from, inner_to = dims[-1]
        if from_stride == inner * inner_from and to_stride == inner * inner_to:
            dims[-1] = (inner * count, inner_from, inner_to)
            return run
    dims.append(dim)
    return run


def _ints(values: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
    return values.tolist() if isinstance(values, np.ndarray) else [int(value) for value in values]


def _rows(box: Box) -> list[tuple[int, int]]:
    rows = box.tolist() if isinstance(box, np.ndarray) else box
    return [(int(start), int(stop)) for start, stop in rows]


def coalesce(moves: Iterable[Move]) -> list[Move]:
    """The same bytes in as few Moves as neighbours allow, in order of source.

    Merges what is contiguous in source and target: runs that follow each other, equal dims whose
    runs touch, and dims that continue where the one before ended. The Moves must not overlap in
    the target, as those of one plan never do.
    """
    todo = sorted(moves, key=lambda one: (one.source, one.target))
    while True:
        done: list[Move] = []
        for one in todo:
            merged = _merged(done[-1], one) if done else None
            if merged is None:
                done.append(one)
            else:
                done[-1] = merged
        if len(done) == len(todo):
            return done
        todo = done


def _merged(a: Move, b: Move) -> Move | None:
    """One Move for a and then b, or None where they do not touch in both buffers."""
    by = (b.source - a.source, b.target - a.target)
    if a.dims == b.dims and by == (a.run, a.run):
        run = a.run + b.run
        if a.dims and run > min(a.dims[-1][1:]):
            return None  # a's next row would start inside b: the dims would no longer nest
        dims: list[Dim] = []
        for dim in reversed(a.dims):
            run = _nest(run, dims, dim)
        return Move(a.source, a.target, run, tuple(reversed(dims)))
    longer = a if len(a.dims) >= len(b.dims) else b
    if a.run != b.run or not longer.dims:
        return None
    (_, *strides), inner = longer.dims[0], longer.dims[1:]
    count_a, count_b = (_iterations_of(one, strides, inner) for one in (a, b))
    if not count_a or not count_b or by != (count_a * strides[0], count_a * strides[1]):
        return None
    return Move(a.source, a.target, a.run, ((count_a + count_b, strides[0], strides[1]), *inner))


def _iterations_of(one: Move, strides: Sequence[int], inner: tuple[Dim, ...]) -> int:
    """How many iterations of a dim with these strides around `inner` a Move is; 0 if it is none."""
    if one.dims == inner:
        return 1
    if one.dims[1:] == inner and one.dims[0][1:] == tuple(strides):
        return one.dims[0][0]
    return 0
