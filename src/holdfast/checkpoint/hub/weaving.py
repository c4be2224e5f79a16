"""Leaves as grids of strided views of tensors: what a plan takes for the layout of a repository.

Whatever a rule does (reorder, join, stack, take, merge dims) only moves elements. So a leaf is a grid of
cells, each of which is a view of one tensor: an offset, and for every dim of the leaf the distance of two
neighbours in the tensor. The planner of `arrays` says which part of which cell a box of the leaf needs;
`Cell.move` then is one strided copy. Read from right to left it is the export.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Final, NamedTuple, final

from holdfast.arrays import ArrayLayout, Move
from holdfast.checkpoint.hub.axes import Groups
from holdfast.errors import UsageError

Shape = tuple[int, ...]

_MOST_CELLS: Final = 1 << 18


@final
@dataclass(frozen=True, slots=True)
class Strand:
    """One tensor of a leaf: its shape, and the distance of neighbours along each of its axes."""

    tensor: str
    shape: Shape
    strides: Mapping[str, int]


class Cell(NamedTuple):
    """A box of a leaf, [lo, hi), that is one strided view of one tensor; all in elements."""

    strand: Strand
    lo: Shape
    hi: Shape
    offset: int
    """Of the element at `lo` in the tensor."""
    strides: Shape
    """For each dim of the leaf, the distance of two neighbours in the tensor."""

    def move(self, lo: Sequence[int], hi: Sequence[int], box: Sequence[Sequence[int]]) -> Move:
        """The copy of the elements [lo, hi) of the leaf out of the tensor into the memory of a box.

        Counts elements, not bytes. Dims are ordered by their distance in the tensor, which is what makes them
        nest there, whatever their order in the leaf.
        """
        source, target, step = self.offset, 0, 1
        dims: list[tuple[int, int, int]] = []
        for dim in reversed(range(len(self.lo))):
            source += (lo[dim] - self.lo[dim]) * self.strides[dim]
            target += (lo[dim] - box[dim][0]) * step
            if hi[dim] - lo[dim] > 1:
                dims.append((int(hi[dim] - lo[dim]), self.strides[dim], int(step)))
            step *= box[dim][1] - box[dim][0]
        return _nested(int(source), int(target), dims)


def _nested(source: int, target: int, dims: list[tuple[int, int, int]]) -> Move:
    """The copy with these dims, innermost in the source first, neighbours collapsed."""
    run = 1
    found: list[tuple[int, int, int]] = []
    for count, from_step, to_step in sorted(dims, key=lambda dim: dim[1]):
        if not found and from_step == run and to_step == run:
            run *= count
        elif found and (from_step, to_step) == (found[-1][0] * found[-1][1], found[-1][0] * found[-1][2]):
            found[-1] = (found[-1][0] * count, *found[-1][1:])
        else:
            found.append((count, from_step, to_step))
    return Move(source, target, run, tuple(reversed(found)))


@final
class Woven:
    """One leaf: its shape, and the cells of the grid that its tensors form in it."""

    __slots__ = ("cells", "cuts", "shape", "strands")

    def __init__(self, shape: Shape, cuts: tuple[Shape, ...], cells: tuple[Cell, ...]) -> None:
        self.shape = shape
        self.cuts = cuts
        self.cells = cells
        self.strands = tuple({cell.strand.tensor: cell.strand for cell in cells}.values())

    def layout(self, dtype: str) -> ArrayLayout:
        """What the planner is told: box i is cell i."""
        return ArrayLayout.grid(dtype, self.shape, self.cuts, ((0,),) * len(self.cells))


class _Run(NamedTuple):
    """Axes of a leaf's dim that lie behind each other in every tensor: one counter."""

    axis: str
    """The fastest of them: its stride is that of the run."""
    size: int
    inner: int
    """How many elements of the run one index of its slowest axis is."""
    outer: str


def woven(
    leaf: Groups,
    sizes: Mapping[str, int],
    stacked: Sequence[str],
    join: str,
    parts: Sequence[int],
    take: tuple[str, int, int] | None,
    strands: Mapping[tuple[int, ...], Strand],
) -> Woven:
    """The leaf whose dims have these axes; `strands` are keyed by part and index of each stacked axis."""
    shape = tuple(math.prod(sizes[axis] for axis in group) for group in leaf)
    views = list(strands.values())
    dims = [_runs(group, sizes, stacked, join, views) for group in leaf]
    edges = {join: (0, *accumulate(parts))} if join else {}
    segments = [_segments(runs, stacked, edges) for runs in dims]
    if math.prod(map(len, segments)) > _MOST_CELLS:
        raise UsageError(
            f"a leaf of shape {list(shape)} would be made of {math.prod(map(len, segments)):,} pieces",
            hint="order the axes of its pattern so that dims that are merged lie together in the tensor",
        )
    cells = []
    for chosen in product(*segments):
        at = {axis: index for segment in chosen for axis, index in segment.at.items()}
        part = 0 if not join else bisect_right(edges[join], at[join] // _scale(dims, join)) - 1
        strand = strands[(part, *(at[axis] for axis in stacked))]
        steps = {
            run.axis: strand.strides[run.axis] for runs in dims for run in runs if run.axis not in stacked
        }
        offset = 0
        for run in (run for runs in dims for run in runs):
            if run.axis in stacked:
                continue
            index = at[run.outer]
            if run.outer == join:
                index -= edges[join][part] * run.inner
            offset += index * steps[run.axis]
        if take is not None:
            offset += take[1] * strand.strides[take[0]]
        cells.append(
            Cell(
                strand,
                tuple(segment.start for segment in chosen),
                tuple(segment.stop for segment in chosen),
                offset,
                tuple(0 if not runs or runs[-1].axis in stacked else steps[runs[-1].axis] for runs in dims),
            )
        )
    cuts = tuple(
        (*(segment.start for segment in some), size) for some, size in zip(segments, shape, strict=True)
    )
    return Woven(shape, cuts, tuple(cells))


def _scale(dims: Sequence[Sequence[_Run]], outer: str) -> int:
    return next(run.inner for runs in dims for run in runs if run.outer == outer)


def _runs(
    group: Sequence[str], sizes: Mapping[str, int], stacked: Sequence[str], join: str, views: Sequence[Strand]
) -> list[_Run]:
    """The axes of one dim, those that lie behind each other in every tensor as one."""
    runs: list[_Run] = []
    for axis in group:
        before = runs[-1] if runs else None
        if (
            before is not None
            and axis not in stacked
            and axis != join
            and before.axis not in stacked
            and all(one.strides[before.axis] == sizes[axis] * one.strides[axis] for one in views)
        ):
            size = sizes[axis]
            runs[-1] = _Run(axis, before.size * size, before.inner * size, before.outer)
        else:
            runs.append(_Run(axis, sizes[axis], 1, axis))
    return runs


class _Segment(NamedTuple):
    """A stretch of a dim in which every tensor has one stride; `at` is where it begins on each run."""

    start: int
    stop: int
    at: dict[str, int]


def _segments(
    runs: Sequence[_Run], stacked: Sequence[str], edges: Mapping[str, Sequence[int]]
) -> list[_Segment]:
    if not runs:
        return [_Segment(0, 1, {})]
    *outer, last = runs
    if last.axis in stacked:
        points: Sequence[int] = range(last.size + 1)
    elif last.outer in edges:
        points = [edge * last.inner for edge in edges[last.outer]]
    else:
        points = (0, last.size)
    found = []
    for number, indices in enumerate(product(*(range(run.size) for run in outer))):
        at = {run.outer: index for run, index in zip(outer, indices, strict=True)}
        for start, stop in pairwise(points):
            base = number * last.size
            found.append(_Segment(base + start, base + stop, {**at, last.outer: start}))
    return found
