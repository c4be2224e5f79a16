"""Real workers, real deaths: whatever happens, the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import journal
from holdfast.supervise.messages import Leave, StopRun
from tests.supervise.run.stage import TRAINER, Drained, Finished, Stage, Worker

pytestmark = pytest.mark.process

UNTIL = 30
full = pytest.mark.full
LONG = ("--until", str(UNTIL), "--lane-s", "0.002", "--in-place")
SOON, LATE = 5, 20
"""Steps in which workers stay until the test has done what it is about."""


def held(*steps: int) -> tuple[str, ...]:
    return (*LONG, "--hold", *map(str, steps))


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


@pytest.mark.parametrize("replicas", [3, *(pytest.param(one, marks=full) for one in (1, 2, 4))])
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
    with Stage(tmp_path / "run", "--until", "5", replicas=2, lanes=1) as stage:
        workers = stage.start()
        stage.finish(*workers)
        assert stage.steps(workers[0]) == stage.steps(workers[1])


MOMENTS = [
    *(pytest.param(f"run.{one}", marks=full) for one in ("step:kill@10", "lane:kill@20", "added:kill@20")),
    *(pytest.param(f"reduce.{one}:kill@10", marks=full) for one in ("announced", "adding", "decided")),
    "reduce.published:kill@10",
    pytest.param("run.decided:kill@10", marks=full),  # as of a replica of two, below
]


@pytest.mark.parametrize("rules", MOMENTS)
def test_a_replica_is_killed_and_replaced(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    with Stage(tmp_path / "run", *held(LATE)) as stage:
        (replacement,) = stage.park("")
        first, victim, last = stage.start("", rules)
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(replacement, 1, attempt=1)
        stage.come_in(replacement)
        stage.release(LATE, size=3)
        check(stage, alone, first, last, replacement)
        assert min(stage.steps(replacement)) <= LATE + 1


@pytest.mark.parametrize(
    "rules",
    ["run.gathered:kill", *(pytest.param(f"run.{one}:kill", marks=full) for one in ("joined", "restored"))],
)
def test_one_is_killed_while_all_come_in(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    with Stage(tmp_path / "run", *held(LATE)) as stage:
        (replacement,) = stage.park("")
        victim, *others = stage.start(rules)
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(replacement, 0, attempt=1)
        stage.come_in(replacement)
        stage.release(LATE, size=3)
        check(stage, alone, *others, replacement)
        assert min(stage.steps(replacement)) <= LATE + 1


@pytest.mark.parametrize(
    "rules",
    [
        "run.received:kill",
        *(pytest.param(f"run.{one}:kill", marks=full) for one in ("receiving", "restored", "step")),
    ],
)
def test_a_newcomer_is_killed_while_it_comes_in(tmp_path: Path, alone: dict[int, str], rules: str) -> None:
    with Stage(tmp_path / "run", *held(SOON, LATE), replicas=2) as stage:
        newcomer, second = stage.park(rules, "")
        first, victim = stage.start("", "run.step:kill@3")
        assert stage.gone(victim) == -signal.SIGKILL
        stage.activate(newcomer, 1, attempt=1)
        stage.come_in(newcomer)
        stage.release(SOON, size=2)
        assert stage.gone(newcomer) == -signal.SIGKILL
        stage.activate(second, 1, attempt=2)
        stage.come_in(second)
        stage.release(LATE, size=2)
        check(stage, alone, first, second)
        assert min(stage.steps(second)) <= LATE + 1


def test_the_donor_is_killed_when_it_has_offered(tmp_path: Path, alone: dict[int, str]) -> None:
    for attempt in range(4):
        with Stage(tmp_path / f"run-{attempt}", *held(LATE)) as stage:
            # The second of the two: the last live replica is the donor, unless it is a step behind just then.
            (newcomer,) = stage.park("")
            first, victim, donor = stage.start("", "run.step:kill@3", "run.offered:kill")
            assert stage.gone(victim) == -signal.SIGKILL
            stage.activate(newcomer, 1, attempt=1)
            stage.come_in(newcomer)
            stage.release(LATE)
            if stage.gone(donor) == -signal.SIGKILL:
                check(stage, alone, first, newcomer)
                return
            check(stage, alone, first, newcomer, donor)
    raise AssertionError("it was a step behind each time")


def test_two_are_killed_in_one_step_and_a_third_while_it_regroups(
    tmp_path: Path, alone: dict[int, str]
) -> None:
    with Stage(tmp_path / "run", *LONG, replicas=4) as stage:
        workers = stage.start("", "reduce.announced:kill@8", "reduce.adding:kill@8", "run.interrupted:kill")
        for victim in workers[1:]:
            assert stage.gone(victim) == -signal.SIGKILL
        check(stage, alone, workers[0])


def test_a_worker_that_leaves_takes_nothing_with_it(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(SOON)) as stage:
        workers = stage.start()
        stage.held(SOON, *workers)
        stage.order(workers[1], Leave("preempted", 30.0))
        stage.release(SOON)
        assert stage.gone(workers[1]) == 0
        assert workers[1].has(Drained)
        assert max(stage.steps(workers[1])) == SOON
        check(stage, alone, workers[0], workers[2])


def test_a_run_stops_where_all_agree_and_goes_on_from_there(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(SOON), replicas=2) as stage:
        workers = stage.start()
        stage.held(SOON, *workers)
        stage.order(workers[1], StopRun("maintenance", 30.0))
        stage.release(SOON)
        assert [stage.gone(worker) for worker in workers] == [0, 0]
        reached = {max(stage.steps(worker)) for worker in workers}
        assert len(reached) == 1
        assert max(reached) < UNTIL - 1
        again = stage.start()
        check(stage, alone, *again)
        assert min(stage.steps(again[0])) == max(reached) + 1


def test_the_coordinator_is_killed_and_comes_back(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(SOON, LATE)) as stage:
        workers = stage.start()
        stage.held(SOON, *workers)
        stage.coordinator.kill()
        stage.release(SOON)
        stage.held(LATE, *workers)  # without a coordinator
        stage.coordinator.start()
        stage.release(LATE)
        check(stage, alone, *workers)


@full  # in every run of the tests: the same under a launch, in tests/recovery/test_pairs.py
def test_a_replica_and_the_coordinator_are_killed(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(SOON, LATE)) as stage:
        (newcomer,) = stage.park("")
        first, victim, last = stage.start("", "reduce.announced:kill@10")
        stage.held(SOON, first, victim, last)
        stage.coordinator.kill()
        stage.release(SOON)
        assert stage.gone(victim) == -signal.SIGKILL
        stage.coordinator.start()
        stage.activate(newcomer, 1, attempt=1)
        stage.come_in(newcomer)
        stage.release(LATE)
        check(stage, alone, first, last, newcomer)


def test_all_are_killed_and_the_run_goes_on_from_the_disk(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(12), "--save-every", "5", replicas=2) as stage:
        workers = stage.start()
        stage.held(12, *workers)
        stage.until(lambda: _durable(stage) == 10, "step 10 on disk")
        for worker in workers:
            worker.kill()
        assert [stage.gone(worker) for worker in workers] == [-signal.SIGKILL] * 2
        stage.release(12)
        again = stage.start()
        check(stage, alone, *again)
        assert min(stage.steps(again[0])) == 10


def _durable(stage: Stage) -> int:
    """The newest step that is on disk."""
    events = [record.event for record in journal.read(stage.folder / "journal.jsonl")]
    return max((one.step for one in events if isinstance(one, journal.SaveDurable)), default=-1)


def test_all_are_killed_and_the_run_goes_on_from_the_vault(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(12), "--save-every", "5", replicas=2, vault=True) as stage:
        workers = stage.start()
        stage.held(12, *workers)
        # Also where it is as new on the disk.
        stage.until(lambda: _durable(stage) == 10, "the vault to have finished")
        for worker in workers:
            worker.kill()
        assert [stage.gone(worker) for worker in workers] == [-signal.SIGKILL] * 2
        stage.release(12)
        again = stage.start()
        check(stage, alone, *again)
        assert min(stage.steps(again[0])) == 10
        events = [record.event for record in journal.read(stage.folder / "journal.jsonl")]
    assert [one.source for one in events if isinstance(one, journal.RunRestored)] == ["init", "vault"]


@full  # in every run of the tests: one that is stopped meanwhile, below
def test_a_worker_that_was_declared_dead_is_started_anew(tmp_path: Path, alone: dict[int, str]) -> None:
    with Stage(tmp_path / "run", *held(SOON), replicas=2) as stage:
        workers = stage.start()
        stage.held(SOON, *workers)
        stage.client.bury(workers[1].incarnation, "by mistake")
        stage.release(SOON)
        assert stage.gone(workers[1]) == 75
        check(stage, alone, workers[0])


def test_one_that_was_stopped_and_replaced_comes_back_to_nothing(
    tmp_path: Path, alone: dict[int, str]
) -> None:
    with Stage(tmp_path / "run", *held(SOON, LATE), replicas=2) as stage:
        (newcomer,) = stage.park("")
        first, stopped = stage.start()
        stage.held(SOON, first, stopped)
        stopped.kill(signal.SIGSTOP)
        stage.client.bury(stopped.incarnation, "stopped")
        stage.activate(newcomer, 1, attempt=1)
        stage.come_in(newcomer)
        stage.release(SOON)
        stage.held(LATE, first, newcomer)
        stopped.kill(signal.SIGCONT)
        assert stage.gone(stopped) == 75
        stage.release(LATE)
        check(stage, alone, first, newcomer)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param("", marks=full),
        "run.decided:kill@8",
        pytest.param("run.lane:kill@20", marks=full),
        pytest.param("reduce.adding:kill@8", marks=full),
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
    with Stage(tmp_path / "run", *held(LATE), replicas=2, workers=2) as stage:
        parked = stage.park("", "")
        workers = stage.start("", "", "", "run.lane:kill@20")
        assert stage.gone(workers[3]) == -signal.SIGKILL
        workers[2].kill()
        for index, worker in enumerate(parked):
            stage.activate(worker, 1, index, attempt=1)
        stage.come_in(*parked)
        stage.release(LATE, size=4)
        check(stage, alone, *workers[:2], *parked)
        assert min(stage.steps(parked[0])) <= LATE + 1


@pytest.mark.parametrize("begun_with", [1, pytest.param(2, marks=full)])
def test_a_replica_of_two_workers_leaves_together(
    tmp_path: Path, alone: dict[int, str], begun_with: int
) -> None:
    """Also in a run that began with one replica and has grown since: only those who are told to leave do."""
    with Stage(tmp_path / "run", *held(SOON), replicas=2, workers=2) as stage:
        workers = stage.start(begun_with=begun_with)
        stage.held(SOON, *workers)
        stage.order(workers[2], Leave("preempted", 30.0))
        stage.release(SOON)
        assert [stage.gone(worker) for worker in workers[2:]] == [0, 0]
        assert all(worker.has(Drained) and not worker.has(Finished) for worker in workers[2:])
        check(stage, alone, *workers[:2])


def test_one_world_that_is_told_to_leave_leaves_and_goes_on_elsewhere(
    tmp_path: Path, alone: dict[int, str]
) -> None:
    with Stage(tmp_path / "run", *held(SOON), replicas=1, workers=2) as stage:
        workers = stage.start()
        stage.held(SOON, *workers)
        stage.order(workers[1], Leave("preempted", 30.0))
        stage.release(SOON)
        assert [stage.gone(worker) for worker in workers] == [0, 0]
        # The one that was told, and the one that was not yet: neither has finished.
        assert all(worker.has(Drained) and not worker.has(Finished) for worker in workers)
        reached = {max(stage.steps(worker)) for worker in workers}
        again = stage.park("", "")
        for index, worker in enumerate(again):
            stage.activate(worker, 0, index, attempt=1)
        check(stage, alone, *again)
        assert {min(stage.steps(worker)) - 1 for worker in again} == reached


@full  # in every run of the tests: a world of two, in tests/recovery/test_worlds.py
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
