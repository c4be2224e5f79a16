"""The conductor's edge, simulated: it carries the policy's decisions out on simulated nodes."""

from __future__ import annotations

import math
from typing import Protocol, final

from holdfast.supervise.decisions import (
    AgentDown,
    Decision,
    End,
    Happening,
    KillAgent,
    Noted,
    StartAgent,
    Tell,
    Tick,
)
from holdfast.supervise.messages import Report
from holdfast.supervise.policy import Policy
from holdfast.testing.coordination.world import Alarm, World
from holdfast.testing.supervision.agents import Agent


class Witness(Protocol):
    """Sees all that the policy is told and decides; raises if it must not be."""

    def stepped(self, happening: Happening | None, decisions: list[Decision], now: float) -> None: ...


@final
class Edge:
    """The launch process."""

    def __init__(self, world: World, policy: Policy, agents: dict[int, Agent], witness: Witness) -> None:
        self.world = world
        self.policy = policy
        self.end: End | None = None
        self.paused = False
        self.steps = 0
        self._agents = agents
        self._witness = witness
        self._streams: dict[int, int] = {}
        """The life of each agent whose stream is open."""
        self._inbox: list[tuple[int, int, Report | None] | Happening] = []
        self._alarm = Alarm(world, self._tick)

    @property
    def now(self) -> float:
        return 1000.0 + self.world.now

    def begin(self) -> None:
        self._carry_out(None, self.policy.begin(now=self.now))

    # ---- what happens

    def hears(self, node: int, life: int, report: Report | None) -> None:
        if self.paused:
            self._inbox.append((node, life, report))
        elif self._streams.get(node) == life:
            if report is None:
                del self._streams[node]
                self._step(AgentDown(node, "its stream ended"))
            else:
                self._step(report)

    def wish(self, wish: Happening) -> None:
        if self.paused:
            self._inbox.append(wish)
        else:
            self._step(wish)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Go on; what came meanwhile is read before the alarm is looked at, as the real edge does."""
        if not self.paused:
            return
        self.paused = False
        inbox, self._inbox = self._inbox, []
        for one in inbox:
            if type(one) is tuple:
                self.hears(*one)
            else:
                self._step(one)  # type: ignore[arg-type]
        self._tick()

    def _tick(self) -> None:
        if self.paused or self.end is not None:
            return
        if self.policy.wake_at <= self.now:
            self._step(Tick())
        else:
            self._set_alarm()

    def _step(self, happening: Happening) -> None:
        if self.end is not None:
            return
        self.steps += 1
        self._carry_out(happening, self.policy.step(happening, now=self.now))

    # ---- decisions

    def _carry_out(self, happening: Happening | None, decisions: list[Decision]) -> None:
        if self.world.tracing:
            if happening is not None and not isinstance(happening, Tick):
                self.world.tell("policy", f"<- {happening!r}")
            for decision in decisions:
                self.world.tell("policy", f"   {decision!r}")
        self._witness.stepped(happening, decisions, self.now)
        for decision in decisions:
            match decision:
                case Tell():
                    if decision.node in self._streams:
                        self._agents[decision.node].send(decision.command)
                case StartAgent():
                    self._start(decision.node)
                case KillAgent():
                    self._kill(decision.node, decision.reason)
                case Noted():
                    pass
                case End():
                    self.end = decision
        self._set_alarm()

    def _start(self, node: int) -> None:
        agent = self._agents[node]
        if agent.start():
            self._streams[node] = agent.life
        else:
            self.world.later(0.01, self.wish, AgentDown(node, "cannot be started"))

    def _kill(self, node: int, reason: str) -> None:
        """SIGKILL is sure and its effect is waited for; what the agent said before is not heard any more."""
        self._streams.pop(node, None)
        self._agents[node].kill()
        self.world.later(self.world.between(0.0, 0.02), self.wish, AgentDown(node, reason))

    def _set_alarm(self) -> None:
        wake_at = self.policy.wake_at
        if wake_at < math.inf:
            # A loop that has other things to do comes a little late.
            wake_at += 1e-6 + 0.02 * self.world.rng.random() ** 3 - 1000.0
        self._alarm.set(wake_at if self.end is None else math.inf)
