"""What an agent does with workers: starts them, seats them, and says how each of them ended, and why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import Deadline
from holdfast.coord import CoordClient
from holdfast.journal import StacksDumped, WorkerExited, WorkerFenced, WorkerHung, read
from holdfast.supervise.messages import (
    CRASHED,
    DONE,
    FENCED,
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
from holdfast.supervise.stacks import stacks_path
from holdfast.supervise.watch import Deadlines
from tests.coord.coordinator_process import CoordinatorProcess
from tests.supervise.agent.agent_process import (
    REPO,
    TIMEOUT_S,
    TOKEN,
    AgentProcess,
    await_end,
    config_of,
    living,
)
from tests.supervise.agent.test_stacks import put_spy

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
        assert f"[0] slot 0 of 1, NPROC 2, nice {os.nice(0)}" in agent.said()
        assert living(tmp_path) == []
        assert not Path(agent.config.root).exists()


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        # What it printed last is not why it was killed.
        ("segv", -11, "killed by SIGSEGV"),
        ("kill", -9, "killed by SIGKILL"),
        ("exit75", 75, "exit code 75: slot 0 of 1, NPROC 2, nice 0"),
        ("raise", 1, "exit code 1: RuntimeError: the loss is not a number"),
        ("done", 0, "ended with 0 in step 3 before its steps were done"),
    ],
)
def test_how_a_worker_crashed(mode: str, code: int, words: str, tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, mode)) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code, ended.step, ended.phase) == (CRASHED, code, 3, "step")
        assert ended.detail.replace(f"nice {os.nice(0)}", "nice 0") == words
        assert shut(agent) == 0
        # The tail of the culprit, for people, who have seen its output.
        assert "worker 1 (replica 0.0" in agent.said()
        assert "    | " not in agent.said()
        events = [record.event for record in read(agent.config.journal)]
        assert [one.code for one in events if isinstance(one, WorkerExited)] == [code]


def test_a_death_before_join_has_no_step(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, "early", log_slots=())) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code, ended.step, ended.phase) == (CRASHED, 1, -1, "start")
        # Its output is not shown otherwise; that of a second one is the same.
        agent.tell(Spawn(2, None))
        agent.expect(WorkerEnded)
        assert shut(agent) == 0
        assert agent.said().count("    | RuntimeError: the loss is not a number\n") == 1
        assert "    its last lines are those of worker 1 (replica 0.0" in agent.said()


def test_a_program_that_never_joins_is_shown_and_may_end(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "0-1.log"
    log.parent.mkdir()
    log.write_text("of an earlier launch\n")
    with AgentProcess(config_of(tmp_path, "unjoined")) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code, ended.step) == (DONE, 0, -1)
        assert shut(agent) == 0
        assert "[0] no part in anything\n" in agent.said()
        assert "ended with 0 and without holdfast.join(): it has trained nothing" in agent.said()
        assert "of an earlier launch" not in agent.said()
        assert agent.log(1) == "of an earlier launch\nno part in anything\n"


def test_a_worker_that_was_declared_dead_and_goes_on_is_ended(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, "cut", fenced_s=2.0)) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        ended = agent.expect(WorkerEnded)
        # It made progress all the time: only the coordinator had missed it.
        assert (ended.cause, ended.code, ended.phase) == (FENCED, -9, "step")
        assert ended.step > 3
        assert "after the coordinator had declared it dead; its stacks: " in ended.detail
        assert shut(agent) == 0
        assert "worker 1 (replica 0.0" in agent.said()
        events = [record.event for record in read(agent.config.journal)]
        (fenced,) = [one for one in events if isinstance(one, WorkerFenced)]
        assert (fenced.worker, fenced.slot) == (1, 0)
        assert fenced.seconds >= 2.0
        assert not [one for one in events if isinstance(one, WorkerHung)]


def test_a_worker_that_was_declared_dead_before_its_agent_found_the_coordinator_is_ended(
    tmp_path: Path,
) -> None:
    with CoordinatorProcess(tmp_path / "other", "--run=demo", "--min-size=1", token=TOKEN.encode()) as other:
        env = {**os.environ, "PYTHONPATH": str(REPO), "STUB_COORD": other.address}
        config = config_of(tmp_path, "cut", hosts_coordinator=False, env=env)
        with (
            AgentProcess(config) as agent,
            CoordClient(other.address, run="demo", token=TOKEN.encode()) as client,
        ):
            agent.tell(Spawn(1, SEAT))
            agent.active(1)
            deadline = Deadline(TIMEOUT_S)
            while [one.state for one in client.status().members] != ["vacant"]:
                deadline.check("the death")
            Path(config.discovery).parent.symlink_to(tmp_path / "other")
            assert agent.expect(WorkerEnded).cause == FENCED
            assert shut(agent) == 0


@pytest.mark.parametrize("mode", ["part", "finished"])
def test_a_worker_that_parted_in_good_order_may_go_on(tmp_path: Path, mode: str) -> None:
    with AgentProcess(config_of(tmp_path, mode, fenced_s=0.1)) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        agent.expect(WorkerProgress, lambda one: one.step > 100)  # a second and more later
        agent.tell(Shutdown("enough", 20.0))
        assert agent.expect(WorkerEnded).cause == DONE
        assert agent.ended() == 0


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
    # One cause at a time: none of the others could be found before it.
    deadlines = Deadlines(
        step_s=3.0 if cause == HUNG else 60.0,
        step_factor=1.0,
        first_step_s=3.0,
        stall_s=3.0 if cause == STALLED else 60.0,
    )
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


@pytest.mark.parametrize(
    ("mode", "cause", "seen"), [("gil", HUNG, "lock_interpreter"), ("stop", STOPPED, "State:\tT")]
)
def test_a_py_spy_that_hangs_prevents_neither_stacks_nor_end(
    mode: str, cause: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = put_spy(tmp_path, monkeypatch, "echo so far", "exec sleep 600")
    deadlines = Deadlines(
        step_s=3.0 if cause == HUNG else 60.0, step_factor=1.0, first_step_s=3.0, stall_s=60.0
    )
    with AgentProcess(config_of(tmp_path, mode, deadlines=deadlines)) as agent:
        agent.tell(Spawn(1, SEAT))
        pid = agent.expect(WorkerStarted).pid
        ended = agent.expect(WorkerEnded)
        assert ended.cause == cause
        text = Path(stacks_path(str(tmp_path), pid)).read_text()
        assert seen in text
        # One that answers signals says itself where it is: nobody reads its memory.
        assert called.exists() == (cause == STOPPED)
        if cause == STOPPED:
            spy, *arguments = called.read_text().split()
            assert arguments == ["dump", "--nonblocking", "--pid", str(pid)]
            assert text.endswith("\nso far\n")
            await_end(int(spy))
            times = {type(one.event): one.t for one in read(agent.config.journal)}
            assert 1.5 < times[StacksDumped] - times[WorkerHung] < 10.0
        assert shut(agent) == 0


def test_a_pause_of_the_machine_is_held_against_no_worker(tmp_path: Path) -> None:
    config = config_of(tmp_path, deadlines=Deadlines(stopped_s=4.0), hosts_coordinator=False, beat_s=0.1)
    with AgentProcess(config) as agent:
        agent.tell(Spawn(3))
        pid = agent.expect(WorkerStarted).pid
        agent.expect(WorkerParked)
        os.kill(pid, signal.SIGSTOP)
        agent.expect(AgentBeat)
        agent.expect(AgentBeat)  # by now it was seen to be stopped
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(4.5)
        agent.process.send_signal(signal.SIGCONT)
        for number in (4, 5):  # it looks at its workers between two commands
            agent.tell(Spawn(number))
            agent.expect(WorkerStarted)
        os.kill(pid, signal.SIGCONT)
        agent.tell(Kill(3, "enough"))
        assert agent.expect(WorkerEnded).cause == KILLED
        shut(agent)


def test_a_parked_process_waits_at_low_priority_until_it_gets_a_seat(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path)) as agent:
        agent.tell(Spawn(3))
        pid = agent.expect(WorkerStarted).pid
        agent.expect(WorkerParked)
        own = os.nice(0)  # a launch that is nice itself has workers that are as nice
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 10)
        agent.tell(Activate(3, SEAT))
        agent.active(3)
        assert os.getpriority(os.PRIO_PROCESS, pid) == own
        assert shut(agent) == 0


def test_a_parked_process_that_hears_nothing_any_more_is_found_when_it_is_needed(tmp_path: Path) -> None:
    deadlines = Deadlines(step_s=0.5)
    with AgentProcess(config_of(tmp_path, "deaf", deadlines=deadlines)) as agent:
        agent.tell(Spawn(3))
        agent.expect(WorkerParked)
        agent.tell(Activate(3, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.phase) == (HUNG, "parked")
        assert "has not taken the seat" in ended.detail
        shut(agent)


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
            # One that is not buried is suspect, and stays so for long.
            deadline = Deadline(20.0)
            while {one.slot: one.state for one in client.status().members}.get(1) != "vacant":
                deadline.check("the burial")
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


def test_a_worker_that_was_told_to_leave_and_says_nothing_has_left_all_the_same(tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, "mute")) as agent:
        agent.tell(Spawn(1, SEAT))
        agent.active(1)
        agent.tell(Drain(1, "the node goes away"))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code) == (PREEMPTED, 0)
        assert shut(agent) == 0


@pytest.mark.parametrize(
    ("mode", "cause", "code", "words"),
    [
        ("finished-segv", DONE, 0, "all its steps were done; then killed by SIGSEGV"),
        ("finished-spin", DONE, 0, "no progress in phase 'shutdown' for"),
        ("finished-exit75", CRASHED, 75, "exit code 75"),
    ],
)
def test_one_that_falls_after_its_last_step_has_done_it(
    mode: str, cause: str, code: int, words: str, tmp_path: Path
) -> None:
    deadlines = Deadlines(phases={"shutdown": 0.5 if mode == "finished-spin" else 60.0})
    with AgentProcess(config_of(tmp_path, mode, deadlines=deadlines)) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code, ended.phase) == (cause, code, "shutdown")
        assert words in ended.detail
        assert shut(agent) == 0
        assert words in agent.said()


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


@pytest.mark.parametrize(("wrong", "code"), [({"program": ("/no/such/program",)}, 127), ({"nproc": -1}, 78)])
def test_a_worker_that_cannot_be_started_has_ended(wrong: dict[str, Any], code: int, tmp_path: Path) -> None:
    with AgentProcess(config_of(tmp_path, **wrong)) as agent:
        agent.tell(Spawn(1, SEAT))
        ended = agent.expect(WorkerEnded)
        assert (ended.cause, ended.code) == (CRASHED, code)
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
