"""The train benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.train import BARS

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.process
def test_smoke_run_reports_every_key() -> None:
    command = [sys.executable, "-m", "bench", "train", "--smoke", "--json"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    assert {key for key in BARS if found[key] is not None} == {"engine_overhead_ms"}
    assert {"engine", "bare"} == set(found["raw"])
