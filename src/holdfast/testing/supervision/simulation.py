"""A whole supervised run in simulated time, from one integer.

simulate(seed) -> Outcome      raises Failure if anything that must hold does not
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from holdfast.coord.settings import Settings
from holdfast.supervise.budgets import Allowance
from holdfast.supervise.decisions import End, StopAsked
from holdfast.supervise.messages import CRASHED, HUNG, OUT_OF_MEMORY, STOPPED
from holdfast.supervise.policy import Policy
from holdfast.supervise.rules import ALLOWANCES, PolicySettings
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Record
from holdfast.testing.coordination.world import Clock, World
from holdfast.testing.seeds import Failure
from holdfast.testing.supervision.agents import Agent, Machine
from holdfast.testing.supervision.edge import Edge
from holdfast.testing.supervision.faults import Faults
from holdfast.testing.supervision.oracle import Oracle, Violation
from holdfast.testing.supervision.processes import Job

PLAIN: Final = "plain"
"""Whatever happens from outside, the run ends with 0."""
TIGHT: Final = "tight"
"""Small budgets: 0, or 80 with a budget that is really spent."""
POISON: Final = "poison"
BROKEN: Final = "broken"
REFUSES: Final = "refuses"
STOPPED_RUN: Final = "stopped"
HOME_LOST: Final = "home"
"""The coordinator's node is told to go."""
KINDS: Final = (PLAIN,) * 11 + (TIGHT,) * 3 + (POISON, BROKEN, REFUSES, STOPPED_RUN, STOPPED_RUN, HOME_LOST)

_PEACE_S: Final = 240.0
"""Once nothing goes wrong any more the run must be over within so much time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to, for statistics."""

    kind: str
    code: int
    events: int
    steps: int
    faults: int
    losses: int
    recoveries: int
    generations: int
    trace: tuple[str, ...] = ()

    def summary(self) -> str:
        return (
            f"{self.kind}, ended with {self.code}: {self.events} events, {self.steps} steps of the policy, "
            f"{self.faults} faults, {self.losses} losses, {self.recoveries} recoveries, "
            f"{self.generations} generations"
        )


def simulate(seed: int, *, tracing: bool = False, keep_trace: bool = False) -> Outcome:
    """Run one seed. Fails: Failure, with a trace if asked for."""
    simulation = Simulation(seed, tracing=tracing)
    try:
        outcome = simulation.run()
    except Exception as error:
        text = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
        raise Failure(seed, text, simulation.world.trace) from error
    return replace(outcome, trace=tuple(simulation.world.trace)) if keep_trace else outcome


@final
class Simulation:
    """The parts of one seed, put together."""

    def __init__(
        self, seed: int, *, tracing: bool = False, kind: str = "", settings: PolicySettings | None = None
    ) -> None:
        self.world = world = World(seed, tracing=tracing)
        rng = world.rng
        self.kind = kind or rng.choice(KINDS)
        self.settings = settings = settings or _settings(world, self.kind)
        self.network = Network(world)
        self.job = _job(world, self.kind, settings)
        self.service = Service(world, self.network, _coordination(settings), Clock())
        self.machine = Machine(world, self.network, self.service, Record(), self.job)
        self.oracle = Oracle(settings, self.machine)
        self.policy = Policy(settings)
        self.agents = {
            node: Agent(self.machine, node, coordinates=node == settings.coordinator_node)
            for node in range(settings.nodes)
        }
        self._stopped = False
        """It was asked to stop before it was done."""
        self.edge = Edge(world, self.policy, self.agents, self.oracle)
        self.machine.ear, self.machine.observer = self.edge, self.oracle
        only = () if self.kind in (PLAIN, TIGHT) else ("crash", "cut")
        rate = 0.0 if self.kind in (PLAIN, TIGHT) else 0.1
        self.faults = Faults(
            world, self.network, self.service, self.machine, self.agents, self.edge, only=only, rate=rate
        )
        if tracing:
            world.tell("seed", f"{seed}: {self.kind}, faults {self.faults.kinds}, {settings}, {self.job}")

    def run(self) -> Outcome:
        world, rng = self.world, self.world.rng
        self.service.start()
        self.edge.begin()
        if self.kind != BROKEN:
            self.faults.start()
        calm_at = rng.choice((5.0, 10.0, 20.0))
        if self.kind == STOPPED_RUN:
            soon = world.chance(0.5)
            world.later(rng.uniform(0.0, 0.5 if soon else calm_at), self._stop)
        if self.kind == HOME_LOST:
            home = self.agents[self.settings.coordinator_node]
            world.later(rng.uniform(1.0, calm_at), home.preempt, 5.0)
        world.run(calm_at)
        self.faults.stop()
        end = world.now + _PEACE_S
        while self.edge.end is None:
            if world.now >= end:
                raise Violation(f"not over after {_PEACE_S:g} s of peace: {self._standing()}")
            world.run(world.now + 0.5)
            self._check_status()
        self._check_end(self.edge.end)
        return self._outcome(self.edge.end)

    def _stop(self) -> None:
        self._stopped = self.policy.status(now=self.edge.now).code is None
        self.edge.wish(StopAsked("asked", at_once=self.world.chance(0.3)))

    def _outcome(self, end: End) -> Outcome:
        core = self.service.core
        return Outcome(
            self.kind, end.code, self.world.events, self.edge.steps, self.faults.count, self.oracle.losses,
            self.oracle.recoveries, core.ledger.generation if core is not None else 0,
        )  # fmt: skip

    def _standing(self) -> str:
        status = self.policy.status(now=self.edge.now)
        seats = [f"{s.replica}.{s.index} {s.state} {s.phase} {s.step} {s.why}" for s in status.seats]
        return f"{status.state}, {seats}, {[f'{n.node} {n.state}' for n in status.nodes]}"

    def _check_status(self) -> None:
        """A seat that nobody has is explained."""
        status = self.policy.status(now=self.edge.now)
        for seat in status.seats:
            if seat.worker < 0 and seat.state == "vacant" and not seat.why:
                raise Violation(f"nobody says why {seat} is vacant")

    def _check_end(self, end: End) -> None:
        expected = {
            PLAIN: (0,),
            TIGHT: (0, 80),
            POISON: (79,),
            BROKEN: (80,),
            REFUSES: (78,),
            STOPPED_RUN: (75,) if self._stopped else (0,),
            # It may have been done before.
            HOME_LOST: (75, 0),
        }[self.kind]
        if self.kind in (PLAIN, TIGHT) and "preempt" in self.faults.kinds and "goes away" in end.message:
            expected = (75,)  # where the rest has no room for the run, it saves and stops
        if end.code not in expected:
            raise Violation(f"ended with {end.code} ({end.message}), expected one of {expected}")
        if end.code == 0 and self.job.furthest < self.job.until:
            raise Violation(f"ended with 0 at step {self.job.furthest} of {self.job.until}")
        if not end.message:
            raise Violation("ended without saying why")
        self.world.run(self.world.now + 5.0)
        left = [process.number for process in self.machine.processes]
        agents = [agent.node for agent in self.agents.values() if agent.alive]
        if left or agents:
            raise Violation(f"after the end there are workers {left} and agents {agents}")


def _settings(world: World, kind: str) -> PolicySettings:
    rng = world.rng
    nodes = rng.choice((1, 1, 2, 3))
    replicas = rng.choice((1, 2, 3, 3))
    width = rng.choice((1, 1, 1, 2))
    spares = 1 if nodes > 2 and rng.random() < 0.5 else 0
    seats = rng.choice((0, 0, -(-replicas // max(1, nodes - spares)) * width))
    if seats and seats * nodes < width:
        seats = width
    limit = rng.choice((2, 4)) if kind == TIGHT else 1000
    if kind == BROKEN:
        limit = 5
    quick = {cause: Allowance(limit=limit, first_s=0.5, longest_s=4.0) for cause in (CRASHED, HUNG, STOPPED)}
    quick[OUT_OF_MEMORY] = Allowance(limit=limit, first_s=0.2, longest_s=2.0)
    rest = {
        cause: Allowance(limit=1000, first_s=0.2, longest_s=3.0) for cause in ALLOWANCES if cause not in quick
    }
    return PolicySettings(
        replicas=replicas,
        workers_per_replica=width,
        min_replicas=rng.choice((1, 1, replicas)),
        max_replicas=replicas + rng.choice((0, 1)),
        nodes=nodes,
        spares=spares,
        seats_per_node=seats,
        parked=rng.choice((0, 1, 2)),
        allowances={**quick, **rest},
        poison_failures=rng.choice((2, 3)) if kind == POISON else 1000,
        stillborn_failures=3 if kind == BROKEN and nodes == 1 else 1000,
        lemon_blames=rng.choice((2, 4)),
        agent_start_s=5.0,
        agent_dead_s=rng.choice((2.0, 5.0)),
        kill_s=3.0,
        spawn_s=5.0,
        drain_s=5.0,
        node_retry_s=rng.choice((1.0, 4.0)),
        wait_s=400.0,
        finish_s=10.0,
        grace_s=rng.choice((1.0, 5.0)),
        end_s=3.0,
        vaults=True,
    )


def _job(world: World, kind: str, settings: PolicySettings) -> Job:
    rng = world.rng
    until = rng.choice((10, 30, 60))
    somewhere = rng.randrange(1, until)
    return Job(
        until=until,
        width=settings.workers_per_replica,
        step_s=rng.choice((0.1, 0.3)),
        poison=somewhere if kind == POISON else -1,
        broken=kind == BROKEN,
        refuses=somewhere if kind == REFUSES else -1,
    )


def _coordination(settings: PolicySettings) -> Settings:
    width = settings.workers_per_replica
    return Settings(
        min_size=settings.min_replicas * width,
        max_size=settings.most * width,
        divisible_by=width,
        last_call_s=2.0,
        straggler_s=5.0,
        session_s=5.0,
    )
