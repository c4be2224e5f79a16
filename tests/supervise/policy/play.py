"""A policy with hand-written agents: tests say what happens and look at what was decided."""

from __future__ import annotations

from typing import Any

from holdfast.journal import Event
from holdfast.supervise import messages as m
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
from holdfast.supervise.policy import Policy
from holdfast.supervise.rules import PolicySettings
from holdfast.supervise.status import RunStatus


class Play:
    """Begins a run; unless told otherwise its agents come up and its workers train."""

    def __init__(self, *, training: bool = True, **settings: Any) -> None:
        self.policy = Policy(PolicySettings(**settings))
        self.now = 100.0
        self.fresh: list[Decision] = []
        """Decisions since the last look."""
        self.told: list[tuple[int, m.Command]] = []
        """Every command that ever went out."""
        self.events: list[Event] = []
        self.end: End | None = None
        self.where: dict[int, int] = {}
        self._take(self.policy.begin(now=self.now))
        if training:
            for node in range(settings.get("nodes", 1)):
                self.up(node)
            self.train()

    # ---- what happens

    def say(self, *happenings: Happening) -> None:
        """One turn of the conductor: all that happened, then the alarms that are due."""
        for happening in happenings:
            self._take(self.policy.step(happening, now=self.now))
        if self.policy.wake_at <= self.now:
            self._take(self.policy.step(Tick(), now=self.now))

    def up(self, node: int = 0) -> None:
        self.say(m.AgentUp(node, 1000 + node))

    def down(self, node: int = 0) -> None:
        self.say(AgentDown(node, "killed"))

    def train(self, step: int = 0) -> None:
        """Everybody who can comes so far: those without a seat are parked, the others train."""
        for seat in self.status.parked:
            if seat.state != "parked":
                self.say(m.WorkerStarted(seat.node, seat.worker, 1), m.WorkerParked(seat.node, seat.worker))
        for one in self.status.seats:
            if one.worker >= 0 and one.state not in ("leaving", "left", "ending"):
                self.active(one.worker, step)

    def started(self) -> None:
        """Agents have started whom they were told to."""
        status = self.status
        for worker in [*(one.worker for one in status.parked), *(one.worker for one in status.seats)]:
            if worker < 0:
                continue
            self.say(m.WorkerStarted(self.where[worker], worker, 1))

    def active(self, worker: int, step: int = 0) -> None:
        node = self.where[worker]
        self.say(
            m.WorkerStarted(node, worker, 1),
            m.WorkerActive(node, worker, f"i{worker}", 0, 1),
            m.WorkerProgress(node, worker, step, "step", 0.1),
        )

    def reach(self, worker: int, step: int) -> None:
        self.say(m.WorkerProgress(self.where[worker], worker, step, "step", 0.1))

    def ended(
        self, worker: int, cause: str = m.CRASHED, code: int = 1, *, step: int = 0, phase: str = "step",
        detail: str = "",
    ) -> None:  # fmt: skip
        self.say(m.WorkerEnded(self.where[worker], worker, cause, code, step, phase, detail))

    def killed(self) -> None:
        """Agents end whom they were told to end."""
        for node, command in list(self.fresh_told()):
            if isinstance(command, m.Kill):
                self.say(m.WorkerEnded(node, command.worker, m.KILLED, -9, 0, "step"))

    def wait(self, seconds: float, *, beats: bool = True) -> None:
        """Let time pass, alarm by alarm; agents that are up give signs of life."""
        until = self.now + seconds
        while self.end is None:
            next_beat = self.now + 0.5 if beats else until
            self.now = min(until, next_beat, max(self.now, self.policy.wake_at))
            if beats:
                for node in self.status.nodes:
                    if node.state == "up":
                        self.say(m.AgentBeat(node.node))
            self.say(Tick())
            if self.now >= until:
                return

    def _take(self, decisions: list[Decision]) -> None:
        self.fresh += decisions
        for decision in decisions:
            match decision:
                case Tell():
                    self.told.append((decision.node, decision.command))
                    if isinstance(decision.command, m.Spawn):
                        self.where[decision.command.worker] = decision.node
                case Noted():
                    self.events.append(decision.event)
                case End():
                    self.end = decision

    # ---- what was decided

    @property
    def status(self) -> RunStatus:
        return self.policy.status(now=self.now)

    def code(self) -> int | None:
        """The code that the run ends with, once that is decided."""
        return self.status.code

    def look(self) -> list[Decision]:
        """Decisions since the last look, without the journal."""
        fresh, self.fresh = self.fresh, []
        return [one for one in fresh if not isinstance(one, Noted)]

    def fresh_told(self) -> list[tuple[int, m.Command]]:
        return [(one.node, one.command) for one in self.look() if isinstance(one, Tell)]

    def commands(self) -> list[m.Command]:
        """Commands since the last look."""
        return [command for _, command in self.fresh_told()]

    def agents(self) -> list[StartAgent | KillAgent]:
        return [one for one in self.look() if isinstance(one, StartAgent | KillAgent)]

    def holder(self, replica: int = 0, index: int = 0) -> int:
        """The worker in a seat; -1 if it is vacant."""
        for seat in self.status.seats:
            if (seat.replica, seat.index) == (replica, index):
                return seat.worker
        raise AssertionError(f"there is no seat {replica}.{index}")

    def nodes_of(self, replica: int) -> list[int]:
        return [seat.node for seat in self.status.seats if seat.replica == replica]

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def finish_up(self) -> None:
        """All agents go, as they were told."""
        for node in self.status.nodes:
            if node.state != "away":
                self.down(node.node)
