"""One worker among the others: which generation it is in, and how it gets into the next one.

    join (coordinator) --> gather reports (one vote) --> decide (pure) --> reducer and donors told

It happens where the worker holds nothing half done: while it waits for a total, at the boundary of a step, in
`restore`, and at the end of the run. Workers of one replica share a JAX world, whose collectives pair up by
their order; so they must go through all of these together, and between lanes or steps nobody turns aside
alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, final

import msgspec

from holdfast import faults, journal
from holdfast.clock import Deadline
from holdfast.coord import CoordClient, Lost, Met, Rally
from holdfast.coord.messages import Push, Welcome
from holdfast.errors import (
    BarrierError,
    CoordError,
    DeadlineError,
    FencedError,
    HoldfastError,
    ReduceError,
    StaleGenerationError,
    UnreachableError,
)
from holdfast.reduce import Group, Member, Reducer
from holdfast.supervise.messages import Seat
from holdfast.supervise.regroup import Circle, Decision, Report, decide

log = logging.getLogger("holdfast.supervise")

EXCHANGE_S: Final = 3600.0
"""Longer than any phase may last: who hangs is found and killed by its agent long before."""
REGROUP_S: Final = EXCHANGE_S
"""How long the others may take to come to a point where they can regroup."""
_FETCH_S: Final = 30.0
_RECEIVE_S: Final = 60.0
_STANDBY_S: Final = 0.5
_GRACE_S: Final = 0.05
"""How long somebody who would like to come in lets an exchange go on that is about to end."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Report)


class Waits(Protocol):
    """The part of the board that tells the agent of waiting for others."""

    def waiting(self, name: str | None) -> None: ...


class GenerationOver(HoldfastError):
    """The members have changed, or are about to: time to regroup."""


class Place(NamedTuple):
    """Where a worker sits, in a run of `replicas` times `workers` whose steps have so many lanes.

    Floats are rounded to `wire_dtype` for their sum, if it is given.
    """

    seat: Seat
    replicas: int
    workers: int
    lanes: int
    wire_dtype: str | None = None

    @property
    def slot(self) -> int:
        return self.seat.replica * self.workers + self.seat.index


class Held(NamedTuple):
    """What this worker brings into a meeting."""

    steps: int
    entering: bool = False
    saving: bool = False
    lanes: tuple[int, ...] = ()


@final
class Members:
    """This worker's view of the generation. Used by the thread that trains.

    `transfer` is the address of its donor.
    """

    def __init__(
        self,
        place: Place,
        reducer: Reducer,
        *,
        connect: Callable[[Callable[[Push], None]], CoordClient],
        transfer: str,
        board: Waits,
        events: journal.Journal,
    ) -> None:
        self.place = place
        self.reducer = reducer
        """What sums the lanes."""
        self._came_in = False
        self._transfer = transfer
        self._board = board
        self._events = events
        self.num_lanes = place.lanes
        self._rallied = -1
        self._rallied_at = 0.0
        self._urgent = False
        self._at_end = ""
        self._changed = threading.Condition()
        self._coord_slots: dict[int, int] = {}
        self._lost: list[int] = []
        self._circle = Circle()
        self.reports: dict[int, Report] = {}
        self.decision: Decision | None = None
        self.meeting = 0
        self.client = connect(self._heard)

    # ---- what the coordinator tells, on a thread of its client

    def _heard(self, push: Push) -> None:
        match push:
            case Rally(generation, urgent, _):
                self._rally(generation, urgent)
            case Lost(slot):
                self._lost.append(self._seat_slots().get(slot, slot))
            case Welcome(fresh=False, generation=generation):
                # What was pushed while the connection was away is lost: ask whether somebody waits for us.
                if self.client.status(timeout_s=60.0).forming:
                    self._rally(generation, False)

    def _rally(self, generation: int, urgent: bool) -> None:
        with self._changed:
            if generation > self._rallied or (urgent and not self._urgent):
                self._rallied_at = time.monotonic()
                self._urgent = urgent
            self._rallied = max(self._rallied, generation)
            self._changed.notify_all()
            end = self._at_end
        if end:
            self._cancel(end)

    def _seat_slots(self) -> dict[int, int]:
        """The coordinator's numbers of the members to ours: it fills holes, we keep our seats."""
        return {theirs: ours for ours, theirs in self._coord_slots.items()}

    def _cancel(self, name: str) -> None:
        try:
            self.client.cancel(name, "the members change", timeout_s=10.0)
        except CoordError as error:
            log.debug("no barrier to cancel: %s", error.message)

    @property
    def called(self) -> bool:
        """Whether the generation is over or somebody waits to come in."""
        return self._rallied >= self.client.generation

    def check(self) -> None:
        """For those who wait in an exchange: raise if it is time to regroup. Fails: GenerationOver."""
        self._board.waiting("reduce")
        if self.called and (self._urgent or time.monotonic() - self._rallied_at > _GRACE_S):
            raise GenerationOver("the members change")

    # ---- a new generation

    def regroup(self, held: Held) -> Decision:
        """Go through meetings until one includes this worker; the decision of that one.

        Blocks: until all members have come to where they can regroup. Fails: DeadlineError; FencedError if
        this worker was declared dead or is too far behind: only a new process can take part.
        """
        began = time.monotonic()
        deadline = Deadline(REGROUP_S)
        self._board.waiting("regroup")
        try:
            while True:
                deadline.check("the other members to regroup", hint="`holdfast status` shows who is missing")
                decision = self._meeting(held, deadline)
                if decision is not None:
                    stays = decision.saver == self.place.seat.replica
                    self._circle.meet(decision.step, self.reports.values(), stays=stays, now=time.monotonic())
                    self._events.append(
                        journal.Regrouped(
                            generation=self.client.generation,
                            step=decision.step,
                            members=decision.members,
                            lost=tuple(self._lost),
                            seconds=time.monotonic() - began,
                        )
                    )
                    self._lost = []
                    return decision
        finally:
            self._board.waiting(None)

    def _meeting(self, held: Held, deadline: Deadline) -> Decision | None:
        """One try; None if it has to be done again."""
        client, place = self.client, self.place
        try:
            self._rendezvous(deadline)
            # `failed` makes it another generation even if the members are the same, as after a broken link:
            # what was said about the last one is then known to be old.
            joined = client.join(slot=place.slot, failed=True, timeout_s=deadline.remaining())
            faults.site("run.joined")
            if joined.slot < 0:
                # No place yet: whoever had ours is not known to be dead, or the replica is not whole.
                self._await_call(deadline, _STANDBY_S)
                return None
            self._came_in = True
            note = _encoder.encode(self._report(held))
            met = client.vote(f"regroup/{joined.generation}", True, note=note, timeout_s=deadline.remaining())
            faults.site("run.gathered")
        except (BarrierError, StaleGenerationError, UnreachableError) as error:
            log.info("meeting again: %s", error.message)
            return None
        return self._decided(met, deadline)

    def _decided(self, met: Met, deadline: Deadline) -> Decision | None:
        place = self.place
        reports = [(slot, _decoder.decode(note)) for slot, note in met.notes]
        found = decide([one for _, one in reports], workers=place.workers, num_lanes=self.num_lanes)
        me = place.slot
        if me in found.late:
            raise FencedError(
                f"slot {me} is too far behind to catch up with step {found.step}",
                hint="the process ends and comes back as a newcomer",
            )
        if me not in found.members:
            self._await_call(deadline)
            return None
        newest: dict[int, Report] = {}
        self._coord_slots = {}
        for coord_slot, one in sorted(reports, key=lambda pair: pair[1].attempt):
            slot = one.replica * place.workers + one.index
            newest[slot] = one
            self._coord_slots[slot] = coord_slot
        self.reports = {slot: newest[slot] for slot in found.members}
        self.decision = found
        self.meeting = met.epoch
        column = [s for s in found.members if s % place.workers == place.seat.index]
        members = tuple(Member(s, newest[s].incarnation, newest[s].reduce) for s in column)
        self.reducer.regroup(Group(met.epoch, me, members))
        return found

    def _report(self, held: Held) -> Report:
        seat = self.place.seat
        return Report(
            replica=seat.replica,
            index=seat.index,
            attempt=seat.attempt,
            incarnation=self.reducer.incarnation,
            reduce=self.reducer.address,
            transfer=self._transfer,
            steps=held.steps,
            decided=self.reducer.decided,
            lanes=held.lanes,
            entering=held.entering,
            saving=held.saving,
        )

    def _rendezvous(self, deadline: Deadline) -> None:
        """Come in together: a generation takes whole replicas only, and each try makes all others regroup."""
        place = self.place
        if place.workers == 1 or self._came_in:
            return
        name = f"row/{place.seat.replica}/{place.seat.attempt}"
        self.client.set(f"{name}/{place.seat.index}", b"", owned=True)
        for index in range(place.workers):
            self.client.wait(f"{name}/{index}", deadline.remaining())

    def _await_call(self, deadline: Deadline, patience_s: float = REGROUP_S) -> None:
        """Wait until the coordinator calls for the next generation, `patience_s` at most."""
        patience = Deadline(patience_s)
        with self._changed:
            while not self.called and not patience.expired():
                deadline.check("a place in the run", hint="`holdfast status` shows who has one")
                self._changed.wait(min(deadline.remaining(), patience.remaining()))

    # ---- within a generation

    def lanes_at(self, step: int) -> dict[int, tuple[int, ...]]:
        """Who computes what at a step, by slot, in this worker's column."""
        assert self.decision is not None
        if step < self.decision.step:
            return {}  # others have its total
        lanes = self.decision.lanes if step == self.decision.step else self.decision.steady
        index, workers = self.place.seat.index, self.place.workers
        return {slot: own for slot, own in lanes.items() if slot % workers == index}

    def holder_of(self, step: int) -> int | None:
        """Who has the total of a step that this worker is to fetch, if it is."""
        assert self.decision is not None
        return self.decision.totals.get(self.place.slot, {}).get(step)

    def complete(self, step: int) -> None:
        """Have the total of a step. Blocks: until all lanes are computed, by whoever.

        Fails: GenerationOver if the members must regroup first.
        """
        self._board.waiting("reduce")
        try:
            if self.place.workers > 1:
                self.check()  # its only chance: a replica that is alone waits for nobody
            holder = self.holder_of(step)
            if self.reducer.decided >= step:
                pass
            elif holder is not None:
                self._board.waiting("total")  # a wait that gives no signs of life
                self.reducer.fetch(step, holder, _FETCH_S, None)
            else:
                # Nobody waits for one that adds nothing: if the others are far ahead, regrouping shows it.
                adds = bool(self.lanes_at(step).get(self.place.slot))
                self.check()  # from its first sign of life on, a silent exchange is a hang
                self.reducer.exchange(EXCHANGE_S if adds else _RECEIVE_S, self.check)
        except ReduceError as error:
            raise GenerationOver(error.message) from error
        finally:
            self._board.waiting(None)

    def row_vote(self, name: str, ok: bool = True, note: bytes = b"") -> Met | None:
        """A vote of the workers of this replica; None if there is nobody to ask.

        All of them get the same answer, or all fail. So that nobody waits for one that has turned aside, a
        worker that cannot go on votes too, against it, before it regroups. Blocks: until all have voted.
        Fails: GenerationOver.
        """
        place = self.place
        if place.workers == 1:
            return None
        first = place.seat.replica * place.workers
        slots = [self._coord_slots[first + index] for index in range(place.workers)]
        self._board.waiting("replica")
        try:
            return self.client.vote(
                f"{name}/{place.seat.replica}/{self.meeting}", ok, note=note, slots=slots, timeout_s=REGROUP_S
            )
        except (BarrierError, StaleGenerationError) as error:
            raise GenerationOver(error.message) from error
        finally:
            self._board.waiting(None)

    # ---- the end

    def all_arrived(self, steps: int) -> bool:
        """Whether all members have come to the same end; False if they must regroup first.

        Blocks: until all are there. Fails: DeadlineError, FencedError.
        """
        name = f"end/{steps}"
        self._board.waiting("end")
        with self._changed:
            self._at_end = name
        try:
            if self.called:
                return False
            self.client.barrier(name, timeout_s=REGROUP_S)
            return True
        except (BarrierError, StaleGenerationError) as error:
            if isinstance(error, DeadlineError):
                raise
            log.info("not all are at the end: %s", error.message)
            return False
        finally:
            with self._changed:
                self._at_end = ""
            self._board.waiting(None)

    def finish(self, timeout_s: float) -> None:
        """Have finished. Blocks: until all members that are alive have. Fails: DeadlineError, FencedError."""
        self._board.waiting("finish")
        try:
            self.client.finish(timeout_s)
        finally:
            self._board.waiting(None)

    def reached_stop(self, steps: int, timeout_s: float) -> bool:
        """Whether all stop here. Blocks: while a stop is announced, not decided. Fails: DeadlineError."""
        self._board.waiting("stop")
        try:
            return self.client.reached_stop(steps, timeout_s=timeout_s)
        finally:
            self._board.waiting(None)

    def close(self) -> None:
        """End the session and all links."""
        self.reducer.close()
        self.client.close()
