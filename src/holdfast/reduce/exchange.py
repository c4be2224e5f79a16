"""One exchange: the roots of all members become the total, at every member.

    announced ──▶ gathered ──▶ added ──▶ published ──▶ collected = decided
      Ready        everyone's     own share   Share         everyone's shares
                   Ready is here  of blocks                 are here

Contributors (members with lanes) own one share of the blocks each. An owner needs the roots of every
contributor for its share; every member needs every owner's share. On one node both are read where they lie,
elsewhere they are asked for. A member without lanes is awaited by nobody: it may come late and still receive.

Nothing is decided before everything has been read and found valid, so a failure at any point leaves the
member as it was: its roots are there, its part of a total is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from holdfast import faults
from holdfast.clock import Deadline
from holdfast.errors import ReduceError, ReplicaLateError, ReplicaLostError
from holdfast.reduce.adder import Scratch, evaluate, quiet
from holdfast.reduce.banks import Bank, Flat, Mirrors
from holdfast.reduce.hub import Hub, Member
from holdfast.reduce.layout import FlatLayout
from holdfast.reduce.links import Link, Reading
from holdfast.reduce.messages import Ready, Root, Share
from holdfast.reduce.tree import Node, recipe, roots
from holdfast.reduce.trees import disagreement

TICK_S: Final = 0.02
"""At least so often the caller's check is called."""
_CHECK_S: Final = 0.005
_SLICE: Final = 16
"""Blocks between two looks at links and deadline: 4 MiB, a few milliseconds at most."""
_HINT: Final = "regroup without it; what is folded stays"


@final
class Watch:
    """The caller's patience: its deadline, its check, and the slots it waits for."""

    def __init__(self, deadline_s: float, check: Callable[[], None], hub: Hub, doing: str) -> None:
        self._deadline = Deadline(deadline_s)
        self._check, self._hub, self._doing = check, hub, doing
        self._checked = 0.0
        self.needed: Callable[[], Mapping[int, Member]] = dict
        """Members that must not be lost, also while others are waited for; called with the lock held."""

    def look(self, waiting: Mapping[int, Member], what: str) -> None:
        """Call the check; raise if a link that is needed broke, or the time is up."""
        if (now := time.monotonic()) - self._checked >= _CHECK_S:
            self._checked = now
            self._check()
        with self._hub.changed:
            self._hub.wait(0.0)
            needed = {**self.needed(), **waiting}
            reasons = {slot: self._hub.lost(member.incarnation) for slot, member in needed.items()}
        lost = sorted(slot for slot, reason in reasons.items() if reason is not None)
        if lost:
            told = "; ".join(f"slot {slot}: {reasons[slot]}" for slot in lost)
            raise ReplicaLostError(f"{self._doing}: lost {told}", slots=lost, hint=_HINT)
        if self._deadline.expired():
            raise ReplicaLateError(
                f"{self._doing}: {what} of slots {sorted(waiting)} did not come in "
                f"{self._deadline.timeout_s:g} s",
                slots=sorted(waiting),
                hint="is it stopped or stuck, or is its network down?",
            )

    def own(self, done: Callable[[float], bool], what: str) -> None:
        """Wait for something of this member's: `done` waits for so many seconds and says whether it is there.

        Fails: as the check; ReplicaLateError, which names nobody else.
        """
        while not done(min(TICK_S, self._deadline.remaining())):
            self._check()
            if self._deadline.expired():
                raise ReplicaLateError(
                    f"{self._doing}: {what} was not folded here in {self._deadline.timeout_s:g} s",
                    slots=(),
                    hint="is its device stuck?",
                )

    def until(self, awaited: Callable[[], Mapping[int, Member]], what: str) -> None:
        """Wait for `what` until `awaited`, called with the lock of the hub held, returns nothing."""
        while True:
            with self._hub.changed:
                waiting = awaited()
                if not waiting:
                    return
                needed = {**self.needed(), **waiting}
                if not any(self._hub.lost(member.incarnation) for member in needed.values()):
                    self._hub.wait(min(TICK_S, self._deadline.remaining()))
                    waiting = awaited()
                    if not waiting:
                        return
            self.look(waiting, what)


@final
class Exchange:
    """One attempt at one step in one generation."""

    def __init__(
        self,
        *,
        generation: int,
        step: int,
        me: int,
        members: Mapping[int, Member],
        lanes: Mapping[int, Sequence[int]],
        num_lanes: int,
        deal: int,
        layout: FlatLayout,
        hub: Hub,
        scratch: Scratch,
        mirrors: Mirrors,
    ) -> None:
        self._key = (generation, step)
        self._me, self._members, self._deal = me, members, deal
        self._layout, self._hub, self._scratch = layout, hub, scratch
        self.owners = sorted(slot for slot, mine in lanes.items() if mine)
        self._shares = dict(zip(self.owners, layout.shares(len(self.owners)), strict=True))
        self._roots = {slot: roots(lanes[slot], num_lanes) for slot in self.owners}
        self._num_lanes, self._mirrors = num_lanes, mirrors
        mirrors.reset()
        self._used: dict[int, Ready] = {}

    def _others(self) -> list[int]:
        return [slot for slot in self.owners if slot != self._me]

    def _link(self, slot: int) -> Link | None:
        return self._hub.link(self._members[slot].incarnation)

    # ---- the owner's part

    def gather(self, mine: Mapping[Node, Bank], watch: Watch) -> dict[Node, Flat]:
        """The roots of all contributors, as far as this member's share goes.

        Blocks: until all of them are ready and, from other nodes, here. Fails: as `Watch.look`,
        MismatchError.
        """
        flats = {node: bank.flat for node, bank in mine.items()}
        readings: dict[int, list[Reading]] = {}

        def awaited() -> dict[int, Member]:
            missing = []
            for slot in self._others():
                if slot not in readings:
                    link = self._link(slot)
                    ready = None if link is None else link.ready.get(self._key)
                    if link is not None and ready is not None:
                        readings[slot] = self._read_roots(slot, link, ready, flats)
                if slot not in readings or any(one.missing for one in readings[slot]):
                    missing.append(slot)
            return {slot: self._members[slot] for slot in missing}

        watch.until(awaited, "the sums")
        return flats

    def _read_roots(self, slot: int, link: Link, ready: Ready, flats: dict[Node, Flat]) -> list[Reading]:
        self._check_peer(slot, link, ready)
        self._used[slot] = ready
        readings = []
        for root in ready.roots:
            node = Node(root.lo, root.hi)
            if link.lent:
                flats[node] = link.flat(root.bank, self._layout.blocks, self._layout.nbytes)
            else:
                flats[node] = self._mirrors.take(self._layout.nbytes, self._layout.blocks)
                readings.append(link.ask(root.bank, root.epoch, self._shares[self._me], flats[node]))
        return readings

    def _check_peer(self, slot: int, link: Link, ready: Ready) -> None:
        """Raise unless the peer adds the same arrays and knows of the same deal."""
        if ready.layout != self._layout.digest:
            raise disagreement(self._layout, link.shape, slot)
        nodes = tuple(Node(root.lo, root.hi) for root in ready.roots)
        if ready.deal != self._deal or nodes != self._roots[slot]:
            raise ReduceError(
                f"slot {slot} was dealt other lanes in generation {self._key[0]}, step {self._key[1]}: it "
                f"has the sums {_shown(nodes)}, expected were {_shown(self._roots[slot])}",
                slots=(slot,),
                hint="deal lanes with the same function of the same members everywhere",
            )

    def add(self, flats: Mapping[Node, Flat], total: Flat, watch: Watch) -> None:
        """Make this member's share of the total. Fails: as `Watch.look`."""
        nodes = [node for slot in self.owners for node in self._roots[slot]]
        nodes.sort()
        plan = recipe(nodes, self._num_lanes)
        operands = [flats[node] for node in nodes]
        share = self._shares[self._me]
        for first in range(share.start, share.stop, _SLICE):
            with quiet():
                for at in range(first, min(first + _SLICE, share.stop)):
                    evaluate(plan, operands, total, at, self._layout.blocks[at], self._scratch)
            if first == share.start:
                faults.site("reduce.adding")
            watch.look({}, "the sums")
        watch.until(self._void_roots, "unchanged sums")

    def unpublished(self) -> dict[int, Member]:
        """Owners whose share is not here or on its way yet; called with the lock held."""
        links = {slot: self._link(slot) for slot in self._others()}
        return {
            slot: self._members[slot]
            for slot, link in links.items()
            if link is None or self._key not in link.shares
        }

    def _void_roots(self) -> dict[int, Member]:
        """Contributors whose roots have changed since they were announced: they are in another generation.

        What was read of them is worth nothing. Nobody is lost; whoever ends this generation is about to say
        so.
        """
        void = []
        for slot, ready in self._used.items():
            link = self._link(slot)
            if link is None or not _all_valid(link, ready.roots):
                void.append(slot)
        return {slot: self._members[slot] for slot in void}

    # ---- everybody's part

    def collect(self, total: Flat, watch: Watch) -> None:
        """Bring the shares of the other owners here. Blocks and fails as `Watch.look`."""
        readings: dict[int, Reading] = {}
        copied: set[int] = set()
        fresh: list[tuple[int, Link, Share]] = []

        def awaited() -> dict[int, Member]:
            missing = [slot for slot in self._others() if slot not in copied]
            for slot in missing:
                link = self._link(slot)
                share = None if link is None else link.shares.get(self._key)
                if link is None or share is None:
                    continue
                if link.lent:
                    fresh.append((slot, link, share))
                elif slot not in readings:
                    readings[slot] = link.ask(share.bank, share.epoch, self._shares[slot], total)
                elif not readings[slot].missing:
                    copied.add(slot)
            return {} if fresh else {slot: self._members[slot] for slot in missing if slot not in copied}

        while len(copied) < len(self._others()):
            watch.until(awaited, "the shares")
            for slot, link, share in fresh:
                self._copy(slot, link, share, total, watch)
                copied.add(slot)
            fresh.clear()

    def _copy(self, slot: int, link: Link, share: Share, total: Flat, watch: Watch) -> None:
        source = link.flat(share.bank, self._layout.blocks, self._layout.nbytes)
        blocks = self._shares[slot]
        for first in range(blocks.start, blocks.stop, _SLICE):
            lo = self._layout.blocks[first].lo
            hi = self._layout.blocks[min(first + _SLICE, blocks.stop) - 1].hi
            total.memory[lo:hi] = source.memory[lo:hi]
            watch.look({}, "the shares")
        # Only a member of another generation makes its share void: then this one is over, too.
        waiting = {slot: self._members[slot]}
        watch.until(lambda: {} if link.valid(share.bank, share.epoch) else waiting, "an unchanged share")


def _shown(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{node.lo}..{node.hi - 1}" for node in nodes) or "none"


def _all_valid(link: Link, announced: Sequence[Root]) -> bool:
    """Blocks that were sent are checked by their sender."""
    return not link.lent or all(link.valid(root.bank, root.epoch) for root in announced)
