"""The step machine against a reducer that is a dictionary and others that are a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, final

import pytest

from holdfast.errors import UsageError
from holdfast.supervise.members import GenerationOver
from holdfast.supervise.step_round import Shape, StepRound

STEP = 4


@final
class Sums:
    """Remembers what is asked of it."""

    def __init__(self) -> None:
        self.decided = STEP - 1
        self.calls: list[str] = []
        self.lanes: list[int] = []
        self.folded: list[int] = []

    def prepare(self, template: object) -> None:
        self.calls.append(f"prepare {template}")

    def begin(self, step: int, lanes: Mapping[int, Sequence[int]]) -> None:
        self.calls.append(f"begin {step} {dict(lanes)}")
        self.lanes = []

    def reassign(self, lanes: Mapping[int, Sequence[int]]) -> None:
        self.calls.append(f"reassign {dict(lanes)}")

    def add(self, lane: int, tree: object) -> None:
        self.lanes.append(lane)

    def held(self) -> tuple[int, ...]:
        self.folded = list(self.lanes)
        return tuple(self.lanes)

    def total(self) -> list[int]:
        return sorted(self.lanes)


class Verdict(NamedTuple):
    step: int
    restart: frozenset[int] = frozenset()


@final
class Others:
    """What each try to have the total comes to, and who computes what after it."""

    def __init__(self, sums: Sums, *plans: dict[int, tuple[int, ...]]) -> None:
        self._sums = sums
        self.plans = list(plans)
        self.verdict = Verdict(STEP)
        self.holder: int | None = None
        self.told: list[tuple[int, ...]] = []

    def lanes_at(self, step: int) -> dict[int, tuple[int, ...]]:
        return self.plans[0]

    def holder_of(self, step: int) -> int | None:
        return self.holder

    def complete(self, step: int) -> None:
        assert self._sums.folded == self._sums.lanes, "others are waited for while a lane is computed here"
        if len(self.plans) > 1:
            raise GenerationOver("somebody is lost")
        self._sums.decided = step

    def regroup(self, lanes: tuple[int, ...]) -> Verdict:
        self.told.append(lanes)
        self.plans.pop(0)
        self.holder = None
        return self.verdict


def agree(complete: bool) -> None:
    if not complete:
        raise GenerationOver("not here")


class Scene(NamedTuple):
    sums: Sums
    others: Others
    round: StepRound

    def run(self) -> list[int]:
        given = []
        for lane in self.round.lanes():
            given.append(lane)
            self.round.add(lane, "tree")
        return given


@pytest.fixture
def make() -> Callable[..., Scene]:
    def scene(*plans: dict[int, tuple[int, ...]], known: bool = True) -> Scene:
        sums, shape = Sums(), Shape()
        shape.known = known
        others = Others(sums, *plans)
        return Scene(
            sums, others, StepRound(STEP, 0, sums, others, shape, regroup=others.regroup, agree=agree)
        )

    return scene


def test_own_lanes_and_then_the_total(make: Callable[..., Scene]) -> None:
    scene = make({0: (0, 1), 1: (2, 3)})
    assert scene.run() == [0, 1]
    assert scene.sums.calls == ["begin 4 {0: (0, 1), 1: (2, 3)}"]
    assert scene.round.decided
    assert scene.round.total() == [0, 1]


def test_lanes_of_the_lost_come_after_the_own_ones(make: Callable[..., Scene]) -> None:
    scene = make({0: (0, 1), 1: (2, 3)}, {0: (0, 1, 2, 3)})
    assert scene.run() == [0, 1, 2, 3]
    assert scene.others.told == [(0, 1)]
    assert scene.sums.calls[1:] == ["reassign {0: (0, 1, 2, 3)}"]


def test_a_step_begun_again_computes_its_lanes_again(make: Callable[..., Scene]) -> None:
    scene = make({0: (0, 1), 1: (2, 3)}, {0: (1, 2), 1: (0, 3)})
    scene.others.verdict = Verdict(STEP, frozenset({0}))
    assert scene.run() == [0, 1, 1, 2]
    assert scene.sums.calls[1:] == ["begin 4 {0: (1, 2), 1: (0, 3)}"]
    assert scene.round.counted == [1, 2]


def test_a_laggard_is_given_no_more_lanes(make: Callable[..., Scene]) -> None:
    scene = make({0: (0, 1), 1: (2, 3)}, {})
    scene.others.verdict = Verdict(STEP + 1)
    assert scene.run() == [0, 1]
    assert len(scene.sums.calls) == 1


def test_a_step_whose_total_is_lost_before_it_was_brought_begins_then(make: Callable[..., Scene]) -> None:
    scene = make({1: (0, 1, 2, 3)}, {0: (0, 1, 2, 3)})
    scene.others.holder = 1
    assert scene.run() == [0, 1, 2, 3]
    assert scene.sums.calls == ["begin 4 {0: (0, 1, 2, 3)}"]
    assert scene.round.total() == [0, 1, 2, 3]


def test_whoever_has_never_added_computes_one_lane_that_does_not_count(make: Callable[..., Scene]) -> None:
    scene = make({1: (0, 1, 2, 3)}, known=False)
    assert scene.run() == [0]
    assert scene.sums.calls[1:] == ["prepare tree"]
    assert scene.sums.lanes == []
    assert scene.round.counted == []


def test_one_that_has_its_total_computes_along_for_its_replica(make: Callable[..., Scene]) -> None:
    scene = make({0: (0,), 2: (1,)}, {0: (0, 1)})
    given = []
    for lane in scene.round.lanes():
        given.append(lane)
        scene.round.add(lane, "tree")
        if given == [0]:
            scene.sums.decided = STEP  # its own column is complete, that of its neighbour is not
    assert given == [0, 1]
    assert scene.round.counted == [0]
    assert scene.others.told == [(0,)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda r: list(r.lanes()), "lane 0 was given and not added"),
        (lambda r: r.add(0, "tree"), "no lane was given"),
        (lambda r: (next(r.lanes()), r.add(1, "tree")), "lane 1 is added, but lane 0 was given"),
        (lambda r: (next(r.lanes()), r.total()), "the sum is not complete"),
        (lambda r: (next(r.lanes()), next(r.lanes())), "gone through once"),
    ],
)
def test_wrong_uses_are_told(
    make: Callable[..., Scene], wrong: Callable[[StepRound], object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        wrong(make({0: (0, 1)}).round)
