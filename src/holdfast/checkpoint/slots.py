"""The host memory of saves: a bounded number of slots, and what to do when all are taken."""

from __future__ import annotations

import logging
import threading
from typing import Literal, final

from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, SaveError, UsageError
from holdfast.vault import Slot, Writer

log = logging.getLogger("holdfast.checkpoint")

OnBusy = Literal["wait", "skip", "queue"]


@final
class SlotPool:
    """Slots for saves under way. Their total size never exceeds the stated budget.

    With `wait` and `skip` there are at most `count` slots. `queue` takes further ones, up to `limit` bytes
    (default: twice `count` slots), before it waits.

    A slot has two users, the copying into it and the writer's save, and either may be done first: it is free
    again after both `let_go` and `give_back`.
    """

    def __init__(
        self, writer: Writer, *, count: int, limit: int | None, on_busy: OnBusy, rotate: bool = False
    ) -> None:
        if on_busy not in ("wait", "skip", "queue"):
            raise UsageError(f"on_busy={on_busy!r} is unknown", hint="use wait, skip or queue")
        if count < 1:
            raise UsageError(f"slots={count}: at least one slot is needed")
        self._writer = writer
        self._count = count
        self._limit = limit
        self._on_busy = on_busy
        self._rotate = rotate
        self._slots: dict[int, Slot] = {}
        self._free: list[int] = []
        self._held: dict[int, bool] = {}
        """Slots that may still be copied into; whether the save in them is over already."""
        self._lost: list[Slot] = []
        self._coming = 0  # bytes of a slot that is being made
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Host memory taken for slots."""
        return sum(slot.size for slot in (*self._slots.values(), *self._lost)) + self._coming

    def take(self, size: int, timeout_s: float, *, wait: bool = True) -> tuple[int, Slot] | None:
        """A free slot of at least `size` bytes; None if there is none and the policy is to skip.

        Blocks: while all slots are busy, unless skipping or not to `wait`. Fails: DeadlineError, SaveError
        over budget.
        """
        if self._limit is not None and size > self._limit:
            raise SaveError(
                f"this process saves {size:,} bytes, more than its budget of {self._limit:,}",
                hint="raise memory_limit, or shard the state over more processes",
            )
        deadline = Deadline(timeout_s)
        with self._changed:
            while True:
                # Where slots serve restores, the last state stays in its slot while the next one is saved.
                spare = self._rotate and len(self._slots) + bool(self._coming) < self._count
                number = None if spare and self._may_grow(size) else self._free_slot(size)
                if number is not None:
                    self._free.remove(number)
                    self._held[number] = False
                    return number, self._slots[number]
                if self._may_grow(size):
                    self._coming += size
                    break
                if self._on_busy == "skip" or not wait:
                    return None
                if not self._changed.wait(deadline.remaining()):
                    raise DeadlineError(
                        f"all {len(self._slots)} save slots were busy for {timeout_s:g} s",
                        hint="the disk is slower than the saves; save less often or on_busy='skip'",
                    )

        return self._grow(size)

    def _grow(self, size: int) -> tuple[int, Slot]:
        # Not under the lock: the writer's threads give slots back while it makes this one.
        try:
            number, slot = self._writer.make_slot(size)
        except BaseException:
            with self._changed:
                self._coming -= size
                self._changed.notify_all()
            raise
        with self._changed:
            self._coming -= size
            self._slots[number] = slot
            self._held[number] = False
        limit = "no further limit" if self._limit is None else f"at most {self._limit:,} in all"
        log.info("a save slot of %s bytes of host memory is ready (%s)", f"{slot.size:,}", limit)
        return number, slot

    def give_back(self, number: int) -> None:
        """The save in this slot is over, or there is none. It is free once nothing is copied into it."""
        with self._changed:
            if number in self._held:
                self._held[number] = True
            elif number in self._slots:
                self._free.append(number)
                self._changed.notify_all()

    def let_go(self, number: int) -> None:
        """Nothing is copied into this slot any more."""
        with self._changed:
            over = self._held.pop(number, False)
        if over:
            self.give_back(number)

    def keep_mapped(self) -> None:
        """Have the slots that may still be copied into stay mapped when the writer drops them."""
        with self._changed:
            for number in self._held:
                self._slots[number].before_unmap(lambda: False)

    def lose(self, number: int) -> None:
        """A device may write into this slot for ever: it is never used again, and still counted."""
        with self._changed:
            self._held.pop(number, None)
            self._lost.append(self._slots.pop(number))
            self._changed.notify_all()

    def _free_slot(self, size: int) -> int | None:
        """A free slot that is large enough; smaller free ones are dropped."""
        for number in self._free:
            if self._slots[number].size >= size:
                return number
        # A tree that has grown needs a larger slot; the small free ones make room for it.
        for number in list(self._free):
            self._free.remove(number)
            del self._slots[number]
            self._writer.drop_slot(number)
        return None

    def _may_grow(self, size: int) -> bool:
        if self._limit is not None and self.nbytes + size > self._limit:
            return False
        count = len(self._slots) + bool(self._coming)
        if self._on_busy == "queue":
            return self._limit is not None or count < 2 * self._count
        return count < self._count
