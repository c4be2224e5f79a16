"""Alarms: on time, again, cancelled, and holding nothing once they are of no use."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import pytest

from holdfast.transfer.timers import Timers

SOON_S = 20.0


class Thing:
    """Something that an alarm holds."""

    def act(self) -> None:
        pass


def test_an_alarm_goes_off_again_as_long_as_it_says() -> None:
    timers, times, done = Timers("test"), [], threading.Event()

    def act() -> float | None:
        times.append(1)
        if len(times) < 3:
            return 0.001
        done.set()
        return None

    timers.after(0.0, act)
    assert done.wait(SOON_S)
    timers.close()
    assert len(times) == 3


def test_alarms_go_off_in_the_order_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("holdfast.transfer.timers.time", clock)
    timers, seen, done = Timers("test"), [], threading.Event()
    gate = threading.Event()
    timers.after(0.0, lambda: gate.wait(SOON_S) and None)
    for delay in (0.03, 0.01, 0.02):
        timers.after(delay, lambda delay=delay: seen.append(delay))  # type: ignore[misc]
    timers.after(0.04, done.set)
    clock.monotonic = lambda: 1.0
    gate.set()
    assert done.wait(SOON_S)
    timers.close()
    assert seen == [0.01, 0.02, 0.03]


def test_a_cancelled_alarm_is_not_called_and_holds_nothing() -> None:
    timers, done, gate = Timers("test"), threading.Event(), threading.Event()
    called: list[int] = []
    timers.after(0.0, lambda: gate.wait(SOON_S) and None)
    alarm = timers.after(0.01, lambda: called.append(1))
    timers.cancel(alarm)
    timers.cancel(alarm)
    gate.set()
    timers.after(0.02, done.set)
    assert done.wait(SOON_S)
    things = [Thing() for _ in range(1000)]
    gone = [weakref.ref(thing) for thing in things]
    alarms = [timers.after(7 * 86400.0, thing.act) for thing in things]
    for alarm in alarms:
        timers.cancel(alarm)
    del things, alarms, alarm
    assert [ref for ref in gone if ref() is not None] == []
    assert len(timers._due) < 200, "what is due in a week is not kept for a week"
    timers.close()
    assert called == []


def test_an_alarm_that_fails_harms_no_other() -> None:
    timers, done = Timers("test"), threading.Event()
    timers.after(0.0, lambda: 1 // 0)
    timers.after(0.01, done.set)
    assert done.wait(SOON_S)
    timers.close()
