"""Real workers, real deaths: whatever happens, the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import journal
from holdfast.supervise.messages import Leave, StopRun
from tests.supervise.run.stage import TRAINER, Drained, Stage, Worker

pytestmark = pytest.mark.process

UNTIL = 30
LONG = ("--until", str(UNTIL), "--lane-s", "0.002", "--in-place")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The state after each step of an undisturbed run of one, which needs no launch."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(TRAINER), str(folder), "--until", str(UNTIL)]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    rows = [line.split() for line in next(folder.glob("steps-*")).read_text().splitlines()]
    assert len(rows) == UNTIL
    assert (folder / "runs" / "run" / "ckpt").is_dir()
    return {int(row[0]): row[3] for row in rows}


def check(stage: Stage, alone: dict[int, str], *done: Worker) -> None:
    """The workers that went through have the right end, and nobody ever had a wrong state in between."""
    assert stage.finish(*done) == alone[UNTIL - 1]
    for worker in stage.workers:
        for step, digest in stage.steps(worker).items():
            assert digest == alone[step], f"step {step} of {worker.seat}"


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_any_number_of_replicas_gives_the_same_bits(
    tmp_path: Path, alone: dict[int, str], replicas: int
) -> None:
    with Stage(tmp_path / "run", "--until", str(UNTIL), replicas=replicas) as stage:
        check(stage, alone, *stage.start())
        records = [record.event for record in journal.read(stage.folder / "journal.jsonl")]
    steps = [event.step for event in records if isinstance(event, journal.StepDone)]
    assert steps == list(range(UNTIL))
    lanes = sorted(
        (event.step, lane)
        for event in records
        if isinstance(event, journal.LaneDigests)
        for lane in event.lanes
    )
    assert lanes == [(step, lane) for step in range(UNTIL) for lane in range(8)]


def test_more_replicas_than_lanes(tmp_path: Path) -> None:
    with Stage(tmp_path / "run", "--until", "5", replicas=3, lanes=2) as stage:
        workers = stage.start()
        stage.finish(*workers)
        assert stage.steps(workers[0]) == stage.steps(workers[2])


MOMENTS = [
    "run.step:kill@10",
    pytest.param("run.lane:kill@20", marks=pytest.mark.full),
    pytest.param("run.added:kill@20", marks=pytest.mark.full),
    pytest.param("reduce.announced:kill@10", marks=pytest.mark.full),
    "reduce.adding:kill@10",
    "reduce.published:kill@10",
    pytest.param("reduce.decided:kill@10", marks=pytest.mark.full),
    "run.decided:kill@10",
]


@pytest.mark.parametrize("rules", MOMENTS)
def test_a_replica_is_killed_and_replaced(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    with Stage(tmp_path / "run", *LONG) as stage:
        (replacement,) = stage.park("")
        first, victim, last = stage.start("", rules)
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(replacement, 1, attempt=1)
        check(stage, alone, first, last, replacement)


@pytest.mark.parametrize("rules", ["run.joined:kill", "run.gathered:kill", "run.restored:kill"])
def test_one_is_killed_while_all_come_in(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    with Stage(tmp_path / "run", *LONG) as stage:
        (replacement,) = stage.park("")
        victim, *others = stage.start(rules)
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(replacement, 0, attempt=1)
        check(stage, alone, *others, replacement)


@pytest.mark.parametrize(
    "rules", ["run.receiving:kill", "run.received:kill", "run.restored:kill", "run.step:kill"]
)
def test_a_newcomer_is_killed_while_it_comes_in(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=2) as stage:
        newcomer, second = stage.park(rules, "")
        first, victim = stage.start("", "run.step:kill@3")
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(newcomer, 1, attempt=1)
        assert stage.gone(newcomer) == -signal.SIGKILL
        stage.activate(second, 1, attempt=2)
        check(stage, alone, first, second)


def test_the_donor_is_killed_when_it_has_offered(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG) as stage:
        # The second of the two: the last live replica is the donor.
        (newcomer,) = stage.park("")
        first, victim, donor = stage.start("", "run.step:kill@3", "run.offered:kill")
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(newcomer, 1, attempt=1)
        assert stage.gone(donor) == -signal.SIGKILL
        check(stage, alone, first, newcomer)


def test_two_are_killed_in_one_step_and_a_third_while_it_regroups(
    tmp_path: Path, alone: dict[int, str]
) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=4) as stage:
        workers = stage.start("", "reduce.announced:kill@8", "reduce.adding:kill@8", "run.interrupted:kill")
        for victim in workers[1:]:
            assert stage.gone(victim) == -signal.SIGKILL
        check(stage, alone, workers[0])


def test_a_worker_that_leaves_takes_nothing_with_it(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG) as stage:
        workers = stage.start()
        stage.until(lambda: workers[1].step >= 5, "step 5")
        stage.order(workers[1], Leave("preempted", 30.0))
        assert stage.gone(workers[1]) == 0
        assert workers[1].has(Drained)
        check(stage, alone, workers[0], workers[2])


def test_a_run_stops_where_all_agree_and_goes_on_from_there(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=2) as stage:
        workers = stage.start()
        stage.until(lambda: workers[1].step >= 5, "step 5")
        stage.order(workers[1], StopRun("maintenance", 30.0))
        assert [stage.gone(worker) for worker in workers] == [0, 0]
        reached = {max(stage.steps(worker)) for worker in workers}
        assert len(reached) == 1
        assert max(reached) < UNTIL - 1
        again = stage.start()
        check(stage, alone, *again)
        assert min(stage.steps(again[0])) == max(reached) + 1


def test_the_coordinator_is_killed_and_comes_back(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG) as stage:
        workers = stage.start()
        stage.until(lambda: workers[0].step >= 5, "step 5")
        stage.coordinator.kill()
        before = workers[0].step
        stage.until(lambda: workers[0].step >= before + 5, "steps without a coordinator")
        stage.coordinator.start()
        check(stage, alone, *workers)


def test_a_replica_and_the_coordinator_are_killed(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG) as stage:
        (newcomer,) = stage.park("")
        first, victim, last = stage.start("", "reduce.announced:kill@10")
        stage.until(lambda: victim.step >= 3, "step 3")
        stage.coordinator.kill()
        assert stage.gone(victim) == -signal.SIGKILL
        stage.coordinator.start()
        stage.activate(newcomer, 1, attempt=1)
        check(stage, alone, first, last, newcomer)


def test_all_are_killed_and_the_run_goes_on_from_the_disk(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG, "--save-every", "5", replicas=2) as stage:
        workers = stage.start()
        stage.until(lambda: workers[0].step >= 12, "step 12")
        for worker in workers:
            worker.kill()
        assert [stage.gone(worker) for worker in workers] == [-signal.SIGKILL] * 2
        again = stage.start()
        check(stage, alone, *again)
        assert min(stage.steps(again[0])) >= 10


def _durable(stage: Stage) -> int:
    """The newest step that is on disk."""
    events = [record.event for record in journal.read(stage.folder / "journal.jsonl")]
    return max((one.step for one in events if isinstance(one, journal.SaveDurable)), default=-1)


def test_all_are_killed_and_the_run_goes_on_from_the_vault(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG, "--save-every", "5", replicas=2, vault=True) as stage:
        workers = stage.start()
        stage.until(lambda: workers[0].step >= 12, "step 12")
        for worker in workers:
            worker.kill()
        assert [stage.gone(worker) for worker in workers] == [-signal.SIGKILL] * 2
        stage.until(lambda: _durable(stage) >= 10, "the vault to have finished")
        for manifest in (stage.folder / "ckpt").glob("step-*/manifest.json"):
            manifest.unlink()
        again = stage.start()
        check(stage, alone, *again)
        assert min(stage.steps(again[0])) >= 10
        events = [record.event for record in journal.read(stage.folder / "journal.jsonl")]
    assert [one.source for one in events if isinstance(one, journal.RunRestored)] == ["init", "vault"]


def test_a_worker_that_was_declared_dead_is_started_anew(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=2) as stage:
        workers = stage.start()
        stage.until(lambda: workers[1].step >= 3, "step 3")
        stage.client.bury(workers[1].incarnation, "by mistake")
        assert stage.gone(workers[1]) == 75
        check(stage, alone, workers[0])


def test_one_that_was_stopped_and_replaced_comes_back_to_nothing(
    tmp_path: Path, alone: dict[int, str]
) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=2) as stage:
        (newcomer,) = stage.park("")
        first, stopped = stage.start()
        stage.until(lambda: stopped.step >= 3, "step 3")
        stopped.kill(signal.SIGSTOP)
        stage.client.bury(stopped.incarnation, "stopped")
        stage.activate(newcomer, 1, attempt=1)
        stage.until(lambda: newcomer.step >= 5, "the newcomer")
        stopped.kill(signal.SIGCONT)
        check(stage, alone, first, newcomer)
        assert stage.gone(stopped) == 75


@pytest.mark.parametrize(
    "rules",
    [
        "",
        "run.decided:kill@8",
        pytest.param("run.lane:kill@20", marks=pytest.mark.full),
        pytest.param("reduce.adding:kill@8", marks=pytest.mark.full),
    ],
)
def test_replicas_of_two_workers(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    """Each of the two reduces the same arrays here; what matters is that they stay together."""
    with Stage(tmp_path / "run", *LONG, replicas=2, workers=2) as stage:
        workers = stage.start("", "", rules)
        if not rules:
            check(stage, alone, *workers)
            return
        assert stage.gone(workers[2]) == -signal.SIGKILL
        workers[3].kill()
        check(stage, alone, *workers[:2])


def test_a_replica_of_two_workers_is_replaced(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=2, workers=2) as stage:
        parked = stage.park("", "")
        workers = stage.start("", "", "", "run.lane:kill@20")
        assert stage.gone(workers[3]) == -signal.SIGKILL
        workers[2].kill()
        for index, worker in enumerate(parked):
            stage.activate(worker, 1, index, attempt=1)
        check(stage, alone, *workers[:2], *parked)
        assert min(stage.steps(parked[0])) < UNTIL - 1


def test_a_replica_of_two_workers_leaves_together(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=2, workers=2) as stage:
        workers = stage.start()
        stage.until(lambda: workers[2].step >= 3, "step 3")
        stage.order(workers[2], Leave("preempted", 30.0))
        assert [stage.gone(worker) for worker in workers[2:]] == [0, 0]
        assert all(worker.has(Drained) for worker in workers[2:])
        check(stage, alone, *workers[:2])


def test_one_world_needs_no_lanes(tmp_path: Path) -> None:
    with Stage(tmp_path / "run", "--until", "12", "--no-lanes", "--save-every", "5", replicas=1) as stage:
        (worker,) = stage.start("run.step:kill@8")
        assert stage.gone(worker) == -signal.SIGKILL
        (again,) = stage.start()
        digest = stage.finish(again)
        assert min(stage.steps(again)) == 5
    with Stage(tmp_path / "other", "--until", "12", "--no-lanes", replicas=1) as stage:
        assert stage.finish(*stage.start()) == digest


def test_a_wrong_use_is_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import holdfast, numpy as np\n"
        "with holdfast.join() as run:\n"
        "    state = run.restore(lambda: {'w': np.zeros(3)})\n"
        "    for step in run.steps(until=3):\n"
        "        step.total()\n"
    )
    with Stage(tmp_path / "run", replicas=1, script=script) as stage:
        (worker,) = stage.start()
        assert stage.gone(worker) == 78
        assert "the sum is not complete" in worker.output()
        assert "hint: go through step.lanes to its end" in worker.output()


def test_stacks_are_dumped_on_a_signal(tmp_path: Path) -> None:
    with Stage(tmp_path / "run", "--until", "100000", "--lane-s", "0.01", replicas=1) as stage:
        (worker,) = stage.start()
        stage.until(lambda: worker.step >= 2, "step 2")
        worker.kill(signal.SIGUSR2)
        path = stage.folder / "crash" / f"{worker.pid}.stacks"
        stage.until(lambda: "trainer.py" in path.read_text(), "the stacks")
        stage.order(worker, StopRun("enough", 30.0))
        assert stage.gone(worker) == 0
