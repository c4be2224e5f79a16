"""The edge around the policy: streams of agents in, decisions out, a journal and a status file for people.

    conductor = Conductor(settings, agents, journal=journal, folder=folder)
    code = conductor.run()            # in the launch process, on its main thread or another
    conductor.ask(StopAsked("SIGINT"))     # from anywhere, signal handlers included

It decides nothing: what it hears goes to `Policy.step`, and what that decides is carried out in order.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, final

import msgspec

from holdfast.clock import REAL, Clock
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.supervise.decisions import (
    AgentDown,
    Decision,
    End,
    Happening,
    KillAgent,
    NodeOffered,
    Noted,
    Resize,
    StartAgent,
    StopAsked,
    Tell,
    Tick,
)
from holdfast.supervise.messages import Report
from holdfast.supervise.policy import Policy
from holdfast.supervise.rules import PolicySettings
from holdfast.supervise.status import STATUS_FILE, RunStatus
from holdfast.supervise.stream import Stream

_log = logging.getLogger("holdfast.supervise")

_STATUS_S: Final = 0.2
"""The status file is written at most so often."""
_LONGEST_S: Final = 1.0
"""The loop looks around at least so often, whatever the policy waits for."""


class Agents(Protocol):
    """Where agents come from: this machine, or a cluster."""

    def start(self, node: int) -> Stream[Report]:
        """Start the agent of `node` and give the stream to it. Never waits for it. Fails: HoldfastError."""
        ...

    def kill(self, node: int) -> None:
        """End the agent of `node` at once and see it gone, within seconds; nothing if there is none."""
        ...


@final
class Conductor:
    """Runs one run. `run` from one thread, once; `ask` from any, and from signal handlers."""

    def __init__(
        self,
        settings: PolicySettings,
        agents: Agents,
        *,
        journal: Journal,
        folder: str | os.PathLike[str],
        clock: Clock = REAL,
        watcher: Callable[[RunStatus], None] | None = None,
    ) -> None:
        self._clock = clock
        self._policy = Policy(settings)
        self._agents = agents
        self._journal = journal
        self._status_path = os.path.join(os.fspath(folder), STATUS_FILE)
        self._watcher = watcher
        self._streams: dict[int, Stream[Report]] = {}
        self._pending: deque[Happening] = deque()
        self._wishes: deque[Resize | StopAsked | NodeOffered] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._ended: End | None = None
        self._written = -1
        self._written_at = -math.inf

    @property
    def message(self) -> str:
        """Why the run ended; empty while it goes on."""
        return self._ended.message if self._ended is not None else ""

    def ask(self, wish: Resize | StopAsked | NodeOffered) -> None:
        """Tell the policy what the user wants; it is heard at once. Never blocks."""
        self._wishes.append(wish)
        with contextlib.suppress(OSError):  # full: it is awake; closed: the run is over
            self._wake_in.send(b"!")

    def run(self) -> int:
        """Keep the run going to its end; the exit code.

        Blocks: until the run is over, which the policy's deadlines bound only once it has begun to end.
        """
        try:
            self._carry_out(self._policy.begin(now=self._clock.monotonic()))
            while self._ended is None:
                self._turn()
            return self._ended.code
        finally:
            self._close()

    def _turn(self) -> None:
        """Wait for something and handle it: reports before alarms, so that nobody's word comes too late."""
        for key, events in self._selector.select(0.0 if self._pending else self._wait_s()):
            if key.data is None:
                self._wake_up()
            else:
                self._heard(key.data, events)
        while self._wishes:
            self._pending.append(self._wishes.popleft())
        while self._pending and self._ended is None:
            happening = self._pending.popleft()
            self._carry_out(self._policy.step(happening, now=self._clock.monotonic()))
        if self._ended is None and self._policy.wake_at <= self._clock.monotonic():
            self._carry_out(self._policy.step(Tick(), now=self._clock.monotonic()))
        self._show()

    def _wait_s(self) -> float:
        now = self._clock.monotonic()
        wait = min(self._policy.wake_at - now, _LONGEST_S)
        if self._written != self._policy.version:
            wait = min(wait, self._written_at + _STATUS_S - now)
        return max(0.0, wait)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            while self._wake_out.recv(4096):
                pass

    # ---- streams

    def _heard(self, node: int, events: int) -> None:
        stream = self._streams.get(node)
        if stream is None:
            return
        if events & selectors.EVENT_WRITE:
            stream.flush()
            self._register(node, stream)
        for report in stream.take():
            if report.node == node:
                self._pending.append(report)
            else:
                _log.warning("the agent of node %d speaks for node %d; ignored", node, report.node)
        if stream.ended is not None:
            self._drop(node, stream.ended)

    def _register(self, node: int, stream: Stream[Report]) -> None:
        """Wait for room to write only while something is to be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.has_backlog else 0)
        self._selector.modify(stream.fileno(), events, node)

    def _drop(self, node: int, reason: str) -> None:
        """A stream is over: see to it that the agent is gone as well, since another may be started."""
        stream = self._streams.pop(node, None)
        if stream is None:
            return  # that it is gone is on its way to the policy: a second time would be of its successor
        self._selector.unregister(stream.fileno())
        stream.close()
        try:
            self._agents.kill(node)
        except HoldfastError as error:
            _log.warning("the agent of node %d cannot be ended: %s", node, error)
        self._pending.append(AgentDown(node, reason))

    # ---- decisions

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Tell():
                    self._tell(decision)
                case StartAgent():
                    self._start(decision.node)
                case KillAgent():
                    _log.warning("the agent of node %d is killed: %s", decision.node, decision.reason)
                    self._drop(decision.node, decision.reason)
                case Noted():
                    self._journal.append(decision.event)
                case End():
                    self._ended = decision

    def _tell(self, decision: Tell) -> None:
        stream = self._streams.get(decision.node)
        if stream is None:
            return  # gone: the policy hears of it
        stream.send(decision.command)
        if stream.ended is not None:
            # What it said before it went is heard first.
            self._heard(decision.node, 0)
        else:
            self._register(decision.node, stream)

    def _start(self, node: int) -> None:
        try:
            stream = self._agents.start(node)
        except HoldfastError as error:
            _log.warning("the agent of node %d cannot be started: %s", node, error)
            self._pending.append(AgentDown(node, f"cannot be started: {error.message}"))
            return
        self._streams[node] = stream
        self._selector.register(stream.fileno(), selectors.EVENT_READ, node)

    # ---- for people

    def _show(self) -> None:
        """Write the status file if something changed and the last time is long enough ago."""
        now = self._clock.monotonic()
        if self._policy.version == self._written:
            return
        if now < self._written_at + _STATUS_S and self._ended is None:
            return
        self._written, self._written_at = self._policy.version, now
        status = self._policy.status(now=now, wall=self._clock.wall(), pid=os.getpid())
        if self._watcher is not None:
            self._watcher(status)
        try:
            _write(self._status_path, msgspec.json.encode(status))
        except OSError as error:
            _log.warning("the status of the run cannot be written: %s", error)

    def _close(self) -> None:
        for node in list(self._streams):
            self._drop(node, "the run is over")
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


def _write(path: str, data: bytes) -> None:
    """Replace the file in one step: a reader sees the old one or the new one."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
