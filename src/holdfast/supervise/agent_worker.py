"""One worker as its agent sees it: process, control socket, board, watch, log."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Final, final

from holdfast.supervise.agent_config import AgentConfig
from holdfast.supervise.board import BoardReader, Reading, make_board
from holdfast.supervise.environment import world_environment
from holdfast.supervise.logs import Tail, log_path, opened, size_of
from holdfast.supervise.messages import Seat, Word
from holdfast.supervise.parts import KIND
from holdfast.supervise.precedence import Standing
from holdfast.supervise.processes import Process, start
from holdfast.supervise.stacks import Dump
from holdfast.supervise.stream import Stream, words_of
from holdfast.supervise.watch import Watch

WORKER: Final = "worker"
_PROGRAM: Final = (sys.executable, "-m", "holdfast.supervise.worker")


@final
class Worker:
    """A process that trains, or is parked. `doom` is the cause and the words for which it was ended."""

    def __init__(self, number: int, config: AgentConfig, *, seat: Seat | None, nice: int) -> None:
        """Start it. For the main thread, whose death ends it. Fails: OSError."""
        self.number = number
        self.seat = seat
        self.nice = nice
        self.waits = False
        self.sat_down = False
        self.hushed = False
        self._entered: int | None = None
        self.trains = False
        """Whether it has done a step."""
        self.leaves = False
        """Whether it was told to."""
        self.drained = False
        self.finished = False
        self.error = ""
        """Why its program failed, as it says itself."""
        self.incarnation = ""
        self.slot = None if seat is None else seat.replica * config.workers_per_replica + seat.index
        self.doom: tuple[str, str] | None = None
        self.dump: Dump | None = None
        self.hung_at: Reading | None = None
        self.told: tuple[int, str] = (-1, "start")
        self.told_at = 0.0
        self.log = log_path(config.folder, f"{config.node}-{number}")
        self.log_from = 0
        """Where its own output begins: an earlier launch had workers of this number, too."""
        now = time.monotonic()
        ours, theirs = socket.socketpair()
        board = make_board()
        token, sink = os.pipe()
        log = -1
        try:
            os.write(sink, config.token.encode())
            os.close(sink)
            log = opened(self.log)
            self.log_from = size_of(log)
            self.process: Process = start(
                [*(config.program or _PROGRAM), *config.script],
                env=_environment(config, control=theirs.fileno(), board=board, token=token),
                log=log,
                fds=(theirs.fileno(), board, token),
                bound=True,
                nice=nice,
                cwd=config.cwd,
            )
            self.reader = BoardReader(board, since=now)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in (board, token, log):
                if fd >= 0:
                    os.close(fd)
        self.stream: Stream[Word] = words_of(ours)
        self.tail: Tail | None = None
        with contextlib.suppress(OSError):
            self.tail = Tail(self.log, since=self.log_from)
        self.watch = Watch(config.deadlines, now=now)

    @property
    def name(self) -> str:
        """For people."""
        seat = "no seat" if self.seat is None else f"replica {self.seat.replica}.{self.seat.index}"
        return f"worker {self.number} ({seat}, pid {self.process.pid})"

    @property
    def warming(self) -> bool:
        """Whether it is nice, and has not come to its seat yet."""
        return bool(self.nice) and not self.sat_down

    def is_mate_of(self, other: Worker) -> bool:
        """Whether both are of one world, as long as nobody ends this one."""
        if other is self or self.seat is None or other.seat is None or self.doom is not None:
            return False
        return self.seat.replica == other.seat.replica

    @property
    def standing(self) -> Standing:
        """Where it stands among those who start."""
        replica = None if self.seat is None else self.seat.replica
        reading = self.reading()
        waits = bool(reading.waiting)
        return Standing(replica, bool(self.incarnation), self.trains, self.warming, reading.phase, waits)

    def reading(self) -> Reading:
        """Where it is."""
        reading = self.reader.read()
        if not self.trains and reading.phase == "step":
            if self._entered is None:
                self._entered = reading.step
            self.trains = reading.step > self._entered
        return reading

    def close(self) -> None:
        """Let go of all that belonged to it."""
        if self.dump is not None:
            self.dump.close()
        self.stream.close()
        self.reader.close()
        self.process.close()
        if self.tail is not None:
            self.tail.close()


def _environment(config: AgentConfig, *, control: int, board: int, token: int) -> dict[str, str]:
    """What the worker finds in its environment. The token itself is not in it."""
    world = world_environment(
        config.workers_per_replica,
        nproc=config.nproc or None,
        cache=Path(config.folder) / "cache",
        given=config.env,
    )
    return {
        **config.env,
        **world,
        **config.marks,
        KIND: WORKER,
        "HOLDFAST_RUN": config.run,
        "HOLDFAST_LAUNCH": config.launch,
        "HOLDFAST_WORKERS": str(config.workers_per_replica),
        "HOLDFAST_COORD": f"file:{config.discovery}",
        "HOLDFAST_CONTROL_FD": str(control),
        "HOLDFAST_BOARD_FD": str(board),
        "HOLDFAST_TOKEN_FD": str(token),
        "HOLDFAST_VAULT": config.vault_socket if config.vault else "",
        "HOLDFAST_VAULTS": "\n".join(address for _, address in config.vaults),
    }
