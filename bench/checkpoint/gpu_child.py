"""Measurements on one GPU, each in a process of its own: `python -m bench.checkpoint.gpu_child NAME ...`.

`saves` times calls and steps, and then has `vault` take the state out of the vault's memory; `disk` loads
what was saved; `orbax` does the same with Orbax. Each prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax

import holdfast
from bench.checkpoint.gpu import PARTIAL
from bench.checkpoint.gpu_state import Ballast, GpuSpec, SplitStep, State, checksums, described, made, ready
from bench.child import run_child
from bench.machine import discard, forget_files
from holdfast.jax import staging
from holdfast.jax.staging import DeviceStager

MODULE: Final = "bench.checkpoint.gpu_child"
_DEADLINE_S: Final = 120.0


def progress(text: str) -> None:
    """One line of progress."""
    print(f"gpu: {text}", file=sys.stderr, flush=True)


def stager(fake: bool, *, roomy: bool) -> DeviceStager:
    """What stages here: the real one, or in a smoke run one with a driver that is none."""
    if not fake:
        return staging.stager()
    from holdfast.testing.cuda import FakeDriver

    stats = {"bytes_limit": 1 << 40, "bytes_in_use": 0, "peak_bytes_in_use": 0} if roomy else None
    made_ = DeviceStager(FakeDriver, platforms=frozenset({"cpu"}), stats=lambda _device: stats)
    staging.install(made_)
    return made_


def in_use() -> int | None:
    """Bytes of the device's memory that are taken; None where it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_in_use") if stats else None


class Saves:
    """Saves while a step runs over and over, and what that does to the steps."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._spec = GpuSpec(**options["spec"])
        self._folder = folder
        self._saves = int(options["saves"])
        self._fake = bool(options["fake"])
        self._number = 0
        self._stager = stager(self._fake, roomy=False)
        progress(f"making {self._spec.nbytes / 1e9:.2f} GB of state")
        self.state = made(self._spec)
        self.nbytes = sum(x.nbytes for x in self.state)
        self.step = SplitStep(self._spec, self.state, progress)
        token = bytes.fromhex(options["token"])
        self.ckpt = holdfast.Checkpointer(folder / "holdfast", keep=1, serve="127.0.0.1:0", token=token)

    def warm_up(self) -> dict[str, Any]:
        """Plan, vault, memory, pinning, self-check, programs; then the steps themselves."""
        started = time.perf_counter()
        self.ckpt.prepare(self.state)
        seconds = time.perf_counter() - started
        progress(f"prepared in {seconds:.2f} s: {self._stager.route}, {self._stager.pinned:,} bytes pinned")
        for way in (self._split, self._asking, self._fused):
            way(None)
        return {"prepare_s": seconds, "pinned": self._stager.pinned}

    def measured(self, name: str, way: Callable[[Any], float], *, fenced: bool) -> dict[str, Any]:
        """Steps without saves, then saves with the steps that follow until each is durable."""
        plain = [way(None) for _ in range(8)]
        calls, moving, durable, fences = [], [], [], []
        snapshots: list[bool | None] = []
        # Those with a bar in full, the others less: all of it is to fit into some minutes.
        for _ in range(self._saves if fenced and way == self._split else -(-self._saves // 2)):
            self._number += 1
            ready(self.state)
            before = in_use()
            started = time.perf_counter()
            handle = self.ckpt.save(self._number, self.state, fenced=fenced)
            calls.append(time.perf_counter() - started)
            snapshots.append(None if before is None else (in_use() or 0) >= before + self.nbytes)
            self._fence_s = 0.0
            moving.append(way(handle))
            fences.append(self._fence_s)
            while handle.state not in ("durable", "failed"):
                durable.append(way(handle))
            handle.durable(_DEADLINE_S)
            self.ckpt.wait(_DEADLINE_S)
        after = [way(None) for _ in range(4)]
        progress(
            f"{name}: call {1e3 * max(calls):.2f} ms at most, step {1e3 * min(plain):.1f} ms, "
            f"while copying {1e3 * moving[-1]:.1f} ms"
        )
        return {
            "call_s": calls,
            "plain_s": plain + after,
            "copying_s": moving,
            "writing_s": durable,
            "fence_s": fences,
            "route": self._stager.route,
            "snapshots": snapshots,
        }

    def _split(self, handle: Any) -> float:
        return self._in_two(handle, self.step.grads)

    def _asking(self, handle: Any) -> float:
        return self._in_two(handle, self.step.asking)

    def _in_two(self, handle: Any, compute: Callable[[State], Any]) -> float:
        started = time.perf_counter()
        grads = compute(self.state)
        self._fence(handle)
        self.state = self.step.apply(self.state, grads)
        ready(self.state)
        return time.perf_counter() - started

    def _fused(self, handle: Any) -> float:
        started = time.perf_counter()
        self._fence(handle)
        self.state = self.step.fused(self.state)
        ready(self.state)
        return time.perf_counter() - started

    def _fence(self, handle: Any) -> None:
        if handle is not None:
            began = time.perf_counter()
            handle.fence()
            self._fence_s = max(self._fence_s, time.perf_counter() - began)

    _fence_s = 0.0

    def roomy(self, yes: bool) -> None:
        """Pretend, in a smoke run, that there is room for a snapshot, or that there is none."""
        if self._fake:
            stats = {"bytes_limit": 1 << 40, "bytes_in_use": 0, "peak_bytes_in_use": 0} if yes else None
            self._stager._stats = lambda _device: stats

    def split_fenced(self, name: str) -> dict[str, Any]:
        return self.measured(name, self._split, fenced=True)

    def asking(self, name: str) -> dict[str, Any]:
        return self.measured(name, self._asking, fenced=True)

    def split_alone(self, name: str) -> dict[str, Any]:
        return self.measured(name, self._split, fenced=False)

    def fused(self, name: str, *, fenced: bool) -> dict[str, Any]:
        return self.measured(name, self._fused, fenced=fenced)

    def last(self) -> list[int]:
        """Save what is to be restored; its checksums."""
        self.ckpt.save(10_000, self.state).durable(_DEADLINE_S)
        return checksums(self.state)

    def announced(self) -> list[tuple[str, str]]:
        """The routes that were taken."""
        return self._stager.announcements()

    def from_vault(self, options: dict[str, Any]) -> dict[str, Any]:
        """Restore from the vault's memory, in a fresh process."""
        progress("restoring from the vault, in a fresh process")
        self.state = []  # make room on the device
        given = {**options, "address": self.ckpt.vault_address}
        # Beside the process that saved, which has three quarters; taken at the start, as other processes do.
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.15"}
        return run_child(MODULE, "vault", self._folder, given, env=environment, timeout_s=_DEADLINE_S)


class Findings:
    """What was found so far. Each part is written down at once; one that fails does not cost the others."""

    def __init__(self, path: Path, **first: Any) -> None:
        self._path = path
        self.all: dict[str, Any] = {**first, "failed": []}

    def add(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure one part."""
        try:
            self.all[name] = measure()
        except Exception as error:
            self.all["failed"].append(f"{name}: {type(error).__name__}: {error}")
            progress(f"failed: {self.all['failed'][-1]}")
        self._path.write_text(json.dumps(self.all), encoding="utf-8")


def measure_saves(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """All ways to save, then the state out of the vault's memory in another process."""
    saves = Saves(folder, options)
    found = Findings(folder / PARTIAL, nbytes=saves.nbytes, **saves.warm_up())
    saves.roomy(True)
    found.add("split, fenced", lambda: saves.split_fenced("split step, fenced"))
    found.add("asking, fenced", lambda: saves.asking("split step that asks the host, fenced"))
    found.add("split, snapshot", lambda: saves.split_alone("split step, no fence"))
    found.add("fused, fenced", lambda: saves.fused("fused step, fenced", fenced=True))
    found.add("fused, snapshot", lambda: saves.fused("fused step, no fence", fenced=False))
    saves.roomy(False)
    ballast = Ballast(jax.local_devices()[0].memory_stats(), saves.nbytes)
    progress(f"{ballast.nbytes / 1e9:.1f} GB of ballast: too little memory is left for a snapshot")
    found.add("ballast", lambda: ballast.checked(jax.local_devices()[0].memory_stats()))
    if "ballast" in found.all:
        found.add("full, fenced", lambda: saves.split_fenced("full memory, split step, fenced"))
        found.add("full, no fence", lambda: saves.split_alone("full memory, split step, no fence"))
    ballast.drop()
    found.add("checksums", saves.last)
    found.add("announced", saves.announced)
    found.add("vault", lambda: saves.from_vault({**options, "checksums": found.all["checksums"]}))
    saves.ckpt.close(_DEADLINE_S)
    return found.all


def _loads(load: Callable[[], State], options: dict[str, Any], num: int) -> list[float]:
    seconds = []
    for number in range(num):
        started = time.perf_counter()
        state = ready(load())
        seconds.append(time.perf_counter() - started)
        progress(f"load {number + 1} of {num}: {seconds[-1]:.2f} s")
        if checksums(state) != options["checksums"]:
            raise AssertionError("what was loaded is not what was saved")
        del state
    return seconds


def measure_vault(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Restores from the vault's memory: the first of a process, and later ones."""
    from holdfast.vault import restore

    template = described(GpuSpec(**options["spec"]))
    token = bytes.fromhex(options["token"])

    def load() -> State:
        state: State = restore([options["address"]], template, token=token).tree
        return state

    ready(jax.device_put(0.0))  # starting the device is no part of a restore
    return {"seconds": _loads(load, options, 3)}


def measure_disk(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Loads from the disk, in a fresh process; `cold` drops the page cache before each."""
    template = described(GpuSpec(**options["spec"]))
    ready(jax.device_put(0.0))
    with holdfast.Checkpointer(folder / "holdfast", journal=False) as ckpt:

        def load() -> State:
            if options["cold"]:
                forget_files(folder, gently=options["fake"])
            state: State = ckpt.load(into=template)
            return state

        return {"seconds": _loads(load, options, 2)}


def measure_orbax(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Orbax's asynchronous saves of the same state, and its restores: warm, then cold."""
    import orbax.checkpoint as ocp

    spec = GpuSpec(**options["spec"])
    state = made(spec)
    wanted = {"checksums": checksums(state)}
    ckpt = ocp.StandardCheckpointer()
    blocked, done = [], []
    path = folder / "orbax"
    for number in range(3):
        started = time.perf_counter()
        ckpt.save(path / str(number), state)
        blocked.append(time.perf_counter() - started)
        ckpt.wait_until_finished()
        done.append(time.perf_counter() - started)
        progress(f"orbax save {number + 1} of 3: blocked {blocked[-1]:.2f} s, done {done[-1]:.2f} s")
        if number:
            discard(path / str(number - 1))
    del state
    template = described(spec)

    def load() -> State:
        found: State = ckpt.restore(path / "2", template)
        return found

    def cold() -> State:
        forget_files(folder, gently=options["fake"])
        return load()

    warm = _loads(load, wanted, 3)
    return {"blocked_s": blocked, "done_s": done, "warm_s": warm, "cold_s": _loads(cold, wanted, 1)}


def _stop(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def main() -> None:
    """Run the measurement named on the command line."""
    signal.signal(signal.SIGTERM, _stop)
    name, folder, given = sys.argv[1:]
    options = json.loads(given)
    if not options["fake"]:
        jax.devices("gpu")  # raises where there is none
    elif name != "saves":
        stager(True, roomy=False)
    measure = {
        "saves": measure_saves,
        "vault": measure_vault,
        "disk": measure_disk,
        "orbax": measure_orbax,
    }[name]
    print(json.dumps(measure(Path(folder), options)))


if __name__ == "__main__":
    main()
