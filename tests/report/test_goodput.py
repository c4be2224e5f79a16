"""The account of a run, from journals written by hand."""

from __future__ import annotations

import pytest

from holdfast.journal import Event, Record, RunEnded, RunStarted, StepDone, WorkerLost
from holdfast.report import goodput


def record(t: float, event: Event) -> Record:
    return Record(t, t, 1, "test", event)


def step(t: float, number: int, replicas: int = 3, seconds: float = 1.0) -> Record:
    return record(t, StepDone(number, seconds, replicas, 8))


def lost(t: float, at_step: int) -> Record:
    return record(t, WorkerLost(4, 1, 0, 0, "crashed", -9, at_step, "step"))


def test_an_undisturbed_run_is_all_good() -> None:
    found = goodput(step(100.0 + n, n) for n in range(11))
    assert (found.steps, found.actual_s, found.undisturbed_s, found.ratio) == (11, 10.0, 10.0, 1.0)
    assert found.recoveries == ()


def test_time_without_steps_is_lost() -> None:
    times = [0.0, 1.0, 2.0, 8.0, 9.0]
    found = goodput(step(t, n, seconds=1.0) for n, t in enumerate(times))
    assert found.ratio == 4.0 / 9.0


def test_the_time_between_two_launches_is_nobodys_loss() -> None:
    begun, stopped = RunStarted(3, 1, 1), RunEnded(75, "stopped")
    found = goodput(
        [
            record(0.0, begun), step(1.0, 0), step(2.0, 1), record(2.5, stopped),
            record(500.0, begun), step(500.5, 2), step(501.5, 3), record(502.0, stopped),
        ]
    )  # fmt: skip
    assert found.actual_s == pytest.approx(3.0)
    assert found.ratio == 1.0
    # What killed the launch itself is a loss: nobody said that the run was over.
    killed = goodput([step(1.0, 0), step(2.0, 1), record(500.0, begun), step(501.0, 2)])
    assert killed.actual_s == 500.0
    # Before the first step, and after the last, nothing is taken off.
    early = [record(0.0, begun), record(1.0, stopped), record(9.0, begun), step(10.0, 0), step(11.0, 1)]
    late = [record(11.5, stopped), record(99.0, begun)]
    assert goodput([*early, *late]).actual_s == 1.0


def test_a_step_that_was_done_twice_counts_once() -> None:
    found = goodput([step(0.0, 0), step(1.0, 1), step(2.0, 2), step(5.0, 2), step(6.0, 3)])
    assert (found.steps, found.undisturbed_s) == (4, 3.0)


def test_a_loss_is_timed_to_the_next_step_and_to_the_full_size() -> None:
    found = goodput(
        [step(0.0, 0), step(1.0, 1), lost(1.2, 2), step(2.5, 2, replicas=2), step(4.0, 3, replicas=3)]
    )
    (one,) = found.recoveries
    assert one.step == 2
    assert "crashed" in one.what
    assert one.next_step_s == pytest.approx(1.3)
    assert one.full_size_s == pytest.approx(2.8)


def test_a_loss_before_the_full_size_is_back_has_no_time_for_it() -> None:
    short = [step(1.0, 1, replicas=2), step(2.0, 2, replicas=2)]
    found = goodput([step(0.0, 0), lost(0.5, 1), lost(1.5, 2), step(3.0, 3), *short])
    assert [one.full_size_s for one in found.recoveries] == [None, 1.5]


def test_the_end_of_a_run_is_no_recovery() -> None:
    found = goodput([step(0.0, 0), lost(0.5, 1)])
    assert [(one.next_step_s, one.full_size_s) for one in found.recoveries] == [(None, None)]


def test_an_empty_journal() -> None:
    found = goodput([])
    assert (found.steps, found.ratio, found.recoveries) == (0, None, ())
