"""The sum of one step: own lanes, then the others', then those of whoever is lost, until it is decided.

    begin --> compute own lanes --> exchange --> decided
                     ^                 |  the members change
                     +---- regroup <---+

Whoever is interrupted brings what it has folded into the next generation, and nothing is computed twice. A
worker that has never added anything does not know what a total looks like: it computes one lane for that,
which is not counted, while the others compute theirs; whatever a lane needs is compiled then, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

from holdfast import faults
from holdfast.errors import UsageError
from holdfast.supervise.members import GenerationOver


class Sums(Protocol):
    """What a step needs of the reducer."""

    @property
    def decided(self) -> int: ...
    def prepare(self, template: Any) -> None: ...
    def begin(self, step: int, lanes: Mapping[int, Sequence[int]]) -> None: ...
    def reassign(self, lanes: Mapping[int, Sequence[int]]) -> None: ...
    def add(self, lane: int, tree: Any) -> None: ...
    def held(self) -> tuple[int, ...]:
        """The folded lanes. Blocks: until the one added last is."""
        ...

    def total(self) -> Any: ...


class Others(Protocol):
    """What a step needs to know of the others."""

    def lanes_at(self, step: int) -> Mapping[int, Sequence[int]]:
        """Who computes what, by slot."""
        ...

    def holder_of(self, step: int) -> int | None:
        """Who has the total already, if somebody has."""
        ...

    def complete(self, step: int) -> None:
        """Have the total. Fails: GenerationOver."""
        ...


@final
class Shape:
    """Whether this worker knows what a total looks like; it lasts for the whole run."""

    def __init__(self) -> None:
        self.known = False


class Verdict(Protocol):
    """What the others say to an interrupted step."""

    @property
    def step(self) -> int: ...
    @property
    def restart(self) -> frozenset[int]: ...


@final
class StepRound:
    """One step of one worker.

    `regroup` is called with the computed lanes when the members change; `agree` with whether the total is
    here, before anything is done with it: it raises GenerationOver unless it is here for all workers of the
    replica.
    """

    def __init__(
        self,
        index: int,
        slot: int,
        sums: Sums,
        others: Others,
        shape: Shape,
        *,
        regroup: Callable[[tuple[int, ...]], Verdict],
        agree: Callable[[bool], None],
    ) -> None:
        self._index = index
        self._slot = slot
        self._sums = sums
        self._others = others
        self._shape = shape
        self._regroup = regroup
        self._agree = agree
        self._expected: int | None = None
        self._counts = True
        self._summing = False
        self.begun = False
        self.decided = False
        self.mine: list[int] = []
        """The lanes that this worker has computed, in order."""
        self.counted: list[int] = []
        """Those of them that are in its sums."""

    def lanes(self) -> Iterator[int]:
        """The lanes to compute, until the step is decided. Blocks: between lanes, for the others."""
        if self.begun:
            raise UsageError(
                f"step {self._index}: step.lanes is gone through once", hint="for lane in step.lanes: ..."
            )
        self.begun = True
        self._begin()
        while not self.decided:
            for lane in self._todo():
                yield from self._one(lane)
            self._sums.held()  # before the wait for others: what still computes here is not one of those
            try:
                self._agree(self._complete())
                self.decided = True
            except GenerationOver:
                faults.site("run.interrupted")
                self._interrupted(self._regroup(tuple(sorted(self.mine))))
        faults.site("run.decided")

    def _complete(self) -> bool:
        """Whether the total is here; if not, the members must regroup."""
        try:
            self._others.complete(self._index)
        except GenerationOver:
            return False
        return True

    def _begin(self) -> None:
        """Begin the step, with nothing folded; also to begin it again."""
        self.mine, self.counted = [], []
        if not self._fetched:
            self._sums.begin(self._index, self._others.lanes_at(self._index))
            self._summing = True

    def _interrupted(self, found: Verdict) -> None:
        if found.step != self._index or self._fetched:
            return  # somebody has the total of this step
        if self._slot in found.restart or not self._summing:
            self._begin()  # whoever had the total when the step began may be lost before it was brought
        else:
            self._sums.reassign(self._others.lanes_at(self._index))

    @property
    def _fetched(self) -> bool:
        """Whether the total is here, or will be brought: then nothing that is computed counts."""
        return self._sums.decided >= self._index or self._others.holder_of(self._index) is not None

    def _todo(self) -> Sequence[int]:
        """Own lanes that are not computed; one for its shape alone where nothing was ever added.

        The workers of a replica compute the same lanes in the same order, also those whose own sum is
        complete: the others of their replica cannot compute a lane without them.
        """
        self._counts = not self._fetched
        todo = [
            lane for lane in self._others.lanes_at(self._index).get(self._slot, ()) if lane not in self.mine
        ]
        if not todo and not self._shape.known:
            self._counts = False
            return [0]
        return todo

    def _one(self, lane: int) -> Iterator[int]:
        faults.site("run.lane")
        self._expected = lane
        yield lane
        if self._expected is not None:
            raise UsageError(
                f"step {self._index}: lane {lane} was given and not added",
                hint="call step.add(lane, tree) for every lane before the next one",
            )

    def add(self, lane: int, tree: Any) -> None:
        """Fold the result of the lane that was given last."""
        if lane != self._expected:
            given = "no lane was given" if self._expected is None else f"lane {self._expected} was given"
            raise UsageError(
                f"step {self._index}: lane {lane} is added, but {given}",
                hint="add each lane of step.lanes once, when it is its turn",
            )
        if self._counts:
            self._sums.add(lane, tree)
            self.counted.append(lane)
        elif not self._shape.known:
            self._sums.prepare(tree)
        if lane in self._others.lanes_at(self._index).get(self._slot, ()):
            self.mine.append(lane)
        self._shape.known = True
        self._expected = None
        faults.site("run.added")

    def total(self) -> Any:
        """The sum over all lanes. Waits for nothing."""
        if not self.decided:
            raise UsageError(
                f"step {self._index}: the sum is not complete",
                hint="go through step.lanes to its end: it ends when all lanes of all replicas are summed",
            )
        return self._sums.total()
