"""Checkpoints: saving and loading beside Orbax, torch DCP, safetensors and the bare disk."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from bench import machine
from bench.checkpoint.state import MIB, StateSpec, spec_of
from bench.child import run_child
from bench.report import Bar, Report, Series

BARS = {
    "durable_vs_raw": Bar("durable save rate / raw direct write", "at least", 0.8),
    "durable_vs_orbax": Bar("durable save rate / Orbax", "at least", 10),
    "durable_vs_dcp": Bar("durable save rate / torch DCP", "at least", 2.5),
    "durable_vs_safetensors": Bar("durable save rate / safetensors + fsync", "at least", 1.4),
    "blocked_vs_memcpy": Bar("time blocked in save() / one warm memcpy", "at most", 1.2),
    "blocked_vs_orbax": Bar("time blocked in save() / Orbax async", "at most", 0.4),
    "load_vs_raw": Bar("verified cold load rate / raw direct read", "at least", 0.85),
    "load_vs_orbax": Bar("verified cold load rate / Orbax", "at least", 6),
    "load_vs_dcp": Bar("verified cold load rate / torch DCP", "at least", 2),
    "load_vs_safetensors": Bar("verified cold load rate / safetensors", "at least", 2),
    "reshard_load_vs_same": Bar("load rate, 4 shards on 3 / 4 on 4", "at least", 0.8),
    "extra_memory_ratio": Bar("peak memory above baseline / state", "at most", 1.1),
    "checksum_cost": Bar("hash CPU-seconds / (cores × load time)", "at most", 0.08),
}

_SMOKE_BYTES = 4 * MIB
_DISK_COPIES = 9  # of the state: two files of each Holdfast, one of each peer, the probe's, and slack
_MEMORY_COPIES = 8  # state, copy target, two slots, a loaded state, and what the peers take


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size-gib", type=float, default=1.5, help="size of the state (default 1.5)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: build/)")
    parser.add_argument(
        "--memory",
        choices=["as-found", "touched"],
        default="as-found",
        help="leave free memory as it is (default), or touch and free it before each measurement",
    )
    parser.add_argument("--gpu", action="store_true", help="measure state on the GPU that is here instead")
    parser.add_argument("--gpu-gb", type=float, default=8.6, help="its size in GB (default 8.6)")
    parser.add_argument("--out", type=Path, help="with --gpu: a file for the JSON, written after each part")
    parser.add_argument("--skip-peers", action="store_true", help="measure Holdfast and the probes only")


def run(args: argparse.Namespace) -> Report:
    """Measure everything; fails with Refused if disk or memory are too small."""
    if args.gpu:
        return _on_gpu(args)
    rounds = 1 if args.smoke else args.rounds
    nbytes = _SMOKE_BYTES if args.smoke else int(args.size_gib * 2**30)
    spec = spec_of(nbytes, smoke=args.smoke)
    touch = args.memory == "touched"
    with machine.work_folder(args.dir or Path("build"), "checkpoint") as folder:
        machine.require_room(
            folder, disk=_DISK_COPIES * nbytes + 64 * MIB, memory=_MEMORY_COPIES * nbytes + 512 * MIB
        )
        about = machine.description(folder)
        # JAX is imported only now: the children choose its number of devices before they import it.
        from bench.checkpoint.rounds import Rounds

        peers = {} if args.skip_peers else _peers()
        with Rounds(folder, spec, peers, touch=touch, gently=args.smoke) as measured:
            measured.run(rounds, progress)
        progress("resharding")
        child = _children(folder, spec, rounds, touch=touch, gently=args.smoke)
        raw = {**measured.raw(), **child}
        return Report(
            bars=BARS,
            values=_values(raw),
            method=_method(spec, measured.nbytes, rounds, about, touch),
            versions=machine.versions(
                "holdfast", "numpy", "jax", "jaxlib", "xxhash", "orbax-checkpoint", "torch", "safetensors"
            ),
            raw=raw,
            notes=_notes(args.smoke, peers),
        )


def _on_gpu(args: argparse.Namespace) -> Report:
    from bench.checkpoint.gpu import GpuRun

    nbytes = _SMOKE_BYTES if args.smoke else int(args.gpu_gb * 1e9)
    with machine.work_folder(args.dir or Path("build"), "checkpoint") as folder:
        machine.require_room(folder, disk=4 * nbytes, memory=4 * nbytes + 512 * MIB)
        return GpuRun(folder, args, machine.description(folder), progress).run()


def _notes(smoke: bool, peers: dict[str, bool]) -> list[str]:
    notes = [f"not installed, so not measured: {name}" for name, there in peers.items() if not there]
    if smoke:
        notes.append("a smoke run: fixed costs and warm caches, the numbers mean nothing")
    return notes


def _peers() -> dict[str, bool]:
    from bench.checkpoint.subjects import peers_installed

    return peers_installed()


def _children(folder: Path, spec: StateSpec, rounds: int, *, touch: bool, gently: bool) -> dict[str, Series]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
    options = {"spec": asdict(spec), "rounds": rounds, "saves": 4, "touch": touch, "gently": gently}
    module, env = "bench.checkpoint.children", {"JAX_PLATFORMS": "cpu"}
    loads = run_child(module, "reshard", folder / "reshard", options, env={**env, "XLA_FLAGS": flags})
    machine.discard(folder / "reshard")
    progress("memory")
    memory = run_child(module, "memory", folder / "memory", options, env=env)
    machine.discard(folder / "memory")
    nbytes = loads["nbytes"]
    extra = memory["peak"] - memory["baseline"]
    return {
        "holdfast load, 4 shards on 4": Series(tuple(loads["same"]), nbytes=nbytes),
        "holdfast load, 4 shards on 3": Series(tuple(loads["reshard"]), nbytes=nbytes),
        "peak PSS above baseline / state": Series((extra / memory["nbytes"],), unit="×"),
    }


def _values(raw: dict[str, Series]) -> dict[str, float | None]:
    def ratio(over: str, under: str) -> float | None:
        return raw[over].median / raw[under].median if over in raw and under in raw else None

    hash_s = raw["holdfast load, hash CPU"].median
    return {
        # Rates over rates are times the other way round: every subject moves the same bytes.
        "durable_vs_raw": ratio("probe write", "holdfast save, durable"),
        "durable_vs_orbax": ratio("orbax save, durable", "holdfast save, durable"),
        "durable_vs_dcp": ratio("dcp save, durable", "holdfast save, durable"),
        "durable_vs_safetensors": ratio("safetensors save, durable", "holdfast save, durable"),
        "blocked_vs_memcpy": ratio("holdfast save, blocked", "memcpy"),
        "blocked_vs_orbax": ratio("holdfast save, blocked", "orbax save, blocked"),
        "load_vs_raw": ratio("probe read", "holdfast load"),
        "load_vs_orbax": ratio("orbax load", "holdfast load"),
        "load_vs_dcp": ratio("dcp load", "holdfast load"),
        "load_vs_safetensors": ratio("safetensors load", "holdfast load"),
        "reshard_load_vs_same": ratio("holdfast load, 4 shards on 4", "holdfast load, 4 shards on 3"),
        "extra_memory_ratio": raw["peak PSS above baseline / state"].median,
        "checksum_cost": hash_s / ((os.cpu_count() or 1) * raw["holdfast load"].median),
    }


def _method(spec: StateSpec, nbytes: int, rounds: int, about: str, touch: bool) -> str:
    free = "as the machine had it"
    if touch:
        free = "touched and freed before each measurement, since a hypervisor takes long-free pages back"
    return (
        f"State: {spec} ({nbytes:,} bytes), float32 and bfloat16 in equal numbers, random bits, "
        f"JAX arrays on CPU. Medians of {rounds} rounds after one for warming up; every round measures every "
        "subject, in an order of its own. Saves: from the call until it returns (blocked) and until the "
        "state is durable. Holdfast at its defaults writes over the file of the step it pruned last (the row "
        "`new files`: without that); old files are removed and the disk synced outside the timing. Probe: "
        "new fallocated file, random data, O_DIRECT, 4 threads, 8 MiB blocks, fsync. Memcpy: one thread, "
        "into memory already faulted in. "
        f"Loads: caches dropped before each ({machine.HOW_CACHES_ARE_DROPPED}), into memory that the process "
        f"never touched (free memory: {free}); values compared bit by bit once per loader. Peers at their "
        f"defaults. safetensors loads to numpy for the key, to JAX under an extra row. Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
