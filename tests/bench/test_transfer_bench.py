"""The transfer benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.transfer import BARS
from bench.transfer.trees import TreeSpec, cut, digest, filled, lines

REPO = Path(__file__).resolve().parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "transfer", *words]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=100)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("peers", ["", "jax"], ids=["none", "jax"])
def test_smoke_run_reports_every_key(peers: str) -> None:
    done = bench("--smoke", "--json", "--peers", peers)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    absent = {key for key in BARS if key.startswith("vs_") and not (peers and peers in key)}
    assert {key for key in BARS if found[key] is None} == absent, found["notes"]
    assert {"python", "kernel", "numpy"} <= set(found["versions"])
    assert "tcp_vs_raw, 1 MiB in 10 arrays" in found["raw"]


@pytest.mark.process
def test_unknown_peers_are_refused() -> None:
    done = bench("--smoke", "--peers", "jax,nonsense")
    assert done.returncode == 2
    assert "no peer nonsense" in done.stderr


@pytest.mark.parametrize("spec", [TreeSpec(1 << 20, 1), TreeSpec(1 << 20, 1000), TreeSpec(64, 1)])
def test_trees_hold_exactly_the_bytes_they_say(spec: TreeSpec) -> None:
    tree = cut(filled(spec), spec)
    assert len(tree) == spec.num_arrays
    assert sum(array.nbytes for array in tree.values()) == spec.nbytes
    assert all(array.ctypes.data % 64 == 0 for array in tree.values())
    assert digest(tree) != digest(cut(lines(spec.nbytes), spec))
