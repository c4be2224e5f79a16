"""Two things go wrong at once, or one after the other before the first is dealt with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from holdfast.journal import StepDone, WorkerFenced
from tests.recovery.mishaps import Mishap
from tests.recovery.stage import LANES, Digests, Scene, check_lanes

pytestmark = pytest.mark.process
full = pytest.mark.full


def at(site: str, *who: str, slot: int = 1, step: int = 6, what: str = "kill") -> tuple[Mishap, ...]:
    """All of them are killed by one, itself last, when it comes by."""
    return tuple(Mishap(at=site, what=what, who=one, slot=slot, step=step) for one in who)


def each(site: str, *slots: int, step: int = 6) -> tuple[Mishap, ...]:
    """Each of these dies when it comes by."""
    return tuple(Mishap(at=site, what="kill", slot=slot, step=step) for slot in slots)


LOSS: Final = Mishap(at="lane", what="kill", slot=1, step=6)
PAIRS: Final = {
    "worker and coordinator in a step": at("lane", "coordinator", "self"),
    "worker and coordinator in the sum": at("reduce.announced", "coordinator", "self"),
    "worker and coordinator, which is stopped": (
        *at("lane", "coordinator", what="stop"),
        *at("lane", "self"),
    ),
    "coordinator while the others regroup": (
        LOSS,
        Mishap(at="run.interrupted", what="kill", who="coordinator", after=0),
    ),
    "worker and vault with a staged state": at("trainer.stage.done", "vault", "self", slot=0, step=9),
    "worker and vault in a step": at("lane", "vault", "self"),
    "two of three in a step": each("lane", 1, 2),
    "two of three in the sum": each("reduce.announced", 0, 2),
    "all in a step": each("lane", 0, 1, 2),
    "one in the sum and one that regroups": (
        Mishap(at="reduce.announced", what="kill", slot=1, step=6),
        Mishap(at="run.interrupted", what="kill", slot=2, after=0),
    ),
    "agent and coordinator": at("lane", "coordinator", "agent"),
    "agent and vault": at("lane", "vault", "agent", slot=0, step=12),
    "agent, coordinator and vault": at("lane", "vault", "coordinator", "agent", slot=0, step=12),
    "coordinator and vault": at("trainer.stage.done", "vault", "coordinator", slot=0, step=9),
    "worker and then its successor as it comes in": (
        LOSS,
        Mishap(at="run.joined", what="kill", slot=1, after=0),
    ),
    "worker and then the donor of its successor": (
        LOSS,
        Mishap(at="run.offered", what="kill", slot=2, after=0),
    ),
    "worker and then its successor with the state": (
        LOSS,
        Mishap(at="run.received", what="kill", slot=1, after=0),
    ),
}
QUICK: Final = {"worker and coordinator in the sum"}
# Where a successor must have come before the end.
LONG: Final = {name for name in PAIRS if "successor" in name}


@pytest.mark.parametrize(
    "name", [pytest.param(one, id=one, marks=() if one in QUICK else (full,)) for one in PAIRS]
)
def test_two_at_once(name: str, tmp_path: Path, undisturbed: Digests) -> None:
    scene = Scene(
        tmp_path,
        PAIRS[name],
        replicas=3,
        parked=1 if name in LONG else 0,
        lane_s=0.04 if name in LONG else 0.004,
    )
    assert scene.play(60.0) == 0
    scene.check(undisturbed)


def test_lanes_are_not_lost_in_the_first_meeting(tmp_path: Path, undisturbed: Digests) -> None:
    # Whoever looks around after another one died must not take those who are left for all there are.
    scene = Scene(
        tmp_path,
        (Mishap(at="run.joined", what="nap", slot=0), Mishap(at="run.joined", what="kill", slot=1)),
    )
    assert scene.play() == 0
    scene.check(undisturbed)
    assert {one.lanes for one in scene.events() if isinstance(one, StepDone)} == {LANES}


def test_a_lane_that_is_computed_again_gives_the_same_bits(tmp_path: Path, undisturbed: Digests) -> None:
    # All workers are lost beyond a saved step: what came after it is computed again, by others.
    # Of step 11 all have told what they computed: the last words of the dead may be lost.
    beyond = Mishap(at="lane", what="kill", who="agent", slot=0, step=13, told=("LaneDigests", 11, 3))
    scene = Scene(tmp_path, (beyond,), replicas=3)
    assert scene.play() == 0
    scene.check(undisturbed)
    assert check_lanes(scene.events()) >= LANES


@full
def test_a_worker_without_a_link_to_the_coordinator_is_ended(tmp_path: Path, undisturbed: Digests) -> None:
    # The others have gone on without it; it cannot be told, and waits for a place that it has lost.
    scene = Scene(tmp_path, (Mishap(at="lane", what="cut", slot=1, step=6),), lane_s=0.02)
    assert scene.play() == 0
    scene.check(undisturbed)
    assert scene.causes() == ["fenced"]
    (fenced,) = [one for one in scene.events() if isinstance(one, WorkerFenced)]
    assert fenced.slot == 1


@full
def test_one_mishap_after_the_other(tmp_path: Path, undisturbed: Digests) -> None:
    scene = Scene(
        tmp_path,
        (
            *each("lane", 1, step=3),
            *each("reduce.announced", 0, step=7),
            *at("lane", "coordinator", slot=-1, step=9),
            *at("lane", "vault", slot=-1, step=11),
            *at("run.decided", "agent", slot=-1, step=13),
            Mishap(at="apply", what="segv", slot=-1, step=17),
            *each("trainer.save.begin", -1, step=19),
            Mishap(at="lane", what="stop", slot=-1, step=22),
            Mishap(at="lane", what="raise", slot=-1, step=26),
        ),
        replicas=3,
        parked=1,
        lane_s=0.02,
    )
    assert scene.play(90.0) == 0
    scene.check(undisturbed)
    assert check_lanes(scene.events()) > 0
