"""A run under `holdfast launch` in a process of its own, to be disturbed and watched through its journal.

with LaunchedRun(script, "200", folder=tmp, replicas=3, parked=1) as run:
    run.await_step(5)
    os.kill(run.pid(replica=1), signal.SIGKILL)
    assert run.wait(60.0) == 0
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

import msgspec

from holdfast.clock import Deadline
from holdfast.errors import DeadlineError
from holdfast.journal import Record, StepDone, WorkerSpawned, follow, read
from holdfast.supervise.status import STATUS_FILE, RunStatus

_GRACE_S = 20.0


@final
class LaunchedRun:
    """One launch of one run. Leaving the context ends it, by force if need be, and all its processes."""

    def __init__(
        self,
        script: str | os.PathLike[str],
        *args: str,
        folder: str | os.PathLike[str],
        run: str = "run",
        replicas: int = 1,
        workers_per_replica: int = 1,
        parked: int = 0,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        shown: bool = False,
        program: Sequence[str] = ("-m", "holdfast.cli", "launch"),
    ) -> None:
        """Start it. `shown`: what the launch prints goes where this process prints, not into `log`."""
        self.folder = Path(folder) / run
        self.log = Path(folder) / f"{run}.launch.log"
        self.journal = self.folder / "journal.jsonl"
        self._command = [
            *(sys.executable, *program, "--run", run, "--folder", os.fspath(folder)),
            *("--replicas", str(replicas), "--workers-per-replica", str(workers_per_replica)),
            *("--parked", str(parked), *options, os.fspath(script), *args),
        ]
        self._env = {**os.environ, **(env or {})}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=None if shown else log,
                stderr=None if shown else log,
                env=self._env,
            )

    # ---- what is known

    def status(self) -> RunStatus | None:
        """What `holdfast status` would show; None before there is anything."""
        with suppress(OSError):
            return msgspec.json.decode((self.folder / STATUS_FILE).read_bytes(), type=RunStatus)
        return None

    def records(self) -> list[Record]:
        """The journal so far."""
        return list(read(self.journal)) if self.journal.exists() else []

    def pid(self, *, replica: int, index: int = 0, timeout_s: float = 60.0) -> int:
        """The process that holds a seat and takes part. Blocks: until there is one. Fails: DeadlineError."""
        deadline = Deadline(timeout_s)
        while True:
            status = self.status()
            for seat in status.seats if status is not None else ():
                if (seat.replica, seat.index) == (replica, index) and seat.slot >= 0 and seat.pid:
                    return seat.pid
            self._check(deadline, f"a worker in seat {index} of replica {replica}")

    def pids(self) -> dict[int, int]:
        """All processes that were ever started for workers, number to process id."""
        return {
            one.event.worker: one.event.pid for one in self.records() if isinstance(one.event, WorkerSpawned)
        }

    # ---- waiting

    def await_record(self, wanted: Callable[[Record], bool], timeout_s: float = 60.0) -> Record:
        """The first record that is wanted, of those there are and those to come. Fails: DeadlineError."""
        for record in follow(self.journal, timeout_s=timeout_s, stop=self._ended):
            if wanted(record):
                return record
        raise DeadlineError(f"the run ended (code {self.process.returncode}) without it; {self.tail()}")

    def await_step(self, step: int, timeout_s: float = 120.0, *, after: float = 0.0) -> Record:
        """The record of a step at or beyond `step`, written after the wall time `after`."""

        def wanted(record: Record) -> bool:
            return isinstance(record.event, StepDone) and record.event.step >= step and record.t > after

        return self.await_record(wanted, timeout_s)

    def wait(self, timeout_s: float) -> int:
        """The exit code of the launch. Fails: DeadlineError."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"the run did not end within {timeout_s:g} s; {self.tail()}") from None

    def tail(self, lines: int = 40) -> str:
        """The end of what the launch printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def _check(self, deadline: Deadline, what: str) -> None:
        """Fail if the run or the time is over; let a moment pass otherwise."""
        if self._ended():
            raise DeadlineError(
                f"the run ended (code {self.process.returncode}) before {what}; {self.tail()}"
            )
        if not deadline.remaining():
            raise DeadlineError(f"no {what} within {deadline.timeout_s:g} s; {self.tail()}")
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.02)

    # ---- the end

    def close(self) -> None:
        """End the launch: orderly first, then by force. Its agents and workers die with it."""
        if self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self.process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_GRACE_S)
                    break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
