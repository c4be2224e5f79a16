"""The fault matrix: whatever goes wrong, wherever, and whoever it befalls, the run ends with the same bits.

A cell is a mishap (or two) in a run of real processes. It passes if the exit code is right, all states are
those of the undisturbed run, every step was applied once and in turn, and nothing is left behind, all within
its time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest
from _pytest.mark import ParameterSet

from holdfast.journal import RunRestored
from tests.recovery.mishaps import Mishap
from tests.recovery.stage import SHORT, UNTIL, Digests, Scene

pytestmark = pytest.mark.process
full = pytest.mark.full

# Where a phase is hit: what a worker comes by, in which slot and at which step.
PHASES: Final = {
    "start": Mishap(at="import", what=""),
    "compile": Mishap(at="rehearse", what=""),
    "init": Mishap(at="init", what="", slot=1),
    "restore": Mishap(at="run.joined", what="", slot=1),
    "meeting": Mishap(at="run.gathered", what="", slot=0),
    "restored": Mishap(at="run.restored", what="", slot=1),
    "step": Mishap(at="lane", what="", slot=1, step=6),
    "reduce": Mishap(at="reduce.announced", what="", slot=1, step=6),
    "adding": Mishap(at="reduce.adding", what="", step=6),
    "decided": Mishap(at="run.decided", what="", slot=0, step=6),
    "apply": Mishap(at="apply", what="", slot=1, step=6),
    "save": Mishap(at="trainer.save.begin", what="", slot=0, step=9),
    "staged": Mishap(at="trainer.stage.done", what="", slot=0, step=9),
    "last save": Mishap(at="trainer.save.begin", what="", slot=0, step=UNTIL - 1),
    "shutdown": Mishap(at="end", what="", slot=1),
    "exit": Mishap(at="exit", what="", slot=0),
}
# What a run has beside its workers.
BESIDE: Final = ("coordinator", "vault", "agent")
PHASES_OF_A_RUN: Final = ("start", "compile", "restore", "step", "reduce", "save", "shutdown")
CAUSES: Final = {
    "kill": "crashed",
    "segv": "crashed",
    "exit1": "crashed",
    "exit75": "crashed",
    "raise": "crashed",
    # Under launch the agent hears of a preemption; a worker that is sent the signal itself dies of it.
    "term": "crashed",
    "oom": "crashed",  # the counter of the control group that would tell it cannot be written here
    "stop": "stopped",
    "gil": "hung",
    "spin": "hung",
}
# Where all steps are done and saved. Who falls there without a word of its program's has not failed.
OVER: Final = ("shutdown", "exit")
SAID: Final = ("exit1", "exit75", "raise")
HANGS: Final = ("stop", "gil", "spin")
# Sites that are passed on a thread, where an exception or a loop would not be the program's.
SIGNALS: Final = ("kill", "stop", "segv", "term", "oom")
# Sites within a named wait, where no code of the program can loop; what holds the interpreter's lock can be
# another thread of it. Such a worker is missed by the coordinator, and may live until the others are done.
INSIDE: Final = ("restore", "meeting", "reduce", "adding")
QUICK: Final = {
    ("kill", "start"),
    ("segv", "restore"),
    ("stop", "save"),
    ("exit1", "shutdown"),
    ("term", "step"),
}


def cells() -> list[ParameterSet]:
    """All faults in all phases; a few of them are quick and certain enough for every day."""
    found = []
    for phase in PHASES:
        for what in CAUSES:
            if (phase == "staged" and what not in SIGNALS) or (phase in INSIDE and what == "spin"):
                continue
            marks = () if (what, phase) in QUICK else (full,)
            found.append(pytest.param(what, phase, id=f"{what} in {phase}", marks=marks))
    return found


def befalls(phase: str, what: str, who: str = "self", *, after: int = -1) -> Mishap:
    return msgspec.structs.replace(PHASES[phase], what=what, who=who, after=after)


@pytest.mark.parametrize(("what", "phase"), cells())
def test_a_worker(what: str, phase: str, tmp_path: Path, undisturbed: Digests) -> None:
    # Hangs outside of steps have deadlines of their own.
    slow = what in ("gil", "spin") and PHASES[phase].at not in ("lane", "apply", "run.decided")
    scene = Scene(tmp_path, (befalls(phase, what),), program=SHORT if slow else ())
    assert scene.play() == 0
    scene.check(undisturbed)
    if phase in OVER and what not in SAID:
        assert scene.causes() == []
        (fallen,) = scene.fallen()
        assert (what in HANGS) == bool(scene.hung()), fallen
        assert what in HANGS or fallen.startswith("all its steps were done; then "), fallen
    elif what == "gil":
        # Its heartbeats stop, too: on a busy machine the coordinator may miss it before its agent does.
        assert phase in INSIDE or scene.causes() in (["hung"], ["fenced"])
    else:
        assert scene.causes() == [CAUSES[what]]


@pytest.mark.parametrize("phase", PHASES_OF_A_RUN)
@full  # in every run of the tests: a script that ends so, in tests/launch/test_launch.py
def test_a_worker_says_that_trying_again_is_no_use(phase: str, tmp_path: Path, undisturbed: Digests) -> None:
    assert Scene(tmp_path, (befalls(phase, "exit78"),)).play() == 78
    # Somebody has seen to it, and starts it again.
    again = Scene(tmp_path)
    assert again.play() == 0
    again.check(undisturbed)


def test_a_step_fails_whoever_tries_it(tmp_path: Path, undisturbed: Digests) -> None:
    scene = Scene(tmp_path, (Mishap(at="lane", what="raise", step=6, always=True),))
    assert scene.play() == 79
    scene.check_so_far(undisturbed)
    assert {one.step for one in scene.applied()} == set(range(6))


WARMING: Final = [(what, phase) for what in CAUSES for phase in ("start", "compile")]


@pytest.mark.parametrize(("what", "phase"), WARMING)
@full
def test_a_parked_process_that_warms_up(what: str, phase: str, tmp_path: Path, undisturbed: Digests) -> None:
    # The first loss promotes the one that is parked; the next one to warm up takes its place, or would.
    warm = Mishap(at="lane", what="kill", slot=1, step=6)
    program = SHORT if what in ("gil", "spin") else ()
    scene = Scene(tmp_path, (warm, befalls(phase, what, after=0)), parked=1, lane_s=0.02, program=program)
    assert scene.play() == 0
    scene.check(undisturbed)


WAITING: Final = [what for what in CAUSES if what != "exit75"]


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=() if one == "kill" else (full,)) for one in WAITING]
)
def test_a_parked_process_that_waits(what: str, tmp_path: Path, undisturbed: Digests) -> None:
    at = {"at": "lane", "slot": 0}
    scene = Scene(
        tmp_path,
        (Mishap(what=what, who="parked", step=4, **at), Mishap(what="kill", who="slot:1", step=6, **at)),  # type: ignore[arg-type]
        parked=1,
        # So that it is missed before the end.
        lane_s=0.04 if what in ("gil", "spin") else 0.02,
    )
    assert scene.play() == 0
    scene.check(undisturbed)
    if what in ("gil", "spin"):
        assert scene.causes() == ["crashed", "hung"]


@pytest.mark.parametrize("what", WAITING)
@full
def test_a_parked_process_that_nobody_needs_any_more(what: str, tmp_path: Path, undisturbed: Digests) -> None:
    scene = Scene(tmp_path, (befalls("shutdown", what, "parked"),), parked=1, lane_s=0.02)
    assert scene.play() == 0
    scene.check(undisturbed)


PARTS: Final = [
    *((what, who, phase) for who in BESIDE for what in ("kill", "stop") for phase in PHASES_OF_A_RUN),
    ("kill", "coordinator", "meeting"),
    *(("kill", who, phase) for who in ("vault", "agent") for phase in ("staged", "last save")),
    ("kill", "coordinator", "last save"),
    ("stop", "vault", "last save"),
    ("segv", "coordinator", "step"),
    ("segv", "vault", "staged"),
    ("segv", "agent", "step"),
    # They end in order, and are started again. To an agent it is a notice: see below.
    *(("term", who, phase) for who in ("coordinator", "vault") for phase in PHASES_OF_A_RUN),
]
QUICK_PARTS: Final = {
    ("kill", "coordinator", "meeting"),
    ("kill", "vault", "staged"),
}


@pytest.mark.parametrize(
    ("what", "who", "phase"),
    [pytest.param(*one, id=" ".join(one), marks=() if one in QUICK_PARTS else (full,)) for one in PARTS],
)
def test_a_part(what: str, who: str, phase: str, tmp_path: Path, undisturbed: Digests) -> None:
    scene = Scene(tmp_path, (befalls(phase, what, who),))
    assert scene.play(60.0) == 0
    scene.check(undisturbed)


@pytest.mark.parametrize(
    "site",
    [
        pytest.param(f"vault.{one}", marks=full)
        for one in ("begin", "reserved", "block.written", "part.synced", "index.written", "decided")
    ]
    + [pytest.param(f"vault.{one}", marks=full) for one in ("manifest.created", "step.synced")],
)
def test_the_vault_dies_at_every_other_save(site: str, tmp_path: Path, undisturbed: Digests) -> None:
    scene = Scene(tmp_path, faults=f"{site}:kill@2")
    assert scene.play() == 0
    scene.check(undisturbed)


PREEMPTED: Final = [phase for phase in PHASES_OF_A_RUN if phase != "shutdown"]


@pytest.mark.parametrize(
    "phase", [pytest.param(one, marks=() if one == "step" else (full,)) for one in PREEMPTED]
)
def test_the_only_node_is_preempted(phase: str, tmp_path: Path, undisturbed: Digests) -> None:
    # Whoever did it waits until the run knows: alone the others get nowhere. One without a seat is ended.
    held = () if phase in ("start", "compile") else (befalls(phase, "hold", after=0),)
    scene = Scene(tmp_path, (befalls(phase, "term", "agent"), *held))
    # It has the coordinator: all save and stop, and the same command goes on.
    assert scene.play() == 75
    scene.check_so_far(undisturbed)
    done = 1 + max((one.step for one in scene.applied()), default=-1)
    told = len(scene.events())
    again = Scene(tmp_path, replicas=3)
    assert again.play() == 0
    again.check(undisturbed)
    # Nothing was lost: it goes on where they stopped.
    (restored,) = [one for one in again.events()[told:] if isinstance(one, RunRestored)]
    assert restored.step == done


# What has no cell, and why: faults, parts, phases ("*": all). tests/recovery/test_table.py holds it complete.
NO_CELL: Final = (
    ("collective", "*", "*", "none spans two replicas; within one: tests/jax/test_launched_world.py"),
    ("spin", "worker", "restore reduce", "no code of the program runs within a named wait"),
    ("exit1 exit75 exit78 raise gil spin", "coordinator vault agent", "*", "no code of a program runs there"),
    ("segv oom", "coordinator vault agent", "*", "who watches sees an end by a signal, as with kill"),
    ("term", "agent", "shutdown", "a notice when all is done: the end and the stop race, and both are right"),
    ("*", "parked", "restore reduce save", "it waits, whatever others do; with a seat it is a worker"),
    ("exit75", "parked", "step shutdown", "of one that waits it is no other word than exit1"),
    ("exit78", "parked", "*", "whoever says it ends the run, as a worker does"),
)


def table() -> set[tuple[str, str, str]]:
    """The cells above: fault, part, phase."""
    return {
        *((str(one.values[0]), "worker", str(one.values[1])) for one in cells()),
        *(("exit78", "worker", phase) for phase in PHASES_OF_A_RUN),
        *((what, "parked", phase) for what, phase in WARMING),
        *((what, "parked", phase) for what in WAITING for phase in ("step", "shutdown")),
        *PARTS,
        *(("term", "agent", phase) for phase in PREEMPTED),
    }
