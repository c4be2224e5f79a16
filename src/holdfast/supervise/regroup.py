"""How a run goes on after a change of members: one pure function of what all of them report.

Every member of a new generation puts a `Report` into the same vote and gets everybody's. `decide` turns them
into one `Decision`, the same for all, since all have the same reports:

    the step to go on with      the newest that anybody has the state for
    laggards, one step behind   fetch the decided total of the step they lack from somebody who holds it
    newcomers, without state    get it from a donor, and compute no lane of the step they come into
    lanes                       what is folded stays with whoever folded it; the rest is dealt out evenly
    nobody has state            the lowest replica loads or makes it, and is the donor of all others
    replicas with a hole        wait: the others of that replica are about to be replaced
    older than one step         cannot catch up: the process ends and comes back as a newcomer

Why the bits do not change: a lane's result depends on the state of its step, on the lane and on nothing else;
the total is the sum over a fixed tree of lane numbers with one adder. So it does not matter who computes a
lane, how often the owner of a lane changes before the sum is complete, or whether a total is fetched or
summed again: two totals of one step are equal, and so are two states after it. A decision has only to see to
it that every lane is in a sum exactly once, and that nobody goes on from a step whose total it does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, final

from msgspec import Struct

from holdfast.errors import DeadlineError

NO_STATE: Final = -1


class Report(Struct, frozen=True, array_like=True):
    """What one worker brings into a generation. Its slot is `replica * workers + index`.

    `steps` is how many steps its state has seen (NO_STATE: it has none), which is also the step it works at.
    `decided` is the newest step of which it holds the total; `lanes` are those it has folded at its step.
    `entering`: its program has not been given its state yet, so that another may take its place.
    """

    replica: int
    index: int
    attempt: int
    incarnation: str
    reduce: str
    transfer: str
    steps: int = NO_STATE
    decided: int = -1
    lanes: tuple[int, ...] = ()
    entering: bool = False
    saving: bool = False


CIRCLES: Final = 10
CIRCLE_S: Final = 60.0
"""So many meetings in so long a time without any change are a circle."""
Lanes = dict[int, tuple[int, ...]]
"""Lanes by slot: each worker of a replica has those of its replica."""


class Decision(NamedTuple):
    """How all go on. Slots are `replica * workers + index` throughout."""

    step: int
    """The step that is worked at now."""
    members: tuple[int, ...]
    """Those who take part, ascending; empty if no replica is whole."""
    waiting: frozenset[int]
    """Workers of replicas that are not whole."""
    late: frozenset[int]
    """Workers that are too far behind."""
    loaders: tuple[int, ...]
    """The replica that loads or makes the state, if nobody has it."""
    sources: dict[int, tuple[int, ...]]
    """Newcomer to the donors of its state, one for each index of a replica."""
    totals: dict[int, dict[int, int]]
    """Worker to the steps whose total it fetches, each with who has it."""
    lanes: Lanes
    """Of `step`; what is folded is included."""
    restart: frozenset[int]
    """Workers whose folded lanes others have too: they begin the step again, with nothing."""
    steady: Lanes
    """Of every later step."""
    saver: int
    """The replica that saves."""


def decide(reports: Iterable[Report], *, workers: int, num_lanes: int) -> Decision:
    """What all reports together mean. `workers` are those of one replica."""
    rows = _rows(reports)
    whole = sorted(r for r, row in rows.items() if len(row) == workers)
    waiting = frozenset(r * workers + index for r, row in rows.items() if r not in whole for index in row)
    kinds = _Kinds(rows, whole, workers)
    late = frozenset(_slots(kinds.late, workers))
    able = [r for r in whole if r not in kinds.late]
    if not able:
        return Decision(0, (), waiting, late, (), {}, {}, {}, frozenset(), {}, -1)
    steady = _by_slot(_dealt(range(num_lanes), able), workers)
    if not kinds.current:
        loader, rest = able[0], able[1:]
        return Decision(
            step=0,
            members=tuple(_slots(able, workers)),
            waiting=waiting,
            late=late,
            loaders=tuple(_slots([loader], workers)),
            sources=_sources(rest, [loader], workers),
            totals={},
            lanes=steady,
            restart=frozenset(),
            steady=steady,
            saver=loader,
        )
    kept, restart = _kept(rows, kinds.current, num_lanes)
    computing = sorted([*kinds.current, *kinds.behind])
    decided = all(kinds.holders(index, kinds.step) for index in range(workers))
    missing = [] if decided else sorted(set(range(num_lanes)) - {x for own in kept.values() for x in own})
    dealt = _dealt(missing, computing)
    now = {r: tuple(sorted((*kept.get(r, ()), *dealt.get(r, ())))) for r in computing}
    saving = [r for r in kinds.current if any(one.saving for one in rows[r].values())]
    return Decision(
        step=kinds.step,
        members=tuple(_slots(able, workers)),
        waiting=waiting,
        late=late,
        loaders=(),
        sources=_sources(kinds.new, kinds.current, workers),
        totals=_totals(kinds, rows, able, workers),
        lanes=_by_slot(now, workers),
        restart=frozenset(_slots(restart, workers)),
        steady=steady,
        saver=min(saving or kinds.current),
    )


class _Kinds:
    """The whole replicas, by how far they are."""

    def __init__(self, rows: Mapping[int, Mapping[int, Report]], whole: Sequence[int], workers: int) -> None:
        self._rows = rows
        self._whole = whole
        self._workers = workers
        at = {r: _common(one.steps for one in rows[r].values()) for r in whole}
        self.step = max((steps for steps in at.values() if steps is not None), default=NO_STATE)
        self.current: list[int] = []
        self.behind: list[int] = []
        self.new: list[int] = []
        self.late: list[int] = []
        for r in whole:
            steps = at[r]
            fresh = all(one.entering or one.steps == NO_STATE for one in rows[r].values())
            if steps is not None and steps == self.step > NO_STATE:
                self.current.append(r)
            elif fresh:
                self.new.append(r)
            elif steps is not None and steps == self.step - 1 and self._reachable(steps):
                self.behind.append(r)
            else:
                self.late.append(r)

    def holders(self, index: int, step: int) -> list[int]:
        """The slots of a column that hold the total of a step. The one before the newest is held too."""
        return [
            r * self._workers + index
            for r in self._whole
            if step >= 0 and step <= self._rows[r][index].decided <= step + 1
        ]

    def _reachable(self, step: int) -> bool:
        return all(self.holders(index, step) for index in range(self._workers))


def _rows(reports: Iterable[Report]) -> dict[int, dict[int, Report]]:
    """Reports by replica and index, of the newest life of each replica."""
    rows: dict[int, dict[int, Report]] = {}
    newest: dict[int, int] = {}
    for one in sorted(reports, key=lambda one: (one.replica, -one.attempt, one.index, one.incarnation)):
        if one.attempt == newest.setdefault(one.replica, one.attempt):
            rows.setdefault(one.replica, {}).setdefault(one.index, one)
    return rows


def _common(steps: Iterable[int]) -> int | None:
    """The step that all workers of a replica are at, or None."""
    found = set(steps)
    return found.pop() if len(found) == 1 else None


def _kept(
    rows: Mapping[int, Mapping[int, Report]], current: Sequence[int], num_lanes: int
) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """The folded lanes of each replica, no lane twice, and the replicas that must fold theirs again.

    One that was left out of a generation comes back with lanes that were given to others meanwhile. A sum
    cannot be taken apart, so it begins again; and one whose workers folded different lanes does too.
    """
    taken: set[int] = set()
    kept: dict[int, tuple[int, ...]] = {}
    restart = []
    # Who folded most is asked first: least is computed again.
    for r in sorted(current, key=lambda r: (-min(len(one.lanes) for one in rows[r].values()), r)):
        folded = [frozenset(one.lanes) for one in rows[r].values()]
        same = all(one == folded[0] for one in folded)
        if same and not folded[0] & taken and all(0 <= lane < num_lanes for lane in folded[0]):
            kept[r] = tuple(sorted(folded[0]))
            taken |= folded[0]
        else:
            restart.append(r)
    return kept, restart


def _dealt(lanes: Sequence[int], replicas: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Lanes over replicas, as even as can be, neighbours together: they share subtrees of the sum."""
    size, extra = divmod(len(lanes), len(replicas))
    found = {}
    at = 0
    for number, replica in enumerate(sorted(replicas)):
        end = at + size + (number < extra)
        found[replica] = tuple(lanes[at:end])
        at = end
    return found


def _sources(new: Sequence[int], donors: Sequence[int], workers: int) -> dict[int, tuple[int, ...]]:
    """Newcomers to donors, in turn; the last donors first, since the first one saves."""
    order = sorted(donors, reverse=True)
    return {
        slot: tuple(_slots([order[number % len(order)]], workers))
        for number, replica in enumerate(sorted(new))
        for slot in _slots([replica], workers)
    }


def _totals(
    kinds: _Kinds, rows: Mapping[int, Mapping[int, Report]], able: Sequence[int], workers: int
) -> dict[int, dict[int, int]]:
    """The totals that each worker fetches, from holders in turn."""
    found: dict[int, dict[int, int]] = {}
    for number, r in enumerate(able):
        for index in range(workers):
            wanted = ([kinds.step - 1] if r in kinds.behind else []) + [kinds.step]
            slot = r * workers + index
            for step in wanted:
                holders = kinds.holders(index, step)
                if holders and slot not in holders:
                    found.setdefault(slot, {})[step] = holders[number % len(holders)]
    return found


def _slots(replicas: Collection[int], workers: int) -> list[int]:
    return [r * workers + index for r in sorted(replicas) for index in range(workers)]


def _by_slot(lanes: Mapping[int, tuple[int, ...]], workers: int) -> Lanes:
    return {r * workers + index: own for r, own in sorted(lanes.items()) for index in range(workers)}


@final
class Circle:
    """Notices that the same members meet again and again over the same step, and nothing comes of it. Pure.

    Two of them that reach the coordinator and not each other would do so for ever. All notice it in the same
    meeting; whoever of them `stays` keeps the state of the run, and the others come back to it as newcomers.
    """

    def __init__(self) -> None:
        self._about: object = None
        self._since = 0.0
        self._times = 0

    def meet(self, step: int, reports: Iterable[Report], *, stays: bool, now: float) -> None:
        """A meeting has ended. Fails: DeadlineError after too many that are alike, unless this one stays."""
        about = (step, frozenset((one.incarnation, one.steps, one.lanes) for one in reports))
        if about != self._about:
            self._about, self._since, self._times = about, now, 0
        self._times += 1
        if not stays and self._times > CIRCLES and now - self._since > CIRCLE_S:
            raise DeadlineError(
                f"the same members have met {self._times} times in {now - self._since:.0f} s over step "
                f"{step}, and it is not decided",
                hint="two of them cannot reach each other, or have different versions; their logs say which",
            )
