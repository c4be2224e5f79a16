"""`holdfast status` and `holdfast resize` say clearly how a run stands, and what there is not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click.testing
import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.live import Goodput, view
from holdfast.launch.lock import RunLock
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
        "budgets": (BudgetStatus("replica 1", "crashed", 2, 10),),
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


def test_a_live_run_is_shown_with_all_that_matters(tmp_path: Path) -> None:
    with RunLock(write(tmp_path, status())):
        code, text = invoke(tmp_path, "status")
    assert code == 0
    for words in (
        "demo: running, step 41",
        "4242",
        "125 ms",
        "a backoff of 3 s",
        "parked: worker 3 on node 0 (ready)",
        "node 0: up, lemon, 2 seats, blamed 2 times",
        "budget of replica 1, crashed: 2 used of 10 allowed",
        "worker 2 crashed",
        "replica 1 gets a parked process",
    ):
        assert words in text


def test_json_is_one_object(tmp_path: Path) -> None:
    with RunLock(write(tmp_path, status())):
        code, text = invoke(tmp_path, "status", "demo", "--json")
    found = json.loads(text)
    assert (code, found["live"], found["seats"][0]["pid"]) == (0, True, 4242)


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
    assert "asked for 3 instead of 2 replicas" in text


def test_lines_say_each_decision_once(capsys: pytest.CaptureFixture[str]) -> None:
    with view(plain=True, folder=Path("/runs/demo")) as screen:
        first = status()
        screen.show(first)
        screen.show(status(wall=first.wall + 1, decisions=(Saying(3.5, first.decisions[0].text),)))
        screen.say("[0] a line")
    shown = capsys.readouterr()
    assert shown.out == "[0] a line\n"
    assert shown.err == "run folder: /runs/demo\nholdfast: replica 1 gets a parked process\n"


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
        (["--log-ranks", "x", __file__], "names no slots"),
        (["--replicas", "1", "--min-replicas", "2", __file__], "min_replicas=2"),
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
    assert list(tmp_path.iterdir()) == []
