"""The benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.checkpoint import BARS
from bench.checkpoint.state import MIB, shapes, spec_of
from bench.report import Bar, Report, Series

REPO = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "bench", "checkpoint", "--smoke", "--json", "--dir"]


@pytest.mark.full
@pytest.mark.process
def test_smoke_run_reports_every_key_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "new")], cwd=REPO, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    own = [key for key in BARS if not re.search("orbax|dcp|safetensors", key)]
    assert all(isinstance(found[key], float) for key in own)
    assert {"python", "kernel", "jax"} <= set(found["versions"])
    assert "holdfast load" in found["raw"]
    assert os.listdir(tmp_path) == []


@pytest.mark.full
@pytest.mark.process
def test_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [*COMMAND, str(tmp_path)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/holdfast/step-*")):
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert os.listdir(tmp_path) == []


@pytest.mark.process
def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "checkpoint", "--size-gib", "1e6", "--dir", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "GiB free" in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_state_is_the_one_of_the_method() -> None:
    spec = spec_of(int(1.5 * 2**30))
    found = [(shape, dtype) for _, shape, dtype in shapes(spec)]
    large = [shape[0] * shape[1] * dtype.itemsize for shape, dtype in found if len(shape) == 2]
    assert len(large) == 300
    assert len(found) == 2300
    assert min(large) >= 0.9 * MIB
    assert max(large) <= 65 * MIB
    assert sum(large) == pytest.approx(spec.nbytes, rel=0.02)
    assert all(side % 12 == 0 for shape, _ in found if len(shape) == 2 for side in shape)


def test_a_report_says_pass_miss_and_not_measured() -> None:
    report = Report(
        bars={key: Bar("m", "at least", 1.0) for key in ("good", "bad", "absent")},
        values={"good": 1.0, "bad": 0.5, "absent": None},
        method="how",
        versions={},
        raw={"one": Series((1.0, 3.0, 2.0), nbytes=4_000_000_000)},
    )
    text = report.as_text()
    for pattern in ("good .*pass", "bad .*MISS", "absent .*not measured", r"one .*2\.000 s.*2\.00"):
        assert re.search(pattern, text), pattern
    assert json.loads(report.as_json())["absent"] is None
