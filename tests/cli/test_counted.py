"""One of a thing is said to be one: no `1 seats`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.live import Display
from holdfast.supervise.status import STATUS_FILE, NodeStatus, RunStatus
from tests.cli.saved import holdfast


def test_one_seat_and_one_blame(tmp_path: Path) -> None:
    nodes = (NodeStatus(0, "up", 1, 1, blames=1), NodeStatus(1, "up", 2, 2, blames=2))
    found = RunStatus(
        run="demo", state="running", wall=time.time(), pid=1, replicas=1, workers_per_replica=1,
        min_replicas=1, step=1, seats=(), parked=(), nodes=nodes,
    )  # fmt: skip
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / STATUS_FILE).write_bytes(msgspec.json.encode(found))
    shown = holdfast("status", "demo", "--folder", tmp_path).stdout
    assert "node 0: up, 1 seat, blamed 1 time\n" in shown
    assert "node 1: up, 2 seats, blamed 2 times\n" in shown


def test_one_line_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.live._MOST_LINES", 1)
    taken, go, seen = threading.Event(), threading.Event(), list[str]()

    class Slow:
        def say(self, line: str) -> None:
            seen.append(line)
            taken.set()
            assert go.wait(30)

        note = say

        def show(self, status: Any) -> None: ...

    with Display(Slow()) as display:
        display.say("first")
        assert taken.wait(30)
        display.say("second")
        display.say("lost")
        monkeypatch.setattr("holdfast.cli.live._MOST_LINES", 2)
        display.say("last")
        go.set()
    assert seen == ["first", "second", "(1 line is missing here)", "last"]
