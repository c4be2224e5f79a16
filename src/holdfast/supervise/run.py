"""`Run`: a worker's part in a run, from its first state to its last step."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

from holdfast import faults, journal
from holdfast.errors import (
    CoordError,
    KeyExistsError,
    ReduceError,
    TransferError,
    UnreachableError,
    UsageError,
)
from holdfast.supervise.arrival import Arrival
from holdfast.supervise.donors import Donor
from holdfast.supervise.members import GenerationOver, Held, Members, Place
from holdfast.supervise.messages import Active, Drained, Finished, Leave, Order, StopRun, Take
from holdfast.supervise.regroup import NO_STATE, Decision
from holdfast.supervise.saving import Every, RunSaver
from holdfast.supervise.solo import Notes, Solo
from holdfast.supervise.step_round import Shape, StepRound
from holdfast.supervise.steps import Step
from holdfast.supervise.stream import Stream

log = logging.getLogger("holdfast.run")

RETRY: Final = 75
"""Exit code: start another process in this one's place."""
_LEAVING: Final = b"leaving"
_AGREED: Final = "agreed/"
_STOP_S: Final = 60.0
_NOTICE_S: Final = 30.0
_FINISH_S: Final = 60.0
State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a worker knows of its run from the start."""

    name: str
    folder: Path
    node: int = 0
    place: Place
    samples_per_step: int | None = None
    key: bytes = b""


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a run is made of; all of it is closed with the run. Without `members` it is a run of one."""

    board: Notes
    events: journal.Journal
    saver: RunSaver
    solo: Solo | None = None
    members: Members | None = None
    donor: Donor | None = None
    orders: Stream[Order] | None = None
    leave_world: Callable[[], None] | None = None

    @property
    def others(self) -> Solo | Members:
        others = self.solo or self.members
        assert others is not None
        return others


@final
class Run:
    """One worker's part in a run; `holdfast.join()` makes it. Leave its block to end that part.

    slot, replica, index: its place; size: workers in all; generation: that of the present members; node and
    folder: where it runs and where everything of the run lies; key: a secret that all workers of the run
    share, to seal what they keep for each other (`holdfast.xla.compiled`).
    """

    def __init__(self, info: RunInfo, parts: Parts) -> None:
        self.name = info.name
        self.folder = info.folder
        self.node = info.node
        self.key = info.key
        self._info = info
        self._place = info.place
        self._parts = parts
        self._shape = Shape()
        self._arrival = Arrival(
            parts.saver, parts.events, parts.board, members=parts.members, donor=parts.donor
        )
        self._state: Any = None
        self._steps = NO_STATE
        self._entering = True
        self._told = False
        self._ended = False
        self._step: Step | None = None
        self._round: StepRound | None = None
        self._began = time.monotonic()
        self._leave: Leave | None = None
        self._row_leaves = False
        self._stopping = ""
        self._asked = False
        self._metrics: Mapping[str, Any] = {}

    # ---- who this is

    @property
    def slot(self) -> int:
        return self._place.slot

    @property
    def replica(self) -> int:
        return self._place.seat.replica

    @property
    def index(self) -> int:
        """Which worker of its replica this is."""
        return self._place.seat.index

    @property
    def size(self) -> int:
        """How many workers take part now."""
        members = self._parts.members
        return 1 if members is None or members.decision is None else len(members.decision.members)

    @property
    def generation(self) -> int:
        return 0 if self._parts.members is None else self._parts.members.client.generation

    def agree(self, name: str, value: str) -> None:
        """Come with the same value as all other workers of the run, now and after any restart of it.

        For what bits depend on: `run.agree("step", executable.digest)`. The first worker's value stands for
        as long as the coordinator's state. Fails: UsageError if another value stands.
        """
        members = self._parts.members
        if members is None:
            return
        key = f"{_AGREED}{name}"
        try:
            members.client.set(key, value.encode(), create=True)
        except KeyExistsError:
            stands = (members.client.get(key) or b"").decode()
            if stands != value:
                raise UsageError(
                    f"this worker has {name} = {value!r}, the run goes by {stands!r}",
                    hint="the bits would differ; give all workers the same program, versions and machine",
                ) from None

    @property
    def _saves(self) -> bool:
        """Whether this worker's replica saves."""
        members = self._parts.members
        return members is None or (members.decision is not None and members.decision.saver == self.replica)

    # ---- state

    def restore(self, init: Callable[[], State]) -> State:
        """The state to go on from: of a live replica, else of a vault, else of the disk, else `init()`.

        `init` is called in any case: what it makes is the shape that the state is brought into. Called by:
        all workers, once, first. Blocks: until the others have come and the state is here. Fails:
        DeadlineError, FencedError, MismatchError if what was saved has another shape.
        """
        if self._steps != NO_STATE:
            raise UsageError("run.restore() was called twice", hint="call it once, before run.steps()")
        before = self._parts.board.phase("init")
        template = init()
        self._parts.board.phase("restore")
        if self._parts.members is None:
            self._steps, self._state = self._arrival.loaded(template)
        else:
            while not self._take_part(self._parts.members, template):
                pass
        self._entering = False
        self._parts.board.phase(before)
        faults.site("run.restored")
        state: State = self._state
        return state

    def _held(self, lanes: tuple[int, ...]) -> Held:
        return Held(self._steps, self._entering, self._saves and self._steps > NO_STATE, lanes)

    def _take_part(self, members: Members, template: Any) -> bool:
        """One try to come into the run with a state; whether it worked."""
        decision = members.regroup(self._held(()))
        if not self._told:
            self._say(Active(members.client.incarnation, self.slot, members.client.generation))
            self._told = True
            self._arrival.tell_of_vault(self.node)
        try:
            found = self._arrival.state(decision, template)
            if found is not None:
                self._steps, self._state = found
            # Whoever was to get a state and did not must not go on with the one it had.
            got = found is not None or not (self.slot in decision.loaders or self.slot in decision.sources)
            met = members.row_vote("restored", got)
        except GenerationOver as error:
            log.info("the members changed: %s", error.message)
            return False
        if not (got if met is None else met.ok):
            return False
        members.decision = decision = decision._replace(step=self._steps)
        self._offer(members, decision)
        return True

    def _offer(self, members: Members, decision: Decision) -> None:
        """Offer the state to the newcomers that are to get it from here."""
        readers = sum(self.slot in donors for donors in decision.sources.values())
        if readers and self._steps == decision.step and self._parts.donor is not None:
            self._parts.donor.offer(
                members.meeting,
                self._steps,
                self._state,
                readers=readers,
                rank=self.index,
                world=self._place.workers,
            )

    # ---- steps

    def steps(self, until: int, *, save_every: Every = "auto") -> Iterator[Step]:
        """The steps of the run that are left, up to `until` in all.

        Call `step.done(state)` on each. `save_every` is a number of steps, "auto" (by the cost of a save and
        the rate of failures), or None to save only at the end. When the run is told to stop, or this worker
        to leave, the process exits with 0 from within the loop, at a step that all agree on.
        """
        if self._steps == NO_STATE:
            raise UsageError("run.steps() before run.restore()", hint="state = run.restore(init) comes first")
        parts = self._parts
        parts.saver.set_interval(save_every)
        before = parts.board.phase("step")
        # Their shapes and programs are known by then, and the first step is a step like any other.
        parts.board.progress(self._steps)
        self._began = time.monotonic()
        while self._steps < until:
            self._boundary()
            yield self._begin()
            if self._step is None or not self._step.is_done:
                raise UsageError(
                    f"step {self._steps}: step.done() was not called", hint="end the loop's body with it"
                )
        self._end()
        parts.board.phase(before)

    def _begin(self) -> Step:
        index = self._steps
        self._round = StepRound(
            index,
            self.slot,
            self._parts.others.reducer,
            self._parts.others,
            self._shape,
            regroup=self._regroup,
            agree=self._agree,
        )
        per_step = self._info.samples_per_step
        samples = None if per_step is None else index * per_step
        self._step = Step(index, samples, self, self._round, alone=self._place.replicas == 1)
        faults.site("run.step")
        return self._step

    def _agree(self, complete: bool) -> None:
        """Workers of one replica end a step together, or none of them does. Fails: GenerationOver."""
        members = self._parts.members
        met = None
        if members is not None and self._place.workers > 1:
            self._hear()
            note = b"" if self._leave is None else _LEAVING
            met = members.row_vote("decided", complete, note)
        if not (complete if met is None else met.ok):
            raise GenerationOver("the total is not here")
        self._row_leaves = met is not None and bool(met.notes)

    def _regroup(self, lanes: tuple[int, ...]) -> Decision:
        members = self._parts.members
        assert members is not None
        saved = self._saves
        decision = members.regroup(self._held(lanes))
        self._parts.saver.failures += 1
        self._offer(members, decision)
        if saved and not self._saves:
            self._parts.saver.hand_over()
        return decision

    def _boundary(self) -> None:
        """Between two steps: nothing is half done here."""
        parts, members = self._parts, self._parts.members
        self._hear()
        if parts.donor is not None:
            parts.donor.tidy()
        if members is None:
            return
        self._stop(members)
        if self._row_leaves or (self._leave is not None and self._place.workers == 1):
            self._drain(members, self._leave or Leave("the replica leaves", _NOTICE_S))
        if members.called and self._place.workers == 1:
            self._regroup(())
        if members.client.reached_stop(self._steps, timeout_s=_STOP_S):
            log.info("the run stops at step %d", self._steps)
            self._end(stopped=True)
            raise SystemExit(0)

    def _hear(self) -> None:
        """Follow the orders that have come."""
        parts = self._parts
        if parts.orders is None:
            return
        for order in parts.orders.take():
            match order:
                case Leave() if self._place.replicas == 1 and self._place.workers > 1:
                    self._stopping = order.reason or "told to leave"
                case Leave():
                    self._leave = order
                case StopRun():
                    self._stopping = order.reason or "told to stop"
                case Take():
                    log.warning("a second seat was offered: %s", order)

    def _stop(self, members: Members) -> None:
        """Ask all to stop; at the next step again if nobody answers."""
        if not self._stopping or self._asked:
            return
        try:
            members.client.preempt(self._stopping)
            self._asked = True
        except UnreachableError as error:
            log.warning("the run is not stopping yet: %s", error.message)

    def _drain(self, members: Members, order: Leave) -> None:
        """Leave between two steps, so that others take over the lanes before this process is ended."""
        if members.decision is not None and len(members.decision.members) == self._place.workers:
            self._save()  # nobody else has the state
            self._parts.saver.settle(order.notice_s)
        with contextlib.suppress(CoordError):  # without an answer, the end of this process says it
            members.client.leave(order.reason)
        self._ended = True
        self._say(Drained())
        raise SystemExit(0)

    # ---- what a step calls

    def fence(self) -> None:
        """Return once the state may be changed."""
        self._parts.saver.fence()

    def step_done(self, step: Step, state: Any, metrics: Mapping[str, Any]) -> None:
        """A step of this run is over."""
        parts, members = self._parts, self._parts.members
        now = time.monotonic()
        self._state, self._steps, self._metrics = state, step.index + 1, metrics
        if members is not None:
            members.client.progress(self._steps)
        parts.board.progress(self._steps)
        lanes = step.lanes_computed
        if lanes:
            digests = tuple(parts.others.reducer.lane_digest(lane) for lane in lanes)
            parts.events.append(
                journal.LaneDigests(step=step.index, slot=self.slot, lanes=lanes, digests=digests)
            )
        if members is None or (members.decision is not None and members.decision.members[0] == self.slot):
            done = journal.StepDone(
                step=step.index,
                seconds=now - self._began,
                replicas=self.size // self._place.workers,
                lanes=parts.others.num_lanes,
            )
            parts.events.append(done)
        self._began = now
        if self._saves and parts.saver.due(self._steps):
            self._save()

    def _save(self) -> None:
        per_step = self._info.samples_per_step
        meta: dict[str, Any] = {} if per_step is None else {"samples": self._steps * per_step}
        numbers = {key: float(value) for key, value in self._metrics.items()}
        if numbers:
            meta["metrics"] = numbers
        with self.phase("save"):
            self._parts.saver.save(self._steps, self._state, meta)

    # ---- for the program

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase with a deadline of its own, such as "eval", for as long as the block lasts."""
        before = self._parts.board.phase(name)
        try:
            yield
        finally:
            self._parts.board.phase(before)

    def log(self, message: str, *values: object) -> None:
        """Write a line to this worker's log, with its slot and step."""
        text = message % values if values else message
        print(f"[slot {self.slot} step {max(0, self._steps)}] {text}", flush=True)

    # ---- the end

    def _end(self, *, stopped: bool = False) -> None:
        """Save, and go when all have come this far. Blocks: until then. Fails: DeadlineError, FencedError."""
        if self._saves:
            self._save()
        members = self._parts.members
        if members is not None:
            while not members.all_arrived(self._steps):
                self._regroup(())
                if self._saves:
                    self._save()
            members.client.finish(_FINISH_S)
        self._parts.saver.settle(_FINISH_S)
        self._ended = True
        if not stopped:
            self._say(Finished())

    def _say(self, word: Active | Drained | Finished) -> None:
        if self._parts.orders is not None:
            self._parts.orders.send(word)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._ended and self._steps > NO_STATE:
            self._end()  # the loop was left early, by all of them
        self.close()

    def close(self) -> None:
        """Let everything go. One that has not finished is dead for the others by it."""
        parts = self._parts
        if self._ended:  # else it fails, and its agent is to see in which phase
            parts.board.phase("shutdown")
        if parts.leave_world is not None and self._ended:
            parts.leave_world()
        if parts.donor is not None:
            with contextlib.suppress(TransferError):
                parts.donor.close()
        with contextlib.suppress(CoordError, ReduceError):
            parts.others.close()
        parts.saver.hand_over()
        parts.events.close(timeout_s=5.0)


def run_folder(name: str, base: str | None = None) -> Path:
    """Where everything of a run lies."""
    return Path(base or os.path.join("runs", name)).absolute()
