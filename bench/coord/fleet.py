"""The clients of a measurement: one or more processes, told what to do over their standard input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from bench.coord.crowds import moment
from bench.coord.process import await_line, ended, quiet_environment

_AHEAD_S = 0.02
"""How far ahead processes are told to start, so that all of them can start at once."""


@dataclass(frozen=True, slots=True)
class Done:
    """What all processes did: from the first start to the last end, and what each of them returned."""

    started: float
    ended: float
    found: list[Any]

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@final
class Fleet:
    """Client processes that work in step."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def do(self, what: str, times: int = 0, *, alone: bool = False) -> Done:
        """Have all processes (`alone`: the first) do something at the same time. Fails: RuntimeError."""
        chosen = self._processes[:1] if alone else self._processes
        at = moment() + _AHEAD_S
        order = json.dumps({"do": what, "times": times, "at": at}).encode() + b"\n"
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(order)
            process.stdin.flush()
        answers = [json.loads(await_line(process)) for process in chosen]
        return Done(
            min(answer["started"] for answer in answers),
            max(answer["ended"] for answer in answers),
            [answer["found"] for answer in answers],
        )


@contextmanager
def fleet(subject: str, address: str, sizes: Sequence[int]) -> Iterator[Fleet]:
    """One process for each of `sizes`, with that many clients; they are ended afterwards, come what may."""
    processes: list[subprocess.Popen[bytes]] = []
    first = 0
    try:
        for size in sizes:
            about = {"address": address, "first": first, "size": size, "total": sum(sizes)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.coord.client", subject, json.dumps(about)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=quiet_environment(),
                    start_new_session=True,
                )
            )
            first += size
        for process in processes:
            await_line(process)
        yield Fleet(processes)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            ended(process)
