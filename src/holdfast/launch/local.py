"""Nodes on this machine: one agent each, with a folder of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Final, final

from holdfast.errors import DeadlineError, StorageError, UsageError
from holdfast.supervise.agent_config import AgentConfig, write_config
from holdfast.supervise.messages import Report
from holdfast.supervise.processes import Process, end_marked, marked, wait_all
from holdfast.supervise.stream import Stream, reports_of

_MARK: Final = "HOLDFAST_AGENT"
_GONE_S: Final = 10.0
"""A killed process is gone by then, unless the machine is in trouble."""


@final
class LocalAgents:
    """The agents of a run on this machine. `say` gets the lines that they print, from other threads."""

    def __init__(self, config: Callable[[int], AgentConfig], *, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._stopped: dict[int, float] = {}

    def start(self, node: int) -> Stream[Report]:
        """Start the agent of `node`; never waits for it. Fails: StorageError."""
        if node in self._running:
            raise UsageError(f"node {node} has an agent", hint="end it first")
        config = self._config(node)
        ours, theirs = socket.socketpair()
        fd = -1
        try:
            fd = write_config(config)
            command = [sys.executable, "-m", "holdfast.supervise.agent"]
            command += ["--config-fd", str(fd), "--stream-fd", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                # For people who look for the agent of a node.
                env={**config.env, _MARK: f"{config.folder}:{node}"},
                pass_fds=(fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Its own session: what is typed at the terminal is for the launch process to hear.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise StorageError.from_os(error, doing="start", path=sys.executable) from error
        finally:
            if fd >= 0:
                os.close(fd)
            theirs.close()
        self._running[node] = process
        assert process.stdout is not None
        reader = threading.Thread(
            target=self._read, args=(process.stdout,), name=f"holdfast-node-{node}", daemon=True
        )
        reader.start()
        self._readers = [thread for thread in self._readers if thread.is_alive()] + [reader]
        return reports_of(ours)

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._say(line.decode(errors="replace").rstrip("\n"))

    def kill(self, node: int) -> None:
        """End the agent of `node` at once; its workers die with it. Blocks: until it is gone.

        Fails: DeadlineError if it is not after some seconds.
        """
        process = self._running.pop(node, None)
        if process is None:
            return
        process.kill()
        try:
            process.wait(_GONE_S)
        except subprocess.TimeoutExpired as error:
            self._running[node] = process
            raise DeadlineError(
                f"the agent of node {node}, process {process.pid}, does not end",
                hint="it may hang in the kernel, on a file system for example: see /proc/PID/stack",
            ) from error

    def signal(self, node: int, number: int) -> None:
        """Send a signal to the agent of `node`: SIGTERM is a notice that the node goes away."""
        if (process := self._running.get(node)) is not None:
            process.send_signal(number)

    def wake(self, now: float, *, stopped_s: float) -> None:
        """Continue agents that somebody has stopped (SIGSTOP) for `stopped_s`. Call it now and then.

        The policy misses one that has come up. Of one that is only starting nobody expects a word for long.
        """
        stopped = {process.pid for process in list(self._running.values()) if _is_stopped(process.pid)}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped}
        for process in list(self._running.values()):
            if now - self._stopped.get(process.pid, now) >= stopped_s:
                process.send_signal(signal.SIGCONT)

    def pid(self, node: int) -> int | None:
        """The process of the agent of `node`."""
        process = self._running.get(node)
        return None if process is None else process.pid

    def close(self, folder: str, flush_s: float) -> None:
        """End whatever is left of the run in `folder`: agents, then parts, which may finish what they hold.

        Blocks: `flush_s` and some seconds at most.
        """
        for node in list(self._running):
            with contextlib.suppress(DeadlineError):
                self.kill(node)
            # What it had forked and is not a program of its own yet has the marks of the agent itself.
            end_marked({_MARK: f"{folder}:{node}"})
        left = []
        for pid, _ in marked({"HOLDFAST_FOLDER": folder}):
            with contextlib.suppress(OSError):
                left.append(Process(pid))
        for process in left:
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)  # one that is stopped cannot end
        wait_all(left, flush_s)
        for process in left:
            process.close()
        end_marked({"HOLDFAST_FOLDER": folder})
        for reader in self._readers:
            reader.join(_GONE_S)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        process = Process(pid)
        try:
            facts = process.facts()
            return facts is not None and facts.state == "T"
        finally:
            process.close()
    return False
