"""The measurements: ours and gloo back to back, again and again; the ratio is taken pair by pair."""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self, final

from bench import machine
from bench.coord.process import ended, free_port, quiet_environment
from bench.reduce import TEAMS
from bench.reduce.side import DEADLINE_S
from bench.report import Series

_ARRAYS_AT_ONCE = 9
"""In memory for each process of both teams: inputs, sums, totals, and what gloo stages."""


@final
class Team:
    """The processes of one subject, started, warmed up, and known to sum rightly; they end with the block.

    Fails: RuntimeError, in whatever way a process fails.
    """

    def __init__(
        self, kind: str, floats: int, size: int, transports: tuple[str, ...] = ("memfd", "tcp")
    ) -> None:
        about = {"floats": floats, "size": size, "port": free_port(), "transports": transports}
        environment = quiet_environment()
        environment.pop("XLA_FLAGS", None)
        environment["JAX_PLATFORMS"] = "cpu"
        self._size = size
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.reduce.side", kind, json.dumps({**about, "rank": rank})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Self:
        try:
            members = [_answer(process) for process in self._processes]
            self._all({"do": "meet", "members": members})
            self._all({"do": "go", "times": 3})  # connections, page faults, second buffers
            expected = [self._size * (self._size + 1) / 2] * 3
            for found in self._all({"do": "values"}):
                if found != expected:
                    raise RuntimeError(f"a wrong sum: {found} instead of {expected}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def sums(self, times: int) -> tuple[float, float]:
        """The medians, at rank 0, of the seconds of a sum and of its exchange."""
        whole, exchange = zip(*self._all({"do": "go", "times": times})[0], strict=True)
        return statistics.median(whole), statistics.median(exchange)

    def _all(self, order: dict[str, Any]) -> list[Any]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        return [_answer(process) for process in self._processes]

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            ended(process)


def _answer(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], DEADLINE_S)[0]:
        process.kill()
        raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with exit code {process.wait()}")
    return json.loads(line)


@final
class Rounds:
    """All measurements."""

    def __init__(self, rounds: int, *, smoke: bool, with_gloo: bool, progress: Callable[[str], None]) -> None:
        self._rounds, self._smoke, self._with_gloo, self._progress = rounds, smoke, with_gloo, progress
        self._series: dict[str, Series] = {}
        self.values: dict[str, float | None] = {}
        self.notes: list[str] = []

    def raw(self) -> dict[str, Series]:
        """Ratios pair by pair, and the times behind them."""
        return self._series

    def measure(self, word: str, floats: int, size: int) -> None:
        """One number of floats on one number of processes."""
        title = f"{word.upper()} floats, {size} processes"
        key = f"reduce_{word}_vs_gloo{TEAMS[size]}"
        wanted, there = _ARRAYS_AT_ONCE * size * floats * 4, machine.memory_bytes("MemAvailable")
        if there < wanted:
            self.notes.append(
                f"{title}: {wanted / 2**30:.1f} GiB of memory are needed, {there / 2**30:.1f} are there"
            )
            return
        self._progress(title)
        times = 1 if self._smoke else max(3, min(50, 100_000_000 // floats))
        took: dict[str, list[float]] = defaultdict(list)
        with ExitStack() as stack:
            ours = stack.enter_context(Team("holdfast", floats, size))
            over_tcp = stack.enter_context(Team("holdfast", floats, size, ("tcp",))) if size == 2 else None
            try:
                gloo = stack.enter_context(Team("gloo", floats, size)) if self._with_gloo else None
            except RuntimeError as error:
                self.notes.append(f"failed: gloo, {title}: {error}")
                gloo = None
            for number in range(self._rounds):
                for mine in (True, False) if number % 2 else (False, True):
                    if mine:
                        whole, exchange = ours.sums(times)
                        took["holdfast"].append(whole)
                        took["holdfast, exchange"].append(exchange)
                    elif gloo is not None:
                        took["gloo"].append(gloo.sums(times)[0])
                if over_tcp is not None:
                    took["holdfast by tcp"].append(over_tcp.sums(max(1, times // 5))[0])
        for name, seconds in took.items():
            millis = tuple(1e3 * one for one in seconds)
            self._series[f"{name}, {title}"] = Series(millis, unit="ms")
        if gloo is not None:
            ratios = [theirs / our for theirs, our in zip(took["gloo"], took["holdfast"], strict=True)]
            self._series[f"{key}"] = Series(tuple(ratios), unit="×")
            self.values[key] = statistics.median(ratios)
