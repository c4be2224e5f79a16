"""Writers: who writes which slice, so that every unique byte is written once and loads are even.

Every process computes this from the same layout and arrives at the same answer; nobody has to ask.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from holdfast.arrays.layout import ArrayLayout, Cuts, Ints, Layout
from holdfast.errors import LayoutError, UsageError

_EVEN_ENOUGH = 1.05
"""Pieces at most this much larger than the mean count as even."""


def spread(layout: Layout, *, min_split_bytes: int = 8 << 20) -> Layout:
    """The layout's boxes, refined and with exactly one holder each, loads as even as is sensible.

    An array with replicated boxes larger than `min_split_bytes` is cut along one dim, all boxes
    alike, so that a grid stays a grid. Then the pieces go, largest first, to whichever of their
    holders has least. Deterministic: equal layouts give equal results everywhere.
    """
    if min_split_bytes < 1:
        raise UsageError(f"min_split_bytes must be positive, got {min_split_bytes}")
    pieces = {name: _refined(name, layout[name], min_split_bytes) for name in sorted(layout)}
    chosen = _assigned(pieces)
    return Layout((name, _with_holders(pieces[name], chosen[name])) for name in layout)


def _with_holders(array: ArrayLayout, chosen: Ints) -> ArrayLayout:
    holders = tuple(zip(chosen.tolist(), strict=True))
    if array.geometry.cuts is not None and array.geometry.order is None:
        return ArrayLayout.grid(array.dtype, array.shape, array.geometry.cuts, holders)
    return ArrayLayout(array.dtype, array.shape, array.boxes, holders)


def _assigned(pieces: dict[str, ArrayLayout]) -> dict[str, Ints]:
    """For each array the one holder of each box."""
    load: Counter[int] = Counter()
    chosen: dict[str, Ints] = {}
    for name, array in pieces.items():
        table, sizes = array.table, array.geometry.volumes * array.itemsize
        chosen[name] = table.ids[table.offsets[:-1]].copy()
        single = table.counts == 1
        if single.any():  # nothing to choose, but it weighs on what is chosen later
            owners, place = np.unique(chosen[name][single], return_inverse=True)
            for owner, size in zip(owners, _sums(sizes[single], place), strict=True):
                load[int(owner)] += int(size)
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for size, name, box in sorted(_shared_boxes(pieces)):
        holders = pieces[name].holders[box]
        if holders not in heaps:
            heaps[holders] = [(0, holder) for holder in holders]
        owner = _least(heaps[holders], load)
        load[owner] -= size  # sizes are negated, for the order
        chosen[name][box] = owner
    return chosen


def _sums(sizes: Ints, place: Ints) -> list[int]:
    totals = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(totals, place, sizes)  # bincount would round through floats
    return [int(total) for total in totals]


def _shared_boxes(pieces: dict[str, ArrayLayout]) -> Iterator[tuple[int, str, int]]:
    """(minus bytes, name, box) of every box with a choice of holders."""
    for name, array in pieces.items():
        shared = np.flatnonzero(array.table.counts > 1)
        sizes = array.geometry.volumes[shared] * -array.itemsize
        for size, box in zip(sizes.tolist(), shared.tolist(), strict=True):
            yield size, name, box


def _least(heap: list[tuple[int, int]], load: Counter[int]) -> int:
    """The holder with least load; loads only grow, so a stale entry is too small, never too big."""
    while True:
        seen, holder = heap[0]
        if seen == load[holder]:
            return holder
        heapq.heapreplace(heap, (load[holder], holder))


def _refined(name: str, array: ArrayLayout, min_split_bytes: int) -> ArrayLayout:
    """The array cut so that its replicated boxes can be shared between their holders."""
    counts = array.table.counts
    if not counts.all():
        box = array.boxes[int(np.argmin(counts))].tolist()
        raise LayoutError(f"nobody holds the box {box} of {name!r}, so nobody can write it")
    sizes = array.geometry.volumes * array.itemsize
    wanted = np.where(counts > 1, np.minimum(counts, -(-sizes // min_split_bytes)), 1)
    pieces = int(wanted.max())
    if pieces <= 1:
        return array
    dim, pieces = _best_cut(array.boxes[int(np.argmax(wanted))], pieces)
    if pieces <= 1:
        return array
    if array.geometry.cuts is not None and array.geometry.order is None:
        return _refined_grid(array, array.geometry.cuts, dim, pieces)
    return _refined_boxes(array, dim, pieces)


def _best_cut(box: Ints, pieces: int) -> tuple[int, int]:
    """The dim to cut and into how many pieces: the outermost that is even enough."""
    options = []
    for dim, (start, stop) in enumerate(box.tolist()):
        extent = stop - start
        into = min(pieces, extent)
        # How much more than its share the largest piece has; fewer pieces than wanted count too.
        uneven = -(-extent // into) * pieces / extent
        if uneven <= _EVEN_ENOUGH:
            return dim, into
        options.append((uneven, dim, into))
    _, dim, into = min(options, default=(1.0, 0, 1))  # a 0-d box cannot be cut
    return dim, into


def _points(start: int, stop: int, pieces: int) -> list[int]:
    """Where [start, stop) is cut into about equal, never empty pieces; without its end."""
    pieces = min(pieces, stop - start)
    return [start + (stop - start) * piece // pieces for piece in range(pieces)]


def _refined_grid(array: ArrayLayout, cuts: Cuts, dim: int, pieces: int) -> ArrayLayout:
    old = cuts[dim]
    parts = [_points(start, stop, pieces) for start, stop in pairwise(old)]
    finer = (*(point for part in parts for point in part), old[-1])
    shape = [len(points) - 1 for points in cuts]
    cells = np.arange(len(array.boxes)).reshape(shape)
    cells = np.repeat(cells, [len(part) for part in parts], axis=dim).reshape(-1)
    holders = tuple(array.holders[cell] for cell in cells.tolist())
    new = (*cuts[:dim], finer, *cuts[dim + 1 :])
    return ArrayLayout.grid(array.dtype, array.shape, new, holders)


def _refined_boxes(array: ArrayLayout, dim: int, pieces: int) -> ArrayLayout:
    boxes, holders = [], []
    for box, held in zip(array.boxes, array.holders, strict=True):
        start, stop = box[dim].tolist()
        points = [*_points(start, stop, pieces), stop]
        for low, high in pairwise(points):
            piece = box.copy()
            piece[dim] = low, high
            boxes.append(piece)
            holders.append(held)
    return ArrayLayout(array.dtype, array.shape, np.stack(boxes), tuple(holders))
