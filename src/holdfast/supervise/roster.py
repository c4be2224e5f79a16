"""Who is where: nodes, replicas and workers as the policy knows them, and the decisions of this step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from holdfast.journal import Event
from holdfast.supervise.alarms import Alarms
from holdfast.supervise.budgets import Budget
from holdfast.supervise.decisions import Decision, Noted, Tell
from holdfast.supervise.messages import AGENT_LOST, Command, Seat
from holdfast.supervise.placement import Site
from holdfast.supervise.rules import PARKING, PolicySettings

# Of workers.
STARTING: Final = "starting"
WARMING: Final = "warming"
READY: Final = "parked"
SEATED: Final = "seated"
ACTIVE: Final = "active"
LEAVING: Final = "leaving"
LEFT: Final = "left"
ENDING: Final = "ending"

# Of replicas.
VACANT: Final = "vacant"
FILLED: Final = "filled"
LOSING: Final = "losing"
"""Its other workers are being ended; no seat of it is given away before they are."""
DRAINING: Final = "draining"
FINISHED: Final = "finished"

# Of nodes.
AWAY: Final = "away"
COMING: Final = "starting"
UP: Final = "up"
DYING: Final = "dying"

_SAID: Final = 40
_FAILURES: Final = 20


@dataclass(slots=True, eq=False)
class Worker:
    """A process, from the order to start it until it is known to be gone."""

    number: int
    node: int
    since: float
    seat: Seat | None = None
    state: str = STARTING
    pid: int = 0
    slot: int = -1
    step: int = -1
    phase: str = "start"
    median_step_s: float = 0.0
    active_since: float = -math.inf
    floor: int = -1
    """The step that the run had reached before this worker took part; -1 if it is not known yet."""
    proven: bool = False
    """It has made progress."""


@dataclass(slots=True, eq=False)
class Replica:
    """W seats that are filled, lost and drained together."""

    number: int
    state: str = VACANT
    attempt: int = -1
    workers: dict[int, Worker] = field(default_factory=dict)
    """By index; those that have ended are not in it."""
    finished: set[int] = field(default_factory=set)
    last_node: int = -1
    due: float = -math.inf
    """It is not filled before."""
    why: str = "not started yet"
    """Why it is vacant, for people."""
    budgets: dict[str, Budget] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Node:
    """A node with its agent."""

    number: int
    spare: bool
    budget: Budget
    parking: Budget
    state: str = AWAY
    heard: float = 0.0
    pid: int = 0
    workers: dict[int, Worker] = field(default_factory=dict)
    blames: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    lemon: bool = False
    leaves_at: float = math.inf
    """When it goes away, as it has told; inf if it has not."""
    dismissed: bool = False
    """Its agent was told to end everything, since the node goes away."""
    parks_at: float = -math.inf
    """No process is parked before; inf if that was given up."""
    parts: tuple[str, ...] = ()
    copies: tuple[int, ...] = ()
    """The nodes whose states its vault was told to keep copies of."""

    @property
    def usable(self) -> bool:
        return self.state in (UP, COMING) and self.leaves_at == math.inf


class Failure(NamedTuple):
    """A worker's or an agent's end that nobody wanted."""

    at: float
    text: str


@final
class Roster:
    """Shared by the parts of the policy; owned by Policy."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.now = -math.inf
        self.alarms = Alarms()
        self.decisions: list[Decision] = []
        self.nodes: dict[int, Node] = {}
        self.replicas = {number: Replica(number) for number in range(settings.replicas)}
        self.workers: dict[int, Worker] = {}
        self.parts: dict[str, Budget] = {}
        """What is used of the allowance of each vault and coordinator that was ever lost, by its name."""
        self.wanted = settings.replicas
        self.newest = -1
        """The furthest step that any worker has reached."""
        self.joined = False
        """Whether anybody has ever taken part."""
        self.verdict: tuple[int, str, float] | None = None
        """Exit code, message and grace, once the run is to end."""
        self.dirty = True
        """Seats or processes may have to be given out."""
        self.version = 0
        self.said: deque[Failure] = deque(maxlen=_SAID)
        self.failures: deque[Failure] = deque(maxlen=_FAILURES)
        self._next_worker = 1
        for number in range(settings.nodes):
            self.add_node(number, spare=number >= settings.nodes - settings.spares)

    def add_node(self, number: int, *, spare: bool = False) -> Node:
        settings = self.settings
        budget, parking = Budget(settings.allowance(AGENT_LOST)), Budget(settings.allowance(PARKING))
        node = self.nodes[number] = Node(number, spare, budget, parking)
        return node

    # ---- what is decided

    def tell(self, node: int, command: Command) -> None:
        self.decisions.append(Tell(node, command))

    def note(self, event: Event) -> None:
        self.decisions.append(Noted(event))

    def say(self, text: str) -> None:
        """A decision in words, for people."""
        self.said.append(Failure(self.now, text))
        self.version += 1

    def stop(self, code: int, message: str, grace_s: float | None = None) -> None:
        """The run is to end; the first reason counts."""
        if self.verdict is None:
            self.verdict = (code, message, self.settings.grace_s if grace_s is None else grace_s)
            self.say(f"stop with {code}: {message}")

    # ---- workers

    def new_worker(self, node: int, seat: Seat | None) -> Worker:
        worker = Worker(self._next_worker, node, self.now, seat)
        self._next_worker += 1
        self.workers[worker.number] = self.nodes[node].workers[worker.number] = worker
        self.alarms.set("spawn", worker.number, self.now + self.settings.spawn_s)
        return worker

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        del self.workers[worker.number]
        del self.nodes[worker.node].workers[worker.number]
        for kind in ("spawn", "kill"):
            self.alarms.clear(kind, worker.number)
        if worker.seat is not None:
            replica = self.replicas[worker.seat.replica]
            if replica.workers.get(worker.seat.index) is worker:
                del replica.workers[worker.seat.index]
        self.dirty = True
        self.version += 1

    def name_of(self, worker: Worker) -> str:
        if worker.seat is None:
            return f"worker {worker.number} (parked on node {worker.node})"
        place = f"replica {worker.seat.replica}"
        if self.settings.workers_per_replica > 1:
            place += f" index {worker.seat.index}"
        return f"worker {worker.number} ({place}, node {worker.node})"

    # ---- views

    def wanted_replicas(self) -> Iterator[Replica]:
        for number in range(self.wanted):
            yield self.replicas[number]

    def filled(self) -> int:
        """Replicas that have workers and are to keep them."""
        return sum(replica.state == FILLED for replica in self.wanted_replicas())

    def holds_state(self, replica: Replica) -> bool:
        """Whether all its workers train, and are to go on."""
        width, workers = self.settings.workers_per_replica, replica.workers.values()
        training = sum(worker.state == ACTIVE and worker.step >= 0 for worker in workers)
        return replica.state == FILLED and training == width

    def any_finished(self) -> bool:
        return any(replica.state == FINISHED for replica in self.replicas.values())

    def site(self, node: Node) -> Site:
        limit = self.settings.seats_per_node or math.inf
        load = ready = warming = 0
        for worker in node.workers.values():
            if worker.seat is not None:
                load += 1
            elif worker.state == READY:
                ready += 1
            elif worker.state in (STARTING, WARMING):
                warming += 1
        return Site(node.number, node.state == UP, limit - load, load, ready, warming, node.spare, node.lemon)

    def sites(self) -> list[Site]:
        return [self.site(node) for node in self.nodes.values() if node.usable]
