"""The peers: torchrun's elastic restart, and a parent that restarts all of a JAX world with Orbax."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
WAIT_S = 240.0
_STEPS = "1000000"


def _steps(folder: Path) -> list[tuple[int, float]]:
    with suppress(OSError):
        lines = (folder / "steps").read_text().splitlines()
        return [
            (int(step), float(at)) for step, at in (line.split() for line in lines if line.count(" ") == 1)
        ]
    return []


def _await_step(folder: Path, after: float, count: int = 1) -> float:
    """The monotonic time of the `count`th step that was done after a moment."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        later = [at for _, at in _steps(folder) if at > after]
        if len(later) >= count:
            return later[count - 1]
        time.sleep(0.005)
    raise RuntimeError(f"no step within {WAIT_S:g} s")


def _kill_one(folder: Path, world: int) -> float:
    time.sleep(random.uniform(0.0, 0.1))
    pid = int((folder / f"pid{random.randrange(world)}").read_text())
    at = time.clock_gettime(time.CLOCK_MONOTONIC)
    os.kill(pid, signal.SIGKILL)
    return at


def torchrun_times(folder: Path, world: int, rounds: int) -> list[float]:
    """Seconds from the SIGKILL of a worker to the next step, again and again."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)),
        *("--max-restarts", "1000", "--monitor-interval", "0.1"),
        *(str(HERE / "torch_trainer.py"), str(folder), _STEPS),
    ]
    # By default the workers of all attempts share one store, whose keys carry no attempt: those of the second
    # find the addresses that those of the first left there, and never connect.
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)
    found = []
    try:
        last = 0.0
        for _ in range(rounds):
            _await_step(folder, last, 10)
            at = _kill_one(folder, world)
            # Steps that were under way when the worker died may still be written by rank 0.
            last = _await_step(folder, at + 0.25)
            found.append(last - at)
    finally:
        process.terminate()  # it ends its workers, which are in sessions of their own
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30.0)
    return found


class RestartAll:
    """The processes of one JAX world; if one ends, all are ended and started again."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder, self._world = folder, world
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with open(self._folder / "log", "ab") as log:
            self._processes = [
                subprocess.Popen(
                    [
                        *(sys.executable, str(HERE / "orbax_trainer.py"), str(self._folder), _STEPS),
                        *(str(rank), str(self._world), str(port)),
                    ],
                    stdout=log,
                    stderr=log,
                )
                for rank in range(self._world)
            ]

    def restart_when_one_ends(self) -> None:
        """Blocks: until one has ended, which is noticed at once; then all are started again."""
        pollers = [os.pidfd_open(one.pid) for one in self._processes]
        try:
            select.select(pollers, [], [], WAIT_S)
        finally:
            for fd in pollers:
                os.close(fd)
        self.end()
        self.start()

    def end(self) -> None:
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.wait(30.0)


def orbax_times(folder: Path, world: int, rounds: int) -> list[float]:
    """Seconds from the SIGKILL of a worker to the next step, with all restarted by a warm compile cache."""
    every = RestartAll(folder, world)
    every.start()
    found = []
    try:
        _await_step(folder, 0.0, 5)
        every.end()  # so that the cache of compiled programs is warm in every measured restart
        every.start()
        last = time.clock_gettime(time.CLOCK_MONOTONIC)
        for _ in range(rounds):
            _await_step(folder, last, 5)
            at = _kill_one(folder, world)
            every.restart_when_one_ends()
            last = _await_step(folder, at + 0.25)
            found.append(last - at)
    finally:
        every.end()
    return found
