"""One world: a replica of several workers loses all of them with any one, and comes back from vaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from holdfast.journal import RunEnded, RunRestored, SaveFailed, WorkerExited
from holdfast.vault.commit import ORPHAN_S
from tests.recovery.mishaps import Mishap
from tests.recovery.stage import SHORT, Digests, Scene

pytestmark = pytest.mark.process
full = pytest.mark.full


# Where a phase is hit, as in the matrix of replicas.
PHASES: Final = {
    "start": Mishap(at="import", what=""),
    "compile": Mishap(at="rehearse", what=""),
    "restore": Mishap(at="run.joined", what="", slot=1),
    "step": Mishap(at="lane", what="", slot=1, step=13),
    "save": Mishap(at="trainer.save.begin", what="", slot=1, step=9),
    "shutdown": Mishap(at="end", what="", slot=1),
}


def befalls(phase: str, what: str, who: str = "self") -> tuple[Mishap, ...]:
    return (msgspec.structs.replace(PHASES[phase], what=what, who=who),)


LOSS: Final = Mishap(at="lane", what="kill", slot=1, step=13)
CELLS: Final = {
    # Workers of a world are not in step: only when both have staged step 10 is there a whole one.
    "kill in step": (Mishap(at="lane", what="kill", slot=1, step=13, told=("SaveStaged", 10, 2)),),
    "stop in step": (Mishap(at="lane", what="stop", slot=0, step=13),),
    "raise in step": (Mishap(at="lane", what="raise", slot=1, step=13),),
    "exit75 in step": (Mishap(at="lane", what="exit75", slot=0, step=13),),
    "gil in step": (Mishap(at="lane", what="gil", slot=1, step=13),),
    "spin in step": (Mishap(at="lane", what="spin", slot=0, step=13),),
    "segv in step": (Mishap(at="lane", what="segv", slot=1, step=13),),
    "kill in start": (Mishap(at="import", what="kill"),),
    "kill in restore": (Mishap(at="run.joined", what="kill", slot=1),),
    "kill in save": (Mishap(at="trainer.save.begin", what="kill", slot=1, step=9),),
    "kill with one of two staged": (Mishap(at="trainer.stage.done", what="kill", slot=1, step=9),),
    "kill in the last save": (Mishap(at="trainer.save.begin", what="kill", slot=0, step=29),),
    "coordinator": (Mishap(at="lane", what="kill", who="coordinator", slot=0, step=13),),
    "worker and vault": (
        Mishap(at="lane", what="kill", who="vault", slot=0, step=13),
        Mishap(at="lane", what="kill", slot=0, step=13),
    ),
    "agent": (Mishap(at="lane", what="kill", who="agent", slot=0, step=13),),
    "worker and coordinator": (
        Mishap(at="lane", what="kill", who="coordinator", slot=1, step=13),
        Mishap(at="lane", what="kill", slot=1, step=13),
    ),
    **{f"{what} in step": befalls("step", what) for what in ("term", "exit1", "oom")},
    **{f"kill in {phase}": befalls(phase, "kill") for phase in ("compile", "shutdown")},
    **{
        f"{what} in {phase}": befalls(phase, what)
        for what in ("stop", "exit1", "gil")
        for phase in PHASES
        if phase != "step"
    },
    **{
        f"{what} {who} in {phase}": befalls(phase, what, who)
        for who in ("coordinator", "vault", "agent")
        for what in ("kill", "stop")
        for phase in PHASES
    },
    **{f"term {who} in step": befalls("step", "term", who) for who in ("coordinator", "vault")},
    # A world needs two of them, and has none or two.
    "kill in step with two parked": (LOSS,),
    **{
        f"{what} parked in step": (Mishap(at="lane", what=what, who="parked", slot=1, step=4), LOSS)
        for what in ("kill", "stop", "gil", "spin")
    },
    **{
        f"{what} parked in compile": (LOSS, Mishap(at="rehearse", what=what, after=0))
        for what in ("kill", "stop")
    },
}
QUICK: Final = {"kill in step"}


def world(root: Path, *mishaps: Mishap, parked: int = 0, program: Sequence[str] = ()) -> Scene:
    return Scene(root, mishaps, replicas=1, workers=2, parked=parked, lane_s=0.02, program=program)


@pytest.mark.parametrize(
    "name", [pytest.param(one, id=one, marks=() if one in QUICK else (full,)) for one in CELLS]
)
def test_one_world(name: str, tmp_path: Path, undisturbed_world: Digests) -> None:
    hangs = name.startswith(("gil", "spin")) and "parked" not in name
    scene = world(tmp_path, *CELLS[name], parked=2 if "parked" in name else 0, program=SHORT if hangs else ())
    assert scene.play(60.0) == 0
    scene.check(undisturbed_world)
    if hangs:
        # Who hangs when all steps are done has finished all the same.
        assert bool({"hung", "fenced"} & set(scene.causes())) == ("shutdown" not in name)
    if name == "kill in step":
        # It had staged step 10, and the vault has outlived it; by now that may be on disk as well.
        restored = [one for one in scene.events() if isinstance(one, RunRestored)]
        assert {one.step for one in restored if one.source != "init"} == {10}


def test_a_save_of_those_who_went_on_does_not_hold_up_the_end(
    tmp_path: Path, undisturbed_world: Digests
) -> None:
    # Workers of a world are not in step here: one hangs when the other has saved what it never will.
    behind = Mishap(at="lane", what="stop", slot=0, step=13, told=("SaveStaged", 15, 1))
    scene = world(tmp_path, behind)
    assert scene.play(60.0) == 0
    scene.check(undisturbed_world)
    halves = {one.step: one.reason for one in scene.events() if isinstance(one, SaveFailed)}
    assert halves[15] == "rank 0 ended without a part in step 15"
    assert not [reason for reason in halves.values() if "in time" in reason]
    last = max(one.t for one in scene.records() if isinstance(one.event, WorkerExited))
    (end,) = (one.t for one in scene.records() if isinstance(one.event, RunEnded))
    assert end - last < ORPHAN_S, "the vault waits for one that is known to be gone"


@full
def test_one_says_that_trying_again_is_no_use(tmp_path: Path, undisturbed_world: Digests) -> None:
    assert world(tmp_path, *befalls("step", "exit78")).play() == 78
    again = world(tmp_path)
    assert again.play() == 0
    again.check(undisturbed_world)


PREEMPTED: Final = ("compile", "step", "save")


@pytest.mark.parametrize("phase", PREEMPTED)
@full
def test_the_only_node_is_preempted(phase: str, tmp_path: Path, undisturbed_world: Digests) -> None:
    # Both wait until the run knows: nobody is through before. One that compiles is ended.
    here = PHASES[phase]
    held = [
        msgspec.structs.replace(here, what="hold", after=0),
        Mishap(at="lane", what="hold", slot=0, after=0),
    ]
    scene = world(tmp_path, *befalls(phase, "term", "agent"), *(held if phase != "compile" else ()))
    assert scene.play() == 75
    scene.check_so_far(undisturbed_world)
    done = 1 + max((one.step for one in scene.applied()), default=-1)
    told = len(scene.events())
    again = world(tmp_path)
    assert again.play() == 0
    again.check(undisturbed_world)
    restored = [one for one in again.events()[told:] if isinstance(one, RunRestored)]
    assert {one.step for one in restored} == {done}, "something was lost, and done again"


# What has no cell here, and why. tests/recovery/test_table.py holds it complete.
NO_CELL: Final = (
    ("*", "*", "reduce", "one world has no sums between replicas"),
    ("collective", "worker", "step compile save", "of JAX's, in tests/jax/test_launched_world.py"),
    ("collective", "worker", "start", "there is no world before all have their seats"),
    ("collective", "worker", "restore shutdown", "they wait for each other in named calls, not in XLA"),
    ("collective", "parked coordinator vault agent", "*", "none of them is in a world"),
    ("segv term exit75 exit78 raise oom", "worker", "*", "an end, as with kill and exit1: all are replaced"),
    ("spin", "worker", "*", "no progress, as with gil, and no end of heartbeats: as in the other matrix"),
    ("segv exit1 exit75 exit78 raise oom gil spin", "coordinator vault agent", "*", "see the other matrix"),
    ("term", "coordinator vault agent", "*", "what a part does then does not depend on who trains"),
    ("*", "parked", "*", "what a parked process does does not depend on the seat it will have"),
)


def table() -> set[tuple[str, str, str]]:
    """The cells above: fault, part, phase."""
    phases = {mishap.at: phase for phase, mishap in PHASES.items()}
    mishaps = [one for cell in CELLS.values() for one in cell if one.at in phases]
    return {
        *((one.what, who(one), phases[one.at]) for one in mishaps),
        ("exit78", "worker", "step"),
        *(("term", "agent", phase) for phase in PREEMPTED),
    }


def who(mishap: Mishap) -> str:
    """One that warms up after a loss is to be parked."""
    if mishap.who != "self":
        return mishap.who
    return "parked" if mishap.after >= 0 else "worker"
