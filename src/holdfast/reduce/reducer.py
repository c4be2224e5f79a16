"""The sum of the lanes of a step over all replicas, for one worker of each."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import msgspec
import xxhash

from holdfast import faults
from holdfast.arrays import dtype as dtype_of
from holdfast.errors import UsageError
from holdfast.reduce.adder import Scratch
from holdfast.reduce.banks import Bank, Mirrors
from holdfast.reduce.exchange import Exchange, Watch
from holdfast.reduce.fetching import HeldTotal
from holdfast.reduce.folding import Folder
from holdfast.reduce.hub import Hub, Member
from holdfast.reduce.intake import INLINE_BYTES, Intake
from holdfast.reduce.layout import FlatLayout
from holdfast.reduce.links import Identity
from holdfast.reduce.messages import Begun, Done, Ready, Root, Shape, Share
from holdfast.reduce.shelf import Shelf
from holdfast.reduce.tree import check_deal
from holdfast.reduce.trees import Trees
from holdfast.reduce.workers import default_threads

_LINGER_S: Final = 2.0
"""How long `close` waits for members on other nodes that still read the last total."""
_MAX_LANES: Final = 1 << 16


class Group(NamedTuple):
    """The members of a generation that hold the same shard: `me` is this one's slot."""

    generation: int
    me: int
    members: tuple[Member, ...]


@final
class Reducer:
    """Sums lanes between members. One thread at a time calls it.

    `num_threads` fold lanes of `inline_bytes` or more, beside the caller; no bit depends on how many.

        reducer.regroup(Group(...))                     a generation begins
        reducer.begin(step, {slot: lanes, ...})
        reducer.add(lane, tree)                         for each of this member's lanes
        reducer.exchange(deadline_s, check)             waits for the others
        reducer.total()

    When `exchange` fails, or `check` raises: `regroup`, then `fetch` if another member has the total already,
    else `reassign`, add what is missing, and `exchange` again. What was folded stays.
    """

    def __init__(
        self,
        *,
        run: str = "run",
        token: bytes | None = None,
        bind: str = "127.0.0.1:0",
        num_lanes: int = 8,
        wire_dtype: str | None = None,
        transports: Sequence[str] = ("memfd", "tcp"),
        name: str = "",
        num_threads: int | None = None,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        if not 1 <= num_lanes <= _MAX_LANES:
            raise UsageError(f"num_lanes={num_lanes}", hint=f"between 1 and {_MAX_LANES}")
        if wire_dtype is not None:
            dtype_of(wire_dtype)
        if num_threads is not None and num_threads < 1:
            raise UsageError(f"num_threads={num_threads}", hint="at least 1")
        self.incarnation = secrets.token_hex(16)
        self._num_lanes, self._wire_dtype = num_lanes, wire_dtype
        name = name or self.incarnation[:8]
        self._hub = Hub(Identity(run, token, self.incarnation), bind, transports, name)
        self.address = self._hub.address
        self._shelf = Shelf(self._hub.tell)
        self._trees = Trees(num_lanes, wire_dtype, self._shaped)
        self._scratch = Scratch()
        self._mirrors = Mirrors()
        self._folder = Folder(num_lanes, self._take, self._give)
        self._intake = Intake(
            self._folder,
            self._scratch,
            num_threads=num_threads or default_threads(),
            inline_bytes=inline_bytes,
            name=name,
        )
        self._group = Group(0, 0, (Member(0, self.incarnation, self.address),))
        self._step = -1
        self._lanes: dict[int, tuple[int, ...]] = {}
        self._last: tuple[int, int] = (-1, -1)
        self._first: tuple[int, int] = (-1, -1)
        self._announced: tuple[int, int] | None = None
        self._leftover: Bank | None = None
        self._closed = False

    # ---- the group

    def regroup(self, group: Group) -> None:
        """A generation begins. Never waits; links to those who stayed are kept. Fails: UsageError.

        A lane that is being folded goes on.
        """
        slots = [member.slot for member in group.members]
        mine = [member for member in group.members if member.slot == group.me]
        if len(set(slots)) != len(slots) or not mine or mine[0].incarnation != self.incarnation:
            raise UsageError(
                f"a group of slots {slots} in which slot {group.me} is not this member ({self.incarnation})"
            )
        if group.generation < self._group.generation:
            raise UsageError(f"generation {group.generation} after {self._group.generation}")
        with self._hub.changed:
            self._group = group
            self._shelf.withdraw()
            self._hub.regroup(self._shelf, group.me, group.members)

    # ---- a step

    def prepare(self, template: Any) -> None:
        """Learn the arrays from a tree like those that will be added, and take memory for them.

        For a member that has no lanes at first. Fails: TreeError, MismatchError, ReduceError.
        """
        self._trees.take(template)

    def begin(self, step: int, lanes: Mapping[int, Sequence[int]]) -> None:
        """A step begins; `lanes` says which member computes which. Fails: UsageError.

        A step that is decided here, or an earlier one, can begin anew in another generation: totals from it
        on are let go. Within a generation, steps only go up, so that what is said of a step is said once.
        Blocks: while a lane of the step before is still computed; it is dropped.
        """
        deal = self._dealt(lanes)
        if (self._group.generation, step) <= self._last or step < 0:
            raise UsageError(
                f"step {step} cannot begin in generation {self._group.generation} after step {self._last[1]}",
                hint="to go back, let all members regroup first",
            )
        self._intake.give_up()
        self._entered(step)
        self._clear()
        with self._hub.changed:
            self._folder.reset()
            self._shelf.unready()
            self._shelf.drop(step)
            self._step, self._lanes = step, deal
            self._tell_begun()

    def reassign(self, lanes: Mapping[int, Sequence[int]]) -> None:
        """Deal the lanes of this step out anew, after `regroup`. Fails: UsageError.

        Lanes that are folded here must stay here: sums cannot be taken apart. Blocks and fails as `held`.
        """
        deal = self._dealt(lanes)
        self._intake.settle()
        if self._announced == (self._group.generation, self._step):
            raise UsageError(
                f"the sums of step {self._step} are announced in generation {self._group.generation}",
                hint="reassign() comes after regroup(), once",
            )
        stolen = sorted(set(self._folder.lanes()) - set(deal.get(self._group.me, ())))
        if stolen:
            raise UsageError(
                f"lanes {stolen} are folded here and were dealt to others",
                hint="leave lanes with whoever has computed them in this step",
            )
        with self._hub.changed:
            self._lanes = deal
            self._entered(self._step)
            self._shelf.withdraw()
            self._tell_begun()

    def _entered(self, step: int) -> None:
        self._last = (self._group.generation, step)
        if self._first[0] != self._group.generation:
            self._first = self._last

    def _tell_begun(self) -> None:
        if self._followed():
            self._shelf.notify(Begun(self._group.generation, self._step))

    def _followed(self) -> bool:
        """Whether anybody must know when this member begins and ends a step.

        Of one that adds, its sums say so; and whoever reads memory in place sees what becomes of it.
        """
        return self._group.me not in self._lanes or self._hub.remote()

    def _dealt(self, lanes: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        check_deal(lanes, [member.slot for member in self._group.members], self._num_lanes)
        return {slot: tuple(sorted(mine)) for slot, mine in lanes.items() if mine}

    def add(self, lane: int, tree: Any) -> None:
        """Fold the result of one lane; the tree, and numpy arrays in it, may be changed afterwards.

        A large lane is folded while the caller goes on: its arrays must be neither donated nor deleted before
        the next call of `add`, `held` or `exchange` has returned, which else fails with a TreeError. Blocks:
        until the lane before is folded; for a small one, and for one of numpy arrays, until it is itself.
        Fails: UsageError, TreeError, MismatchError, ReduceError, and what the lane before failed with; of
        lanes that were to be added to one that failed, none is held.
        """
        if lane not in self._lanes.get(self._group.me, ()):
            mine = self._lanes.get(self._group.me, ())
            raise UsageError(f"lane {lane} is not dealt to slot {self._group.me}, which has {mine}")
        layout, leaves = self._trees.take(tree)
        self._intake.add(lane, layout, leaves)

    def held(self) -> tuple[int, ...]:
        """The lanes folded here in this step.

        Blocks: until the one added last is. Fails: what it failed with, once; DeadlineError.
        """
        self._intake.settle()
        return self._folder.lanes()

    def lane_digest(self, lane: int) -> str:
        """The digest of what was added for a lane of this step, in hex: see `Fold.digest`.

        Blocks and fails as `held`. Fails: UsageError.
        """
        self._intake.settle()
        return self._folder.digest(lane)

    def exchange(self, deadline_s: float, check: Callable[[], None]) -> None:
        """Sum over all members.

        Blocks: until the total is here, `deadline_s` at most. Calls `check` at least every 20 ms; it may
        raise. Fails: ReplicaLostError as soon as a link breaks from which something is missing,
        ReplicaLateError, MismatchError, ReduceError, UsageError. Each leaves what is folded as it is. First
        waits for the lane that was added last, and fails with what that failed with.
        """
        step, generation, me = self._step, self._group.generation, self._group.me
        if step in self._shelf.totals:
            return
        watch = Watch(deadline_s, check, self._hub, f"step {step} in generation {generation}")
        self._intake.settle(watch)
        missing = sorted(set(self._lanes.get(me, ())) - set(self._folder.lanes()))
        if not self._lanes or missing:
            raise UsageError(
                f"lanes {missing} of step {step} are not added", hint="begin() and add() come first"
            )
        self._clear()
        if set(self._lanes) == {me} and self._alone():
            self._decide_alone()
            return
        with self._hub.attended():
            self._exchanged(watch)

    def _exchanged(self, watch: Watch) -> None:
        me = self._group.me
        layout = self._known_layout(watch)
        exchange = self._exchange(layout)
        watch.needed = exchange.unpublished
        if me in self._lanes:
            self._announce(layout)
            faults.site("reduce.announced")
        bank = self._total_bank(watch)
        try:
            if me in self._lanes:
                flats = exchange.gather(self._folder.held, watch)
                exchange.add(flats, bank.flat, watch)
                self._publish(bank)
                faults.site("reduce.published")
            exchange.collect(bank.flat, watch)
        except BaseException:
            self._abandon(bank)
            raise
        self._decide(bank)

    def _abandon(self, bank: Bank) -> None:
        """It failed. A share that was published stays until the next attempt: others may need it."""
        with self._hub.changed:
            self._shelf.withdraw()
            self._stop_reading()  # no block may arrive in a bank that is used again
            if bank.epoch:
                self._leftover = bank
            else:
                self._shelf.give(bank)

    def _clear(self) -> None:
        with self._hub.changed:
            if self._leftover is not None:
                self._shelf.give(self._leftover)
                self._leftover = None

    def _alone(self) -> bool:
        return len(self._group.members) == 1

    def _exchange(self, layout: FlatLayout) -> Exchange:
        return Exchange(
            generation=self._group.generation,
            step=self._step,
            me=self._group.me,
            members={member.slot: member for member in self._group.members},
            lanes=self._lanes,
            num_lanes=self._num_lanes,
            deal=self._deal_digest(),
            layout=layout,
            hub=self._hub,
            scratch=self._scratch,
            mirrors=self._mirrors,
        )

    def _deal_digest(self) -> int:
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(sorted(self._lanes.items())))

    def _announce(self, layout: FlatLayout) -> None:
        self._announced = (self._group.generation, self._step)
        with self._hub.changed:
            roots = tuple(Root(*node, bank.number, bank.seal()) for node, bank in self._folder.held.items())
            self._shelf.notify(
                Ready(self._group.generation, self._step, layout.digest, self._deal_digest(), roots)
            )

    def _publish(self, bank: Bank) -> None:
        with self._hub.changed:
            self._shelf.publish(Share(self._group.generation, self._step, bank.number, bank.seal()))

    def _total_bank(self, watch: Watch) -> Bank:
        """A bank for the total. The total of the step before the last makes room, once nobody reads it."""

        def reading() -> dict[int, Member]:
            waiting = {}
            for member in self._group.members:
                if self._reads(member):
                    waiting[member.slot] = member
            return waiting

        watch.until(reading, f"word that step {self._step - 2} was read")
        with self._hub.changed:
            self._shelf.retire(self._step - 2)
        bank = self._take()
        bank.void()
        return bank

    def _reads(self, member: Member) -> bool:
        """Whether a member does not have the total of the step before the last yet, though it may need it."""
        link = self._hub.link(member.incarnation)
        begun = None if link is None else link.begun
        if member.slot == self._group.me or self._hub.lost(member.incarnation) is not None:
            return False
        if link is None or begun is None or begun.generation != self._group.generation:
            # Not heard of yet: one that adds is awaited anyway, one that does not starts where all do.
            return member.slot not in self._lanes and self._first[1] <= self._step - 2
        return link.has < self._step - 2

    def _decide_alone(self) -> None:
        """All lanes are here: their sum is the total as it lies."""
        (bank,) = self._folder.held.values()
        self._folder.release()
        bank.seal()
        self._decide(bank)

    def _decide(self, bank: Bank) -> None:
        with self._hub.changed:
            bank.seal()
            self._shelf.keep(self._step, bank)
            if self._followed():
                self._shelf.notify(Done(self._step))
        faults.site("reduce.decided")

    # ---- totals

    @property
    def decided(self) -> int:
        """The newest step whose total is held here, -1 without one."""
        return max(self._shelf.totals, default=-1)

    def fetch(self, step: int, slot: int, deadline_s: float, template: Any) -> None:
        """Take the decided total of `step` from a member that has it.

        Blocks: until it is here. Fails: ReplicaLostError, ReplicaLateError, ReduceError if the member does
        not have it, MismatchError if its arrays are not those of `template` (None: whatever was added
        before).
        """
        if step in self._shelf.totals:
            return
        if template is not None:
            self.prepare(template)
        watch = Watch(deadline_s, lambda: None, self._hub, f"the total of step {step} from slot {slot}")
        member = next((one for one in self._group.members if one.slot == slot), None)
        if member is None or slot == self._group.me:
            raise UsageError(f"slot {slot} is no other member of generation {self._group.generation}")
        with self._hub.changed:
            self._shelf.drop(step)
            self._shelf.retire(step - 2)
        with self._hub.attended():
            self._fetched(step, member, watch)

    def _fetched(self, step: int, member: Member, watch: Watch) -> None:
        source = HeldTotal(step, member, self._hub, watch)
        if self._shelf.layout is None:
            self._trees.adopt(source.shape())
        layout = self._shelf.layout
        assert layout is not None
        bank = self._take()
        bank.void()
        try:
            source.copy(layout, bank.flat)
        except BaseException:
            with self._hub.changed:
                self._stop_reading()
            self._give(bank)
            raise
        self._step, self._lanes = step, {}
        self._decide(bank)

    def total(self) -> Any:
        """The total of the newest decided step, in the structure of what was added, as numpy arrays.

        Valid until the step after next begins; not to be written. Fails: UsageError, TreeError.
        """
        if self.decided < 0:
            raise UsageError("no step is decided here", hint="total() comes after exchange() or fetch()")
        return self._trees.rebuilt(self._shelf.totals[self.decided].flat.memory)

    def close(self) -> None:
        """Let go of everything; arrays that were handed out stay.

        Blocks: while members on other nodes still read the last total, for two seconds at most; while a lane
        is being computed, for five.
        """
        if self._closed:
            return
        self._closed = True
        self._intake.close()
        ends = time.monotonic() + _LINGER_S
        with self._hub.changed:
            while self._read_from_afar() and (left := ends - time.monotonic()) > 0:
                self._hub.changed.wait(left)
        self._hub.close()
        self._folder.release()
        self._leftover = None
        self._shelf.close()

    def _read_from_afar(self) -> bool:
        """Whether a member that gets its bytes over the network does not have our last total yet."""
        links = [self._hub.link(member.incarnation) for member in self._group.members]
        return any(
            link.has < self.decided and link.begun is not None and link.begun.step <= self.decided
            for link in links
            if link is not None and link.broken is None and not link.lent
        )

    # ---- memory and layout

    def _take(self) -> Bank:
        with self._hub.changed:
            bank = self._shelf.spare()
        if bank is None:
            # Without the lock: a second without an answer would look like a dead member to the others.
            bank = self._shelf.made()
            with self._hub.changed:
                self._shelf.show(bank)
        return bank

    def _give(self, bank: Bank) -> None:
        with self._hub.changed:
            self._shelf.give(bank)

    def _shaped(self, layout: FlatLayout, shape: Shape) -> None:
        with self._hub.changed:
            self._shelf.shape(layout, shape)

    def _stop_reading(self) -> None:
        for member in self._group.members:
            link = self._hub.link(member.incarnation)
            if link is not None:
                link.forget_readings()

    def _known_layout(self, watch: Watch) -> FlatLayout:
        """The layout; a member that has added nothing waits for a contributor to tell it."""
        if self._shelf.layout is None:
            members = {member.slot: member for member in self._group.members if member.slot in self._lanes}

            def awaited() -> dict[int, Member]:
                told = [
                    link for one in members.values() if (link := self._hub.link(one.incarnation)) is not None
                ]
                if any(link.shape is not None for link in told):
                    return {}
                return members

            watch.until(awaited, "word of the arrays")
            with self._hub.changed:
                links = [self._hub.link(one.incarnation) for one in members.values()]
            shapes = [link.shape for link in links if link is not None and link.shape is not None]
            self._trees.adopt(shapes[0])
        assert self._shelf.layout is not None
        return self._shelf.layout
