"""Writers: who writes which slice, so that every unique byte is written once and loads are even.

Every process computes this from the same layout and arrives at the same answer; nobody has to ask.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from holdfast.arrays.layout import ArrayLayout, Cuts, Geometry, Holders, Ints, Layout
from holdfast.errors import LayoutError, UsageError

_EVEN_ENOUGH = 1.05
"""Pieces at most this much larger than the mean count as even."""
_SHORT_RUN = 256
"""Bytes in a row below which gathering a piece takes longer than it should."""


def spread(layout: Layout, *, min_split_bytes: int = 8 << 20) -> Layout:
    """The layout's boxes, refined and with exactly one holder each, loads as even as is sensible.

    An array with replicated boxes larger than `min_split_bytes` is cut along one dim, all boxes
    alike, so that a grid stays a grid. Then the pieces go, largest first, to whichever of their
    holders has least; among holders that have about as little, neighbouring pieces go to
    neighbouring ones, and small arrays go together, so that whoever wants a stretch of every array
    later finds it with few writers. Deterministic: equal layouts give equal results everywhere.
    """
    if min_split_bytes < 1:
        raise UsageError(f"min_split_bytes must be positive, got {min_split_bytes}")
    pieces = {name: _refined(name, layout[name], min_split_bytes) for name in sorted(layout)}
    chosen = _assigned(pieces, _bundle(layout, min_split_bytes))
    return Layout((name, _with_holders(pieces[name], chosen[name])) for name in layout)


class _Pieces(NamedTuple):
    """An array, its boxes after refinement, and the box of the array that each of them is a piece of."""

    array: ArrayLayout
    geometry: Geometry
    origin: Ints

    def shared(self) -> Ints:
        """Of pieces with a choice of holders: bytes, piece, its box, its number there, and of how many."""
        origin = self.origin
        order = np.argsort(origin, kind="stable")
        counts = np.bincount(origin)
        number = np.empty(len(origin), np.int64)
        number[order] = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.flatnonzero(self.array.table.counts[origin] > 1)
        box = origin[rows]
        return np.stack((self.sizes[rows], rows, box, number[rows], counts[box]))

    @property
    def sizes(self) -> Ints:
        """Bytes of each piece."""
        return self.geometry.volumes * self.array.itemsize


def _with_holders(pieces: _Pieces, chosen: Ints) -> ArrayLayout:
    (array, geometry, _), holders = pieces, Holders.alone(chosen)
    if geometry.cuts is not None and geometry.order is None:
        return ArrayLayout.grid(array.dtype, array.shape, geometry.cuts, holders)
    return ArrayLayout(array.dtype, array.shape, geometry.boxes, holders)


def _bundle(layout: Layout, min_split_bytes: int) -> int:
    """Bytes of small arrays that may go to one writer together: a hundredth of its share at most."""
    tables = {id(array.table): array.table for array in layout.values()}
    holders = len(
        np.unique(np.concatenate([table.ids for table in tables.values()] or [np.zeros(1, np.int64)]))
    )
    return min(min_split_bytes, layout.nbytes // max(1, holders) // 100)


def _assigned(pieces: dict[str, _Pieces], bundle: int) -> dict[str, Ints]:
    """For each array the one holder of each piece."""
    load: Counter[int] = Counter()
    chosen: dict[str, Ints] = {}
    for name, piece in pieces.items():
        table = piece.array.table
        chosen[name] = table.ids[table.offsets[:-1]][piece.origin]
        single = table.counts[piece.origin] == 1
        if single.any():  # nothing to choose, but it weighs on what is chosen later
            owners, place = np.unique(chosen[name][single], return_inverse=True)
            for owner, size in zip(owners.tolist(), _sums(piece.sizes[single], place), strict=True):
                load[owner] += size
    names = list(pieces)
    columns = [pieces[name].shared() for name in names]
    at = np.repeat(np.arange(len(names)), [column.shape[1] for column in columns])
    size, row, *rest = np.concatenate(columns, axis=1) if columns else np.empty((5, 0), np.int64)
    order = np.lexsort((row, at, -size))  # largest first, then by name
    groups = _Groups(load, bundle)
    for one in zip(*(column[order].tolist() for column in (at, size, row, *rest)), strict=True):
        name, nbytes, piece_number, box, number, count = one
        owner = groups.of(pieces[names[name]].array, box).chosen(number, count, nbytes)
        load[owner] += nbytes
        chosen[names[name]][piece_number] = owner
    return chosen


class _Groups:
    """The sets of holders that boxes are shared by; asked for hundreds of thousands of pieces."""

    def __init__(self, load: Counter[int], bundle: int) -> None:
        self._load = load
        self._bundle = bundle
        self._by_box: dict[tuple[int, int], _Group] = {}
        self._by_holders: dict[bytes, _Group] = {}

    def of(self, array: ArrayLayout, box: int) -> _Group:
        """The holders of one box."""
        key = (id(array.table), box)
        group = self._by_box.get(key)
        if group is None:
            table = array.table
            ids = table.ids[table.offsets[box] : table.offsets[box + 1]]
            made = _Group(ids.tolist(), self._load, self._bundle)
            group = self._by_holders.setdefault(ids.tobytes(), made)
            self._by_box[key] = group
        return group


class _Group:
    """Holders of the same boxes, who share the writing."""

    def __init__(self, holders: list[int], load: Counter[int], bundle: int) -> None:
        self._holders = holders
        self._load = load
        self._bundle = bundle
        self._open = (-1, -1)
        """Who gets the next small array, and how many more bytes of them."""
        self._heaps: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def chosen(self, number: int, count: int, size: int) -> int:
        """The writer of piece `number` of `count` of a box: near its place, unless that has more to do."""
        total = len(self._holders)
        if count == 1 and size <= self._bundle:
            owner, room = self._open
            if size > room:
                owner, room = self._least(0, total), self._bundle
            self._open = owner, room - size
            return owner
        best = self._least(0, total)
        # A holder more on both sides: windows of 3 and of 4 would fill up unevenly.
        begin = max(0, number * total // count - 1)
        near = self._least(begin, min(total, -(-(number + 1) * total // count) + 1))
        return near if self._load[near] < self._load[best] + 2 * size else best

    def _least(self, begin: int, end: int) -> int:
        """The holder with least load; loads only grow, so a stale entry is too small, never too big."""
        heap = self._heaps.get((begin, end))
        if heap is None:
            heap = self._heaps[begin, end] = [(0, holder) for holder in self._holders[begin:end]]
        while True:
            seen, holder = heap[0]
            if seen == self._load[holder]:
                return holder
            heapq.heapreplace(heap, (self._load[holder], holder))


def _sums(sizes: Ints, place: Ints) -> list[int]:
    totals = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(totals, place, sizes)  # bincount would round through floats
    return [int(total) for total in totals]


def _refined(name: str, array: ArrayLayout, min_split_bytes: int) -> _Pieces:
    """The array cut so that its replicated boxes can be shared between their holders."""
    counts = array.table.counts
    if not counts.all():
        box = array.boxes[int(np.argmin(counts))].tolist()
        raise LayoutError(f"nobody holds the box {box} of {name!r}, so nobody can write it")
    sizes = array.geometry.volumes * array.itemsize
    wanted = np.where(counts > 1, np.minimum(counts, -(-sizes // min_split_bytes)), 1)
    pieces = int(wanted.max())
    whole = _Pieces(array, array.geometry, np.arange(array.geometry.num_boxes))
    if pieces <= 1:
        return whole
    dim, pieces = _best_cut(array, int(np.argmax(wanted)), pieces)
    if pieces <= 1:
        return whole
    if array.geometry.cuts is not None and array.geometry.order is None:
        return _refined_grid(array, array.geometry.cuts, dim, pieces)
    return _refined_boxes(array, dim, pieces)


def _best_cut(array: ArrayLayout, box: int, pieces: int) -> tuple[int, int]:
    """The dim to cut and into how many pieces: the outermost that is even enough.

    One that is not cut yet is better, unless its pieces would be of very short runs: who reads an array
    that was cut along one dim, on a mesh of two axes, wants a stretch of the other dim.
    """
    extents = [stop - start for start, stop in array.boxes[box].tolist()]
    options, even = [], []
    for dim, extent in enumerate(extents):
        into = min(pieces, extent)
        # How much more than its share the largest piece has; fewer pieces than wanted count too.
        uneven = -(-extent // into) * pieces / extent
        options.append((uneven, dim, into))
        if uneven <= _EVEN_ENOUGH:
            run = math.prod(extents[dim:]) // into * array.itemsize
            even.append((extent < array.shape[dim] or run < _SHORT_RUN, dim, into))
    if even:
        _, dim, into = min(even)
    else:
        _, dim, into = min(options, default=(1.0, 0, 1))  # a 0-d box cannot be cut
    return dim, into


def _points(start: int, stop: int, pieces: int) -> list[int]:
    """Where [start, stop) is cut into about equal, never empty pieces; without its end."""
    pieces = min(pieces, stop - start)
    return [start + (stop - start) * piece // pieces for piece in range(pieces)]


def _refined_grid(array: ArrayLayout, cuts: Cuts, dim: int, pieces: int) -> _Pieces:
    old = cuts[dim]
    parts = [_points(start, stop, pieces) for start, stop in pairwise(old)]
    finer = (*(point for part in parts for point in part), old[-1])
    shape = [len(points) - 1 for points in cuts]
    cells = np.arange(array.geometry.num_boxes).reshape(shape)
    cells = np.repeat(cells, [len(part) for part in parts], axis=dim).reshape(-1)
    new = (*cuts[:dim], finer, *cuts[dim + 1 :])
    return _Pieces(array, Geometry(len(cells), new), cells)


def _refined_boxes(array: ArrayLayout, dim: int, pieces: int) -> _Pieces:
    boxes: list[Ints] = []
    origin: list[int] = []
    for number, box in enumerate(array.boxes):
        start, stop = box[dim].tolist()
        points = [*_points(start, stop, pieces), stop]
        for low, high in pairwise(points):
            piece = box.copy()
            piece[dim] = low, high
            boxes.append(piece)
            origin.append(number)
    cells = np.array(origin, np.int64)
    return _Pieces(array, Geometry(len(boxes), None, np.stack(boxes)), cells)
