"""A folder with ten thousand committed steps, and what it takes to list them and to retain some."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.scale.reading import CountingFiles
from bench.scale.synthetic import Mesh, Model, Writers, write_step
from holdfast.checkpoint import best, committed_steps, doomed, every, latest, readable_steps
from holdfast.storage import LocalStore

_TINY = Model(layers=1, hidden=8, ffn=16, vocab=16, kv=8)
_KEEP = latest(3) | every(1_000) | best(5, "loss")


def make_steps(folder: Path, count: int) -> None:
    """`count` steps of a small state with one writer, 100 apart, as a long run leaves them."""
    writers = Writers(_TINY, Mesh(1, 1))
    for number in range(count):
        write_step(folder, writers.at(100 * number))


def measured(folder: Path) -> dict[str, float]:
    """Wall seconds of everything that looks at all steps, and the files that were opened for it."""
    files = CountingFiles()
    store = LocalStore(folder, files=files)
    found: dict[str, float] = {}
    started = time.perf_counter()
    steps = committed_steps(store)
    found["list_s"] = time.perf_counter() - started
    found["list_opened"] = files.opened_files
    assert steps[-1] == 100 * (len(steps) - 1)
    started = time.perf_counter()
    infos, broken = readable_steps(store)
    found["read_s"] = time.perf_counter() - started
    assert not broken
    started = time.perf_counter()
    gone = doomed(infos, _KEEP, now=1.8e9)
    found["decide_s"] = time.perf_counter() - started
    assert len(infos) - len(gone) >= 8
    started, before = time.perf_counter(), _children_cpu_s()
    command = [sys.executable, "-m", "holdfast.cli", "ckpt", "ls", str(folder), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    found["ls_s"] = time.perf_counter() - started
    found["ls_cpu_s"] = _children_cpu_s() - before
    return found


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
