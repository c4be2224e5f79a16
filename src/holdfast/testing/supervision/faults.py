"""Everything that can go wrong in a supervised run, in doses that the seed decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from holdfast.supervise.decisions import Resize
from holdfast.supervise.messages import CRASHED, HUNG, OUT_OF_MEMORY, STOPPED
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.world import World
from holdfast.testing.supervision.agents import Agent, Machine
from holdfast.testing.supervision.edge import Edge
from holdfast.testing.supervision.processes import Process


@final
class Faults:
    """Causes faults until `stop`."""

    def __init__(
        self, world: World, network: Network, service: Service, machine: Machine, agents: dict[int, Agent],
        edge: Edge, *, only: tuple[str, ...] = (), rate: float = 0.0,
    ) -> None:  # fmt: skip
        self._world = world
        self._network = network
        self._service = service
        self._machine = machine
        self._agents = agents
        self._edge = edge
        self._on = True
        self.count = 0
        kinds: dict[str, Callable[[], None]] = {
            "crash": self._crash,
            "hang": lambda: self._fail(HUNG),
            "stop": lambda: self._fail(STOPPED),
            "memory": lambda: self._fail(OUT_OF_MEMORY),
            "several": self._several,
            "agent_kill": self._agent_kill,
            "agent_hang": self._agent_hang,
            "coordinator": self._coordinator,
            "node": self._node,
            "preempt": self._preempt,
            "resize": self._resize,
            "cut": self._cut,
            "late": self._late,
            "finale": self._finale,
        }
        rng = world.rng
        self.kinds = list(only) or ["crash", *(kind for kind in kinds if rng.random() < 0.35)]
        self._causes = [kinds[kind] for kind in self.kinds]
        self._rate = rate or rng.choice((0.3, 0.8, 2.0))

    def start(self) -> None:
        self._world.later(self._world.rng.expovariate(self._rate), self._next)

    def _next(self) -> None:
        if self._on and self._edge.end is None:
            self.count += 1
            self._world.rng.choice(self._causes)()
            self._world.later(self._world.rng.expovariate(self._rate), self._next)

    def stop(self) -> None:
        """Nothing more goes wrong. What was killed or stands still is not brought back from here."""
        self._on = False
        self._edge.resume()
        for agent in self._agents.values():
            agent.there = True

    def _tell(self, text: str) -> None:
        if self._world.tracing:
            self._world.tell("fault", text)

    # ---- workers

    def _victims(self) -> list[tuple[Agent, Process]]:
        return [
            (agent, process)
            for agent in self._agents.values()
            if agent.alive
            for process in agent.processes.values()
            if process.alive and not process.stuck and not process.paused
        ]

    def _crash(self) -> None:
        self._fail(CRASHED)

    def _fail(self, how: str) -> None:
        victims = self._victims()
        if victims:
            agent, process = self._world.rng.choice(victims)
            agent.fail(process, how)

    def _several(self) -> None:
        """Several processes at once, whoever they are."""
        for agent, process in self._victims():
            if self._world.chance(0.5):
                agent.fail(process, self._world.rng.choice((CRASHED, STOPPED, HUNG)))

    def _finale(self) -> None:
        """Somebody falls when the run is all but done."""
        if self._machine.job.furthest < self._machine.job.until - 1:
            self._world.later(0.05, self._finale)
        elif self._edge.end is None:
            self._fail(self._world.rng.choice((CRASHED, HUNG)))

    # ---- agents and nodes

    def _agent(self) -> Agent | None:
        live = [agent for agent in self._agents.values() if agent.alive and not agent.paused]
        return self._world.rng.choice(live) if live else None

    def _agent_kill(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.kill()

    def _agent_hang(self) -> None:
        agent = self._agent()
        if agent is not None:
            self._tell(f"agent{agent.node} stands still")
            agent.pause()
            if self._world.chance(0.5):
                self._world.later(self._world.rng.expovariate(0.3), self._resumed, agent, agent.life)

    def _resumed(self, agent: Agent, life: int) -> None:
        if agent.life == life:
            agent.resume()

    def _node(self) -> None:
        """A node is gone with all that is on it, for a while; not the coordinator's, which ends the run."""
        agent = self._agent()
        if agent is not None and not agent.coordinates:
            agent.there = False
            agent.kill(machine=True)
            self._world.later(self._world.rng.expovariate(0.2), self._return, agent)

    def _return(self, agent: Agent) -> None:
        agent.there = True

    def _preempt(self) -> None:
        agent = self._agent()
        if agent is not None and not agent.coordinates:
            self._tell(f"node {agent.node} gets its notice")
            agent.preempt(self._world.rng.choice((0.5, 2.0, 8.0)))

    # ---- the rest

    def _coordinator(self) -> None:
        if self._service.up:
            self._service.kill()

    def _resize(self) -> None:
        self._edge.wish(Resize(self._world.rng.randrange(1, 6)))

    def _cut(self) -> None:
        if self._network.live:
            self._network.break_off(self._world.rng.choice(self._network.live))

    def _late(self) -> None:
        """The launch process stands still."""
        if not self._edge.paused:
            self._tell("the conductor stands still")
            self._edge.pause()
            self._world.later(self._world.rng.expovariate(0.5), self._edge.resume)
