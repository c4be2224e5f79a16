"""Trackers: named with their mistakes, and, once a run goes on, unable to hold it up or to end it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.train import trackers
from holdfast.train.trackers import Post, Tracker, Trackers, named, tracker_problems
from tests.train.runs import train
from tests.train.tiny import tiny

NUMBERS = {"loss": 1.0}
QUICK = (0.001, 0.002)


class Board:
    """A dashboard that is down while `down` is set."""

    def __init__(self) -> None:
        self.down = threading.Event()
        self.steps: list[int] = []
        self.closed = 0
        self.tries = 0
        self.tried = threading.Semaphore(0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert values == NUMBERS or "loss" in values
        self.tries += 1
        self.tried.release()
        if self.down.is_set():
            raise ConnectionError("nobody answers")
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def dashboards(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], str]:
    """Makes a module whose function `make` is the one given; its name as a setting."""

    def offered(make: Callable[[], Any]) -> str:
        module = ModuleType("dashboards")
        setattr(module, "make", make)  # noqa: B010 - a module has no such attribute for the type checker
        monkeypatch.setitem(sys.modules, "dashboards", module)
        return "dashboards:make"

    return offered


def broken() -> Tracker:
    raise KeyError("API_KEY")


def unreachable() -> Tracker:
    raise ConnectionError("nobody answers")


def test_a_mistake_is_told_when_a_run_begins(dashboards: Callable[[Callable[[], Any]], str]) -> None:
    name = dashboards(broken)
    assert tracker_problems([name]) == []
    with pytest.raises(UsageError, match="'dashboards:make' failed: KeyError: 'API_KEY'"):
        named([name], refuse=True)
    with pytest.raises(UsageError, match="gave a int"):
        named([dashboards(lambda: 3)], refuse=True)
    with pytest.raises(UsageError, match="did you mean json:loads"):
        named(["json:load_s"], refuse=True)


def test_one_that_cannot_be_reached_is_no_mistake(
    dashboards: Callable[[Callable[[], Any]], str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = named([dashboards(unreachable)], refuse=True)
    assert "tried again now and then; training goes on" in caplog.text
    found.close()


def test_a_run_that_goes_on_makes_nothing_before_there_is_something_to_tell() -> None:
    found = named(["json:dumps", "no_such_module:make"])
    assert not [one.name for one in threading.enumerate() if one.name.startswith("tracker ")]
    found.close()


def test_what_was_missed_comes_after(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    made: Iterator[Callable[[], Tracker]] = iter([unreachable, lambda: board])

    def make() -> Tracker:
        tracker = next(made)()
        board.down.set()
        return tracker

    post = Post("board", make, pauses_s=QUICK)
    found = Trackers([post])
    for step in range(5):
        found.log(step, NUMBERS)
    for _ in range(3):  # each is another failure
        assert board.tried.acquire(timeout=10.0)
    assert board.steps == []
    board.down.clear()
    with caplog.at_level(logging.WARNING):
        found.close()
    assert board.steps == [0, 1, 2, 3, 4]
    assert board.closed == 1
    assert caplog.text.count("is back after") == 1


def test_one_that_fails_while_it_ends_is_tried_once_more() -> None:
    class Returning(Board):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if not self.tries:
                post.end()  # while the first try is under way
                self.tries += 1
                raise ConnectionError("nobody answers")
            super().log(step, values)

    board = Returning()
    post = Post("board", lambda: board, pauses_s=(60.0, 60.0))
    post.put(0, NUMBERS)
    post.wait(10.0)
    assert (board.steps, board.closed) == ([0], 1)


def test_the_oldest_go_where_it_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    board.down.set()
    post = Post("board", lambda: board, most=3, pauses_s=(60.0, 60.0))
    found = Trackers([post])
    found.log(0, NUMBERS)
    assert board.tried.acquire(timeout=10.0)
    for step in range(1, 10):
        found.log(step, NUMBERS)
    with caplog.at_level(logging.WARNING):
        found.close()
    assert board.tries == 2  # one last try
    assert "did not get the metrics of 10 steps" in caplog.text


def test_one_that_hangs_holds_up_neither_a_step_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_LAST_S", 0.05)
    release = threading.Event()

    class Hanging(Board):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(60.0)

    other = Board()
    post = Post("other", lambda: other)
    found = Trackers([Post("hanging", Hanging), post])
    for step in range(3):
        found.log(step, NUMBERS)
    with caplog.at_level(logging.WARNING):
        found.close()
    post.wait(10.0)
    assert "the tracker hanging has not ended, and is left behind" in caplog.text
    assert other.steps == [0, 1, 2]
    release.set()


def test_one_that_exits_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def leaves() -> Tracker:
        raise SystemExit(3)

    found = Trackers([Post("leaving", leaves, pauses_s=QUICK)])
    found.log(0, NUMBERS)
    with caplog.at_level(logging.WARNING):
        found.close()
    assert "it exits: 3" in caplog.text


@pytest.mark.process
def test_a_run_under_way_goes_on_without_its_dashboard(
    tmp_path: Path, dashboards: Callable[[Callable[[], Any]], str], caplog: pytest.LogCaptureFixture
) -> None:
    board = Board()
    config = tiny(f"log.trackers={dashboards(lambda: board)}", "rate.decay=64")
    first = train(config.override(["samples=16"]), tmp_path)
    assert (first.steps, board.steps, board.closed) == (2, [0, 1], 1)
    # Whatever is wrong with it now: the next start, as that of a worker which takes another's place, goes on.
    for make, until in ((broken, 32), (unreachable, 64)):
        dashboards(make)
        with caplog.at_level(logging.WARNING):
            outcome = train(config.override([f"samples={until}"]), tmp_path)
        assert outcome.samples == until
        assert "training goes on" in caplog.text
        assert "did not get the metrics of" in caplog.text
        caplog.clear()
    fresh = tiny(f"log.trackers={dashboards(broken)}")
    for _ in range(2):  # a start that failed is none
        with pytest.raises(UsageError, match="API_KEY"):
            train(fresh, tmp_path, name="fresh")
