"""Every rule by which a worker counts as hung, and those by which it does not."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.supervise.board import Reading
from holdfast.supervise.messages import HUNG, STALLED, STOPPED
from holdfast.supervise.watch import Deadlines, Facts, Watch

BEGAN = 1000.0
DEADLINES = Deadlines()


def at(phase: str, **changes: object) -> Reading:
    """A worker that entered `phase` at BEGAN."""
    reading = Reading(
        step=5, phase=phase, phase_since=BEGAN, progressed_at=0.0, waiting="", median_step_s=0.1, num_steps=9
    )
    return reading._replace(**changes)  # type: ignore[arg-type]


def busy(now: float) -> Facts:
    """A process that uses all of one CPU."""
    return Facts("R", now - BEGAN)


def verdict_at(reading: Reading, after_s: float, deadlines: Deadlines = DEADLINES) -> str | None:
    """What a watch that looks four times a second says of a busy worker that stays as it is."""
    watch = Watch(deadlines, now=BEGAN)
    now = BEGAN
    while now < BEGAN + after_s:
        now += 0.25
        if (verdict := watch.look(reading, busy(now), now)) is not None:
            return verdict.cause
    return None


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        ("start", 300.0),
        ("import", 300.0),
        ("init", 300.0),
        ("compile", 1800.0),
        ("restore", 600.0),
        ("save", 600.0),
        ("eval", 1800.0),
        ("shutdown", 60.0),
        ("step", 10.0),
        ("a phase of the user's own", 1800.0),
    ],
)
def test_each_phase_has_its_deadline(phase: str, limit_s: float) -> None:
    assert verdict_at(at(phase), limit_s - 0.5) is None
    assert verdict_at(at(phase), limit_s + 0.5) == HUNG


def test_a_parked_process_may_wait_for_ever() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    assert watch.look(at("parked"), Facts("S", 1.0), BEGAN + 1e6) is None
    assert watch.look(at("parked"), Facts("S", 1.0), BEGAN + 2e6) is None


def test_a_parked_process_that_does_not_take_its_seat_hangs() -> None:
    """Its interpreter may have been locked for days, and nobody could see it."""
    watch = Watch(DEADLINES, now=BEGAN)
    watch.seated(BEGAN + 1e6)
    assert watch.look(at("parked"), Facts("S", 1.0), BEGAN + 1e6 + 9.0) is None
    found = watch.look(at("parked"), Facts("R", 9.0), BEGAN + 1e6 + 11.0)
    assert found is not None
    assert (found.cause, found.since) == (HUNG, BEGAN + 1e6)
    assert "seat" in found.detail
    assert watch.look(at("init", phase_since=BEGAN + 1e6 + 1), Facts("S", 1.0), BEGAN + 1e6 + 11.0) is None


@pytest.mark.parametrize(("median_s", "limit_s"), [(0.01, 10.0), (1.0, 10.0), (3.0, 30.0), (100.0, 1000.0)])
def test_a_step_may_take_ten_times_the_median_but_ten_seconds_at_least(
    median_s: float, limit_s: float
) -> None:
    assert DEADLINES.of(at("step", median_step_s=median_s)) == limit_s


def test_a_first_step_has_a_deadline_of_its_own() -> None:
    assert DEADLINES.of(at("step", num_steps=2, median_step_s=0.1)) == 60.0


def test_progress_moves_the_deadline_of_a_step() -> None:
    reading = at("step", progressed_at=BEGAN + 8.0)
    assert verdict_at(reading, 17.0) is None
    assert verdict_at(reading, 19.0) == HUNG


def test_deadlines_can_be_set() -> None:
    deadlines = Deadlines(phases={"eval": 2.0}, step_s=3.0, step_factor=5.0)
    assert verdict_at(at("eval"), 3.0, deadlines) == HUNG
    assert deadlines.of(at("step", median_step_s=1.0)) == 5.0


@pytest.mark.parametrize("wrong", [{"phases": {"stepp": 1.0}}, {"phases": {"eval": 0.0}}, {"step_s": -1.0}])
def test_deadlines_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Deadlines(**wrong)  # type: ignore[arg-type]


def test_who_waits_for_others_is_not_the_culprit() -> None:
    reading = at("step", waiting="exchange", waiting_since=BEGAN, pulsed_at=BEGAN)
    assert verdict_at(reading, 3000.0) is None


def test_a_wait_that_falls_silent_is_a_hang() -> None:
    reading = at("step", waiting="exchange", waiting_since=BEGAN, pulsed_at=BEGAN + 5.0)
    assert verdict_at(reading, 14.0) is None
    assert verdict_at(reading, 16.0) == HUNG


def test_the_deadline_of_a_step_begins_anew_when_a_wait_is_over() -> None:
    reading = at("step", waiting_since=BEGAN + 20.0)
    assert verdict_at(reading, 29.0) is None
    assert verdict_at(reading, 31.0) == HUNG


def test_who_steps_while_a_mate_saves_waits_for_it() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    step = at("step", num_steps=9, median_step_s=0.1)
    for second in range(500):
        assert watch.look(step, Facts("S", 0.0), BEGAN + second, ["step", "save"]) is None
    for second in range(500, 509):
        assert watch.look(step, Facts("S", 0.0), BEGAN + second, ["step", "step"]) is None
    verdict = watch.look(step, Facts("S", 0.0), BEGAN + 509.5, ["step", "step"])
    assert verdict is not None
    assert verdict.cause == "hung"
    assert verdict.since == BEGAN + 499


def test_mates_who_are_at_the_same_wait_for_nobody() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    for second in range(60):
        assert watch.look(at("init"), Facts("S", 0.0), BEGAN + second, ["init"]) is None
    verdict = watch.look(at("init"), Facts("S", 0.0), BEGAN + 61.0, ["init"])
    assert verdict is not None
    assert verdict.cause == "stalled"


@pytest.mark.parametrize("phase", ["start", "compile", "step", "parked"])
@pytest.mark.parametrize("waiting", ["", "barrier"])
def test_a_stopped_process_hangs_in_every_phase(phase: str, waiting: str) -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    reading = at(phase, waiting=waiting)
    assert watch.look(reading, Facts("T", 0.0), BEGAN + 0.1) is None
    assert watch.look(reading, Facts("T", 0.0), BEGAN + 1.0) is None
    verdict = watch.look(reading, Facts("T", 0.0), BEGAN + 1.2)
    assert verdict is not None
    assert (verdict.cause, verdict.since) == (STOPPED, BEGAN + 0.1)


def test_a_stop_that_is_over_is_forgotten() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    for second, state in enumerate("TSTSTS"):
        assert watch.look(at("init"), Facts(state, 0.0), BEGAN + second) is None


def test_one_that_uses_no_cpu_stalls() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    assert watch.look(at("init"), Facts("S", 7.0), BEGAN + 1.0) is None
    assert watch.look(at("init"), Facts("S", 7.05), BEGAN + 60.0) is None
    verdict = watch.look(at("init"), Facts("S", 7.05), BEGAN + 61.0)
    assert verdict is not None
    assert (verdict.cause, verdict.since) == (STALLED, BEGAN + 1.0)


def test_a_little_cpu_now_and_then_is_enough() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    for second in range(0, 250, 10):
        assert watch.look(at("init"), Facts("S", second / 100), BEGAN + second) is None


def test_who_waits_for_others_does_not_stall() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    waiting = at("init", waiting="join", waiting_since=BEGAN, pulsed_at=BEGAN)
    for second in range(0, 250, 10):
        assert watch.look(waiting, Facts("S", 0.0), BEGAN + second) is None
    # The time in the call is not held against it afterwards.
    assert watch.look(at("init"), Facts("S", 0.0), BEGAN + 295.0) is None


def test_who_waits_for_a_disk_has_the_time_of_its_phase() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    for second in range(0, 600, 5):
        assert watch.look(at("save"), Facts("S", 0.0), BEGAN + second) is None
    verdict = watch.look(at("save"), Facts("S", 0.0), BEGAN + 600.0)
    assert verdict is not None
    assert verdict.cause == HUNG
    # Nor is that time held against it afterwards.
    assert watch.look(at("step", phase_since=BEGAN + 601), Facts("S", 0.0), BEGAN + 605.0) is None


def test_one_that_does_steps_needs_no_cpu() -> None:
    """Its device does the work."""
    watch = Watch(DEADLINES, now=BEGAN)
    for second in range(0, 600, 20):
        now = BEGAN + second
        assert watch.look(at("step", progressed_at=now - 1.0), Facts("S", 1.0), now) is None


def test_a_step_that_always_takes_long_may_use_no_cpu_for_as_long() -> None:
    patient = Deadlines(stall_s=60.0)
    watch = Watch(patient, now=BEGAN)
    slow = at("step", progressed_at=BEGAN, median_step_s=90.0)
    assert watch.look(slow, Facts("S", 1.0), BEGAN) is None
    assert watch.look(slow, Facts("S", 1.0), BEGAN + 170.0) is None
    found = watch.look(slow, Facts("S", 1.0), BEGAN + 190.0)
    assert found is not None
    assert found.cause == STALLED


@pytest.mark.parametrize("phase", ["step", "parked", "init"])
@pytest.mark.parametrize("state", ["R", "S", "T"])
def test_time_in_which_nobody_could_look_is_held_against_nobody(phase: str, state: str) -> None:
    """The machine was paused; then each has the time that it had left, and no more."""
    allowed = (
        {"R": 10.0, "S": 10.0, "T": 1.0}[state]
        if phase != "init"
        else {"R": 300.0, "S": 60.0, "T": 1.0}[state]
    )
    watch = Watch(DEADLINES, now=BEGAN)
    watch.seated(BEGAN)

    def look(after_s: float) -> str | None:
        cpu_s = after_s if state == "R" else 0.0
        verdict = watch.look(at(phase), Facts(state, cpu_s), BEGAN + after_s)
        return None if verdict is None else verdict.cause

    assert look(0.0) is None
    assert look(allowed - 0.5) is None
    watch.unseen(3600.0)
    assert look(allowed + 3599.9) is None
    assert look(allowed + 3600.1) is not None


def test_one_that_came_on_in_the_meantime_has_all_its_time() -> None:
    watch = Watch(DEADLINES, now=BEGAN)
    watch.unseen(3600.0)
    assert watch.look(at("step"), busy(BEGAN), BEGAN + 3605.0) is None
    later = BEGAN + 3606.0
    assert watch.look(at("step", progressed_at=later), busy(later), later + 9.9) is None
    assert watch.look(at("step", progressed_at=later), busy(later), later + 10.1) is not None
