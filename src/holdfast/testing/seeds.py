"""Seeds of a simulator, run from the command line: in several processes if asked; says which fail."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol, final

_SHOWN: Final = 20
"""Failures that are shown, of each process and in the end."""


class Failure(AssertionError):
    """A seed under which something went wrong; `trace` says how it came to that."""

    def __init__(self, seed: int, problem: str, trace: list[str]) -> None:
        super().__init__(f"seed {seed}: {problem}")
        self.seed = seed
        self.problem = problem
        self.trace = trace


class Outcome(Protocol):
    """What a seed came to."""

    @property
    def trace(self) -> tuple[str, ...]: ...

    def summary(self) -> str: ...


class Simulate(Protocol):
    """Runs one seed. Fails: Failure, with a trace if asked for."""

    def __call__(self, seed: int, *, tracing: bool = False, keep_trace: bool = False) -> Outcome: ...


@final
class Seeds:
    """The command line of the simulator that is run as `python -m MODULE`."""

    def __init__(self, module: str, simulate: Simulate) -> None:
        self._module = module
        self._simulate = simulate

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """0 if every seed held, 1 if one did not."""
        about = "run seeds, in several processes if asked; say which fail"
        parser = argparse.ArgumentParser(prog=f"python -m {self._module}", description=about)
        parser.add_argument("--seed", type=int, help="one seed; prints its trace if it fails")
        parser.add_argument(
            "--seeds", default="0:1000", metavar="A:B", help="seeds A to B-1 (default %(default)s)"
        )
        parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
        parser.add_argument(
            "-v", "--verbose", action="store_true", help="print traces, of a single seed always"
        )
        chosen = parser.parse_args(arguments)
        if chosen.seed is not None:
            return 0 if self._told(chosen.seed, always=chosen.verbose) else 1
        first, last = (int(part) for part in chosen.seeds.split(":"))
        start = time.monotonic()
        if chosen.jobs > 1:
            failed = self._in_processes(first, last, chosen.jobs)
        else:
            failed = [seed for seed in range(first, last) if not self._held(seed, verbose=chosen.verbose)]
        took = time.monotonic() - start
        count = last - first
        each = 1000 * took / max(1, count)
        print(f"{count} seeds in {took:.1f} s ({each:.1f} ms each), {len(failed)} failed")
        for seed in failed[:_SHOWN]:
            print(f"  python -m {self._module} --seed {seed}")
        return 1 if failed else 0

    def _told(self, seed: int, *, always: bool) -> bool:
        """Run one seed with its trace; whether it held."""
        try:
            outcome = self._simulate(seed, tracing=True, keep_trace=always)
        except Failure as failure:
            print("\n".join(failure.trace))
            print(f"\nseed {seed} failed: {failure.problem}")
            return False
        if always:
            print("\n".join(outcome.trace))
        print(f"seed {seed} held: {outcome.summary()}")
        return True

    def _held(self, seed: int, *, verbose: bool) -> bool:
        try:
            self._simulate(seed)
        except Failure as failure:
            print(f"failed {seed}: {failure.problem.splitlines()[0][:300]}", flush=True)
            return False if not verbose else self._told(seed, always=False)
        return True

    def _in_processes(self, first: int, last: int, jobs: int) -> list[int]:
        """Run the seeds in slices of their own processes; those that failed."""
        size = max(1, min(2000, -(-(last - first) // jobs)))
        failed: list[int] = []
        running: list[subprocess.Popen[str]] = []
        for a in range(first, last, size):
            while len(running) >= jobs:
                failed += _reaped(running)
            command = [sys.executable, "-m", self._module, "--seeds", f"{a}:{min(a + size, last)}"]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        while running:
            failed += _reaped(running)
        return sorted(failed)


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
