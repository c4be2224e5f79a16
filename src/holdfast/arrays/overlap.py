"""Overlaps: which source boxes meet which target boxes, and where.

Two grids meet in a finer grid: per dim, the union of their cuts. So the overlaps are a product of
per-dim segments and need no test of pairs. Boxes that form no grid are tested pairwise, vectorised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from holdfast.arrays.layout import Geometry, Ints
from holdfast.arrays.strided import ranges

_PAIRS_AT_ONCE = 1 << 19
"""Bounds the memory of a pairwise test."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows of (place in the asked boxes, source box, [lo, hi)), ascending by place.

    `turn` counts the target boxes that read the same source box, as if all were asked for.
    """

    place: Ints
    source_box: Ints
    turn: Ints
    lo: Ints
    hi: Ints

    def rows(self, index: Ints) -> Overlap:
        """The rows at `index`."""
        return Overlap(*(getattr(self, column.name)[index] for column in fields(self)))

    def repeated(self, places: Ints) -> tuple[Overlap, Ints]:
        """The rows of each of `places` in turn, and for each row which entry of `places` it is."""
        starts = np.searchsorted(self.place, places, "left")
        stops = np.searchsorted(self.place, places, "right")
        return self.rows(ranges(starts, stops)), np.repeat(np.arange(len(places)), stops - starts)


def overlaps(source: Geometry, target: Geometry, boxes: Ints) -> Overlap:
    """Where the target boxes numbered `boxes` (ascending, distinct) meet the source boxes."""
    if not len(boxes):
        ndim = source.boxes.shape[1] if source.cuts is None else len(source.cuts)
        none, corner = np.empty(0, np.int64), np.empty((0, ndim), np.int64)
        return Overlap(none, none, none, corner, corner)
    if source.cuts is None or target.cuts is None:
        return _pairwise(source.boxes, target.boxes, boxes)
    if len(boxes) == 1 or 8 * len(boxes) < target.num_boxes:
        parts = [_grids(source, target, target.boxes[box].tolist()) for box in boxes]
        if len(parts) == 1:
            return parts[0]
        return _joined(parts)
    whole = [[0, points[-1]] for points in target.cuts]
    return _chosen(_grids(source, target, whole), target, boxes)


def _joined(parts: list[Overlap]) -> Overlap:
    place = np.repeat(np.arange(len(parts)), [len(part.place) for part in parts])
    columns = ("source_box", "turn", "lo", "hi")
    return Overlap(place, *(np.concatenate([getattr(p, c) for p in parts]) for c in columns))


def _chosen(every: Overlap, target: Geometry, boxes: Ints) -> Overlap:
    """The rows of `boxes` out of those of every cell, sorted by their place in `boxes`."""
    box = every.place if target.order is None else target.order[every.place]
    place_of = np.full(target.num_boxes, -1, np.int64)
    place_of[boxes] = np.arange(len(boxes))
    place = place_of[box]
    index = np.argsort(place, kind="stable")
    if len(boxes) < target.num_boxes:
        index = index[np.searchsorted(place[index], 0) :]
    chosen = every.rows(index)
    return Overlap(place[index], chosen.source_box, chosen.turn, chosen.lo, chosen.hi)


class _Segments(NamedTuple):
    """One dim of the finer grid: per segment the source and target cell, its turn, and extent."""

    source: Ints
    target: Ints
    turn: Ints
    num_turns: Ints
    lo: Ints
    hi: Ints


def _segments(source: Geometry, target: Geometry, dim: int, lo: int, hi: int) -> _Segments:
    assert source.cuts is not None
    assert target.cuts is not None
    inner = []
    for geometry, points in ((source, source.cuts[dim]), (target, target.cuts[dim])):
        cut = geometry.cut_arrays[dim]
        inner.append(cut[bisect_right(points, lo) : bisect_left(points, hi)])
    edges = np.concatenate(([lo], *inner, [hi]))
    if len(inner[0]) and len(inner[1]):
        edges = np.unique(edges)
    starts = edges[:-1]
    from_cuts, to_cuts = source.cut_arrays[dim], target.cut_arrays[dim]
    from_cell = np.searchsorted(from_cuts, starts, "right") - 1
    to_cell = np.searchsorted(to_cuts, starts, "right") - 1
    first = np.searchsorted(to_cuts, from_cuts[from_cell], "right") - 1
    after = np.searchsorted(to_cuts, from_cuts[from_cell + 1], "left")
    return _Segments(from_cell, to_cell, to_cell - first, after - first, starts, edges[1:])


def _grids(source: Geometry, target: Geometry, region: list[list[int]]) -> Overlap:
    """The overlaps inside `region` of two grids; `place` is the target cell, in no order.

    When the region is a single target box, `place` is all zeros.
    """
    assert source.cuts is not None
    assert target.cuts is not None
    dims = [_segments(source, target, dim, *extent) for dim, extent in enumerate(region)]
    from_cell = to_cell = turn = np.zeros(1, np.int64)
    for dim, part in enumerate(dims):
        from_cell = (from_cell[:, None] * (len(source.cuts[dim]) - 1) + part.source).reshape(-1)
        to_cell = (to_cell[:, None] * (len(target.cuts[dim]) - 1) + part.target).reshape(-1)
        turn = (turn[:, None] * part.num_turns + part.turn).reshape(-1)
    corners = np.empty((2, *(len(part.lo) for part in dims), len(dims)), np.int64)
    for dim, part in enumerate(dims):
        along = (-1, *[1] * (len(dims) - 1 - dim))
        corners[0, ..., dim] = part.lo.reshape(along)
        corners[1, ..., dim] = part.hi.reshape(along)
    lo, hi = corners.reshape(2, len(from_cell), len(dims))
    source_box = from_cell if source.order is None else source.order[from_cell]
    if to_cell[0] == to_cell[-1]:  # cells are unique to a box: the region was one box
        to_cell = np.zeros(len(to_cell), np.int64)
    return Overlap(to_cell, source_box, turn, lo, hi)


def _pairwise(source: Ints, target: Ints, boxes: Ints) -> Overlap:
    """The overlaps of boxes that form no grid, by testing all pairs."""
    at_once = max(1, _PAIRS_AT_ONCE // len(source))
    found = []
    for at in range(0, len(boxes), at_once):
        some = target[boxes[at : at + at_once]]
        meets = (some[:, None, :, 0] < source[None, :, :, 1]) & (source[None, :, :, 0] < some[:, None, :, 1])
        found.append(np.argwhere(meets.all(axis=2)) + np.array([at, 0]))
    place, box = np.concatenate(found).T
    wanted = target[boxes[place]]
    lo = np.maximum(wanted[:, :, 0], source[box, :, 0])
    hi = np.minimum(wanted[:, :, 1], source[box, :, 1])
    # An exact turn would need every target box; its number is spread well enough.
    return Overlap(place, box, boxes[place], lo, hi)
