"""The scale benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.scale import BARS

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_smoke_run_reports_every_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "scale", "--smoke", "--json", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    assert all(found[key] is not None for key in BARS), found["notes"]
    assert found["raw"]["steps list_opened"]["median"] == 0
    assert found["raw"]["reader plan_peak_mb"]["median"] > 0
    assert list(tmp_path.iterdir()) == []
