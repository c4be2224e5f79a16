"""The coordination benchmark runs and reports every key; its numbers are not a test's business."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bench.coord import BARS, _values
from bench.coord.peers import put_request, range_request
from bench.report import Series

REPO = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "bench", "coord", "--smoke", "--json", "--dir"]


@pytest.mark.full
@pytest.mark.process
def test_smoke_run_reports_every_key_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "new")], cwd=REPO, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(BARS) == [
        *("barrier_4_vs_jaxlib", "barrier_256_vs_jaxlib", "register_256_vs_jaxlib", "kv_vs_jaxlib"),
        *("kv_vs_tcpstore", "durable_set_vs_etcd", "restart_s"),
    ]
    assert set(found) == {*BARS, "method", "versions", "notes", "raw"}
    missing = {note.rpartition(" ")[2] for note in found["notes"] if note.startswith("not installed")}
    for key in BARS:
        assert (found[key] is None) == any(re.search(peer, key) for peer in missing), key
    assert not [note for note in found["notes"] if note.startswith("failed")]
    assert {"python", "kernel", "holdfast"} <= set(found["versions"])
    assert os.listdir(tmp_path) == []


@pytest.mark.process
def test_interrupted_run_ends_its_processes_and_leaves_nothing(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [*COMMAND, str(tmp_path)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/one/state")):
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert os.listdir(tmp_path) == []
    assert not [line for line in _command_lines() if str(tmp_path) in line]


def _command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it is over
            found.append(path.read_bytes().decode(errors="replace"))
    return found


def test_ratios_above_one_mean_holdfast_is_better() -> None:
    rows = {"barrier, 4 clients": 1.0, "barrier, 256 clients": 1.0, "registration, 256 clients": 1.0}
    rates = {"set and get, 256 clients": 8.0, "set, 256 clients": 8.0}
    raw = {f"holdfast {name}": Series((value,)) for name, value in {**rows, **rates}.items()}
    raw |= {f"jaxlib {name}": Series((2.0,)) for name in rows}
    raw |= {f"{peer} {name}": Series((4.0,)) for peer in ("jaxlib", "tcpstore") for name in rates}
    raw["holdfast restart, 260 clients"] = Series((0.5,))
    found = _values(raw, 4, 256)
    assert set(found) == set(BARS)
    assert found.pop("restart_s") == 0.5
    assert found.pop("durable_set_vs_etcd") is None
    assert set(found.values()) == {2.0}


def test_the_messages_to_etcd_are_protocol_buffers() -> None:
    """Field 1, then field 2, each with its length, as in etcd's rpc.proto."""
    assert put_request("k", b"vv") == b"\x0a\x01k\x12\x02vv"
    assert range_request("key") == b"\x0a\x03key"
