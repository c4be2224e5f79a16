"""Simulated nodes: an agent as hands and eyes of the policy, and the processes that it has.

Streams between agents and conductor are in order and complete until they break; then what was under way
towards the conductor arrives or not, and what was under way towards the agent does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from holdfast.coord import messages as m
from holdfast.errors import CoordError, FencedError
from holdfast.supervise.messages import (
    CRASHED,
    DONE,
    HUNG,
    KILLED,
    OUT_OF_MEMORY,
    STOPPED,
    Activate,
    AgentBeat,
    AgentUp,
    Command,
    Drain,
    Kill,
    NodePreempted,
    PartLost,
    Report,
    Seat,
    Shutdown,
    Spawn,
    WorkerActive,
    WorkerDrained,
    WorkerEnded,
    WorkerParked,
    WorkerProgress,
    WorkerStarted,
)
from holdfast.testing.coordination.member import Member
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Ask, Record, Rest, Script
from holdfast.testing.coordination.world import Clock, World
from holdfast.testing.supervision.processes import Job, Process

_HANG_S: Final = 1.5
_STOPPED_S: Final = 1.0


class Ear(Protocol):
    """The conductor, as agents need it."""

    def hears(self, node: int, life: int, report: Report | None) -> None:
        """A report; None at the end of the stream."""
        ...


class Observer(Protocol):
    """Sees what agents do; raises if that must not be."""

    def seated(self, agent: Agent, process: Process, seat: Seat) -> None: ...
    def commanded(self, agent: Agent, command: Command) -> None: ...


@dataclass(slots=True)
class Machine:
    """What all nodes of one simulation share."""

    world: World
    network: Network
    service: Service
    record: Record
    job: Job
    ear: Ear | None = None
    observer: Observer | None = None
    processes: set[Process] = field(default_factory=set)
    """Every live process of every node."""


@final
class Agent:
    """The agents of one node, one life after another."""

    def __init__(self, machine: Machine, node: int, *, coordinates: bool) -> None:
        self._machine = machine
        self.world = machine.world
        self.node = node
        self.coordinates = coordinates
        self.there = True
        """The node itself is there."""
        self.alive = False
        self.paused = False
        self.leaving = False
        self.life = 0
        self.processes: dict[int, Process] = {}
        self.numbers: set[int] = set()
        """Every worker number that it ever got to start, in this life."""
        self._client: Member | None = None
        self._last_up = 0.0
        self._last_down = 0.0
        self._held: list[Callable[[], None]] = []
        self._ending = False

    # ---- life and death

    def start(self) -> bool:
        """The conductor has it started; False if the node is not there."""
        if not self.there:
            return False
        self.life += 1
        self.alive, self.paused, self._ending, self.leaving = True, False, False, False
        self.numbers.clear()
        self._held.clear()
        self.world.later(self.world.between(0.05, 0.4), self._in_life, self.life, self._up)
        return True

    def _up(self) -> None:
        machine = self._machine
        self._client = Member(
            self.world, machine.network, machine.service, machine.record, f"agent{self.node}.{self.life}",
            Clock(), _bury,
        )  # fmt: skip
        self._client.start()
        self.report(AgentUp(self.node, self.life))
        self._beat()
        if self.coordinates:
            self._keep_coordinator()

    def kill(self, *, machine: bool = False) -> None:
        """The agent dies, by a fault or on order; its workers die with it."""
        if not self.alive:
            return
        if self.world.tracing:
            self.world.tell(f"agent{self.node}", "loses its machine" if machine else "dies")
        self.alive, self.paused = False, False
        for process in list(self.processes.values()):
            process.kill(machine=machine)
            self._forget(process)
        if self._client is not None:
            self._client.kill(machine=machine)
            self._client.done = True
            self._client = None
        # What was said before is heard before the end, unless the machine is gone.
        last = 0.0 if machine else self._last_up
        when = max(last, self.world.now + self.world.between(0.001, 0.05))
        self.world.at(when, self._hangs_up, self.life)

    def _hangs_up(self, life: int) -> None:
        assert self._machine.ear is not None
        self._machine.ear.hears(self.node, life, None)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            held, self._held = self._held, []
            for action in held:
                action()
            self._beat()

    def _in_life(self, life: int, action: Callable[[], None]) -> None:
        """Do it, if this life still lasts; once it goes on, if it stands still."""
        if life != self.life or not self.alive:
            return
        if self.paused:
            self._held.append(lambda: self._in_life(life, action))
        else:
            action()

    def _beat(self) -> None:
        self.report(AgentBeat(self.node))
        self.world.later(0.5, self._in_life, self.life, self._beat)

    def _forget(self, process: Process) -> None:
        self.processes.pop(process.number, None)
        self._machine.processes.discard(process)

    # ---- the stream

    def report(self, report: Report) -> None:
        self._last_up = max(self._last_up, self.world.now + self._delay())
        self.world.at(self._last_up, self._arrive, self.life, report)

    def _arrive(self, life: int, report: Report) -> None:
        assert self._machine.ear is not None
        self._machine.ear.hears(self.node, life, report)

    def _delay(self) -> float:
        roll = self.world.rng.random()
        return 0.0002 + 0.002 * roll if roll < 0.97 else 0.3 * roll

    def send(self, command: Command) -> None:
        """The conductor sends a command."""
        self._last_down = max(self._last_down, self.world.now + self._delay())
        self.world.at(self._last_down, self._in_life, self.life, lambda: self._obey(command))

    def _obey(self, command: Command) -> None:
        if self.world.tracing:
            self.world.tell(f"agent{self.node}", f"<- {command!r}")
        machine = self._machine
        assert machine.observer is not None
        machine.observer.commanded(self, command)
        match command:
            case Spawn():
                self._spawn(command)
            case Activate():
                process = self.processes.get(command.worker)
                if process is not None:
                    machine.observer.seated(self, process, command.seat)
                    process.take(command.seat)
            case Kill():
                process = self.processes.get(command.worker)
                if process is not None:
                    self._end(process, KILLED, -9)
            case Drain():
                process = self.processes.get(command.worker)
                if process is not None:
                    process.leave = True
            case Shutdown():
                self._shut_down(command)

    def _spawn(self, command: Spawn) -> None:
        machine = self._machine
        assert machine.observer is not None
        process = Process(
            self.world, machine.network, machine.service, machine.record, machine.job, self,
            command.worker, command.seat,
        )  # fmt: skip
        self.processes[command.worker] = process
        machine.processes.add(process)
        self.numbers.add(command.worker)
        if command.seat is not None:
            machine.observer.seated(self, process, command.seat)
        self.report(WorkerStarted(self.node, command.worker, command.worker))
        if self._ending:
            process.stop = True
        process.start()

    def _shut_down(self, command: Shutdown) -> None:
        self._ending = True
        for process in list(self.processes.values()):
            process.stop = True
            if process.seat is None:
                self._end(process, KILLED, -15)
        self.world.later(command.grace_s, self._in_life, self.life, self._end_all)
        self._leave_if_empty()

    def _end_all(self) -> None:
        for process in list(self.processes.values()):
            self._end(process, KILLED, -9)
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if self._ending and not self.processes and self.alive:
            self.world.later(0.01, self._in_life, self.life, self.kill)

    # ---- processes

    def says(self, process: Process, what: str) -> None:
        """A worker's word over its control socket, or a look at its board."""
        if process.number not in self.processes:
            return
        number, node = process.number, self.node
        match what:
            case "parked":
                report: Report = WorkerParked(node, number)
            case "active":
                incarnation = process.member.incarnation
                report = WorkerActive(node, number, incarnation, process.slot, process.generation)
            case "drained":
                report = WorkerDrained(node, number)
            case _:
                report = WorkerProgress(node, number, process.step, process.phase, 0.1)
        self._in_life(self.life, lambda: self.report(report))

    def exited(self, process: Process, code: int) -> None:
        """A process ended by itself."""
        if process.number in self.processes:
            self._end(process, DONE if code == 0 else CRASHED, code)

    def fail(self, process: Process, how: str) -> None:
        """A fault: the process dies, or stands still until this agent notices."""
        life = self.life
        if self.world.tracing:
            self.world.tell(f"w{process.number}", f"fault: {how} in {process.phase} at {process.step}")
        if how == HUNG:
            process.stuck = True
            self.world.later(_HANG_S, self._in_life, life, lambda: self._end(process, HUNG, -9))
        elif how == STOPPED:
            process.pause()
            self.world.later(_STOPPED_S, self._in_life, life, lambda: self._end(process, STOPPED, -9))
        else:
            code = -9 if how == OUT_OF_MEMORY else self.world.rng.choice((1, -11, 75, -9))
            process.kill()
            self._in_life(life, lambda: self._end(process, how, code))

    def _end(self, process: Process, cause: str, code: int) -> None:
        """See a process gone: bury it at the coordinator, tell the conductor."""
        if process.number not in self.processes:
            return
        if process.alive or code != 0:
            process.kill()
        self._forget(process)
        if self._client is not None and code != 0:
            self._client.bury(process.member.incarnation)
        ended = WorkerEnded(self.node, process.number, cause, code, process.step, process.phase)
        self._in_life(self.life, lambda: self.report(ended))
        self._leave_if_empty()

    # ---- the node

    def preempt(self, notice_s: float) -> None:
        if not self.alive or self.leaving:
            return
        self.leaving = True
        self.report(NodePreempted(self.node, notice_s, "notice"))
        life = self.life
        self.world.later(notice_s, self._in_life, life, lambda: self.kill())

    def _keep_coordinator(self) -> None:
        """Start the coordinator if it is not there, now and whenever it is not."""
        service = self._machine.service
        if not service.up:
            service.start()
            self.report(PartLost(self.node, "coordinator", "it was killed"))
        self.world.later(0.1, self._in_life, self.life, self._keep_coordinator)


def _bury(member: Member) -> Script:
    """An agent's own client: it tells the coordinator of dead processes."""
    while True:
        yield Rest(3600.0, lambda: bool(member.buried))
        while member.buried:
            try:
                yield Ask(m.Bury(member.buried[0], "it exited"), 2.0)
            except FencedError:
                raise
            except CoordError:
                continue
            del member.buried[0]
