"""Loads: Hugging Face repositories beside safetensors + device_put and the bare disk, cold."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import machine
from bench.child import run_child
from bench.report import Bar, Refused, Report, Series
from holdfast.checkpoint.loading import READERS

BARS = {
    "load_vs_safetensors": Bar("cold load rate on 1 device / safetensors + device_put", "at least", 2),
    "load_vs_safetensors_8": Bar("the same, sharded over 8 devices", "at least", 2),
    "mapped_vs_safetensors_8": Bar("as 8 devices, joined QKV and transposes / numpy's", "at least", 1),
}

_SMOKE_BYTES = 8 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size-gib", type=float, default=1.0, help="size of the weights (default 1)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument("--threads", type=int, default=READERS, help="reading threads of holdfast")
    parser.add_argument(
        "--memory",
        choices=["as-found", "touched"],
        default="touched",
        help="touch and free memory before each measurement (default), or leave it as it is",
    )
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: build/)")


def run(args: argparse.Namespace) -> Report:
    """Measure; fails with Refused if disk or memory are too small or safetensors is not there."""
    if find_spec("safetensors") is None:
        raise Refused("safetensors is not installed: pip install -r requirements-bench.lock")
    rounds = 1 if args.smoke else args.rounds
    nbytes = _SMOKE_BYTES if args.smoke else int(args.size_gib * 2**30)
    with machine.work_folder(args.dir or Path("build"), "load") as folder:
        machine.require_room(folder, disk=nbytes + (64 << 20), memory=4 * nbytes + (1 << 30))
        about = machine.description(folder)
        options: dict[str, Any] = {"nbytes": nbytes, "rounds": rounds, "threads": args.threads}
        options["touch"] = args.memory == "touched"
        env = {"JAX_PLATFORMS": "cpu"}
        progress("writing the weights")
        made = run_child("bench.load.children", "make", folder, options, env=env)
        raw: dict[str, Series] = {}
        resident = 0.0
        for devices in (1, 8):
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
            found = run_child(
                "bench.load.children", "load", folder, options, env={**env, "XLA_FLAGS": flags.strip()}
            )
            resident = max(resident, found["resident"])
            for name, values in found["seconds"].items():
                size = 0 if name.endswith("CPU") else made["nbytes"]
                raw[f"{name}, {devices} device{'s' if devices > 1 else ''}"] = Series(
                    tuple(values), nbytes=size
                )
        return Report(
            bars=BARS,
            values=_values(raw),
            method=_method(made, rounds, args.threads, about, resident, options["touch"]),
            versions=machine.versions("holdfast", "numpy", "jax", "jaxlib", "safetensors"),
            raw=raw,
            notes=_notes(raw, args.smoke),
        )


def _values(raw: dict[str, Series]) -> dict[str, float | None]:
    def ratio(over: str, under: str) -> float:
        # Rates over rates are times the other way round: both load the same bytes.
        return raw[over].median / raw[under].median

    return {
        "load_vs_safetensors": ratio("safetensors, 1 device", "holdfast, 1 device"),
        "load_vs_safetensors_8": ratio("safetensors, 8 devices", "holdfast, 8 devices"),
        "mapped_vs_safetensors_8": ratio("safetensors mapped, 8 devices", "holdfast mapped, 8 devices"),
    }


def _notes(raw: dict[str, Series], smoke: bool) -> list[str]:
    ours = raw["holdfast, 1 device"].median
    alone, four = (raw[f"disk, {name}, 1 device"].median / ours for name in ("1 thread", "4 threads"))
    cpu = {name: raw[f"{name} CPU, 1 device"].median for name in ("holdfast", "safetensors")}
    notes = [
        f"the rate of holdfast is {alone:.2f} of one reading thread's past the cache, {four:.2f} of four's",
        f"CPU seconds of a load: holdfast {cpu['holdfast']:.2f}, safetensors {cpu['safetensors']:.2f}",
    ]
    return [*notes, "a smoke run: the numbers mean nothing"] if smoke else notes


def _method(made: dict[str, Any], rounds: int, threads: int, about: str, resident: float, touch: bool) -> str:
    free = "Free memory is as the machine has it."
    if touch:
        free = (
            "Three times the weights in memory are touched and freed before each measurement: a hypervisor "
            "takes free pages back, and their next first touch takes up to 20 times as long. Where the "
            "kernel tells when (every two seconds, here), that is done right afterwards."
        )
    return (
        f"Weights: {made['tensors']} bfloat16 tensors of a Llama ({made['nbytes']:,} bytes, random bits) in "
        f"{made['files']} files with an index, written by safetensors. Medians of {rounds} rounds after one "
        "for warming up, in which values are compared bit by bit; every round measures every subject, in an "
        "order of its own. Cold: sync, then posix_fadvise(DONTNEED) on each file, and mincore shows what "
        f"is left in the page cache (at most {100 * resident:.2f} % here; more than 1 % ends the benchmark). "
        f"holdfast: load_hub, {threads} threads. safetensors: safe_open to numpy, jax.device_put of each "
        "tensor with its sharding, until all are ready. On 8 virtual CPU devices rows and columns are cut in "
        "turn. Mapped: into the tree of holdfast's decoder, with joined QKV and transposes; numpy does them "
        "for safetensors. Disk: the same files read with O_DIRECT, 8 MiB at a time, by one thread in order "
        f"into a buffer, and by 4 threads into fresh memory. {free} Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
