"""The reduce benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.reduce import BARS

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "sizes"),
    [(("--max-floats", "1000"), ("1m",)), pytest.param((), ("1m", "10m", "100m"), marks=pytest.mark.full)],
    ids=["the smallest", "all"],
)
def test_smoke_run_reports_every_key(options: tuple[str, ...], sizes: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "bench", "reduce", "--smoke", "--json", *options]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    measured = {key for key in BARS if found[key] is not None}
    assert measured == {key for key in BARS if key.split("_")[1] in sizes}, found["notes"]
    assert {"python", "kernel", "numpy", "jaxlib"} <= set(found["versions"])
    assert "holdfast, exchange, 1M floats, 2 processes" in found["raw"]
