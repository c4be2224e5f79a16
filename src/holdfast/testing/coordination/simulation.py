"""A whole run in simulated time, from one integer.

simulate(seed) -> Outcome      raises Failure if anything that must hold does not
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from holdfast.coord import messages as m
from holdfast.coord.settings import Settings
from holdfast.testing.coordination.faults import Faults
from holdfast.testing.coordination.member import Member
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.oracle import Oracle, Violation
from holdfast.testing.coordination.scripts import Scripts, Term
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Ask, Record, Script
from holdfast.testing.coordination.world import Clock, World
from holdfast.testing.linearizability import check, meeting_problems
from holdfast.testing.seeds import Failure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to, for statistics."""

    events: int
    records: int
    calls: int
    met: int
    generations: int
    lives: int
    trace: tuple[str, ...] = ()

    def summary(self) -> str:
        return (
            f"{self.events} events, {self.calls} calls, {self.met} of them met, {self.records} records, "
            f"{self.generations} generations, {self.lives} lives of the coordinator"
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

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.world = world = World(seed, tracing=tracing)
        rng = world.rng
        self.network = Network(world)
        num_workers = rng.choice((2, 3, 3, 4, 5))
        self.settings = settings = _settings(world, num_workers)
        skew = rng.choice((0.0, 0.0, 0.02, 0.2))
        self.service = Service(world, self.network, settings, _clock(world, skew))
        self.record = Record()
        self.oracle = Oracle(self.service, self.record)
        self.service.witness = self.oracle
        self.term = Term()
        scripts = Scripts(world, self.term, num_steps=rng.choice((6, 12, 20)))
        self.members: list[Member] = []
        fixed = rng.random() < 0.6
        for number in range(num_workers):
            slot = number if fixed and number < settings.max_size else -1
            worker = self._member(f"w{number}", scripts.worker(slot), skew)
            if rng.random() < 0.3:
                worker.second = scripts.busy
        for number in range(rng.choice((0, 1, 2))):
            self._member(f"o{number}", scripts.observer, skew)
        if rng.random() < 0.4:
            self._member("agent", scripts.agent, skew).is_agent = True
        self.watcher: Member | None = None
        if rng.random() < 0.5:
            self.watcher = self._member("watcher", scripts.watcher, skew)
            self.watcher.watches = rng.choice(("g/", "a", "b"))
        self.faults = Faults(world, self.network, self.service, self.members, self.oracle)
        if world.tracing:
            world.tell("seed", f"{seed}: {num_workers} workers, faults {self.faults.kinds}, {settings}")

    def _member(self, name: str, script: Callable[[Member], Script], skew: float) -> Member:
        member = Member(
            self.world, self.network, self.service, self.record, name, _clock(self.world, skew), script
        )
        self.members.append(member)
        return member

    def run(self) -> Outcome:
        world = self.world
        self.service.start()
        for member in self.members:
            world.later(world.rng.expovariate(3.0), member.start)
        self.faults.start()
        world.run(world.rng.choice((3.0, 6.0, 10.0)))
        self._raise_problems()
        self.faults.stop()
        self.term.closing = True
        self._until(lambda: not self._busy(), 60.0, self._not_done)
        self._audit()
        self._check_watcher()
        return self._close()

    def _until(self, reached: Callable[[], bool], limit_s: float, say: Callable[[], str]) -> None:
        """Let time pass until something is reached; if it is not, that is a violation."""
        end = self.world.now + limit_s
        while not reached():
            if self.world.now >= end:
                raise Violation(say())
            self.world.run(self.world.now + 0.5)
            self._raise_problems()

    def _busy(self) -> list[str]:
        return [member.name for member in self.members if not member.done and member is not self.watcher]

    def _check_watcher(self) -> None:
        """Whoever watches keys has seen every change: it knows what there is now."""
        watcher, core = self.watcher, self.service.core
        if watcher is not None:
            self.world.run(self.world.now + 20.0)
            assert core is not None
            keys = core.ledger.keys
            there = {key: keys[key].value for key in keys if key.startswith(watcher.watches)}
            if watcher.view != there:
                raise Violation(f"{watcher.incarnation} has seen {watcher.view}, there is {there}")
            self.term.over = True
            watcher.close()

    def _not_done(self) -> str:
        waiting = self._busy()
        return f"{', '.join(waiting)} did not come to an end in 60 s of peace"

    def _raise_problems(self) -> None:
        if self.record.problems:
            raise Violation(self.record.problems[0])

    def _audit(self) -> None:
        """A last client reads everything: no write that was answered may be missing."""
        auditor = self._member("audit", _audit_script, 0.0)
        auditor.start()
        self._until(lambda: auditor.done, 30.0, lambda: "the last reader got no answer")

    def _close(self) -> Outcome:
        settings = self.settings
        self.world.run(self.world.now + settings.session_s + settings.dead_s + 20.0)
        self._raise_problems()
        core = self.service.core
        assert core is not None
        if not core.idle():
            raise Violation("somebody is still waited for, and nobody is there")
        live = [s.incarnation for s in core.ledger.sessions.values() if not s.over]
        if live:
            raise Violation(f"{live} closed and are still remembered")
        owned = [key for key, entry in core.ledger.keys.items() if entry.owner]
        if owned:
            raise Violation(f"keys {owned} have outlived their owners")
        self.oracle.compare()
        history = self.record.history
        verdict = check([*history, *self.oracle.history()])
        if not verdict:
            raise Violation(verdict.problem)
        # After a power cut a barrier that was not synced may have passed for some only; they enter it again.
        if settings.sync_barriers == "always" or not self.oracle.power_lost:
            for problem in meeting_problems(history):
                raise Violation(problem)
        met = sum(isinstance(done.result, m.Met) for done in history)
        return Outcome(
            self.world.events,
            len(self.oracle.log),
            len(history),
            met,
            core.ledger.generation,
            self.service.lives,
        )


def _audit_script(member: Member) -> Script:
    for op in (m.Get("a"), m.Get("b"), m.Get("n"), m.Scan("g/")):
        yield Ask(op, 5.0)
    yield Ask(m.Status(), 5.0)


def _clock(world: World, skew: float) -> Clock:
    rng = world.rng
    return Clock(rng.uniform(0.0, 1e5), 1.0 + rng.uniform(-skew, skew))


def _settings(world: World, num_workers: int) -> Settings:
    rng = world.rng
    rejoin = rng.random() < 0.4
    min_size = rng.choice((1, max(1, num_workers - 1), num_workers))
    return Settings(
        min_size=min_size,
        max_size=rng.choice((num_workers, num_workers + 1, max(min_size, num_workers - 1))),
        divisible_by=1,
        shrink_only=rng.random() < 0.1,
        rejoin=rejoin,
        last_call_s=rng.choice((0.0, 0.2, 1.0)),
        straggler_s=rng.choice((0.5, 2.0)),
        heartbeat_s=0.5,
        suspect_s=rng.choice((1.2, 2.0)),
        dead_s=rng.choice((2.5, 5.0)),
        reconnect_s=rng.choice((0.05, 0.25, 1.0)),
        session_s=rng.choice((3.0, 10.0)),
        remind_s=rng.choice((0.5, 10.0)),
        sync_keys="always",
        sync_barriers="always" if rng.random() < 0.3 else "process",
        history=rng.choice((4, 4096)),
    )
