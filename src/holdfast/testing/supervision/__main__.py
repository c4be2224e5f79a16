"""`python -m holdfast.testing.supervision`: run seeds, in several processes if asked; say which fail."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.testing.supervision.simulation import Failure, simulate

_SHOWN: Final = 20
"""Failures that are shown, of each process and in the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every seed held, 1 if one did not."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.testing.supervision", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed; prints its trace if it fails")
    parser.add_argument(
        "--seeds", default="0:1000", metavar="A:B", help="seeds A to B-1 (default %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print traces, of a single seed always")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return 0 if _told(chosen.seed, always=chosen.verbose) else 1
    first, last = (int(part) for part in chosen.seeds.split(":"))
    start = time.monotonic()
    if chosen.jobs > 1:
        failed = _in_processes(first, last, chosen.jobs)
    else:
        failed = [seed for seed in range(first, last) if not _held(seed, verbose=chosen.verbose)]
    took = time.monotonic() - start
    count = last - first
    print(f"{count} seeds in {took:.1f} s ({1000 * took / max(1, count):.1f} ms each), {len(failed)} failed")
    for seed in failed[:_SHOWN]:
        print(f"  python -m holdfast.testing.supervision --seed {seed}")
    return 1 if failed else 0


def _told(seed: int, *, always: bool) -> bool:
    """Run one seed with its trace; whether it held."""
    try:
        outcome = simulate(seed, tracing=True, keep_trace=always)
    except Failure as failure:
        print("\n".join(failure.trace))
        print(f"\nseed {seed} failed: {failure.problem}")
        return False
    if always:
        print("\n".join(outcome.trace))
    print(f"seed {seed} held: {outcome.summary()}")
    return True


def _held(seed: int, *, verbose: bool) -> bool:
    try:
        simulate(seed)
    except Failure as failure:
        print(f"failed {seed}: {failure.problem.splitlines()[0][:300]}", flush=True)
        return False if not verbose else _told(seed, always=False)
    return True


def _in_processes(first: int, last: int, jobs: int) -> list[int]:
    """Run the seeds in slices of their own processes; those that failed."""
    size = max(1, min(2000, -(-(last - first) // jobs)))
    slices = iter([(a, min(a + size, last)) for a in range(first, last, size)])
    failed: list[int] = []
    running: list[subprocess.Popen[str]] = []
    for one in slices:
        while len(running) >= jobs:
            failed += _reaped(running)
        running.append(_started(one))
    while running:
        failed += _reaped(running)
    return sorted(failed)


def _started(seeds: tuple[int, int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "holdfast.testing.supervision", "--seeds", f"{seeds[0]}:{seeds[1]}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _reaped(running: list[subprocess.Popen[str]]) -> Iterator[int]:
    """Wait for the oldest, tell what it told; the seeds that failed."""
    process = running.pop(0)
    output, _ = process.communicate()
    found = 0
    for line in output.splitlines():
        if line.startswith("failed "):
            found += 1
            if found <= _SHOWN:
                print(line, flush=True)
            yield int(line.split()[1].rstrip(":"))
    if process.returncode not in (0, 1) or (process.returncode == 1 and not found):
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")


if __name__ == "__main__":
    sys.exit(main())
