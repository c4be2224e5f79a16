"""`python -m bench checkpoint --gpu`: its arithmetic, and that all of it runs, with a driver that is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoint.gpu import BARS, raw, snapshot_notes, values
from bench.checkpoint.gpu_state import Ballast, GpuSpec, ballast_pieces
from holdfast.jax.snapshots import Headroom

REPO = Path(__file__).parents[2]
WAY = {
    "call_s": [0.009, 0.001],
    "plain_s": [0.5, 0.5, 0.6],
    "copying_s": [0.51, 0.51],
    "writing_s": [],
    "fence_s": [0.0, 0.2],
    "route": "pinned arena",
    "snapshots": [True, False],
}


def test_values_are_ratios_of_what_was_measured() -> None:
    found: dict[str, dict[str, Any]] = {
        "saves": {"nbytes": 4_000_000_000, "split, fenced": WAY, "vault": {"seconds": [0.5, 0.2]}},
        "orbax": {"blocked_s": [4.0, 0.2], "done_s": [9.0, 5.0], "warm_s": [2.0, 2.0], "cold_s": [3.0]},
        "disk, cold": {"seconds": [2.0, 1.0]},
    }
    seen = values(found)
    assert set(seen) == set(BARS)
    assert seen["gpu_call_ms"] == pytest.approx(9.0)
    assert seen["gpu_slowdown"] == pytest.approx(0.02)
    assert seen["gpu_restore_vs_orbax"] == pytest.approx(4.0)
    assert seen["gpu_writing_slowdown"] is None
    assert seen["gpu_full_call_ms"] is None
    assert seen["gpu_full_writing_slowdown"] is None
    series = raw(found)
    assert series["vault, first"].rate == pytest.approx(8.0)
    assert series["orbax first save, blocked"].values == (4.0,)
    assert series["disk, cold, first"].rate == pytest.approx(2.0)
    assert values({}) == dict.fromkeys(BARS)


def test_a_full_device_has_keys_of_its_own() -> None:
    full = {**WAY, "call_s": [0.004, 0.002], "copying_s": [0.505], "writing_s": [0.52, 0.51, 0.5]}
    seen = values({"saves": {"nbytes": 4, "split, fenced": WAY, "full, fenced": full}})
    assert seen["gpu_full_call_ms"] == pytest.approx(4.0)
    assert seen["gpu_full_slowdown"] == pytest.approx(0.01)
    assert seen["gpu_full_writing_slowdown"] == pytest.approx(0.02)
    assert seen["gpu_slowdown"] == pytest.approx(0.02)
    assert seen["gpu_writing_slowdown"] is None


def test_ballast_needs_a_device_that_says_how_much_it_has() -> None:
    assert Ballast(None, 1 << 30).checked(None) == 0
    assert GpuSpec(8_600_000_000, 64, 0.5, 8192).shape == (32806, 1024)


def test_beside_ballast_no_snapshot_fits_whatever_the_peak_was() -> None:
    nbytes, limit = 8_600_000_000, 112_000_000_000
    # Snapshots of ways measured before are in the peak, and gone.
    stats = {"bytes_limit": limit, "bytes_in_use": nbytes, "peak_bytes_in_use": 3 * nbytes}
    full = {**stats, "bytes_in_use": nbytes + sum(ballast_pieces(stats, nbytes))}
    assert not Headroom().fits(full, nbytes)
    assert limit - full["bytes_in_use"] >= nbytes // 2, "none for temporaries"
    assert ballast_pieces({**stats, "bytes_in_use": limit}, nbytes) == []
    empty = Ballast(None, nbytes)
    assert empty.checked(full) == 0
    with pytest.raises(RuntimeError, match="a snapshot fits"):
        empty.checked(stats)


def test_which_ways_made_snapshots_is_noted() -> None:
    silent = {**WAY, "snapshots": [None, None]}
    assert snapshot_notes({"nbytes": 3, "split": WAY, "fused": silent}) == [
        "split: 1 of 2 saves made a snapshot on the device"
    ]


@pytest.mark.full
@pytest.mark.process
def test_a_smoke_run_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench", "checkpoint", "--gpu", "--smoke", "--json", "--skip-peers"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path / "work"), "--out", str(out)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=110.0,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(out.read_text())
    assert "route: pinned arena" in found["notes"], found["notes"]
    assert not [note for note in found["notes"] if "failed" in note]
    # A small save may be durable before the step after it is over.
    missing = {key for key in BARS if found[key] is None} - {
        "gpu_writing_slowdown",
        "gpu_full_writing_slowdown",
    }
    assert missing == {"gpu_restore_vs_orbax"}
    assert {"vault, first", "disk, cold, first", "full, no fence: save()"} <= set(found["raw"])
    assert not (tmp_path / "work").exists()
