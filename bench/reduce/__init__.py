"""Reductions: sums of float32 arrays over processes of one machine, beside gloo's psum inside XLA."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from bench import machine
from bench.report import Bar, Report

SIZES = {"1m": 1_000_000, "10m": 10_000_000, "100m": 100_000_000}
"""Floats, by the word for them in the keys."""
TEAMS = {2: "", 4: "_4"}
"""Processes, and what the key says of them."""
BARS = {
    f"reduce_{word}_vs_gloo{ending}": Bar(
        f"{word.upper()} floats, {number} processes: rate / psum by gloo inside XLA", "at least", 1.5
    )
    for number, ending in TEAMS.items()
    for word in SIZES
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each comparison (default 5)")
    parser.add_argument(
        "--max-floats", type=int, default=max(SIZES.values()), help="leave larger arrays out (default: none)"
    )


def run(args: argparse.Namespace) -> Report:
    """Measure everything."""
    from bench.reduce import overlap
    from bench.reduce.rounds import Rounds

    notes = []
    if find_spec("jax") is None:
        notes.append("not installed, so not measured: jax")
    about = machine.description(Path.cwd())
    rounds = 1 if args.smoke else args.rounds
    measured = Rounds(rounds, smoke=args.smoke, with_gloo=not notes, progress=progress)
    for number in TEAMS:
        for word, floats in SIZES.items():
            if args.smoke:
                floats //= 1000
            if floats <= args.max_floats:
                measured.measure(word, floats, number)
    raw = measured.raw()
    if find_spec("jax") is not None:
        raw |= overlap.measure(rounds, smoke=args.smoke, progress=progress)
    notes += measured.notes
    if args.smoke:
        notes.append("a smoke run: little data and cold code, the numbers mean nothing")
    return Report(
        bars=BARS,
        values=measured.values,
        method=_method(rounds, about),
        versions=machine.versions("holdfast", "numpy", "xxhash", "jax", "jaxlib"),
        raw=raw,
        notes=notes,
    )


def _method(rounds: int, about: str) -> str:
    return (
        f"Every ratio is the median of {rounds} pairs: a few sums by one, then by the other, in turns; of "
        "each few the median counts, taken at the process of rank 0. All processes are on this "
        "machine, started and warmed up before, and both results are compared with the sum that is known. "
        "Holdfast, as it comes: begin, add (one lane per process, hashed and copied into shared memory), "
        "exchange, total: from a numpy array in every process to one in every process. gloo: jit of a "
        "shard_map with lax.psum over one CPU device per process, jax_cpu_collectives_implementation=gloo, "
        "the input on its device, until block_until_ready. 'exchange' is the part of Holdfast's time after "
        "the lane was added. Lanes that are computed as long as they are folded: one process, JAX arrays; "
        "the computation is a wait that takes no core; folded in the call that adds them, and beside it. "
        f"Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
