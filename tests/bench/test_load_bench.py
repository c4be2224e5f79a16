"""The load benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.load import BARS
from bench.load.coldness import resident_share
from bench.machine import forget_files

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.process
def test_smoke_run_reports_every_key_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "load", "--smoke", "--json", "--dir", str(tmp_path / "new")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    assert all(isinstance(found[key], float) for key in BARS)
    assert {"holdfast, 1 device", "safetensors mapped, 8 devices", "disk, 1 thread, 1 device"} <= set(
        found["raw"]
    )
    assert done.stderr.count("equal bits") == 2
    assert os.listdir(tmp_path) == []


def test_a_file_that_was_read_is_warm_until_it_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    path.read_bytes()
    if resident_share(path) < 0.9:
        pytest.skip("this file system keeps nothing in the page cache")
    forget_files(tmp_path, gently=True)
    assert resident_share(path) < 0.01
