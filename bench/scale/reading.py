"""One reader in a process of its own: `python -m bench.scale.reading FOLDER SCALE RANK`, one JSON object.

Its memory and its caches are its own, as those of a real reader are.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, final

from bench.scale import shards
from bench.scale.scales import SCALES, Scale
from bench.scale.synthetic import STEP, reader_layouts
from holdfast.arrays import unflatten
from holdfast.checkpoint.loading import LoadOptions, StepLoad
from holdfast.checkpoint.steps import step_manifest
from holdfast.format import Manifest
from holdfast.storage import Files, LocalStore


@final
class CountingFiles(Files):
    """Files that count what is opened and read."""

    def __init__(self) -> None:
        super().__init__()
        self.opened_files = 0
        self.bytes_read = 0

    def open_read(self, path: str) -> int:
        self.opened_files += 1
        return super().open_read(path)

    def read_at(self, fd: int, buffer: Any, offset: int) -> int:
        got = super().read_at(fd, buffer, offset)
        self.bytes_read += got
        return got


def wanted(scale: Scale) -> Any:
    """The template of the readers: the whole state, in shares."""
    leaves: dict[str, Any] = {
        name: shards.Shard(layout) for name, layout in reader_layouts(scale.model, scale.readers).items()
    }
    return unflatten({**leaves, "step": 0})


def planned(manifest: Manifest, store: LocalStore, scale: Scale, template: Any, rank: int) -> tuple[int, int]:
    """Plan one reader's part as a load does, indexes included; the parts it needs, and its blocks."""
    with shards.known():
        load = StepLoad(manifest, template, LoadOptions(), rank=rank, world=scale.readers.world)
        plan = load.planned([store])
    return len(plan.indexes), len(plan.blocks)


def measured(folder: str, scale: Scale, rank: int) -> dict[str, float]:
    """Open the step, then plan; wall seconds, and the peak of memory above that of the imports."""
    files = CountingFiles()
    store = LocalStore(folder, files=files)
    template = wanted(scale)
    found: dict[str, float] = {}
    _forget_peak()
    before, started, cpu = _peak_mb(), time.perf_counter(), time.process_time()
    manifest = step_manifest(store, STEP)
    found["open_s"] = time.perf_counter() - started
    found["open_cpu_s"] = time.process_time() - cpu
    found["open_peak_mb"] = _peak_mb() - before
    found["manifest_mb"] = files.bytes_read / 1e6
    files.bytes_read = files.opened_files = 0
    started, cpu = time.perf_counter(), time.process_time()
    found["parts"], found["blocks"] = planned(manifest, store, scale, template, rank)
    found["plan_s"] = time.perf_counter() - started
    found["plan_cpu_s"] = time.process_time() - cpu
    found["plan_peak_mb"] = _peak_mb() - before
    found["index_mb"] = files.bytes_read / 1e6
    found["index_files"] = files.opened_files
    return found


def _forget_peak() -> None:
    """Begin the peak anew. That of getrusage is no good here: a child starts with its parent's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(measured(sys.argv[1], SCALES[sys.argv[2]], int(sys.argv[3]))))
