"""Several workers as real processes, without an agent: the test plays that part."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, final

from holdfast import faults
from holdfast.coord import CoordClient
from holdfast.errors import CoordError
from holdfast.supervise.board import BoardReader, make_board
from holdfast.supervise.messages import Active, Drained, Finished, Leave, Seat, StopRun, Take, Waiting, Word
from holdfast.supervise.stream import Stream, words_of
from tests.coord.coordinator_process import CoordinatorProcess

TIMEOUT_S = 60.0
TRAINER = Path(__file__).with_name("trainer.py")
_WORKER = (sys.executable, "-m", "holdfast.supervise.worker")
TOKEN = b"a token of the tests"


@dataclass(eq=False)
class Worker:
    """One process, as its agent knows it."""

    seat: Seat | None
    process: subprocess.Popen[bytes]
    pidfd: int
    stream: Stream[Word]
    board: BoardReader
    log: Path
    words: list[Word] = field(default_factory=list)
    over: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def step(self) -> int:
        """Steps that are done, as its board says."""
        return self.board.read().step

    def has(self, kind: type[Word]) -> bool:
        return any(isinstance(word, kind) for word in self.words)

    @property
    def incarnation(self) -> str:
        return next((word.incarnation for word in self.words if isinstance(word, Active)), "")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@final
class Stage:
    """A run of `replicas` in `folder`. Leaving it ends every process it started."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        replicas: int = 3,
        min_size: int = 1,
        lanes: int = 8,
        script: Path = TRAINER,
        last_call_s: float = 30.0,
        vault: bool = False,
        out: bool = True,
        workers: int = 1,
    ) -> None:
        self.folder = folder
        self.replicas = replicas
        self.workers_per_replica = workers
        self.lanes = lanes
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        self._script = script
        self._arguments = [str(self.out), *arguments] if out else list(arguments)
        self._vault = folder / "vault.sock"
        self._vaults: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []
        self._unburied: list[str] = []
        settings = (
            f"--min-size={min_size * workers}",
            f"--max-size={replicas * workers}",
            f"--divisible-by={workers}",
            f"--num-lanes={lanes}",
            f"--last-call-s={last_call_s}",
            "--run=test",
        )
        self.coordinator = CoordinatorProcess(folder / "coord", *settings, token=TOKEN)
        self._client: CoordClient | None = None
        if vault:
            self._start_vault()

    def _start_vault(self) -> None:
        token = self.folder / "token"
        token.write_bytes(TOKEN)
        command = [sys.executable, "-m", "holdfast.vault", "--listen", str(self._vault), "--run", "test"]
        command += ["--serve", "127.0.0.1:0", "--token-file", str(token)]
        self._vaults.append(subprocess.Popen(command))
        self.until(lambda: Path(f"{self._vault}.address").exists(), "the vault")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._show()
        for worker in self.workers:
            if not worker.over:
                worker.kill()
                worker.process.wait(TIMEOUT_S)
            worker.stream.close()
            worker.board.close()
            os.close(worker.pidfd)
        if self._client is not None:
            self._client.close()
        for vault in self._vaults:
            vault.terminate()
            vault.wait(TIMEOUT_S)
        self.coordinator.__exit__(None, None, None)

    def _show(self) -> None:
        """Where everybody is, for whoever reads why a test failed."""
        for worker in self.workers:
            path = self.folder / "crash" / f"{worker.pid}.stacks"
            print(f"---- {worker.seat} pid {worker.pid} rc {worker.process.poll()}: {worker.board.read()}")
            if worker.process.poll() is None and worker.words:
                worker.kill(signal.SIGUSR2)
                ends = time.monotonic() + 2.0
                while time.monotonic() < ends and not path.stat().st_size:
                    time.sleep(0.01)
                print(path.read_text(encoding="utf-8"))
            print(worker.output())

    # ---- the agent's part

    def spawn(self, seat: Seat | None, *, rules: str = "") -> Worker:
        """Start a worker; without a seat it parks itself."""
        ours, theirs = socket.socketpair()
        board = make_board()
        token, sink = os.pipe()
        os.write(sink, TOKEN)
        os.close(sink)
        log = self.folder / f"log-{len(self.workers)}"
        env = {
            **os.environ,
            "HOLDFAST_RUN": "test",
            "HOLDFAST_COORD": self.coordinator.address,
            "HOLDFAST_FOLDER": str(self.folder),
            "HOLDFAST_NODE": "0",
            "HOLDFAST_CONTROL_FD": str(theirs.fileno()),
            "HOLDFAST_BOARD_FD": str(board),
            "HOLDFAST_TOKEN_FD": str(token),
            "HOLDFAST_VAULT": str(self._vault) if self._vaults else "",
            faults.ENV: rules,
        }
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*_WORKER, str(self._script), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                pass_fds=(theirs.fileno(), board, token),
            )
        worker = Worker(seat, process, os.pidfd_open(process.pid), words_of(ours), BoardReader(board), log)
        theirs.close()
        os.close(board)
        os.close(token)
        self.workers.append(worker)
        return worker

    def park(self, *rules: str) -> list[Worker]:
        """Start a process for each of the fault rules; returns when all of them wait for a seat."""
        parked = [self.spawn(None, rules=one) for one in rules]
        self.until(lambda: all(one.has(Waiting) or one.over for one in parked), "parked processes")
        return parked

    def start(self, *rules: str, begun_with: int = 0) -> list[Worker]:
        """Start one worker for each seat, with the fault rules that are given for it.

        `begun_with` is the number of replicas that they are told the run began with.
        """
        given = [*rules, *[""] * self.replicas * self.workers_per_replica]
        size = self.workers_per_replica
        started = self.park(*given[: self.replicas * size])
        for slot, worker in enumerate(started):
            self.activate(worker, slot // size, slot % size, begun_with=begun_with)
        return started

    def activate(
        self, worker: Worker, replica: int, index: int = 0, attempt: int = 0, *, begun_with: int = 0
    ) -> None:
        """Give a parked process a seat."""
        worker.seat = Seat(replica, index, attempt)
        replicas = begun_with or self.replicas
        worker.stream.send(Take(worker.seat, replicas, self.workers_per_replica, self.lanes))

    def held(self, step: int, *workers: Worker) -> None:
        """Wait until these workers are in `step`, which is one of `--hold`: nothing goes on behind it."""
        # Not by its board: that says so while it is still between two steps, where orders are heard.
        marks = [self.out / f"held-{step}-{one.process.pid}" for one in workers]
        self.until(lambda: all(mark.exists() for mark in marks), f"step {step}")
        assert {one.step for one in workers} == {step}

    def release(self, step: int, *, size: int = 0) -> None:
        """Let everybody go on who is held in `step`, or will come there: as one of `size` members, or once it
        has heard that somebody asks to come in, so that the next exchange lets them in.
        """
        new = self.out / "go"
        new.write_text(str(size))
        new.rename(self.out / f"go-{step}")

    def come_in(self, *newcomers: Worker) -> None:
        """Wait until these workers are members, or ask to be."""

        def come() -> bool:
            found = self.client.status()
            known = [*found.standbys, *(one.name for one in found.members)]
            return all(any(name.endswith(f"pid {one.pid}") for name in known) for one in newcomers)

        self.until(come, "newcomers")

    def order(self, worker: Worker, order: Leave | StopRun) -> None:
        worker.stream.send(order)

    @property
    def client(self) -> CoordClient:
        if self._client is None:
            self._client = CoordClient(self.coordinator.address, run="test", token=TOKEN, name="agent")
        return self._client

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Play the agent until something is so; a test fails if it is not in time."""
        ends = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends, f"waited {timeout_s:g} s for {what}"
            poller = select.poll()
            for worker in self.workers:
                if not worker.over:
                    poller.register(worker.pidfd, select.POLLIN)
                    if worker.stream.ended is None:
                        poller.register(worker.stream.fileno(), select.POLLIN)
            poller.poll(20)  # boards are read without being told of a change
            for worker in self.workers:
                if not worker.over:
                    self._attend(worker)
            self._bury()

    def _attend(self, worker: Worker) -> None:
        ended = worker.process.poll() is not None
        for word in worker.stream.take():
            worker.words.append(word)
            if isinstance(word, Waiting) and worker.seat is not None:
                self.activate(worker, worker.seat.replica, worker.seat.index, worker.seat.attempt)
        if ended:
            worker.over = True
            if worker.incarnation:
                self._unburied.append(worker.incarnation)

    def _bury(self) -> None:
        """Tell the coordinator of deaths, as soon as there is one: it may be away."""
        with contextlib.suppress(CoordError):
            while self._unburied and self.coordinator.process.poll() is None:
                self.client.bury(self._unburied[0], "its process ended", timeout_s=2.0)
                del self._unburied[0]

    # ---- what tests ask

    def finish(self, *workers: Worker, timeout_s: float = TIMEOUT_S) -> str:
        """Wait until these workers are done; the digest that all of them have."""
        self.until(lambda: all(one.over for one in workers), "the end of the run", timeout_s)
        assert [one.process.returncode for one in workers] == [0] * len(workers)
        assert all(one.has(Finished) for one in workers)
        found = {self.result(one)["digest"] for one in workers}
        assert len(found) == 1, found
        return str(found.pop())

    def result(self, worker: Worker) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.out / f"{worker.pid}.json").read_text())
        return found

    def steps(self, worker: Worker) -> dict[int, str]:
        """The state after each step that a worker has done, as digests."""
        path = self.out / f"steps-{worker.pid}"
        if not path.exists():
            return {}
        rows = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 3]
        return {int(row[0]): row[3] for row in rows}

    def gone(self, worker: Worker, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end of a process; its exit code."""
        self.until(lambda: worker.over, f"the end of pid {worker.pid}", timeout_s)
        return worker.process.returncode


__all__ = ["Drained", "Finished", "Stage", "Worker"]
