"""Measurements that need a process of their own: `python -m bench.checkpoint.children NAME FOLDER OPTIONS`.

`memory` must not share a process with peers that keep memory; `reshard` needs several virtual devices, and
their number is fixed when JAX starts. Each prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from bench.checkpoint.on_jax import described, on_device, ready
from bench.checkpoint.state import StateSpec, host_arrays, nest, same_bits, shapes
from bench.machine import forget_files, forget_memory


def pss_bytes(pid: int) -> int:
    """Proportional set size: private memory, and each shared page divided by those who map it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class PeakPss:
    """Samples the sum of several processes' PSS until closed."""

    def __init__(self) -> None:
        self.pids = [os.getpid()]
        self.peak = 0
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> PeakPss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, sum(pss_bytes(pid) for pid in list(self.pids)))
            self.samples += 1


def measure_memory(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of trainer and vault during saves, above that of the trainer before."""
    state = on_device(StateSpec(**options["spec"]))
    tree = nest(state)
    forget_memory(0)
    baseline = pss_bytes(os.getpid())
    with PeakPss() as sampled, holdfast.Checkpointer(folder, keep=1) as ckpt:
        ckpt.prepare(tree)
        assert ckpt.vault_pid is not None
        sampled.pids.append(ckpt.vault_pid)
        handles = [ckpt.save(step, tree) for step in range(options["saves"])]
        handles[-1].durable(600.0)
    return {
        "nbytes": sum(array.nbytes for array in state.values()),
        "baseline": baseline,
        "peak": sampled.peak,
        "samples": sampled.samples,
    }


def measure_reshard(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Cold loads of a state saved on 4 shards: on 4, and on 3."""
    spec = StateSpec(**options["spec"])
    placed = {shards: _shardings(spec, shards) for shards in (4, 3)}
    state = {name: jax.device_put(array, placed[4][name]) for name, array in host_arrays(spec)}
    templates = {shards: nest(described(state, placed[shards])) for shards in placed}
    seconds: dict[int, list[float]] = {4: [], 3: []}
    with holdfast.Checkpointer(folder, keep=1) as ckpt:
        ckpt.save(0, nest(state)).durable(600.0)
        for round_ in range(options["rounds"] + 1):
            for shards, template in sorted(templates.items(), reverse=bool(round_ % 2)):
                forget_files(folder, gently=options["gently"])
                forget_memory(2 * spec.nbytes if options["touch"] else 0)
                started = time.perf_counter()
                tree = ready(ckpt.load(into=template))
                seconds[shards].append(time.perf_counter() - started)
                if not round_:
                    _check(state, tree, shards)
                del tree
    return {
        "nbytes": sum(array.nbytes for array in state.values()),
        "same": seconds[4][1:],  # the first was for warming up
        "reshard": seconds[3][1:],
    }


def _shardings(spec: StateSpec, shards: int) -> dict[str, Any]:
    """Cut rows, columns, rows, columns ...; the tiny arrays lie whole on every device."""
    mesh = Mesh(np.array(jax.devices()[:shards]), ("shard",))
    cut: list[Any] = [PartitionSpec("shard", None), PartitionSpec(None, "shard")]  # type: ignore[no-untyped-call]
    whole: Any = PartitionSpec()  # type: ignore[no-untyped-call]
    return {
        name: NamedSharding(mesh, cut[number % 2] if len(shape) == 2 else whole)
        for number, (name, shape, _) in enumerate(shapes(spec))
    }


def _check(state: dict[str, Any], tree: Any, shards: int) -> None:
    for name, array in state.items():
        group, _, leaf = name.partition("/")
        if not same_bits(np.asarray(array), np.asarray(tree[group][leaf])):
            raise AssertionError(f"{name} came back different on {shards} shards")


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def main() -> None:
    """Run the measurement named on the command line."""
    signal.signal(signal.SIGTERM, _stop)
    name, folder, options = sys.argv[1:]
    measure = {"memory": measure_memory, "reshard": measure_reshard}[name]
    print(json.dumps(measure(Path(folder), json.loads(options))))


if __name__ == "__main__":
    main()
