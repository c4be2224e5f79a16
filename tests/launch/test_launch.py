"""A launched run ends with success and the same bits, whatever is done to its processes meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import faults
from holdfast.journal import PartRestarted, SaveDurable, WorkerExited
from holdfast.supervise.status import RunStatus
from tests.launch.launch_process import TIMEOUT_S, LaunchProcess, active, alone

pytestmark = pytest.mark.process

UNTIL = 60
full = pytest.mark.full


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last state of the run of one."""
    return alone(tmp_path_factory.mktemp("alone"), UNTIL)


def holdfast(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=full)])
def test_an_undisturbed_run_ends_well_and_leaves_nothing(
    nodes: int, tmp_path: Path, undisturbed: str
) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", "--nodes", str(nodes), "--parked", "1") as launch:
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        assert launch.living() == []
        left = {path.name for path in launch.folder.iterdir()}
        assert left <= {"ckpt", "coord", "crash", "cache", "journal.jsonl", "logs", "status.json"}
        shown = holdfast(tmp_path, "status", "demo", "--json")
        assert shown.returncode == 0
        status = json.loads(shown.stdout)
        assert (status["state"], status["code"], status["live"]) == ("ended", 0, False)


def test_sums_in_a_wire_dtype_are_the_same_for_any_number_of_replicas(
    tmp_path: Path, undisturbed: str
) -> None:
    finals = []
    for replicas in ("1", "2"):
        root = tmp_path / replicas
        root.mkdir()
        with LaunchProcess(root, "--replicas", replicas, "--wire-dtype", "bfloat16") as launch:
            assert launch.ended() == 0
            finals.append(launch.finals())
            shown = json.loads(holdfast(root, "status", "--json").stdout)
            assert shown["wire_dtype"] == "bfloat16"
    assert finals[0] == finals[1]
    assert len(finals[0]) == 1
    assert finals[0] != {undisturbed}


LOOKS = """import json, os, sys
found = {"environ": dict(os.environ), "began_with": open("/proc/self/environ", "rb").read().decode()}
found["links"], found["bytes"] = {}, {}
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        found["links"][fd] = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue  # of the listing itself
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
        found["bytes"][fd] = os.read(again, 65536).decode(errors="replace")
    except OSError:
        pass  # nothing to read: a socket, or for writing only
with open(os.path.join(os.environ["HOLDFAST_FOLDER"], "seen.json"), "w") as file:
    json.dump(found, file)
"""


def test_a_script_finds_no_token_from_its_first_line_on(tmp_path: Path) -> None:
    script = tmp_path / "looks.py"
    script.write_text(LOOKS)
    with LaunchProcess(tmp_path, script=script) as launch:
        assert launch.ended() == 0
        found = json.loads((launch.folder / "seen.json").read_text())
        token = (launch.folder / "coord" / "token").read_text().strip()
    assert len(token) == 64
    # It came by an inherited pipe, which is closed: left are the control socket, the board, logs, stacks.
    assert "HOLDFAST_TOKEN_FD=" in found["began_with"]
    assert "HOLDFAST_TOKEN_FD" not in found["environ"]
    assert not [
        link for link in found["links"].values() if link.startswith("pipe:") or link.endswith("/token")
    ]
    seen = [*found["environ"].values(), found["began_with"], *found["links"].values()]
    assert found["bytes"]
    assert not [text for text in [*seen, *found["bytes"].values()] if token in text]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(one, marks=full) for one in (signal.SIGSTOP, signal.SIGSEGV))]
)
def test_a_worker_is_lost(number: int, tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", "--parked", "1", brake=5) as launch:
        before = launch.training(2, 5)
        victim = active(before)[1]
        os.kill(victim.pid, number)
        replaced = launch.status(lambda one: new_worker(one, victim.replica, victim.worker))
        assert replaced.step > before.step - 2
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        ends = [one for one in launch.events() if isinstance(one, WorkerExited)]
        assert [one.worker for one in ends if one.cause in ("crashed", "stopped")] == [victim.worker]
        assert launch.living() == []


@full
@pytest.mark.parametrize(
    ("fault", "cause"), [("gil", "hung"), ("spin", "hung"), ("raise", "crashed"), ("exit", "crashed")]
)
def test_a_worker_goes_wrong_by_itself(fault: str, cause: str, tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", "--step-s", "2", lane_s=0.005, fault=fault) as launch:
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        ends = [one for one in launch.events() if isinstance(one, WorkerExited)]
        # Whoever waits for the culprit is not blamed.
        failed = [(one.cause, one.step) for one in ends if one.cause not in ("done", "killed")]
        assert failed == [(cause, 6)]
        if cause == "hung":
            (path,) = [one for one in (launch.folder / "crash").glob("*.stacks") if one.stat().st_size]
            assert {"gil": "lock_interpreter", "spin": "spin"}[fault] in path.read_text()
        assert launch.living() == []


@pytest.mark.full
def test_all_workers_of_a_replica_are_replaced_together(tmp_path: Path, undisturbed: str) -> None:
    options = ("--replicas", "2", "--workers-per-replica", "2", "--parked", "2")
    with LaunchProcess(tmp_path, *options, brake=5) as launch:
        before = launch.training(4, 5)
        victims = [seat for seat in active(before) if seat.replica == 1]
        os.kill(victims[0].pid, signal.SIGKILL)
        old = {seat.worker for seat in victims}
        launch.status(
            lambda one: sum(seat.replica == 1 and seat.worker not in old for seat in active(one)) == 2
        )
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        ends = [one for one in launch.events() if isinstance(one, WorkerExited)]
        assert {one.worker: one.cause for one in ends if one.worker in old} == {
            victims[0].worker: "crashed",
            victims[1].worker: "killed",
        }
        assert launch.living() == []


def new_worker(status: RunStatus, replica: int, old: int) -> bool:
    return any(seat.replica == replica and seat.worker != old for seat in active(status))


@full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_agent_is_lost(number: int, tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", brake=12) as launch:
        launch.training(2, 12)
        parts = launch.pids("coordinator") + launch.pids("vault")
        (agent,) = launch.agents()
        os.kill(agent, number)
        launch.status(lambda one: bool(one.failures))
        launch.training(2, 15)
        assert launch.pids("coordinator") + launch.pids("vault") == parts
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        assert launch.living() == []


@pytest.mark.full
def test_a_node_goes_away_with_notice_and_its_seat_moves(tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", "--nodes", "2", brake=5) as launch:
        before = launch.training(2, 5)
        assert {seat.node for seat in active(before)} == {0, 1}
        os.kill(launch.agent(1), signal.SIGTERM)
        launch.status(lambda one: [seat.node for seat in active(one)] == [0, 0])
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        ends = [one for one in launch.events() if isinstance(one, WorkerExited)]
        assert [one.cause for one in ends if one.node == 1] == ["preempted"]
        assert launch.living() == []


@pytest.mark.full
def test_a_node_is_lost_with_its_vault(tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", "--nodes", "2", brake=12) as launch:
        launch.training(2, 12)
        for pid in [launch.agent(1), *launch.on_node(1)]:
            os.kill(pid, signal.SIGKILL)
        launch.status(lambda one: bool(one.failures))
        launch.training(2, 15)
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        assert launch.living() == []


@full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("part", ["coordinator", "vault"])
def test_a_part_is_lost(part: str, number: int, tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", brake=5) as launch:
        launch.training(2, 5)
        (pid,) = launch.pids(part)
        os.kill(pid, number)
        launch.release()
        assert launch.ended() == 0
        started = [one for one in launch.events() if isinstance(one, PartRestarted)]
        assert [one.part for one in started] == ([part] if number == signal.SIGKILL else [])
        assert (f"the {part} was stopped (SIGSTOP)" in launch.said()) == (number == signal.SIGSTOP)
        assert launch.finals() == {undisturbed}
        assert launch.living() == []


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", brake=13) as launch:
        launch.training(2, 13)
        # Two launches of one run would ruin it.
        again = holdfast(tmp_path, "launch", "--run", "demo", __file__)
        assert again.returncode == 2
        assert f"launched already, by process {launch.process.pid}" in again.stderr
        launch.process.send_signal(signal.SIGINT)
        code = launch.ended()
        assert launch.living() == []
        saved = sorted(
            int(path.name.removeprefix("step-")) for path in (launch.folder / "ckpt").glob("step-*")
        )
        assert saved[-1] >= 13
        assert f"the {saved[-1]} steps so far are saved" in launch.said()
        assert "the same command goes on" in launch.said()
    assert code == 75
    with LaunchProcess(tmp_path, "--replicas", "3") as launch:
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        assert f"the run goes on from step {saved[-1]}, on disk" in launch.said()
        assert launch.said().count("slot 0 of 2") == 1, "the output of the first launch was shown again"
        restored = [one for one in launch.events() if type(one).__name__ == "RunRestored"]
        assert getattr(restored[-1], "step", 0) == saved[-1]


def fill(pipe: int) -> None:
    """Leave no room in a pipe, whoever else writes to it."""
    own = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"." * size)
    os.close(own)


def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(tmp_path: Path) -> None:
    """`holdfast launch ... | less`, then `| head`: what nobody reads is not worth a run."""
    reader, writer = os.pipe()
    with LaunchProcess(tmp_path, "--replicas", "2", "--parked", "1", brake=5, to=writer) as launch:
        first, second = active(launch.training(2, 5))
        fill(writer)
        os.close(writer)
        os.kill(first.pid, signal.SIGKILL)  # there is something to say
        launch.status(lambda one: new_worker(one, first.replica, first.worker))
        os.close(reader)
        os.kill(second.pid, signal.SIGKILL)
        launch.status(lambda one: new_worker(one, second.replica, second.worker))
        launch.release()
        assert launch.ended() == 0
        ends = [one for one in launch.events() if isinstance(one, WorkerExited)]
        assert [one.worker for one in ends if one.cause == "crashed"] == [first.worker, second.worker]
        assert launch.living() == []


def test_a_last_save_that_takes_longer_than_a_step_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.ENV, "vault.block.written:delay=6")
    with LaunchProcess(tmp_path, "--step-s", "3", until=20) as launch:
        assert launch.ended() == 0
        events = launch.events()
        assert [one.cause for one in events if isinstance(one, WorkerExited)] == ["done"]
        assert [one.step for one in events if isinstance(one, SaveDurable)] == [10, 20]


def test_ctrl_c_twice_ends_it_at_once(tmp_path: Path) -> None:
    # Nobody would come to the end of such a lane.
    with LaunchProcess(tmp_path, "--replicas", "2", lane_s=600.0) as launch:
        launch.status(lambda one: len(active(one)) == 2)
        launch.process.send_signal(signal.SIGINT)
        launch.status(lambda one: one.state == "stopping")
        launch.process.send_signal(signal.SIGINT)
        assert launch.ended(20.0) != 0
        assert launch.living() == []


def test_a_launch_that_dies_takes_everything_with_it(tmp_path: Path) -> None:
    with LaunchProcess(tmp_path, "--replicas", "2", "--parked", "1", lane_s=0.02, until=5000) as launch:
        launch.training(2, 5)
        agents = launch.agents()
        launch.process.kill()
        launch.ended()
        for pid in [*agents, *launch.living()]:
            await_end(pid)
        assert launch.living() == []
        shown = holdfast(tmp_path, "status")
        assert shown.returncode == 1
        assert "not live any more" in shown.stdout


def await_end(pid: int) -> None:
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], TIMEOUT_S)[0], f"process {pid} still runs"
    os.close(fd)


def test_a_script_that_always_fails_uses_up_what_is_allowed(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("raise SystemExit(78)\n")
    with LaunchProcess(tmp_path, script=script) as launch:
        assert launch.ended() == 78
        assert launch.living() == []


def test_a_script_that_cannot_be_imported_ends_the_run_soon_and_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import no_such_module_at_all\n")
    with LaunchProcess(tmp_path, "--replicas", "2", script=script) as launch:
        assert launch.ended(60.0) == 80
        assert launch.living() == []
        assert "before the run came to its first step" in launch.said()
        assert "No module named 'no_such_module_at_all'" in launch.said()


@full
def test_resize_while_it_runs(tmp_path: Path, undisturbed: str) -> None:
    with LaunchProcess(tmp_path, "--replicas", "1", "--max-replicas", "3", brake=3) as launch:
        launch.training(1, 3)
        assert holdfast(tmp_path, "resize", "demo", "3").returncode == 0
        launch.training(3, 5)
        assert holdfast(tmp_path, "resize", "demo", "2").returncode == 0
        launch.status(lambda one: one.replicas == 2 and len(active(one)) == 2)
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        assert launch.living() == []


@full
def test_resize_of_replicas_of_two_workers(tmp_path: Path, undisturbed: str) -> None:
    options = ("--replicas", "1", "--max-replicas", "2", "--workers-per-replica", "2")
    with LaunchProcess(tmp_path, *options, brake=3) as launch:
        launch.training(2, 3)
        assert holdfast(tmp_path, "resize", "demo", "2").returncode == 0
        grown = launch.training(4, 4)
        assert holdfast(tmp_path, "resize", "demo", "1").returncode == 0
        launch.status(lambda one: one.replicas == 1 and len(active(one)) == 2 and one.step > grown.step)
        launch.release()
        assert launch.ended() == 0
        assert launch.finals() == {undisturbed}
        ends = {one.worker: one.cause for one in launch.events() if isinstance(one, WorkerExited)}
        left = {seat.worker for seat in active(grown) if seat.replica == 1}
        assert {ends[worker] for worker in left} == {"preempted"}
