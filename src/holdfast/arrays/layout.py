"""Layouts: for every named array its dtype, global shape, and which slice of it lies where.

The boxes of an array partition it, and each box has holders: the ids of whoever has its bytes
(devices, processes, files; any int). Most shardings are grids, which plans exploit, so a layout
knows whether it is one. Geometry and holders repeat over thousands of arrays; equal ones are
checked once and share their memory. Boxes of a grid and tuples of holders are made when somebody
looks at them: a reader of a checkpoint with ten thousand writers meets only a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import index
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.arrays.dtypes import dtype as dtype_of
from holdfast.errors import LayoutError, UsageError

Ints = npt.NDArray[np.int64]
Cuts = tuple[tuple[int, ...], ...]

_HINT = "the boxes of an array must be disjoint and cover it; replicas are holders of one box"


@dataclass(frozen=True, eq=False)
class Geometry:
    """Checked boxes, and how they form a grid if they do; shared between equal layouts."""

    num_boxes: int
    cuts: Cuts | None
    given: Ints | None = None
    """The boxes; None where they are the cells of the cuts in row-major order."""
    order: Ints | None = None
    """The box of each row-major grid cell; None when boxes are already in that order."""

    @cached_property
    def boxes(self) -> Ints:
        """The boxes [n, ndim, (start, stop)], read-only."""
        if self.given is not None:
            return self.given
        assert self.cuts is not None
        return _frozen(_cells(self.cuts))

    @cached_property
    def cut_arrays(self) -> tuple[Ints, ...]:
        """The cuts as arrays, for searching."""
        return tuple(np.array(points, np.int64) for points in self.cuts or ())

    @cached_property
    def cells(self) -> Ints | None:
        """The grid cell of each box, the inverse of `order`."""
        return None if self.order is None else np.argsort(self.order)

    @cached_property
    def volumes(self) -> Ints:
        """The number of elements in each box."""
        volumes: Ints = (self.boxes[:, :, 1] - self.boxes[:, :, 0]).prod(axis=1, dtype=np.int64)
        return volumes


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds each box, as flat arrays: box i's holders are ids[offsets[i]:offsets[i + 1]]."""

    ids: Ints
    offsets: Ints

    @classmethod
    def alone(cls, ids: Ints) -> Holders:
        """One holder per box."""
        return cls(ids, np.arange(len(ids) + 1))

    def taken(self, boxes: Ints) -> Holders:
        """The holders of these boxes, in this order; a box may be named several times."""
        counts = self.counts[boxes]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        starts = np.repeat(self.offsets[boxes] - offsets[:-1], counts)
        return Holders(self.ids[starts + np.arange(offsets[-1])], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def tuples(self) -> tuple[tuple[int, ...], ...]:
        """The holders of each box, ascending."""
        ids, bounds = self.ids.tolist(), self.offsets.tolist()
        return tuple(tuple(ids[a:b]) for a, b in pairwise(bounds))

    @cached_property
    def counts(self) -> Ints:
        """How many holders each box has."""
        return np.diff(self.offsets)

    @cached_property
    def boxes(self) -> Ints:
        """The box that each entry of `ids` belongs to."""
        return np.repeat(np.arange(len(self)), self.counts)

    @cached_property
    def encoded(self) -> bytes:
        """Canonical bytes for digests."""
        return self.offsets.astype("<i8").tobytes() + self.ids.astype("<i8").tobytes()

    def holds(self, boxes: npt.NDArray[np.integer[Any]], ids: Ints) -> npt.NDArray[np.bool_]:
        """For each pair of a box and an id, whether that id holds that box."""
        known, codes = self._codes
        if not codes.size:
            return np.zeros(len(ids), np.bool_)
        place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        wanted = boxes.astype(np.int64) * len(known) + place
        found = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        held: npt.NDArray[np.bool_] = (known[place] == ids) & (codes[found] == wanted)
        return held

    @cached_property
    def _codes(self) -> tuple[Ints, Ints]:
        """The distinct ids, and every (box, id) pair as one sorted number."""
        known, place = np.unique(self.ids, return_inverse=True)
        return known, np.sort(self.boxes * len(known) + place)


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class ArrayLayout:
    """Where one array lies: boxes [n, ndim, (start, stop)] that partition it, and their holders.

    Constructing one checks everything and raises LayoutError; boxes come back read-only. A box may
    have no holder (its bytes are lost or elsewhere); planning to read it then fails.
    """

    dtype: str
    shape: tuple[int, ...]
    geometry: Geometry
    table: Holders

    def __init__(self, dtype: str, shape: Sequence[int], boxes: Any, holders: Any) -> None:
        checked = _shape(shape)
        array = _boxes(boxes, len(checked))
        self._fill(dtype_of(dtype).name, checked, _geometry(checked, len(array), array.tobytes()), holders)

    def _fill(self, name: str, shape: tuple[int, ...], geometry: Geometry, holders: Any) -> None:
        table = holders if isinstance(holders, Holders) else _holders(holders)
        if len(table) != geometry.num_boxes:
            raise LayoutError(f"{geometry.num_boxes} boxes but {len(table)} holder sets")
        put = object.__setattr__
        put(self, "dtype", name)
        put(self, "shape", shape)
        put(self, "geometry", geometry)
        put(self, "table", table)

    @property
    def boxes(self) -> Ints:
        """The boxes [n, ndim, (start, stop)], read-only."""
        return self.geometry.boxes

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Who holds each box, ascending."""
        return self.table.tuples

    @classmethod
    def whole(cls, dtype: str, shape: Sequence[int], holders: Sequence[int] = (0,)) -> ArrayLayout:
        """The layout of an array that each of `holders` has completely."""
        return cls.grid(dtype, shape, tuple((0, dim) for dim in shape), (tuple(holders),))

    @classmethod
    def grid(
        cls,
        dtype: str,
        shape: Sequence[int],
        cuts: Sequence[Sequence[int]],
        holders: Sequence[Sequence[int]] | Holders,
    ) -> ArrayLayout:
        """The layout cut at `cuts` (per dim, ascending, from 0 to its size), cells row-major.

        A cut given twice makes empty cells; they are dropped together with their holders, unless
        the array itself is empty.
        """
        shape = _shape(shape)
        points = tuple(tuple(map(int, per_dim)) for per_dim in cuts)
        geometry, kept, cells = _grid(shape, points)
        if len(holders) != cells:
            raise LayoutError(f"the grid has {cells} cells but there are {len(holders)} holder sets")
        if kept is not None:
            table = holders if isinstance(holders, Holders) else _holders(holders)
            holders = table.taken(np.array(kept, np.int64))
        self = cls.__new__(cls)
        self._fill(dtype_of(dtype).name, shape, geometry, holders)
        return self

    @property
    def itemsize(self) -> int:
        """Bytes per element in memory."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, replicas not counted."""
        return math.prod(self.shape) * self.itemsize

    def box_nbytes(self, box: int) -> int:
        """Bytes of one box."""
        if self.geometry.num_boxes == 1:
            return self.nbytes
        return int(self.geometry.volumes[box]) * self.itemsize

    def digest(self) -> str:
        """xxh3_128 of everything in this layout; equal layouts have equal digests."""
        return xxhash.xxh3_128_hexdigest(self._encoded())

    def _encoded(self) -> bytes:
        head = f"{self.dtype} {self.shape} {self.geometry.num_boxes}\n".encode()
        return head + self.boxes.astype("<i8", copy=False).tobytes() + self.table.encoded

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrayLayout):
            return NotImplemented
        return (
            (self.dtype, self.shape) == (other.dtype, other.shape)
            and self.table.encoded == other.table.encoded
            and np.array_equal(self.boxes, other.boxes)
        )

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.table.encoded))

    def __repr__(self) -> str:
        boxes = self.geometry.num_boxes
        return f"ArrayLayout({self.dtype}{list(self.shape)}, {boxes} boxes, {len(self.table.ids)} held)"


def cuts(layout: ArrayLayout) -> Cuts | None:
    """The cut points per dim if the boxes form a grid, else None."""
    return layout.geometry.cuts


class Layout(Mapping[str, ArrayLayout]):
    """The layouts of a tree's arrays by name; immutable, equal by content in any order."""

    __slots__ = ("_arrays", "_digest")

    def __init__(self, arrays: Mapping[str, ArrayLayout] | Iterable[tuple[str, ArrayLayout]]):
        self._arrays = dict(arrays)
        self._digest: str | None = None
        for name, array in self._arrays.items():
            if not isinstance(array, ArrayLayout):
                raise UsageError(f"{name!r} is a {type(array).__name__}, not an ArrayLayout")

    def __getitem__(self, name: str) -> ArrayLayout:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return self._arrays == other._arrays if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return f"Layout({len(self)} arrays, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, replicas not counted."""
        return sum(array.nbytes for array in self._arrays.values())

    def digest(self) -> str:
        """xxh3_128 of all names and layouts, whatever their order."""
        if self._digest is None:
            total = xxhash.xxh3_128()
            for name in sorted(self._arrays):
                key = name.encode()
                total.update(len(key).to_bytes(8, "little") + key)
                total.update(xxhash.xxh3_128_digest(self._arrays[name]._encoded()))
            self._digest = total.hexdigest()
        return self._digest


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(map(index, shape))
    if any(dim < 0 for dim in checked):
        raise LayoutError(f"the shape {checked} has a negative dimension")
    return checked


def _boxes(boxes: Any, ndim: int) -> Ints:
    given = np.asarray(boxes)
    if given.size and given.dtype.kind not in "iu":
        raise LayoutError(f"the boxes are {given.dtype}, not ints")
    array = np.ascontiguousarray(given, dtype=np.int64)
    if array.ndim != 3 or array.shape[0] == 0 or array.shape[1:] != (ndim, 2):
        raise LayoutError(
            f"the boxes have shape {array.shape}, expected (n, {ndim}, 2) with n > 0",
            hint="boxes[i, dim] is (start, stop)",
        )
    return array


def _holders(holders: Any) -> Holders:
    try:
        return _holders_of(holders)
    except TypeError:  # lists are welcome, but only tuples can be looked up
        try:
            return _holders_of(tuple(tuple(map(index, each)) for each in holders))
        except TypeError as error:
            raise LayoutError(f"holders are one set of ints per box: {error}") from error


@lru_cache(maxsize=1024)
def _holders_of(holders: tuple[tuple[int, ...], ...]) -> Holders:
    tuples = tuple(tuple(sorted(map(index, each))) for each in holders)
    for box, each in enumerate(tuples):
        if len(set(each)) != len(each):
            raise LayoutError(f"box {box} names a holder twice: {each}")
    counts = np.fromiter(map(len, tuples), np.int64, len(tuples))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    ids = np.fromiter((one for each in tuples for one in each), np.int64, int(offsets[-1]))
    return Holders(ids, offsets)


@lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], cuts: Cuts) -> tuple[Geometry, tuple[int, ...] | None, int]:
    """The grid's geometry, the cells kept if some were empty, and how many cells were given."""
    for dim, (size, points) in enumerate(zip(shape, cuts, strict=False)):
        ascending = all(a <= b for a, b in pairwise(points))
        if len(points) < 2 or points[0] != 0 or points[-1] != size or not ascending:
            raise LayoutError(f"the cuts {points} of dim {dim} do not rise from 0 to {size}", hint=_HINT)
    if len(cuts) != len(shape):
        raise LayoutError(f"cuts for {len(cuts)} dims, but the shape is {shape}")
    cells = math.prod(len(points) - 1 for points in cuts)
    if 0 in shape:
        return _empty(shape, _frozen(_cells(cuts))), None, cells
    if all(len(set(points)) == len(points) for points in cuts):
        return Geometry(cells, cuts), None, cells
    boxes = _cells(cuts)
    full = (boxes[:, :, 1] > boxes[:, :, 0]).all(axis=1)
    distinct = tuple(tuple(sorted(set(points))) for points in cuts)
    return Geometry(int(full.sum()), distinct), tuple(np.flatnonzero(full).tolist()), cells


def _cells(cuts: Cuts) -> Ints:
    """The cells of a grid, in row-major order."""
    counts = [len(points) - 1 for points in cuts]
    boxes = np.empty((*counts, len(cuts), 2), np.int64)
    for dim, points in enumerate(cuts):
        along = (-1, *[1] * (len(cuts) - 1 - dim))
        boxes[..., dim, 0] = np.array(points[:-1]).reshape(along)
        boxes[..., dim, 1] = np.array(points[1:]).reshape(along)
    return boxes.reshape(math.prod(counts), len(cuts), 2)


def _empty(shape: tuple[int, ...], boxes: Ints) -> Geometry:
    """The geometry of an array without elements: nothing in it is ever copied."""
    whole: Cuts = tuple((0, size) for size in shape)
    one = boxes.tolist() == [list(map(list, whole))]
    return Geometry(len(boxes), whole if one else None, boxes)


def _frozen(array: Ints) -> Ints:
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array


@lru_cache(maxsize=512)
def _geometry(shape: tuple[int, ...], num_boxes: int, encoded: bytes) -> Geometry:
    """The checked geometry of these boxes; LayoutError unless they partition the shape."""
    boxes = np.frombuffer(encoded, np.int64).reshape(num_boxes, len(shape), 2)
    sizes = np.array(shape, np.int64)
    low, high = boxes[:, :, 0], boxes[:, :, 1]
    wrong = ((low < 0) | (high > sizes) | (low > high)).any(axis=1)
    if wrong.any():
        box = boxes[np.flatnonzero(wrong)[0]].tolist()
        raise LayoutError(f"the box {box} is not inside the shape {shape}", hint=_HINT)
    if 0 in shape:
        return _empty(shape, boxes)
    if (low == high).any():
        raise LayoutError(f"an array of shape {shape} has an empty box", hint="leave it out")
    grid = _as_grid(shape, boxes)
    if grid is None:
        _check_partition(shape, boxes)
        return Geometry(len(boxes), None, boxes)
    return grid


def _as_grid(shape: tuple[int, ...], boxes: Ints) -> Geometry | None:
    """The geometry if the boxes are exactly the cells of a grid, in whatever order."""
    cell = np.zeros(len(boxes), np.int64)
    points: list[tuple[int, ...]] = []
    for dim, size in enumerate(shape):
        starts, place = np.unique(boxes[:, dim, 0], return_inverse=True)
        ends = np.append(starts[1:], size)
        if starts[0] != 0 or (boxes[:, dim, 1] != ends[place]).any():
            return None
        cell = cell * len(starts) + place
        points.append((*starts.tolist(), size))
    cells = math.prod(len(per_dim) - 1 for per_dim in points)
    if cells != len(boxes) or (np.bincount(cell, minlength=cells) != 1).any():
        return None
    in_order = bool((cell == np.arange(cells)).all())
    return Geometry(len(boxes), tuple(points), boxes, None if in_order else np.argsort(cell))


def _check_partition(shape: tuple[int, ...], boxes: Ints) -> None:
    """LayoutError unless the boxes, all inside the shape, are disjoint and cover it."""
    if not shape:
        raise LayoutError(f"a 0-d array has one box, got {len(boxes)}", hint=_HINT)
    # Sorted along the dim with most distinct starts, only a window of later boxes can overlap.
    dim = max(range(len(shape)), key=lambda d: len(np.unique(boxes[:, d, 0])))
    ordered = boxes[np.argsort(boxes[:, dim, 0], kind="stable")]
    starts = ordered[:, dim, 0]
    low, high = ordered[:, :, 0], ordered[:, :, 1]
    for at in range(0, len(boxes), 256):
        some = slice(at, at + 256)
        end = int(np.searchsorted(starts, high[some, dim].max(), "left"))
        both = (low[some, None] < high[None, at:end]) & (low[None, at:end] < high[some, None])
        hits = np.argwhere(both.all(axis=2))
        hits = hits[hits[:, 0] != hits[:, 1]]
        if len(hits):
            a, b = (ordered[at + int(i)].tolist() for i in hits[0])
            raise LayoutError(f"the boxes {a} and {b} overlap", hint=_HINT)
    # Python ints: the product of a shape may pass 2**63 for a broken layout.
    covered = sum(math.prod(stop - start for start, stop in box) for box in boxes.tolist())
    if covered != math.prod(shape):
        raise LayoutError(
            f"the boxes cover {covered} of the {math.prod(shape)} elements of {shape}", hint=_HINT
        )
