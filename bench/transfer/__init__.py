"""Transfers: trees between two processes beside plain sockets, memcpy, JAX, Ray and gloo."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from bench import machine
from bench.report import Bar, Refused, Report

BARS = {
    "tcp_vs_raw": Bar("TCP without checksums / plain sockets", "at least", 0.9),
    "tcp_checked_vs_raw": Bar("TCP with checksums / plain sockets", "at least", 0.8),
    "local_vs_memcpy": Bar("same node, no checksums / one copy by one thread", "at least", 0.8),
    "many_vs_one": Bar("1,000 arrays / one of the same bytes", "at least", 0.9),
    "vs_jax_best": Bar("same node / jax.experimental.transfer, tuned", "at least", 1.5),
    "vs_jax_default": Bar("same node / jax.experimental.transfer as it comes", "at least", 3),
    "vs_ray": Bar("same node / Ray's object store", "at least", 1),
    "vs_gloo": Bar("same node / torch's gloo", "at least", 1),
    "rerun_overhead_us": Bar("run of tiny arrays, beyond 5 µs per segment", "at most", 1000),
}

PEERS = ("jax", "ray", "torch")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=9, help="pairs of each comparison (default 9)")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="which to measure, with commas (default: all; '' for none)"
    )


def run(args: argparse.Namespace) -> Report:
    """Measure everything."""
    from bench.transfer.rounds import SMOKE, Plan, Rounds

    wanted = [name for name in args.peers.split(",") if name]
    if unknown := set(wanted) - set(PEERS):
        raise Refused(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    rounds = 1 if args.smoke else args.rounds
    plan = SMOKE if args.smoke else Plan()
    _require_memory(max(plan.sizes))
    about = machine.description(Path.cwd())
    absent = [name for name in wanted if find_spec(name) is None]
    measured = Rounds(plan, [name for name in wanted if name not in absent], rounds, progress)
    measured.run()
    notes = [f"not installed, so not measured: {name}" for name in absent]
    notes += [f"failed: {failure}" for failure in measured.failures]
    if args.smoke:
        notes.append("a smoke run: little data and cold code, the numbers mean nothing")
    ratios = {key: measured.value(key) for key in BARS if key != "rerun_overhead_us"}
    return Report(
        bars=BARS,
        values={**ratios, "rerun_overhead_us": measured.rerun_overhead_us()},
        method=_method(rounds, measured.way(), about),
        versions=machine.versions("holdfast", "numpy", "xxhash", "jax", "jaxlib", "ray", "torch"),
        raw=measured.raw(),
        notes=notes,
    )


_TREES_AT_ONCE = 8
"""The tree in memory: in the sources and targets of three subjects, with what JAX stages on the way."""


def _require_memory(nbytes: int) -> None:
    wanted, there = _TREES_AT_ONCE * nbytes, machine.memory_bytes("MemAvailable")
    if there < wanted:
        raise Refused(
            f"{there / 2**30:.1f} GiB of memory are available, the benchmark needs {wanted / 2**30:.1f} GiB"
        )


def _method(rounds: int, way: str, about: str) -> str:
    return (
        f"Every ratio is the median of {rounds} pairs measured back to back, ours and the other first in "
        "turns; a key shows the tree for which it is worst (256 MiB and 2 GiB, each as one array and as "
        "1,000), the rest is below. Times are taken at the target, from asking until all bytes are there. "
        "Source and target are two processes, over the loopback, connected and warmed up by two transfers, "
        "after which the bytes are compared; memory is there before. Holdfast as it comes: with checksums, "
        "except where it says unchecked; same node: by memfd, where the source hashes what it reads back "
        "out of the target's memory; TCP: the same without it. Plain sockets: "
        f"Python, sendall and recv_into (MSG_WAITALL) into one flat buffer, {way}: the fastest of 12 ways, "
        "tried at the start. One copy: np.copyto of every array, within a process. JAX tuned: 4 "
        "transports, 32 MiB "
        "chunks, raw buffers, _pull_into_flat into arrays that are there; as it comes: pull, with the one "
        "transport that it needs; no checksums in either. Ray: an actor puts the tree, the driver gets it; "
        "both count, since the put moves the bytes; what it gets are views of the store. gloo: isend and "
        "irecv of every array. No peer has checksums: 'tcp unchecked' and 'memfd unchecked' compare like "
        "with like. Runs of tiny arrays: 1, 100 and 1,000 of 64 bytes, with checksums, by TCP and by memfd; "
        "the worst median less 5 µs per "
        f"array. Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
