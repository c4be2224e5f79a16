"""Simulated workers: processes that start, import, park, join the real coordinator, train, and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from holdfast.coord import messages as m
from holdfast.errors import CoordError, DeadlineError, FencedError, HoldfastError
from holdfast.supervise.messages import Seat
from holdfast.testing.coordination.member import Member
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Ask, Record, Rest, Script
from holdfast.testing.coordination.world import Clock, World

_FOR_EVER_S: Final = 1e6
_JOIN_S: Final = 4.0
_BARRIER_S: Final = 1.0


@dataclass(slots=True)
class Job:
    """What the simulated run is to do, and what is wrong with its program."""

    until: int
    width: int
    step_s: float
    save_every: int = 5
    poison: int = -1
    """Whoever computes this step dies."""
    broken: bool = False
    """Nobody gets beyond its imports."""
    refuses: int = -1
    """At this step a worker says that trying again is no use."""
    saved: int = 0
    """The step of the newest checkpoint."""
    furthest: int = 0
    steps_done: int = 0
    finished: set[int] = field(default_factory=set)


class Parent(Protocol):
    """The agent, as a process needs it."""

    def says(self, process: Process, what: str) -> None: ...
    def exited(self, process: Process, code: int) -> None: ...


@final
class Process:
    """One life of one worker."""

    def __init__(
        self, world: World, network: Network, service: Service, record: Record, job: Job, parent: Parent,
        number: int, seat: Seat | None,
    ) -> None:  # fmt: skip
        self.world = world
        self.number = number
        self.seat = seat
        self.alive = True
        self.paused = False
        self.stuck = False
        self.phase = "start"
        self.step = -1
        self.leave = False
        self.stop = False
        self.slot = -1
        self.generation = 0
        self.parked = False
        self._job = job
        self._parent = parent
        self._waiting = False
        self._heard = 0
        self.member = Member(
            world, network, service, record, f"w{number}", Clock(), self._script, silence_s=2.0
        )
        self.member.restarts = False

    # ---- life and death

    def start(self) -> None:
        self._after(0.01, 0.05, self._import)

    def _import(self) -> None:
        self.phase = "import"
        self._after(0.2, 1.0, self._imported)

    def _imported(self) -> None:
        if self._job.broken:
            self._exit(1)
        elif self.seat is None:
            self.phase, self._waiting, self.parked = "parked", True, True
            self._parent.says(self, "parked")
        else:
            self._init()

    def take(self, seat: Seat) -> None:
        """It gets a seat, wherever it is on its way to being parked."""
        self.seat = seat
        if self._waiting:
            self._waiting = False
            self._init()

    def _init(self) -> None:
        self.phase = "init"
        self._after(0.02, 0.2, self.member.start)

    def kill(self, *, machine: bool = False) -> None:
        """SIGKILL. Nobody is told here: its agent sees it."""
        self.alive = False
        self.member.kill(machine=machine)
        self.member.done = True

    def pause(self) -> None:
        self.paused = True
        self.member.pause()

    def _after(self, low: float, high: float, action: Callable[[], None]) -> None:
        self.world.later(self.world.between(low, high), self._go_on, action)

    def _go_on(self, action: Callable[[], None]) -> None:
        if not self.alive or self.paused or self.stuck:
            return  # a stopped one is ended by its agent, never resumed
        if self.stop:
            self._exit(75)
            return
        action()

    def _exit(self, code: int) -> None:
        if self.alive:
            self.alive = False
            # The kernel tells the parent a moment later; by then its sockets are closed.
            self.world.later(self.world.between(0.0, 0.005), self._parent.exited, self, code)

    # ---- training

    def _script(self, member: Member) -> Script:
        code = 75
        try:
            code = yield from self._train(member)
        except FencedError:
            pass
        except HoldfastError:
            code = 1
        self._exit(code)

    def _train(self, member: Member) -> Script:
        """Join, train, and join again whenever the others changed; the exit code."""
        assert self.seat is not None
        slot = self.seat.replica * self._job.width + self.seat.index
        failed = False
        while True:
            if self.stop:
                return 75
            self.phase = "restore" if self.step < 0 else "step"
            self._heard = len(member.pushes)
            try:
                # After a failed meeting the same members must not meet under the same names again.
                got = yield Ask(m.Join(slot, _JOIN_S, failed=failed), _JOIN_S)
                if got.slot < 0:
                    yield Rest(1.0, lambda: self._rallied(member))
                    continue
                failed = False
                self.slot, self.generation = got.slot, got.generation
                self._parent.says(self, "active")
                yield from self._regroup(got)
                code = yield from self._steps(member)
            except FencedError:
                raise
            except (CoordError, DeadlineError):
                failed = True
                yield Rest(self.world.between(0.0, 0.05))
                continue
            if code is not None:
                return code

    def _regroup(self, got: m.Joined) -> Script:
        """All say where they are; who has no state takes it from who has, else from the checkpoint."""
        note = b"%d" % self.step
        met = yield Ask(m.Meet(m.VOTE, f"regroup/{got.generation}", _BARRIER_S, note=note), _BARRIER_S)
        newest = max((int(text) for _, text in met.notes), default=-1)
        if newest < 0:
            newest = self._job.saved
        if self.step < newest:
            yield Rest(self.world.between(0.01, 0.1))
        self.step = newest

    def _steps(self, member: Member) -> Script:
        """Train until something changes (None) or the process is to end (its exit code)."""
        job = self._job
        while True:
            self.phase = "step"
            self._parent.says(self, "progress")
            if self.step >= job.until:
                try:
                    yield Ask(m.Meet(m.FINISH, "run", _BARRIER_S), _BARRIER_S)
                except DeadlineError:
                    return 1  # its own: the others may yet finish, and count it as one that has
                return 0
            if self.stop:
                return 75
            if self.leave:
                yield Ask(m.Leave("drained"), 2.0)
                self._parent.says(self, "drained")
                return 0
            if self._rallied(member):
                return None
            yield Rest(job.step_s)
            while self.stuck:
                yield Rest(_FOR_EVER_S)
            if self.step == job.poison:
                return 1
            if self.step == job.refuses:
                return 78
            yield Ask(m.Meet(m.BARRIER, f"step/{self.step}", _BARRIER_S), _BARRIER_S)
            self._stepped()

    def _stepped(self) -> None:
        self.step += 1
        job = self._job
        if self.step > job.furthest:
            job.furthest = self.step
        job.steps_done += 1
        if self.step % job.save_every == 0:
            job.saved = max(job.saved, self.step)

    def _rallied(self, member: Member) -> bool:
        return any(isinstance(push, m.Rally) for push in member.pushes[self._heard :])
