"""`holdfast status` and `holdfast resize` say clearly how a run stands, and what there is not."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.launch import _doubts
from holdfast.cli.live import Display, Goodput, Remarks, view
from holdfast.launch import LaunchSettings
from holdfast.launch.launcher import WISH, taken_wish
from holdfast.supervise.run_lock import RunLock
from holdfast.supervise.status import (
    STATUS_FILE,
    BudgetStatus,
    NodeStatus,
    ParkedStatus,
    RunStatus,
    Saying,
    SeatStatus,
)


def status(**changes: Any) -> RunStatus:
    base: dict[str, Any] = {
        "run": "demo",
        "state": "running",
        "wall": time.time() - 5,
        "pid": os.getpid(),
        "replicas": 2,
        "workers_per_replica": 1,
        "min_replicas": 1,
        "step": 41,
        "seats": (
            SeatStatus(0, 0, 1, "active", 1, 0, 4242, 0, 41, "step", 0.125),
            SeatStatus(1, 0, 2, "vacant", why="a backoff of 3 s"),
        ),
        "parked": (ParkedStatus(3, 0, "ready"),),
        "nodes": (NodeStatus(0, "up", 2, 1, blames=2, lemon=True),),
        "budgets": (
            BudgetStatus("replica 1", "crashed", 2, 10),
            BudgetStatus("the vault of node 0", "part lost", 3, 20),
        ),
        "wire_dtype": "bfloat16",
        "failures": (Saying(3.0, "worker 2 crashed"),),
        "decisions": (Saying(2.5, "replica 1 gets a parked process"),),
    }
    return RunStatus(**{**base, **changes})


def write(tmp_path: Path, found: RunStatus, run: str = "demo") -> Path:
    folder = tmp_path / "runs" / run
    folder.mkdir(parents=True)
    (folder / STATUS_FILE).write_bytes(msgspec.json.encode(found))
    return folder


def invoke(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    result = click.testing.CliRunner().invoke(main, [*arguments, "--folder", str(tmp_path / "runs")])
    return result.exit_code, result.output


def test_a_live_run_is_shown_with_all_that_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = status()
    monkeypatch.setattr("holdfast.cli.status.time", SimpleNamespace(time=lambda: found.wall + 5.0))
    with RunLock(write(tmp_path, found)):
        code, text = invoke(tmp_path, "status")
    assert code == 0
    for words in (
        "demo: running, step 41 (live; it last changed 5 s ago)",
        "8 s ago  worker 2 crashed",
        "4242",
        "125 ms",
        "a backoff of 3 s",
        "parked: worker 3 on node 0 (ready)",
        "node 0: up, lemon, 2 seats, blamed 2 times",
        "budget of replica 1, crashed: 2 used of 10 allowed",
        "budget of the vault of node 0, part lost: 3 used of 20 allowed",
        "sums: floats are rounded to bfloat16",
        "worker 2 crashed",
        "replica 1 gets a parked process",
    ):
        assert words in text


def test_json_is_one_object(tmp_path: Path) -> None:
    with RunLock(write(tmp_path, status())):
        code, text = invoke(tmp_path, "status", "demo", "--json")
    found = json.loads(text)
    assert (code, found["live"], found["seats"][0]["pid"]) == (0, True, 4242)
    assert found["budgets"] == [
        {"culprit": "replica 1", "cause": "crashed", "used": 2, "limit": 10},
        {"culprit": "the vault of node 0", "cause": "part lost", "used": 3, "limit": 20},
    ]
    assert [(one["node"], one["lemon"], one["blames"]) for one in found["nodes"]] == [(0, True, 2)]
    assert found["failures"] == [{"ago_s": 3.0, "text": "worker 2 crashed"}]
    assert found["decisions"] == [{"ago_s": 2.5, "text": "replica 1 gets a parked process"}]
    assert found["wire_dtype"] == "bfloat16"


def test_a_run_whose_launch_is_gone_is_not_live(tmp_path: Path) -> None:
    write(tmp_path, status())
    code, text = invoke(tmp_path, "status")
    assert code == 1
    assert f"not live any more (its launch, process {os.getpid()}, is gone)" in text


@pytest.mark.parametrize(("code", "words"), [(0, "demo: done"), (80, "demo: ended with exit code 80")])
def test_a_run_that_is_over(code: int, words: str, tmp_path: Path) -> None:
    write(tmp_path, status(state="ended", code=code, message="why it ended"))
    exit_code, text = invoke(tmp_path, "status", "--follow")
    assert exit_code == (1 if code else 0)
    assert words in text
    assert "why it ended" in text


def test_the_last_run_is_shown_unless_another_is_named(tmp_path: Path) -> None:
    older = write(tmp_path, status(run="older", code=0), "older")
    write(tmp_path, status(run="newer", code=0), "newer")
    os.utime(older / STATUS_FILE, (1, 1))
    assert "newer: done" in invoke(tmp_path, "status")[1]
    assert "older: done" in invoke(tmp_path, "status", "older")[1]


def test_no_run_is_said_clearly(tmp_path: Path) -> None:
    code, text = invoke(tmp_path, "status")
    assert code == 2
    assert "there is no run in" in text
    assert "hint:" in text
    code, text = invoke(tmp_path, "status", "demo")
    assert code == 2
    assert "there is no run 'demo'" in text
    write(tmp_path, status(run="other"), "other")
    assert "hint: there are other\n" in invoke(tmp_path, "status", "demo")[1]


def test_a_run_that_was_not_launched_has_no_status(tmp_path: Path) -> None:
    (tmp_path / "runs" / "alone").mkdir(parents=True)
    code, text = invoke(tmp_path, "status", "alone")
    assert code == 2
    assert "alone was not launched" in text
    assert "ckpt ls" in text


def test_a_run_may_be_named_by_its_path(tmp_path: Path) -> None:
    folder = write(tmp_path, status(code=0))
    assert "demo: done" in invoke(tmp_path, "status", str(folder))[1]


def test_a_file_that_is_no_status(tmp_path: Path) -> None:
    folder = write(tmp_path, status())
    (folder / STATUS_FILE).write_text("{}")
    code, text = invoke(tmp_path, "status")
    assert code == 2
    assert "is no status of a run" in text


def test_only_a_live_run_can_be_resized(tmp_path: Path) -> None:
    folder = write(tmp_path, status())
    code, text = invoke(tmp_path, "resize", "demo", "3")
    assert code == 2
    assert "is not running" in text
    with RunLock(folder):
        code, text = invoke(tmp_path, "resize", "demo", "3")
    assert code == 0
    assert "demo: asked for 3 replicas (now 1)" in text  # and 2 are wanted
    assert taken_wish(folder / WISH) == 3


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        ("9", "9 replicas are not between 1 and 4, the limits of this launch"),
        ("0", "0 replicas are not between 1 and 4"),
        ("x", "'x' is not a valid integer"),
    ],
)
def test_a_resize_beyond_the_limits_is_refused_at_once(replicas: str, words: str, tmp_path: Path) -> None:
    folder = write(tmp_path, status(max_replicas=4))
    with RunLock(folder):
        code, text = invoke(tmp_path, "resize", "demo", replicas)
    assert code == 2
    assert words in text
    assert "hint:" in text
    assert taken_wish(folder / WISH) is None


def test_lines_say_each_decision_once(capsys: pytest.CaptureFixture[str]) -> None:
    with view(plain=True, folder=Path("/runs/demo")) as screen:
        first = status()
        screen.show(first)
        screen.show(status(wall=first.wall + 1, decisions=(Saying(3.5, first.decisions[0].text),)))
        screen.say("[0] a line")
    shown = capsys.readouterr()
    assert shown.out == "[0] a line\n"
    assert shown.err == "run folder: /runs/demo\nholdfast: replica 1 gets a parked process\n"


class SlowScreen:
    """An output that takes nothing until it is let go on."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.takes = threading.Event()
        self.seen: list[object] = []

    def _take(self, what: object) -> None:
        self.busy.set()
        assert self.takes.wait(60.0)
        self.seen.append(what)

    def say(self, line: str) -> None:
        self._take(line)

    def note(self, text: str) -> None:
        self._take(f"note: {text}")

    def show(self, found: RunStatus) -> None:
        self._take(found.step)


def test_an_output_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.live._MOST_LINES", 3)
    screen = SlowScreen()
    with Display(screen) as display:
        display.say("first")
        assert screen.busy.wait(60.0)
        for step in range(5):
            display.show(status(step=step))
        for line in range(5):
            display.say(f"line {line}")
        log = logging.getLogger("holdfast.supervise")
        handler = Remarks(display)
        log.addHandler(handler)
        log.warning("nobody reads this")
        log.removeHandler(handler)
        assert screen.seen == []
        screen.takes.set()
    assert not display.stuck
    # Of the statuses the newest, of the lines the first.
    assert screen.seen == ["first", 4, "line 0", "line 1", "line 2"]


def test_lines_that_found_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.live._MOST_LINES", 1)
    screen = SlowScreen()
    with Display(screen) as display:
        display.say("first")
        assert screen.busy.wait(60.0)
        for line in range(3):
            display.say(f"line {line}")
        display._lines.clear()  # as if they had been taken
        display.note("there is room again")
        screen.takes.set()
    assert screen.seen == ["first", "(2 lines are missing here)", "note: there is room again"]


def test_an_output_that_still_takes_nothing_at_the_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cli.live._STUCK_S", 0.01)
    screen = SlowScreen()
    with Display(screen) as display:
        display.say("first")
        assert screen.busy.wait(60.0)
    assert display.stuck
    screen.takes.set()
    display._thread.join(60.0)


def test_goodput_is_the_share_of_steps(tmp_path: Path) -> None:
    goodput = Goodput()
    assert goodput.share(status(step=-1), 100.0) is None
    assert goodput.share(status(step=0), 100.0) is None
    assert goodput.share(status(step=8), 102.0) is None
    assert goodput.share(status(step=60), 110.0) == 0.75
    assert goodput.share(status(step=600), 110.0) == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such.py"], "there is no script /no/such.py"),
        (["python3", "-u", "train.py"], "hint: leave it out: holdfast launch train.py"),
        ([str(Path(__file__).parent)], "is a folder, not a script"),
        (["--replica", "2", __file__], "no such option '--replica'"),
        (["--log-ranks", "0,9", __file__], "--log-ranks 0,9: there is no slot 9"),
        (["--replicas", "0", __file__], "error: --replicas 0 is less than 1"),
        (["--log-ranks", "x", __file__], "names no slots"),
        (["--deadline", "compile", __file__], "--deadline compile is no PHASE=SECONDS"),
        (["--deadline", "lunch=60", __file__], "no deadline can be set for phase 'lunch'"),
        (["--deadline", "save=0", __file__], "a deadline that is not above 0"),
        (["--wire-dtype", "bf16", __file__], "--wire-dtype bf16: no sums are made in that"),
        (["--wire-dtype", "int8", __file__], "hint: use bfloat16, float16, float32"),
        (["--replicas", "1", "--min-replicas", "2", __file__], "--min-replicas 2"),
        ([], "missing argument"),
    ],
)
def test_mistakes_are_said_before_anything_starts(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = click.testing.CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert "run folder" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_is_probably_not_meant_is_said(tmp_path: Path) -> None:
    def doubts(*script: str, **changes: Any) -> list[str]:
        return _doubts(script, LaunchSettings(script=script, folder=str(tmp_path), **changes))

    assert doubts(__file__, "--lr", "1", "replicas") == []
    (late,) = doubts(__file__, "20", "--replicas=2", "--run", "x", "--run")
    assert late.startswith(f"--replicas, --run after {__file__} is for the script")
    (idle,) = doubts(__file__, replicas=16, lanes=8)
    assert "8 of them have nothing to compute" in idle
