"""The memory of a vault, and the staged states in it: whose they are, which are kept, what is lent to whom.

While a trainer is connected, every state in its slots is offered until a save begins in that slot. When it is
gone, a standing vault keeps the newest `keep` states of that rank for whoever restores them, and one free
slot: the next trainer of the same rank is lent this memory instead of new one, and gets the kept state's as
soon as its own first state is staged. So a rank never takes more than `keep + 1` slots, plus one for a moment
where its trainer asks for two before it has staged anything.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, final

import numpy as np

from holdfast.arrays import Bytes1D
from holdfast.errors import HoldfastError, VaultError
from holdfast.format import block_digest, block_range, block_seed, num_blocks
from holdfast.transfer import Endpoint
from holdfast.vault.arena import Slot
from holdfast.vault.catalogue import Held
from holdfast.vault.messages import ServeAt
from holdfast.vault.offers import About, Offers, Owner, Published

log = logging.getLogger("holdfast.vault")

_NOTHING: Final[Bytes1D] = np.empty(0, np.uint8)


@final
class State:
    """One staged state. `slot` is None for a copy from a neighbour, which has memory of its own."""

    def __init__(self, owner: Owner, about: About, memory: Bytes1D, slot: Slot | None, serial: int) -> None:
        self.owner = owner
        self.about = about
        self.memory = memory
        self.slot = slot
        self.serial = serial
        self.digests = b""
        self.orphaned = slot is None
        self.settled = True
        self.published: Published | None = None

    @property
    def step(self) -> int:
        return self.about.order.save.step

    def bad_block(self) -> int | None:
        """The first block that is not what was staged; None if all are, or nothing is known about them."""
        if not self.digests:
            return None
        order, recipe = self.about.order, self.about.recipe
        for block in range(num_blocks(recipe.size)):
            begin, end = block_range(block, recipe.size)
            seed = block_seed(order.save, recipe.part, block)
            if block_digest(self.memory[begin:end].data, seed) != self.digests[16 * block : 16 * block + 16]:
                return block
        return None

    def arrays_in(self, block: int) -> tuple[str, ...]:
        """The names of the arrays with bytes in a block."""
        begin, end = block_range(block, self.about.recipe.size)
        hits = [
            piece.name
            for piece in self.about.recipe.slices
            if piece.nbytes and piece.offset < end and piece.offset + piece.nbytes > begin
        ]
        return tuple(dict.fromkeys(hits))

    def hash(self) -> None:
        """Remember what the blocks are now."""
        order, recipe = self.about.order, self.about.recipe
        ranges = [block_range(block, recipe.size) for block in range(num_blocks(recipe.size))]
        self.digests = b"".join(
            block_digest(self.memory[begin:end].data, block_seed(order.save, recipe.part, block))
            for block, (begin, end) in enumerate(ranges)
        )


@final
class Holdings:
    """All memory and all states of one vault. Safe from any thread.

    `keep` is 0 for a vault that ends with its trainer; nothing outlives a session then.
    """

    def __init__(
        self,
        *,
        keep: int = 0,
        limit: int | None = None,
        on_open: Callable[[], None] | None = None,
    ) -> None:
        self.keep = keep
        self.copies = False
        """Whether copies of a neighbour's states are kept as well."""
        self._limit = limit
        self._on_open = on_open
        self._lock = threading.RLock()
        self._offers: Offers | None = None
        self._states: list[State] = []
        self._lent: dict[Owner, list[Slot]] = {}
        self._free: dict[Owner, list[Slot]] = {}
        self._serials = itertools.count()

    # ---- offering

    def open(self, serve: ServeAt) -> None:
        """Offer states at this address. Fails: VaultError if another run's are offered; TransferError."""
        with self._lock:
            if self._offers is not None:
                mine = self._offers.serve
                if (mine.run, mine.token) != (serve.run, serve.token):
                    raise VaultError(
                        f"this vault offers the states of run {mine.run!r}, not of {serve.run!r}",
                        hint="one vault per node and run; and all its trainers need the run's token",
                    )
                return
            self._offers = Offers(serve)
        if self._on_open is not None:
            self._on_open()

    @property
    def address(self) -> str:
        """Where states are offered; empty if they are not."""
        return self._offers.address if self._offers is not None else ""

    @property
    def endpoint(self) -> Endpoint | None:
        """One to take states of other vaults with; None while nothing is offered."""
        return self._offers.front if self._offers is not None else None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to offer."""
        return not self._states

    def _list(self) -> None:
        """Publish the catalogue as it is now."""
        offers = self._offers
        if offers is None:
            return
        with self._lock:
            entries = tuple(
                Held(
                    run=offers.serve.run,
                    folder=state.owner.folder,
                    step=state.step,
                    attempt=state.about.order.save.attempt,
                    rank=state.about.rank,
                    world=state.about.world,
                    nbytes=state.about.recipe.size,
                    address=state.published.address,
                    origin=state.owner.origin,
                    settled=state.settled,
                )
                for state in self._states
                if state.published is not None
            )
            offers.list(entries)

    # ---- memory

    @property
    def nbytes(self) -> int:
        """Host memory taken, copies for neighbours included."""
        with self._lock:
            slots = {id(slot): slot.size for slot in self._slots()}
            return sum(slots.values()) + sum(one.memory.size for one in self._states if one.slot is None)

    def _slots(self) -> Iterable[Slot]:
        kept = (state.slot for state in self._states if state.slot is not None)
        return itertools.chain(*self._lent.values(), *self._free.values(), kept)

    def lend(self, owner: Owner, size: int) -> Slot:
        """Memory for a trainer: that of an earlier one, or fresh. Fails: VaultError beyond the limit."""
        with self._lock:
            free = self._free.setdefault(owner, [])
            for slot in [slot for slot in free if not size <= slot.size <= max(2 * size, 1 << 20)]:
                free.remove(slot)
                slot.close()
            if free:
                slot = free.pop()
            else:
                self._make_room(size)
                slot = Slot.make(size)
            self._lent.setdefault(owner, []).append(slot)
        try:
            slot.populate()
        except BaseException:
            with self._lock:
                self._lent[owner].remove(slot)
            slot.close()
            raise
        return slot

    def _make_room(self, size: int) -> None:
        """Let go of what nobody needs, as far as the limit asks for it."""
        if self._limit is None:
            return
        while self.nbytes + size > self._limit:
            unused = next((slots for slots in self._free.values() if slots), None)
            orphan = next((state for state in self._states if state.orphaned), None)
            if unused is not None:
                unused.pop().close()
            elif orphan is not None:
                log.warning("step %d is not kept: its memory is needed for the next save", orphan.step)
                self._drop(orphan, "its memory is needed for the next save")
            else:
                raise VaultError(
                    f"{size:,} bytes more than the {self.nbytes:,} in use are beyond this vault's memory "
                    f"limit of {self._limit:,}",
                    hint="raise --memory-limit, use fewer slots, or save a smaller state",
                )

    def adopt(self, owner: Owner, slot: Slot) -> None:
        """Memory that a trainer brought along: from another vault, or from an earlier connection to this one.

        Nobody else may have it then, and what was offered out of it is the trainer's to change.
        """
        self.withdraw(slot)
        with self._lock:
            for free in self._free.values():
                for other in [one for one in free if one.memory_id == slot.memory_id]:
                    free.remove(other)
                    other.close()
            self._lent.setdefault(owner, []).append(slot)

    def give_back(self, owner: Owner, slot: Slot) -> None:
        """The trainer has no use for this slot any more."""
        self.withdraw(slot)
        with self._lock:
            self._lent[owner].remove(slot)
        slot.close()

    # ---- states

    def stage(self, owner: Owner, about: About, slot: Slot) -> State | None:
        """A state lies in this slot: offer it. None if it is not offered, which is no failure of the save."""
        memory = np.frombuffer(slot.view, np.uint8)[: about.recipe.size]
        return self._add(owner, about, memory, slot)

    def copied(self, owner: Owner, about: About, memory: Bytes1D) -> None:
        """A copy of a neighbour's state has arrived, verified."""
        found = self._add(owner, about, memory, None)
        if found is not None:
            found.hash()  # so that it can be verified again when its own node is lost

    def room_for(self, size: int) -> bool:
        """Whether a copy of so many bytes fits into the limit."""
        return self._limit is None or self.nbytes + size <= self._limit

    def has(self, owner: Owner, attempt: str) -> bool:
        with self._lock:
            return any(one.owner == owner and one.about.order.save.attempt == attempt for one in self._states)

    def _add(self, owner: Owner, about: About, memory: Bytes1D, slot: Slot | None) -> State | None:
        if self._offers is None:
            return None
        state = State(owner, about, memory, slot, next(self._serials))
        try:
            state.published = self._offers.offer(owner, about, memory, slot.fd if slot is not None else None)
        except HoldfastError as error:
            log.warning("step %d is not offered for restores: %s", state.step, error.message)
            return None
        with self._lock:
            self._states.append(state)
            self._trim(owner)
        self._list()
        return state

    def withdraw(self, slot: Slot) -> None:
        """Cut off whoever reads from a slot: it is about to be written. Returns when nobody does."""
        with self._lock:
            found = [one for one in self._states if one.slot and one.slot.memory_id == slot.memory_id]
            self._states = [state for state in self._states if state not in found]
        for state in found:
            if state.published is not None:
                state.published.revoke("its memory is needed for the next save")
            state.memory = _NOTHING
        if found:
            self._list()

    def _drop(self, state: State, reason: str) -> None:
        """Forget an orphaned state; its slot is free for the next trainer."""
        self._states.remove(state)
        if state.published is not None:
            state.published.revoke(reason)
        state.memory = _NOTHING
        if state.slot is not None:
            self._free.setdefault(state.owner, []).append(state.slot)

    def _trim(self, owner: Owner) -> None:
        """Keep the newest `keep` states of an owner, of those whose trainer is gone."""
        mine = [state for state in self._states if state.owner == owner]
        for state in mine[: max(0, len(mine) - self.keep)]:
            if state.orphaned:
                self._drop(state, "newer states took its place")
        free = self._free.get(owner, [])
        kept = sum(
            state.orphaned and state.slot is not None for state in self._states if state.owner == owner
        )
        while free and len(free) + kept + len(self._lent.get(owner, [])) > self.keep + 1:
            free.pop().close()

    # ---- trainers that are gone

    def part(self, owner: Owner, slots: Iterable[Slot], *, trusted: bool) -> None:
        """A trainer has no more to do with these slots.

        `trusted` False: it may still write to them, so that neither they nor what is in them can be kept.
        """
        for slot in slots:
            with self._lock:
                self._lent[owner].remove(slot)
                state = next((one for one in self._states if one.slot is slot), None)
                keep = trusted and self.keep > 0 and self._offers is not None
                if keep and state is not None:
                    state.orphaned = True
                elif keep:
                    self._free.setdefault(owner, []).append(slot)
            if not keep:
                self.withdraw(slot)
                slot.close()
        with self._lock:
            self._trim(owner)
        self._list()

    def verify(self, matches: Callable[[Owner], bool], on_bad: Callable[[State, int], None]) -> None:
        """Hash the orphaned states of some owners again: somebody is about to rely on them.

        A state that is not what was staged is withdrawn, after `on_bad` was told which block it is.
        """
        with self._lock:
            due = [one for one in self._states if one.orphaned and one.digests and matches(one.owner)]
            for state in due:
                state.settled = False
        if not due:
            return
        self._list()
        for state in reversed(due):
            block = state.bad_block()
            with self._lock:
                state.settled = True
                if block is not None and state in self._states:
                    on_bad(state, block)
                    self._drop(state, "its memory does not verify any more")
            self._list()

    def close(self) -> None:
        """Let go of everything."""
        if self._offers is not None:
            self._offers.close()
        with self._lock:
            slots = {id(slot): slot for slot in self._slots()}
            self._states, self._lent, self._free = [], {}, {}
        for slot in slots.values():
            slot.close()
