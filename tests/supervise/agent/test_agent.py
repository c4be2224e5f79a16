"""What an agent does with workers: starts them, seats them, and says how each of them ended, and why."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from holdfast.coord import CoordClient
from holdfast.journal import StacksDumped, WorkerExited, WorkerHung, read
from holdfast.supervise.messages import (
    CRASHED,
    DONE,
    HUNG,
    KILLED,
    PREEMPTED,
    STALLED,
    STOPPED,
    Activate,
    AgentBeat,
    AgentUp,
    Drain,
    Kill,
    NodePreempted,
    Seat,
    Shutdown,
    Spawn,
    WorkerActive,
    WorkerDrained,
    WorkerEnded,
    WorkerParked,
    WorkerProgress,
    WorkerStarted,
)
from holdfast.supervise.watch import Deadlines
from tests.supervise.agent.agent_process import TOKEN, AgentProcess, await_end, config_of, living

pytestmark = pytest.mark.process

SEAT = Seat(0, 0, 1)


def shut(agent: AgentProcess, grace_s: float = 5.0) -> int:
    agent.tell(Shutdown("the test is over", grace_s))
    return agent.ended()


def test_a_worker_from_start_to_stop(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path)) as agent:
        assert agent.expect(AgentUp).parts == ()
        agent.tell(Spawn(7, SEAT))
        pid = agent.expect(WorkerStarted).pid
        active = agent.active(7)
        assert active.slot == 0
        assert agent.expect(WorkerProgress, lambda one: one.step > 20).phase == "step"
        agent.expect(AgentBeat)
        # The token is in no argument list and in no environment.
        for name in ("cmdline", "environ"):
            assert TOKEN not in Path(f"/proc/{pid}/{name}").read_bytes().decode()
        agent.tell(Shutdown("enough", 20.0))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code) == (DONE, 0)
        assert agent.ended() == 0
        assert "saved and stopped: enough" in agent.log(7)
        assert "[0] slot 0 of 1, NPROC 2, nice 0" in agent.said()
        assert living(tmp_path) == []
        assert not Path(agent.config.root).exists()


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("segv", -11, "SIGSEGV"),
        ("kill", -9, "SIGKILL"),
        ("exit75", 75, "exit code 75"),
        ("raise", 1, "RuntimeError: the loss is not a number"),
    ],
)
def test_how_a_worker_crashed(mode: str, code: int, words: str, tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, mode)) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code, ended.step, ended.phase) == (CRASHED, code, 3, "step")
        assert words in ended.detail
        assert shut(agent) == 0
        # The tail of the culprit, for people.
        assert "worker 1 (replica 0.0" in agent.said()
        events = [record.event for record in read(agent.config.journal)]
        assert [one.code for one in events if isinstance(one, WorkerExited)] == [code]


def test_a_death_before_join_has_no_step(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, "early")) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code, ended.step, ended.phase) == (CRASHED, 1, -1, "start")


@pytest.mark.parametrize(
    ("mode", "cause", "seen"),
    [
        ("gil", HUNG, "lock_interpreter"),
        ("spin", HUNG, "in spin"),
        ("doze", STALLED, "in doze"),
        ("stop", STOPPED, "State:\tT"),
    ],
)
def test_hangs_are_found_written_down_and_ended(mode: str, cause: str, seen: str, tmp_path: Path) -> None:
    step_s, stall_s = (60.0, 1.0) if mode == "doze" else (1.0, 60.0)
    deadlines = Deadlines(step_s=step_s, step_factor=1.0, first_step_s=1.0, stall_s=stall_s)
    with AgentProcess(config_of(tmp_path, mode, deadlines=deadlines)) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.step, ended.phase) == (cause, 3, "step")
        path = re.search(r"its stacks: (.*)", ended.detail)
        assert path is not None, ended.detail
        assert seen in Path(path[1]).read_text()
        shut(agent)
        events = [record.event for record in read(agent.config.journal)]
        hung = next(one for one in events if isinstance(one, WorkerHung))
        assert (hung.worker, hung.slot, hung.cause, hung.phase, hung.step) == (1, 0, cause, "step", 3)
        assert any(isinstance(one, StacksDumped) for one in events)
        assert "hangs in step 4, phase 'step'" in agent.said()


def test_a_parked_process_waits_at_low_priority_until_it_gets_a_seat(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path)) as agent:
        agent.tell(Spawn(3))
        pid = agent.expect(WorkerStarted).pid
        agent.expect(WorkerParked)
        assert os.getpriority(os.PRIO_PROCESS, pid) == 10
        agent.tell(Activate(3, SEAT))
        agent.active(3)
        assert os.getpriority(os.PRIO_PROCESS, pid) == 0
        assert shut(agent) == 0


def test_the_dead_are_buried_at_once(tmp_path: Path) -> None:
    # Without a burial the coordinator would wait for the member to come back.
    config = config_of(
        tmp_path, replicas=2, coordinator={"min_size": 2, "last_call_s": 0.05, "reconnect_s": 50.0}
    )
    with AgentProcess(config) as agent:
        for worker in (1, 2):
            agent.tell(Spawn(worker, Seat(worker - 1, 0, 1)))
        agent.expect(WorkerActive)
        agent.expect(WorkerActive)
        address = f"file:{config.discovery}"
        with CoordClient(address, run="demo", token=TOKEN.encode()) as client:
            agent.tell(Kill(2, "for a test"))
            ended = agent.expect(WorkerEnded)
            assert (ended.worker, ended.cause, ended.detail) == (2, KILLED, "for a test")
            while [one.slot for one in client.status().members if one.state == "alive"] != [0]:
                pass
        assert shut(agent) == 0


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, "offspring")) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        found = re.search(r"offspring (\d+)", agent.log(1))
        assert found is not None
        agent.tell(Kill(1, "for a test"))
        agent.expect(WorkerEnded)
        await_end(int(found[1]))
        assert shut(agent) == 0


def test_a_drained_worker_leaves_and_that_is_no_failure(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path)) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        agent.tell(Drain(1, "the node goes away"))
        agent.expect(WorkerDrained)
        assert agent.expect(WorkerEnded).cause == PREEMPTED
        assert shut(agent) == 0


def test_sigterm_is_a_notice_and_the_agent_goes_with_its_node(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, notice_s=2.0)) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        agent.process.send_signal(signal.SIGTERM)
        notice = agent.expect(NodePreempted)
        assert (notice.notice_s, notice.reason) == (2.0, "SIGTERM")
        # The conductor says nothing: what is left is ended before the node is gone.
        assert agent.expect(WorkerEnded).cause == PREEMPTED
        assert agent.ended() == 0
        assert living(tmp_path) == []


def test_a_worker_that_cannot_be_started_has_ended(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, program=("/no/such/program",))) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code) == (CRASHED, 127)
        assert shut(agent) == 0


def test_descriptors_stay_flat_over_many_workers(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, "early")) as agent:

        def lives(numbers: range) -> int:
            for number in numbers:
                agent.tell(Spawn(number, SEAT))
            for _ in numbers:
                agent.expect(WorkerEnded)
            agent.expect(AgentBeat)
            return len(os.listdir(f"/proc/{agent.process.pid}/fd"))

        # The agent's own session with the coordinator stands by then.
        lives(range(2))
        before = lives(range(2, 4))
        assert lives(range(4, 12)) <= before + 2
        assert shut(agent) == 0
