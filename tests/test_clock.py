"""Clocks and deadlines."""

from __future__ import annotations

import math

import pytest

from holdfast.clock import REAL, Deadline, ManualClock
from holdfast.errors import DeadlineError, UsageError


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(monotonic=5.0, wall=100.0)
    assert (clock.monotonic(), clock.wall()) == (5.0, 100.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)
    clock.sleep(1.0)
    assert (clock.monotonic(), clock.wall()) == (8.5, 103.5)


def test_manual_clock_cannot_go_back() -> None:
    with pytest.raises(UsageError, match="cannot go back"):
        ManualClock().advance(-1.0)


def test_deadline_counts_down_to_zero_and_no_further() -> None:
    clock = ManualClock()
    deadline = Deadline(3.0, clock)
    assert deadline.remaining() == 3.0
    clock.advance(2.0)
    assert deadline.remaining() == 1.0
    assert not deadline.expired()
    deadline.check("rank 3")
    clock.advance(5.0)
    assert deadline.remaining() == 0.0
    assert deadline.expired()


def test_expired_deadline_names_who_was_waited_for_and_how_long() -> None:
    clock = ManualClock(wall=0.0)
    deadline = Deadline(3.0, clock)
    clock.advance(4.25)
    with pytest.raises(DeadlineError) as caught:
        deadline.check("rank 3's vote", hint="look at rank 3's log")
    assert str(caught.value) == (
        "waited 4.2 s for rank 3's vote, since 00:00:00 UTC (timeout_s=3)\n\nhint: look at rank 3's log"
    )
    assert isinstance(caught.value, TimeoutError)


def test_zero_timeout_is_a_poll() -> None:
    assert Deadline(0.0, ManualClock()).expired()


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, -1.0])
def test_a_wait_without_an_end_is_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="every wait has a deadline"):
        Deadline(timeout_s)


def test_real_clock_moves() -> None:
    before = REAL.monotonic()
    REAL.sleep(0.001)
    assert REAL.monotonic() >= before + 0.001
    assert REAL.wall() > 1.6e9
