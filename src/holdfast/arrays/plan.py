"""Plans: the copies that turn one layout into another.

One pure function serves every movement of state. Each target byte is copied exactly once for each
of its holders. Which replica a copy reads from depends only on the two layouts and the cost, never
on which ranks are planned: the plan for some ranks is exactly those rows of the plan for all, so
processes that plan for themselves agree and spread their reads evenly over the replicas.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.arrays.layout import ArrayLayout, Holders, Ints, Layout
from holdfast.arrays.overlap import overlaps
from holdfast.errors import LayoutError, UsageError

Cost = Callable[[int, int], float]
"""cost(source_holder, target_holder): must be pure; the cheapest replica is read."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPlan:
    """The copies of one array: row i takes [lo[i], hi[i]) (global coordinates) out of a source box
    at its holder and puts it into a target box at its holder. Rows ascend by target holder's place.
    """

    name: str
    itemsize: int
    source_box: npt.NDArray[np.int32]
    target_box: npt.NDArray[np.int32]
    source_holder: Ints
    target_holder: Ints
    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return len(self.source_box)

    @property
    def row_nbytes(self) -> Ints:
        """Bytes of each copy."""
        sizes: Ints = (self.hi - self.lo).prod(axis=1, dtype=np.int64) * self.itemsize
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all copies, those from a holder to itself included."""
        return int(self.row_nbytes.sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrayPlan):
            return NotImplemented
        mine, theirs = self._columns(), other._columns()
        return (self.name, self.itemsize) == (other.name, other.itemsize) and all(
            np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def _columns(self) -> tuple[npt.NDArray[np.integer], ...]:
        return (
            self.source_box,
            self.target_box,
            self.source_holder,
            self.target_holder,
            self.lo,
            self.hi,
        )


class Plan(Mapping[str, ArrayPlan]):
    """The copies of every array by name; immutable."""

    __slots__ = ("_arrays", "_digest")

    def __init__(self, arrays: Mapping[str, ArrayPlan]) -> None:
        self._arrays = dict(arrays)
        self._digest: str | None = None

    def __getitem__(self, name: str) -> ArrayPlan:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        rows = sum(len(array) for array in self._arrays.values())
        return f"Plan({len(self)} arrays, {rows} copies, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all copies, those from a holder to itself included."""
        return sum(array.nbytes for array in self._arrays.values())

    def digest(self) -> str:
        """xxh3_128 of all copies, whatever the order of names; equal plans have equal digests."""
        if self._digest is None:
            total = xxhash.xxh3_128()
            for name in sorted(self._arrays):
                array, key = self._arrays[name], name.encode()
                total.update(f"{len(key)} {array.itemsize} {array.lo.shape}\n".encode() + key)
                for column in array._columns():
                    total.update(np.ascontiguousarray(column).data)
            self._digest = total.hexdigest()
        return self._digest


def plan(
    source: Layout,
    target: Layout,
    *,
    ranks: Collection[int] | None = None,
    cost: Cost | None = None,
) -> Plan:
    """The copies after which every target box is complete at each of its holders in `ranks`.

    A holder that already has the bytes copies from itself; otherwise the cheapest replica by
    `cost` is read, and equally cheap ones take turns. `source` may have more arrays than `target`.
    LayoutError lists every array that is missing, differs in dtype or shape, or has lost bytes.
    """
    arrays: dict[str, ArrayPlan] = {}
    problems = list(_mismatches(source, target))
    if not problems:
        planner = _Planner(source, target, ranks, cost)
        arrays = {name: planner.array(name) for name in target}
        problems = planner.lost
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise LayoutError(
            f"source and target layouts disagree about {len(problems)} array(s):\n{listed}",
            hint="a plan needs equal names, dtypes and shapes on both sides, and every byte held",
        )
    return Plan(arrays)


def _mismatches(source: Layout, target: Layout) -> Iterator[str]:
    for name, wants in target.items():
        has = source.get(name)
        if has is None:
            yield f"{name}: not in the source"
        elif (has.dtype, has.shape) != (wants.dtype, wants.shape):
            yield (
                f"{name}: the source has {has.dtype}{list(has.shape)}, "
                f"the target wants {wants.dtype}{list(wants.shape)}"
            )


class _Rows(NamedTuple):
    """The copies of all arrays with one geometry, before a replica is chosen."""

    source_box: npt.NDArray[np.int32]
    target_box: npt.NDArray[np.int32]
    target_holder: Ints
    lo: Ints
    hi: Ints
    counts: Ints
    """How many replicas each copy can read."""
    local: npt.NDArray[np.bool_] | None
    """Which copies are from the target itself; None where nothing is left to choose."""
    turn: Ints


class _Planner:
    """Plans array by array; arrays with the same sharding share all but the choice of replica."""

    def __init__(
        self, source: Layout, target: Layout, ranks: Collection[int] | None, cost: Cost | None
    ) -> None:
        self.lost: list[str] = []
        self._source, self._target = source, target
        self._ranks = None if ranks is None else np.array(sorted(set(ranks)), np.int64)
        self._cost = cost
        self._cheapest: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        self._rows: dict[tuple[int, ...], _Rows] = {}
        # Replicas take turns over arrays in order of size, so that turns are about equal in bytes.
        by_size = sorted(target, key=lambda name: (-target[name].nbytes, name))
        self._turn = {name: turn for turn, name in enumerate(by_size)}

    def array(self, name: str) -> ArrayPlan:
        """The copies of one array."""
        source, target = self._source[name], self._target[name]
        rows = self._rows_of(source, target)
        if rows.local is None:
            chosen = source.table.ids[source.table.offsets[rows.source_box]]
        elif not rows.counts.all():
            box = source.boxes[rows.source_box[int(np.argmin(rows.counts))]].tolist()
            self.lost.append(f"{name}: nobody holds the box {box} of the source")
            chosen = rows.target_holder
        elif self._cost is None:
            pick = source.table.offsets[rows.source_box] + (rows.turn + self._turn[name]) % rows.counts
            chosen = np.where(rows.local, rows.target_holder, source.table.ids[pick])
        else:
            chosen = self._by_cost(source.table, rows, self._turn[name])
        boxes, holder = (rows.source_box, rows.target_box), rows.target_holder
        return ArrayPlan(name, source.itemsize, *boxes, chosen, holder, rows.lo, rows.hi)

    def _rows_of(self, source: ArrayLayout, target: ArrayLayout) -> _Rows:
        key = tuple(map(id, (source.geometry, source.table, target.geometry, target.table)))
        rows = self._rows.get(key)
        if rows is not None:
            return rows
        if source.geometry.num_boxes == target.geometry.num_boxes == 1 and 0 not in source.shape:
            # Arrays in one piece on both sides differ in their corners only, whatever their shapes.
            alike = (id(source.table), id(target.table))
            whole = self._rows.get(alike)
            if whole is None:
                whole = self._rows[alike] = self._shared_rows(source, target)
            corners = np.zeros((2, len(whole.source_box), len(source.shape)), np.int64)
            corners[1] = source.shape
            corners.flags.writeable = False
            rows = whole._replace(lo=corners[0], hi=corners[1])
        else:
            rows = self._shared_rows(source, target)
        self._rows[key] = rows
        return rows

    def _shared_rows(self, source: ArrayLayout, target: ArrayLayout) -> _Rows:
        pairs = self._pairs(target.table)
        if 0 in source.shape:
            pairs = pairs[:0]
        boxes, holders = target.table.boxes[pairs], target.table.ids[pairs]
        first = np.ones(len(boxes), np.bool_)
        first[1:] = boxes[1:] != boxes[:-1]
        found = overlaps(source.geometry, target.geometry, boxes[first])
        place = found.place
        if len(boxes) > int(first.sum()):  # meet each box once, then repeat it for its holders
            found, place = found.repeated(np.cumsum(first) - 1)
        box, holder = boxes[place], holders[place]
        counts = source.table.counts[found.source_box]
        local = None
        if not (counts == 1).all():
            local = source.table.holds(found.source_box, holder)
        slot = pairs[place] - target.table.offsets[box]
        turn = found.turn * target.table.counts[box] + slot + found.source_box
        narrow = found.source_box.astype(np.int32), box.astype(np.int32)
        for column in (*narrow, holder, found.lo, found.hi):
            column.flags.writeable = False  # many ArrayPlans share them
        return _Rows(*narrow, holder, found.lo, found.hi, counts, local, turn)

    def _pairs(self, table: Holders) -> Ints:
        """Which of the target's (box, holder) pairs are planned."""
        if self._ranks is None:
            return np.arange(len(table.ids))
        if len(self._ranks) == 1:
            return np.flatnonzero(table.ids == self._ranks[0])
        return np.flatnonzero(np.isin(table.ids, self._ranks))

    def _by_cost(self, table: Holders, rows: _Rows, turn: int) -> Ints:
        chosen = rows.target_holder.copy()
        assert rows.local is not None
        for row in np.flatnonzero(~rows.local).tolist():
            holders, to = table.tuples[rows.source_box[row]], int(rows.target_holder[row])
            cheapest = self._cheapest.get((holders, to))
            if cheapest is None:
                cheapest = self._cheapest[holders, to] = self._cheapest_of(holders, to)
            chosen[row] = cheapest[(int(rows.turn[row]) + turn) % len(cheapest)]
        return chosen

    def _cheapest_of(self, holders: tuple[int, ...], to: int) -> tuple[int, ...]:
        assert self._cost is not None
        costs = [self._cost(holder, to) for holder in holders]
        if any(math.isnan(cost) for cost in costs):
            raise UsageError(f"the cost of reading {holders} from {to} is not a number: {costs}")
        least = min(costs)
        return tuple(h for h, cost in zip(holders, costs, strict=True) if cost == least)


class PlanCache:
    """The latest `size` plans by layouts, ranks and cost; safe to share between threads."""

    def __init__(self, size: int = 16) -> None:
        if size < 1:
            raise UsageError(f"a plan cache holds at least one plan, got size={size}")
        self._size = size
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(
        self,
        source: Layout,
        target: Layout,
        *,
        ranks: Collection[int] | None = None,
        cost: Cost | None = None,
    ) -> Plan:
        """What `plan` returns, computed at most once while it stays among the latest."""
        some = None if ranks is None else tuple(sorted(set(ranks)))
        key = (source.digest(), target.digest(), some, cost)
        with self._lock:
            if key in self._plans:
                self.hits += 1
                self._plans.move_to_end(key)
                return self._plans[key]
            self.misses += 1
        made = plan(source, target, ranks=some, cost=cost)  # outside the lock: it may take a second
        with self._lock:
            self._plans[key] = made
            while len(self._plans) > self._size:
                self._plans.popitem(last=False)
        return made


_CACHE = PlanCache()


def cached_plan(
    source: Layout,
    target: Layout,
    *,
    ranks: Collection[int] | None = None,
    cost: Cost | None = None,
) -> Plan:
    """What `plan` returns, out of this process's cache where it has it."""
    return _CACHE.get(source, target, ranks=ranks, cost=cost)
