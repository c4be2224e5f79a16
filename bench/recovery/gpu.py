"""A replica on a GPU replaced by a parked process, step by step: `python -m bench.recovery.gpu [small]`.

Two replicas share the GPU. One is killed; the times are those of the parked process that takes its place.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench import machine
from bench.recovery.ours import worked_again
from holdfast.journal import StateReceived, WorkerReplaced
from holdfast.testing.launched import LaunchedRun

WAIT_S = 400.0
_WATCH_S = 60.0
_GONE_MIB = 4096
"""More than anything but the end of a process gives back at once."""


def _said(run: LaunchedRun) -> dict[int, list[dict[str, Any]]]:
    """What the trainers said, by worker."""
    found: dict[int, list[dict[str, Any]]] = {}
    for log in (run.folder / "logs").glob("0-[0-9]*.log"):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"at"')]
        found[int(log.stem.split("-")[1])] = [json.loads(line) for line in lines]
    return found


def main() -> None:
    large = "small" not in sys.argv
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if large:
        env["HOLDFAST_BENCH_SCALE"] = "large"
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as folder,
        LaunchedRun(
            Path(__file__).with_name("gpu_trainer.py"),
            "1000",
            folder=folder,
            run="gpu",
            replicas=2,
            parked=1,
            options=("--lanes", "4" if large else "6", "--step-s", "120"),
            env=env,
        ) as run,
    ):
        run.await_step(3, WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while not any(one.state == "parked" for one in (run.status() or _none()).parked):
            if time.monotonic() > deadline:
                raise SystemExit(f"no parked process: {run.tail()}")
            run.await_step(0, WAIT_S, after=time.time())
        reclaimed = _Reclaimed()
        at = time.time()
        os.kill(run.pid(replica=1), signal.SIGKILL)
        first = run.await_step(0, WAIT_S, after=at)
        back = worked_again(run, 1, at)
        run.await_step(0, WAIT_S, after=run.await_step(0, WAIT_S, after=back).t)
        print(json.dumps({"hbm_reclaim_s": reclaimed.after(at), **_summary(run, at, first.t, back)}))


class _Reclaimed:
    """Watches the GPU's memory from now on, as the driver accounts for it."""

    def __init__(self) -> None:
        self._before = _used_mib()
        self._seen: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        ends = time.monotonic() + _WATCH_S
        while time.monotonic() < ends and not self._dropped():
            self._seen.append((time.time(), _used_mib()))

    def _dropped(self) -> bool:
        return bool(self._seen) and self._seen[-1][1] < self._before - _GONE_MIB

    def after(self, at: float) -> float | None:
        """Seconds after `at` until the memory of a replica was free again; None if that was not seen."""
        self._thread.join(_WATCH_S + 10.0)
        return self._seen[-1][0] - at if self._dropped() else None


def _used_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


def _none() -> Any:
    raise SystemExit("there is no status yet")


def _summary(run: LaunchedRun, at: float, first: float, back: float) -> dict[str, Any]:
    said, records = _said(run), run.records()
    newcomer = next(
        one.event.worker for one in records if isinstance(one.event, WorkerReplaced) and one.t > at
    )
    moments = {line["what"]: line["at"] for line in reversed(said[newcomer])}
    loaded = next(line["loaded"] for line in said[newcomer] if line["what"] == "programs")
    received = next(one.event for one in records if isinstance(one.event, StateReceived) and one.t > at)
    steps = [
        line for lines in said.values() for line in lines if line["what"] == "step" and line["index"] > 1
    ]
    began = next(line["began"] for line in said[newcomer] if line["what"] == "imported")
    return {
        "kill_to_next_step_s": first - at,
        "kill_to_full_size_s": back - at,
        "parked_before": {
            "imports_s": moments["imported"] - began,
            "context_s": moments["context"] - moments["imported"],
        },
        "after_the_kill": {
            "seated_s": moments["seated"] - at,
            "programs_s": moments["programs"] - moments["seated"],
            "programs_loaded": loaded,
            "state_in_s": received.seconds,
            "state_bytes": received.bytes,
            "restored_s": moments["restored"] - at,
        },
        "median_step": {
            key: statistics.median(line[key] for line in steps)
            for key in ("compute_s", "add_s", "exposed_s", "whole_s")
        },
        "versions": machine.versions("jax", "jaxlib", "numpy"),
        "machine": machine.description(Path.cwd()),
    }


if __name__ == "__main__":
    main()
