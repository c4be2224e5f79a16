"""Checkpoints of state on a GPU: calls, steps while bytes move, and restores, beside Orbax."""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench import machine
from bench.checkpoint.gpu_state import GpuSpec
from bench.child import run_child
from bench.report import Bar, Report, Series

BARS: Final = {
    "gpu_call_ms": Bar("longest save() of a fenced split step", "at most", 10),
    "gpu_slowdown": Bar("what the step after a save takes longer, fenced", "at most", 0.03),
    "gpu_writing_slowdown": Bar("what later steps take longer, until durable", "at most", 0.03),
    "gpu_full_call_ms": Bar("longest save(), no memory for a snapshot", "at most", 10),
    "gpu_full_slowdown": Bar("the step after a save, no memory for a snapshot", "at most", 0.03),
    "gpu_full_writing_slowdown": Bar("later steps until durable, no memory for a snapshot", "at most", 0.03),
    "gpu_restore_vs_orbax": Bar("first restore from the vault / Orbax, warm", "at least", 3),
}
_CHILD: Final = "bench.checkpoint.gpu_child"
PARTIAL: Final = "saves.json"
"""What the saves have shown so far, in the folder of the benchmark."""
_ALL_S: Final = 450.0
"""All of it is to fit into one lease of a machine with a GPU."""
_LEAST_S: Final = 20.0
SMOKE: Final = GpuSpec(nbytes=1 << 20, num_arrays=4, grads_s=0.002, width=32)


def spec_of(size_gb: float) -> GpuSpec:
    """A state of so many GB in 64 arrays, and a step of half a second to save it under."""
    return GpuSpec(nbytes=int(size_gb * 1e9), num_arrays=64, grads_s=0.5, width=8192)


class GpuRun:
    """The measurements one after the other; what one of them cannot do is noted, and the next is made."""

    def __init__(
        self, folder: Path, args: argparse.Namespace, about: str, progress: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._args = args
        self._about = about
        self._progress = progress
        self._spec = SMOKE if args.smoke else spec_of(args.gpu_gb)
        self._token = secrets.token_hex(16)
        self._notes: list[str] = []
        self._deadline = time.monotonic() + _ALL_S
        self._found: dict[str, dict[str, Any]] = {}

    def run(self) -> Report:
        """Measure all; the report so far goes to `--out` after each part."""
        self._part("saves", "saves", saves=2 if self._args.smoke else 5)
        sums = self._found.get("saves", {}).get("checksums")
        if sums is not None:
            for cold in (True, False):
                self._part("disk, cold" if cold else "disk", "disk", cold=cold, checksums=sums)
        machine.discard(self._folder / "holdfast")
        if self._args.skip_peers or find_spec("orbax") is None:
            self._notes.append("Orbax was not measured")
        else:
            self._part("orbax", "orbax")
        self._write()
        return self._report()

    def _part(self, name: str, measure: str, **options: Any) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s < _LEAST_S:
            self._notes.append(f"no time was left for {name}")
            return
        self._progress(f"gpu: {name}")
        given = {"spec": asdict(self._spec), "fake": self._args.smoke, "token": self._token, **options}
        environment = {"JAX_PLATFORMS": "cpu"} if self._args.smoke else {}
        try:
            self._found[name] = run_child(
                _CHILD, measure, self._folder, given, env=environment, timeout_s=left_s
            )
        except Exception as error:  # whatever ends one part must not cost the others
            self._notes.append(f"{name} failed: {type(error).__name__}: {error}")
            self._progress(self._notes[-1])
            partial = self._folder / PARTIAL
            if measure == "saves" and partial.exists():
                self._found[name] = json.loads(partial.read_text())
        self._notes += [f"{name}, {failure}" for failure in self._found.get(name, {}).get("failed", ())]
        self._write()

    def _write(self) -> None:
        if self._args.out is not None:
            self._args.out.write_text(self._report().as_json() + "\n", encoding="utf-8")

    def _report(self) -> Report:
        notes = list(self._notes)
        if self._args.smoke:
            notes.append("a smoke run on the CPU, with a driver that is none: the numbers mean nothing")
        announced = self._found.get("saves", {}).get("announced", ())
        notes += [f"route: {route} {reason}".strip() for route, reason in announced]
        notes += snapshot_notes(self._found.get("saves", {}))
        return Report(
            bars=BARS,
            values=values(self._found),
            method=_method(self._spec, self._about),
            versions=machine.versions("holdfast", "jax", "jaxlib", "numpy", "orbax-checkpoint"),
            raw=raw(self._found),
            notes=notes,
        )


def values(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The keys that have bars, as far as they were measured."""
    saves = found.get("saves", {})

    def call_ms(way: str) -> float | None:
        return 1e3 * max(saves[way]["call_s"]) if way in saves else None

    def slower(way: str, which: str) -> float | None:
        if way not in saves or not saves[way][which]:
            return None
        return _median(saves[way][which]) / _median(saves[way]["plain_s"]) - 1.0

    vault, orbax = saves.get("vault", {}).get("seconds"), found.get("orbax", {}).get("warm_s")
    return {
        "gpu_call_ms": call_ms("split, fenced"),
        "gpu_slowdown": slower("split, fenced", "copying_s"),
        "gpu_writing_slowdown": slower("split, fenced", "writing_s"),
        "gpu_full_call_ms": call_ms("full, fenced"),
        "gpu_full_slowdown": slower("full, fenced", "copying_s"),
        "gpu_full_writing_slowdown": slower("full, fenced", "writing_s"),
        "gpu_restore_vs_orbax": _median(orbax) / vault[0] if vault and orbax else None,
    }


def raw(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Series]:
    """Everything that was measured, by name."""
    series: dict[str, Series] = {}
    saves = found.get("saves", {})
    nbytes = int(saves.get("nbytes", 0))

    def add(name: str, seconds: Any, size: int = 0) -> None:
        if seconds:
            series[name] = Series(tuple(seconds), nbytes=size)

    for way, one in saves.items():
        if isinstance(one, Mapping) and "call_s" in one:
            add(f"{way}: save()", one["call_s"])
            add(f"{way}: fence()", one["fence_s"])
            add(f"{way}: step, no save", one["plain_s"])
            add(f"{way}: step, copying", one["copying_s"])
            add(f"{way}: step, writing", one["writing_s"])
    vault = saves.get("vault", {}).get("seconds", [])
    add("vault, first", vault[:1], nbytes)
    add("vault, later", vault[1:], nbytes)
    for name, one in found.items():
        if name.startswith("disk"):
            add(f"{name}, first", one["seconds"][:1], nbytes)
            add(f"{name}, later", one["seconds"][1:], nbytes)
    orbax = found.get("orbax", {})
    for name, key in (("first save, blocked", "blocked_s"), ("first save, done", "done_s")):
        add(f"orbax {name}", orbax.get(key, [])[:1])
        add(f"orbax {name.replace('first', 'later')}", orbax.get(key, [])[1:])
    add("orbax restore, warm", orbax.get("warm_s"), nbytes)
    add("orbax restore, cold", orbax.get("cold_s"), nbytes)
    if "prepare_s" in saves:
        add("prepare()", [saves["prepare_s"]], nbytes)
    return series


def snapshot_notes(saves: Mapping[str, Any]) -> list[str]:
    """Of each way whose device says what it has in use: how many saves made a snapshot there."""
    ways = {
        name: one["snapshots"] for name, one in saves.items() if isinstance(one, Mapping) and "call_s" in one
    }
    return [
        f"{name}: {sum(made)} of {len(made)} saves made a snapshot on the device"
        for name, made in ways.items()
        if None not in made
    ]


def _median(found: Any) -> float:
    return Series(tuple(found)).median


def _method(spec: GpuSpec, about: str) -> str:
    return (
        f"State: {spec.nbytes / 1e9:.2f} GB in {spec.num_arrays} float32 arrays on one device. A step is "
        f"about {spec.grads_s:g} s of matrix products that read the state (grads), then a donating update of "
        "all of it (apply); `asking` reads back at every product whether there is another; `fused` does both "
        "in one donating program. After prepare(), each way of saving: "
        "8 steps without a save; then saves, each followed by steps until it is durable. `save()` is the "
        "time of the call, of every save, the first included; `copying` the step after it, `writing` those "
        "until it is durable, all timed from their beginning until the state is computed. `fenced`: "
        "save(fenced=True) and fence() before apply. `full`: so much else lies on the device that no "
        "snapshot fits. Restores: in a fresh process whose device is started; `first` is the first of the "
        "process; page cache dropped before each where it says cold. What is restored is compared by "
        f"checksums. Orbax: StandardCheckpointer at its defaults, a process of its own. Machine: {about}."
    )
