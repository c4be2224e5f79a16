"""A member is killed or stopped in every phase of a step; the others end it with the same bits."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import pytest
import xxhash

from holdfast.faults import ENV
from holdfast.reduce import Reducer
from tests.checkpoint.children import Child, Children, await_state, within
from tests.reduce.crew import dealt, flat, grads, unchecked

pytestmark = pytest.mark.process

LANES: Final = 6
SIZE: Final = 400_000
"""Several blocks for each share."""
VICTIM: Final = 1
Line = dict[str, Any]


@cache
def expected(step: int) -> str:
    """The digest of the total of a step, made by one member."""
    reducer = Reducer(num_lanes=LANES)
    try:
        reducer.begin(step, {0: range(LANES)})
        for lane in range(LANES):
            reducer.add(lane, grads(step, lane, size=SIZE))
        reducer.exchange(1.0, unchecked)
        return xxhash.xxh3_128_hexdigest(flat(reducer.total()))
    finally:
        reducer.close()


@final
class Run:
    """Members in processes, and the test as the one who regroups them."""

    def __init__(self, children: Children, num_members: int, faults: str, transports: Sequence[str]) -> None:
        about = json.dumps({"size": SIZE, "num_lanes": LANES, "transports": transports})
        self.members: dict[int, Child] = {
            slot: children.python(
                "-m", "tests.reduce.child", about, **({ENV: faults} if slot == VICTIM else {})
            )
            for slot in range(num_members)
        }
        self._up = {slot: child.until("up") for slot, child in self.members.items()}
        self._generation = 0
        self.regroup()

    def regroup(self) -> dict[int, Line]:
        self._generation += 1
        members = [(slot, self._up[slot]["incarnation"], self._up[slot]["address"]) for slot in self.members]
        return self.all("regroup", generation=self._generation, members=members)

    def tell(self, do: str, **fields: Any) -> None:
        for slot, child in self.members.items():
            child.tell(json.dumps({"do": do, "me": slot, **fields}))

    def all(self, do: str, **fields: Any) -> dict[int, Line]:
        """Give an order to all and hear what the survivors say."""
        self.tell(do, **fields)
        return self.heard()

    def heard(self) -> dict[int, Line]:
        lines = {
            slot: child.line(40.0) for slot, child in self.members.items() if slot != VICTIM or not self.hit
        }
        return {slot: line for slot, line in lines.items() if line is not None}

    hit = False

    def step(self, step: int, lanes: Mapping[int, Sequence[int]], **fields: Any) -> dict[int, Line]:
        return self.all("step", **{"step": step, "lanes": lanes, "anew": True, "deadline_s": 20.0, **fields})

    def whole(self, step: int, lanes: Mapping[int, Sequence[int]], **fields: Any) -> None:
        """A step that all must end with the right bits."""
        for line in self.step(step, lanes, **fields).values():
            assert (line.get("decided"), line.get("digest")) == (step, expected(step)), line

    def resume(self, step: int, heard: Mapping[int, Line]) -> None:
        """Go on without the victim: fetch the total if somebody has it, else take over its lanes."""
        del self.members[VICTIM]
        self.hit = False
        deciders = [slot for slot, line in heard.items() if line.get("decided") == step]
        state = self.regroup()
        if deciders:
            for slot in sorted(set(self.members) - set(deciders)):
                self.members[slot].tell(
                    json.dumps({"do": "fetch", "step": step, "slot": deciders[0], "deadline_s": 20.0})
                )
                line = self.members[slot].line()
                assert line is not None
                assert line.get("digest") == expected(step), line
        else:
            held = {slot: list(line["held"]) for slot, line in state.items()}
            orphans = sorted(set(range(LANES)) - {lane for mine in held.values() for lane in mine})
            for at, lane in enumerate(orphans):
                held[sorted(held)[at % len(held)]].append(lane)
            self.whole(step, held, anew=False)
        self.whole(step + 1, dealt(LANES, sorted(self.members)))


# In step 1, the second: a member has two lanes in each step.
PHASES: Final = {
    "before its lanes are folded": "reduce.folded:{}@3",
    "before it announces": "reduce.folded:{}@4",
    "after it announced": "reduce.announced:{}@2",
    "in the middle of its share": "reduce.adding:{}@2",
    "after its share": "reduce.published:{}@2",
    "when it has decided": "reduce.decided:{}@2",
}
STOPPED: Final = {"after it announced", "in the middle of its share"}
"""Before and while others read from it; in every run of the tests."""
BOTH: Final = (("memfd", ("memfd", "tcp")), ("tcp", ("tcp",)))
# Each phase over one of the ways, in turn, in every run of the tests; over both in a full one.
in_turn = pytest.mark.parametrize(
    ("phase", "transports"),
    [
        pytest.param(phase, ways, id=f"{name}-{way}", marks=() if at % 2 == turn else pytest.mark.full)
        for at, (name, phase) in enumerate(PHASES.items())
        for turn, (way, ways) in enumerate(BOTH)
    ],
)


@in_turn
def test_a_kill_in_any_phase_changes_no_bit(
    children: Children, phase: str, transports: tuple[str, ...]
) -> None:
    run = Run(children, 3, phase.format("kill"), transports)
    run.whole(0, dealt(LANES, range(3)))
    run.hit = True
    with within(10.0):
        heard = run.step(1, dealt(LANES, range(3)))
    for line in heard.values():
        lost = line.get("kind") == "ReplicaLostError" and line["slots"] == [VICTIM]
        assert lost or line.get("digest") == expected(1), line
    run.members[VICTIM].end()
    run.resume(1, heard)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, id=name, marks=() if name in STOPPED else pytest.mark.full)
        for name, phase in list(PHASES.items())[1:5]
    ],
)
def test_a_stop_in_any_phase_ends_at_the_deadline_and_its_return_hurts_nobody(
    children: Children, phase: str
) -> None:
    run = Run(children, 3, phase.format("stop"), ("memfd", "tcp"))
    run.whole(0, dealt(LANES, range(3)))
    run.hit = True
    with within(30.0):
        # So long that those who are well are never that far apart.
        heard = run.step(1, dealt(LANES, range(3)), deadline_s=4.0)
    for line in heard.values():
        late = line.get("kind") == "ReplicaLateError" and line["slots"] == [VICTIM]
        assert late or line.get("digest") == expected(1), line
    victim = run.members[VICTIM]
    await_state(victim.pid, "T")
    run.resume(1, heard)
    # It wakes up in a generation that is long over, while the others go on.
    victim.kill(signal.SIGCONT)
    run.whole(3, dealt(LANES, sorted(run.members)))
    said = victim.line()
    assert said is not None
    assert said["saw"] == "error" or said["digest"] == expected(1), said
    run.whole(4, dealt(LANES, sorted(run.members)))


def test_a_laggard_that_dies_while_it_fetches_hurts_nobody(children: Children) -> None:
    run = Run(children, 3, "reduce.fetched:kill", ("memfd", "tcp"))
    lanes = dealt(LANES, [0, 2])
    for slot in (0, 2):
        run.members[slot].tell(
            json.dumps(
                {"do": "step", "me": slot, "step": 0, "lanes": lanes, "anew": True, "deadline_s": 20.0}
            )
        )
    for slot in (0, 2):
        run.members[slot].until("done", digest=expected(0))
    victim = run.members[VICTIM]
    victim.tell(json.dumps({"do": "fetch", "step": 0, "slot": 2, "deadline_s": 20.0}))
    assert victim.end() == -signal.SIGKILL
    del run.members[VICTIM]
    run.regroup()
    run.whole(1, lanes)


def test_memory_of_the_dead_goes_with_the_next_generation(children: Children) -> None:
    run = Run(children, 3, "reduce.published:kill@2", ("memfd", "tcp"))
    run.whole(0, dealt(LANES, range(3)))
    run.hit = True
    lent = mapped(run.members[VICTIM].pid, "rw-s")
    assert lent <= mapped(run.members[0].pid, "r--s")
    heard = run.step(1, dealt(LANES, range(3)))
    run.members[VICTIM].end()
    run.resume(1, heard)
    for child in run.members.values():
        assert not lent & mapped(child.pid, "r--s")


def mapped(pid: int, mode: str) -> set[str]:
    """The inodes of the memfds that a process has mapped in a mode; its own are those that it can write."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:holdfast-reduce" in line and line.split()[1] == mode}
