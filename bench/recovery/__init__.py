"""Recovery: from a lost worker to the next step, beside torchrun and a restart of all with Orbax."""

from __future__ import annotations

import argparse
import compileall
import sys
import tempfile
from pathlib import Path

import holdfast
from bench import machine
from bench.report import Bar, Report

LANES = 6
SAVE_EVERY = 50

BARS = {
    "replica_lost_s": Bar("SIGKILL of a replica's worker until the next step", "at most", 0.3),
    "standby_back_s": Bar("... until its successor has done a step with lanes of its own", "at most", 2),
    "group_replaced_s": Bar(
        "SIGKILL in a replica of 2 workers until the next step (CPU, gloo)", "at most", 1.2
    ),
    "all_lost_s": Bar("all workers and the agent killed, from the vault", "at most", 3),
    "all_lost_disk_s": Bar("... the vault too, from disk (no bar)", "at most", float("inf")),
    "hang_s": Bar("SIGSTOP until the next step, beyond three steps", "at most", 2),
    "vs_torchrun": Bar("torchrun's restart / replica_lost_s", "at least", 10),
    "vs_restart_orbax": Bar("restart of all with Orbax / replica_lost_s", "at least", 10),
    "overhead_ms": Bar(
        "CPU per step of agent, coordinator, vault, launch and Holdfast's threads in workers", "at most", 2
    ),
    "snapshot_vs_memcpy": Bar("step.done that saves 100 MB into the vault / one copy of it", "at most", 1.3),
    "goodput_60s": Bar("undisturbed / actual time, a worker killed every 60 s", "at least", 0.93),
    "goodput_15s": Bar("... every 15 s", "at least", 0.8),
    "goodput_15s_mixed": Bar("... half of them stopped instead (no bar)", "at least", 0),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=7, help="losses of each kind (default 7)")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of each goodput run (default 5)")
    parser.add_argument(
        "--only",
        default="",
        help="parts to measure, with commas: lost,hang,group,all,overhead,snapshot,peers,goodput",
    )


def run(args: argparse.Namespace) -> Report:
    """Measure everything."""
    from bench.recovery.measuring import Measuring

    # As an installation does: a checkout whose bytecode is not kept would compile itself in every process.
    for package in (Path(holdfast.__file__).parent, Path(__file__).parents[1]):
        compileall.compile_dir(package, quiet=2)
    wanted = set(args.only.split(",")) if args.only else set()
    rounds = 1 if args.smoke else args.rounds
    about = machine.description(Path.cwd())
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as folder:
        measuring = Measuring(Path(folder), rounds, wanted, args.minutes, args.smoke, progress)
        measuring.run()
    values = {key: measuring.values.get(key) for key in BARS}
    return Report(
        bars=BARS,
        values=values,
        method=_method(rounds, args.minutes, about),
        versions=machine.versions("holdfast", "numpy", "jax", "jaxlib", "torch", "orbax-checkpoint"),
        raw=measuring.raw,
        notes=measuring.notes,
    )


def _method(rounds: int, minutes: float, about: str) -> str:
    return (
        f"Medians of {rounds} losses. A transformer of two layers and 0.95 M parameters, f32, Adam, "
        f"sequences of 64, 12 rows a step in {LANES} lanes, three replicas of one process and one parked "
        "process, on one machine. A loss is a signal to the worker of a random seat at a random moment "
        "within a step, once all replicas take part and the parked process is ready; times are from the "
        "signal to the journal's record of the next step. torchrun: the same model in PyTorch, three "
        "processes, gradients by gloo, saved to disk every step, --monitor-interval 0.1. Restart of all: "
        "one JAX world of three processes over gloo, Orbax saves every step, the parent sees the death at"
        " once, kills and restarts all, JAX's compile cache on (on CPUs only rank 0 finds its programs "
        "there). All lost: a save every 10 steps, at least two of them since the loss before. Snapshot: 25 "
        "arrays of 4 MB, two saves first so that the vault has its memory, against one copy by one thread "
        f"into memory that is there. Goodput: {minutes:g} minutes of steps, SIGKILL of a random worker (or "
        "SIGSTOP, where mixed) at exponential intervals, against an undisturbed run of the same steps in the "
        "same benchmark; final states are compared bit by bit. Holdfast's bytecode is compiled, as if it "
        f"were installed. Machine: {about}."
    )


def progress(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)
