"""`Run`: a worker's part in a run, from its first state to its last step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

from holdfast import faults, journal
from holdfast.errors import (
    CoordError,
    DeadlineError,
    KeyExistsError,
    ReduceError,
    SaveError,
    TransferError,
    UnreachableError,
    UsageError,
)
from holdfast.supervise import garbage, lives
from holdfast.supervise.arrival import Arrival, Found
from holdfast.supervise.donors import Donor
from holdfast.supervise.members import GenerationOver, Held, Members, Place
from holdfast.supervise.messages import Active, Drained, Finished, Leave, Order, Remark, StopRun, Take
from holdfast.supervise.regroup import NO_STATE, Decision
from holdfast.supervise.saving import SAVE_S, Every, RunSaver
from holdfast.supervise.solo import Notes, Solo
from holdfast.supervise.step_round import Shape, StepRound
from holdfast.supervise.steps import Remarks, Step
from holdfast.supervise.stream import Stream

log = logging.getLogger("holdfast.run")

_LEAVING: Final = b"leaving"
_AGREED: Final = "agreed/"
_TOLD: Final = "told/"
_STOP_S: Final = 60.0
_NOTICE_S: Final = 30.0
_FINISH_S: Final = 60.0
_LAST_TRIES: Final = 2
"""So often the last state is saved, at most, until it is on disk."""
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
    launch: str = ""


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
            parts.saver,
            parts.events,
            parts.board,
            members=parts.members,
            donor=parts.donor,
            say=self._tell_all,
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
        self._told_to_stop = False
        self._asked = False
        self._remarks = Remarks({}, {}, False)
        self._words: dict[str, bytes] = {}

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
        """Come with the same value as all other workers of the run, and as those that are started for them.

        For what bits depend on: `run.agree("step", executable.digest)`. The first worker's value stands for
        as long as the launch. Fails: UsageError if another value stands.
        """
        stands = self.agreed(name, value)
        if stands != value:
            raise UsageError(
                f"this worker has {name} = {value!r}, the run goes by {stands!r}",
                hint="the bits would differ; give all the same program, data, versions and machine",
            )

    def agreed(self, name: str, value: str) -> str:
        """The value that all workers go by: that of the first of them, for as long as the launch.

        For what each finds for itself, a moment before or after the others. Fails: CoordError.
        """
        members = self._parts.members
        if members is None:
            return value
        # The coordinator may know what workers of an earlier launch agreed on: they are gone.
        key = f"{_AGREED}{self._info.launch}/{name}"
        try:
            members.client.set(key, value.encode(), create=True)
        except KeyExistsError:
            return (members.client.get(key) or b"").decode()
        return value

    def tell(self, name: str, value: bytes) -> None:
        """Leave a word for the other workers, in place of the last of that name; it goes with this worker.

        Once a later step is decided, all who had a part in it can `heard` it. Fails: CoordError.
        """
        if self._parts.members is None:
            self._words[name] = value
        else:
            self._parts.members.client.set(f"{_TOLD}{name}/{self.slot}", value, owned=True)

    def heard(self, name: str) -> dict[int, bytes]:
        """The words of that name that workers have told, by slot. Waits for nobody. Fails: CoordError."""
        if self._parts.members is None:
            return {self.slot: self._words[name]} if name in self._words else {}
        prefix = f"{_TOLD}{name}/"
        found = self._parts.members.client.scan(prefix)
        return {int(key.removeprefix(prefix)): value for key, value in found.items()}

    @property
    def step(self) -> int:
        """How many steps the state has seen; -1 before `restore`."""
        return self._steps

    @property
    def alone(self) -> bool:
        """Whether this is a run of one: nobody launched it."""
        return self._parts.members is None

    @property
    def replicas(self) -> int:
        """How many replicas take part now."""
        return max(1, self.size // self._place.workers)

    @property
    def leads(self) -> bool:
        """Whether this worker is the one that tells of the run: the first of those that take part."""
        members = self._parts.members
        return members is None or (members.decision is not None and members.decision.members[0] == self.slot)

    @property
    def _saves(self) -> bool:
        """Whether this worker's replica saves."""
        members = self._parts.members
        return members is None or (members.decision is not None and members.decision.saver == self.replica)

    # ---- state

    def restore(
        self, init: Callable[[], State], *, into: Any = None, steps: int | Callable[[State], int] = 0
    ) -> State:
        """The state to go on from: of a live replica, else of a vault, else of the disk, else `init()`.

        What `init` makes is also the shape that a state is brought into, and it is then called in any case.
        With `into`, a tree of descriptions (shape, dtype, sharding) in its place, it is called only where no
        state is found: both at once take twice the memory. `steps` is how many steps the state of `init` has
        seen, where it comes out of another run; or what counts them. Called by: all workers, once, first.
        Blocks: until the others have come and the state is here. Fails: DeadlineError, FencedError,
        MismatchError if what was saved has another shape.
        """
        if self._steps != NO_STATE:
            raise UsageError("run.restore() was called twice", hint="call it once, before run.steps()")
        before = self._parts.board.phase("restore")

        def begun() -> Found:
            with self.phase("init"):
                made = init()
                return Found(steps(made) if callable(steps) else steps, made)

        first: Callable[[], Found] = begun
        if into is None:
            made = begun()
            into, first = made.state, lambda: made
        if self._parts.members is None:
            self._steps, self._state = self._arrival.loaded(into, first)
        else:
            lives.declare(self._parts.members.client, self.node)
            while not self._take_part(self._parts.members, into, first):
                pass
        self._entering = False
        self._parts.board.phase(before)
        faults.site("run.restored")
        state: State = self._state
        return state

    def _held(self, lanes: tuple[int, ...]) -> Held:
        return Held(self._steps, self._entering, self._saves and self._steps > NO_STATE, lanes)

    def _take_part(self, members: Members, template: Any, first: Callable[[], Found]) -> bool:
        """One try to come into the run with a state; whether it worked."""
        decision = members.regroup(self._held(()))
        if not self._told:
            self._say(Active(members.client.incarnation, self.slot, members.client.generation))
            self._told = True
            self._arrival.tell_of_vault(self.node)
        try:
            found = self._arrival.state(decision, template, first)
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
        garbage.resume()
        self._began = time.monotonic()
        if self._steps >= until and self.leads:
            found = f"{self._steps} steps are done, until={until}"
            self._tell_all(Remark(f"nothing is left to do: {found}"))
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
            with self.phase("save"):
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
        if (
            self._leave is not None
            and self._place.workers > 1
            and self.replicas == 1
            and not self._row_leaves
        ):
            # One world may have no lanes, and then no vote in which its workers could agree to leave.
            self._stopping = self._stopping or self._leave.reason or "told to leave"
        self._stop(members)
        if self._row_leaves or (self._leave is not None and self._place.workers == 1):
            self._drain(members, self._leave or Leave("the replica leaves", _NOTICE_S))
        if members.called and self._place.workers == 1:
            self._regroup(())
        if members.reached_stop(self._steps, _STOP_S):
            log.info("the run stops at step %d", self._steps)
            self._end(stopped=True)
            if self._saves:
                saved = (
                    "are saved" if parts.saver.saved(self._steps) else "are still being saved by the vault"
                )
                self._tell_all(Remark(f"the {self._steps} steps so far {saved}"))
            self._hear()
            if not self._told_to_stop:
                # The run goes on: only this replica was to go, perhaps another worker of it was told first.
                self._say(Drained())
            raise SystemExit(0)

    def _hear(self) -> None:
        """Follow the orders that have come."""
        parts = self._parts
        if parts.orders is None:
            return
        for order in parts.orders.take():
            match order:
                case Leave():
                    self._leave = order
                case StopRun():
                    self._told_to_stop = True
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
            with contextlib.suppress(DeadlineError):  # the vault finishes it
                self._settle(order.notice_s)
        lives.part(members.client, self.node)
        with contextlib.suppress(CoordError):  # without an answer, the end of this process says it
            members.client.leave(order.reason)
        self._ended = True
        self._say(Drained())
        raise SystemExit(0)

    # ---- what a step calls

    def fence(self) -> None:
        """Return once the state may be changed."""
        saver = self._parts.saver
        with self.phase("save") if saver.copies else contextlib.nullcontext():
            saver.fence()

    def step_done(self, step: Step, state: Any, remarks: Remarks) -> None:
        """A step of this run is over."""
        parts, members = self._parts, self._parts.members
        now = time.monotonic()
        self._state, self._steps, self._remarks = state, step.index + 1, remarks
        if members is not None:
            members.client.progress(self._steps)
        parts.board.progress(self._steps)
        lanes = step.lanes_computed
        if lanes:
            digests = tuple(parts.others.reducer.lane_digest(lane) for lane in lanes)
            parts.events.append(
                journal.LaneDigests(step=step.index, slot=self.slot, lanes=lanes, digests=digests)
            )
        if self.leads:
            done = journal.StepDone(
                step=step.index,
                seconds=now - self._began,
                replicas=self.replicas,
                lanes=parts.others.num_lanes,
            )
            parts.events.append(done)
        self._began = now
        if self._saves and (remarks.save or parts.saver.due(self._steps, self.agreed)):
            self._save()

    def _save(self, *, again: bool = False) -> None:
        per_step = self._info.samples_per_step
        meta: dict[str, Any] = {} if per_step is None else {"samples": self._steps * per_step}
        meta |= self._remarks.meta
        numbers = {key: float(value) for key, value in self._remarks.metrics.items()}
        if numbers:
            meta["metrics"] = numbers
        with self.phase("save"):
            self._parts.saver.save(self._steps, self._state, meta, again=again)

    def _settle(self, timeout_s: float) -> None:
        """Wait for the saves under way: one takes as long as the disk does, a step does not.

        Fails: DeadlineError.
        """
        with self.phase("save"):
            self._parts.saver.settle(timeout_s)

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

    def finish(self) -> None:
        """End this worker's part where the loop was left early, by all of them; the block's end does it else.

        For a program that has more to do than it may be given time for. Blocks: until the state is saved.
        Fails: DeadlineError, FencedError.
        """
        if not self._ended and self._steps > NO_STATE:
            self._end()

    def _end(self, *, stopped: bool = False) -> None:
        """Save, and go when all have come this far. Blocks: until then.

        Fails: DeadlineError, FencedError; SaveError if the last state cannot be saved.
        """
        members = self._parts.members
        while not self._arrived(members, stopped):
            self._regroup(())
        if members is not None:
            members.finish(_FINISH_S)
        self._ended = True
        if not stopped:
            self._say(Finished())

    def _arrived(self, members: Members | None, stopped: bool) -> bool:
        """Whether the state is safe and all are here; False if the members must regroup first."""
        try:
            if self._saves:
                self._keep(stopped)
        except GenerationOver as error:
            log.info("the members changed while the last state was saved: %s", error.message)
            return False
        except (DeadlineError, SaveError):
            self._parts.board.phase("save")  # its agent is to see where it failed: it is no fault of the step
            raise
        return members is None or members.all_arrived(self._steps)

    def _keep(self, stopped: bool) -> None:
        """See the last state on disk, for all workers of this replica: nobody computes it again.

        One that stops does not insist on it in time: the vault goes on. Fails: SaveError, DeadlineError,
        GenerationOver.
        """
        saver, members = self._parts.saver, self._parts.members
        limit_s = SAVE_S if self._leave is None else self._leave.notice_s
        for tries in range(_LAST_TRIES + 1):
            if saver.last == self._steps:
                try:
                    self._settle(limit_s)
                except DeadlineError as error:
                    if not stopped:
                        raise
                    log.warning("%s", error.message)
                    return
            saved = saver.saved(self._steps)
            met = None if members is None else members.row_vote("saved", saved)
            if saved if met is None else met.ok:
                return
            if tries < _LAST_TRIES:
                self._save(again=True)
        raise SaveError(
            f"step {self._steps}, the last one, is not saved: {saver.why}",
            hint="make room, or whatever it says; the vault holds the state only while the run lasts",
        )

    def _say(self, word: Active | Drained | Finished | Remark) -> None:
        if self._parts.orders is not None:
            self._parts.orders.send(word)

    def _tell_all(self, remark: Remark) -> None:
        """Say something of the run to people, once for all workers of this replica."""
        if self.index == 0:
            self._say(remark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
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
        if parts.members is not None:
            lives.part(parts.members.client, self.node)
        with contextlib.suppress(CoordError, ReduceError):
            parts.others.close()
        parts.saver.hand_over(ends=self._ended)
        parts.events.close(timeout_s=5.0)
