"""What must hold in a supervised run, checked by an account that is kept apart from the policy's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, final

from holdfast.supervise.decisions import AgentDown, Decision, End, Happening, KillAgent, StartAgent, Tell
from holdfast.supervise.messages import (
    DONE,
    KILLED,
    PREEMPTED,
    Activate,
    AgentUp,
    Command,
    Drain,
    Kill,
    Seat,
    Shutdown,
    Spawn,
    WorkerActive,
    WorkerDrained,
    WorkerEnded,
    WorkerParked,
    WorkerProgress,
)
from holdfast.supervise.rules import PolicySettings
from holdfast.testing.supervision.agents import Agent, Machine
from holdfast.testing.supervision.processes import Process

_STORM: Final = 200
"""So many steps at one moment are a circle."""


class Violation(AssertionError):
    """Something that must hold does not."""


@dataclass(slots=True)
class Life:
    """A worker by what was said to and by its agent."""

    node: int
    seat: Seat | None
    parked: bool = False
    killed: bool = False
    asked_to_leave: bool = False
    left: bool = False
    floor: int = -1


@dataclass(slots=True)
class Account:
    """Failures of one replica for one cause since its last progress."""

    failures: list[float] = field(default_factory=list)


@final
class Oracle:
    """Watches the policy and the nodes."""

    def __init__(self, settings: PolicySettings, machine: Machine) -> None:
        self._settings = settings
        self._machine = machine
        self._lives: dict[int, Life] = {}
        self._last_number = 0
        self._up: set[int] = set()
        self._started: set[int] = set()
        self._accounts: dict[tuple[int, str], Account] = {}
        self._not_before: dict[int, float] = {}
        self._overdrawn: dict[tuple[int, str], int] = {}
        self._newest = -1
        self._done: dict[tuple[int, int], set[int]] = {}
        self._finished = False
        self._moment = (-math.inf, 0)
        self.recoveries = 0
        self.losses = 0
        self.end: End | None = None

    # ---- the policy

    def stepped(self, happening: Happening | None, decisions: list[Decision], now: float) -> None:
        """One step of the policy."""
        at, count = self._moment
        self._moment = (now, count + 1) if at == now else (now, 1)
        if self._moment[1] > _STORM:
            raise Violation(f"{_STORM} steps at one moment, the last for {happening!r}")
        if happening is not None:
            self._told(happening, now)
        for decision in decisions:
            self._decided(decision, now)

    def _told(self, happening: Happening, now: float) -> None:
        match happening:
            case AgentDown():
                self._up.discard(happening.node)
                self._started.discard(happening.node)
                self._lives = {n: life for n, life in self._lives.items() if life.node != happening.node}
            case AgentUp():
                self._up.add(happening.node)
            case WorkerParked():
                if happening.worker in self._lives:
                    self._lives[happening.worker].parked = True
            case WorkerActive():
                if (life := self._lives.get(happening.worker)) is not None and life.floor < 0:
                    life.floor = self._newest
            case WorkerDrained():
                if happening.worker in self._lives:
                    self._lives[happening.worker].left = True
            case WorkerProgress():
                self._progress(happening)
            case WorkerEnded():
                self._ended(happening, now)

    def _progress(self, report: WorkerProgress) -> None:
        life = self._lives.get(report.worker)
        if life is None or life.seat is None:
            return
        self._newest = max(self._newest, report.step)
        if life.killed:
            return
        if life.floor < 0:
            life.floor = report.step
        if life.floor >= 0 and report.step >= life.floor + self._settings.progress_steps:
            for replica, cause in list(self._accounts):
                if replica == life.seat.replica:
                    del self._accounts[replica, cause]

    def _ended(self, report: WorkerEnded, now: float) -> None:
        life = self._lives.pop(report.worker, None)
        if life is None or life.seat is None or life.killed:
            return
        if report.cause == DONE and not life.left:
            done = self._done.setdefault((life.seat.replica, life.seat.attempt), set())
            done.add(life.seat.index)
            self._finished = self._finished or len(done) == self._settings.workers_per_replica
            return
        if life.asked_to_leave:
            return
        if self._finished:
            return  # nothing is to be done any more
        replica, cause = life.seat.replica, report.cause
        self.losses += 1
        account = self._accounts.setdefault((replica, cause), Account())
        account.failures.append(now)
        count = len(account.failures)
        allowance = self._settings.allowance(cause)
        wait = 0.0 if count == 1 else min(allowance.longest_s, allowance.first_s * 2.0 ** (count - 2))
        self._not_before[replica] = now + wait
        if cause in (KILLED, PREEMPTED):
            return
        stillborn = self._newest < 0 and report.step < 0 and count >= self._settings.stillborn_failures
        if stillborn or (allowance.limit and count > allowance.limit):
            self._overdrawn[replica, cause] = count

    def _decided(self, decision: Decision, now: float) -> None:
        if self.end is not None:
            raise Violation(f"{decision!r} after the end")
        match decision:
            case StartAgent():
                if decision.node in self._started:
                    raise Violation(f"the agent of node {decision.node} is started while there is one")
                self._started.add(decision.node)
            case KillAgent():
                if decision.node not in self._started:
                    raise Violation(f"the agent of node {decision.node} is killed and is not there")
            case End():
                self.end = decision
                self._check_end(decision)
            case Tell():
                self._tells(decision.node, decision.command, now)

    def _tells(self, node: int, command: Command, now: float) -> None:
        if node not in self._up:
            raise Violation(f"{command!r} goes to node {node}, which has no agent")
        match command:
            case Spawn():
                if command.worker <= self._last_number:
                    raise Violation(f"{command!r}: the number was given before")
                self._last_number = command.worker
                self._lives[command.worker] = Life(node, command.seat)
                self._seat(command.seat, now)
            case Activate():
                life = self._lives.get(command.worker)
                if life is None or life.node != node or life.seat is not None or life.killed:
                    raise Violation(f"{command!r} for {life}")
                life.seat = command.seat
                self._seat(command.seat, now)
            case Kill() | Drain():
                life = self._lives.get(command.worker)
                if life is None or life.node != node:
                    raise Violation(f"{command!r} for {life}")
                if isinstance(command, Kill):
                    life.killed = True
                else:
                    life.asked_to_leave = True
            case Shutdown():
                if command.reason == "all steps are done" and not self._finished:
                    raise Violation("all steps are to be done, and no replica has finished")

    def _seat(self, seat: Seat | None, now: float) -> None:
        if seat is None:
            return
        if self._finished:
            raise Violation(f"{seat} is given away although all steps are done")
        if seat.attempt > 0 and seat.index == 0:
            self.recoveries += 1
        if now < self._not_before.get(seat.replica, -math.inf) - 1e-9:
            raise Violation(f"{seat} is given away {self._not_before[seat.replica] - now:.2f} s too early")
        if not 0 <= seat.replica < self._settings.most:
            raise Violation(f"there is no {seat}")
        if self._overdrawn:
            raise Violation(f"{seat} is given away although {self._overdrawn} is more than is allowed")

    def _check_end(self, end: End) -> None:
        if end.code == 0 and not self._finished:
            raise Violation("ended with 0 and no replica has finished")
        if end.code == 80 and not self._overdrawn:
            raise Violation(f"ended with 80 and nothing is spent: {end.message}")
        if self._overdrawn and end.code not in (75, 78, 79, 80):
            raise Violation(f"ended with {end.code} although {self._overdrawn} is more than is allowed")

    # ---- the nodes

    def seated(self, agent: Agent, process: Process, seat: Seat) -> None:
        """A process gets a seat: nobody else may have it, and nobody of another life of its replica."""
        for other in self._machine.processes:
            if other is process or other.seat is None or other.seat.replica != seat.replica:
                continue
            if not other.alive:
                continue  # it has ended, and its agent is about to see it
            if other.seat.index == seat.index:
                raise Violation(f"workers {other.number} and {process.number} are both in {seat}")
            if other.seat.attempt != seat.attempt:
                raise Violation(f"worker {other.number} of {other.seat} lives while {seat} begins")

    def commanded(self, agent: Agent, command: Command) -> None:
        """An agent carries a command out."""
        if isinstance(command, Spawn) and command.worker in agent.numbers:
            raise Violation(f"{command!r} comes a second time")
