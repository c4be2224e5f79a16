"""Slots: who has them, and when they are free again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from holdfast.checkpoint.slots import OnBusy, SlotPool
from holdfast.vault import Slot, Writer


class Memory:
    """Makes slots, and nothing else."""

    def __init__(self) -> None:
        self.made: dict[int, Slot] = {}

    def make_slot(self, size: int) -> tuple[int, Slot]:
        number = len(self.made)
        self.made[number] = Slot.make(size)
        return number, self.made[number]

    def drop_slot(self, number: int) -> None:
        self.made[number].close()


def pool(on_busy: OnBusy = "skip", **options: Any) -> SlotPool:
    options = {"count": 1, "limit": None, **options}
    return SlotPool(cast(Writer, Memory()), on_busy=on_busy, **options)


@pytest.mark.parametrize("first", ["let_go", "give_back"])
def test_a_slot_is_free_when_it_is_neither_copied_into_nor_written_from(first: str) -> None:
    slots = pool()
    for _ in range(2):
        taken = slots.take(4096, 1.0)
        assert taken is not None
        number, _slot = taken
        getattr(slots, first)(number)
        assert slots.take(4096, 1.0) is None, "one of the two is not done with it"
        getattr(slots, "give_back" if first == "let_go" else "let_go")(number)


def test_a_lost_slot_is_never_free_and_still_counted() -> None:
    slots = pool()
    taken = slots.take(4096, 1.0)
    assert taken is not None
    slots.lose(taken[0])
    slots.let_go(taken[0])
    slots.give_back(taken[0])
    other = slots.take(4096, 1.0)
    assert other is not None
    assert other[0] != taken[0]
    assert slots.nbytes == 8192


def test_slots_that_rotate_do_so_only_as_far_as_memory_allows() -> None:
    for limit, numbers in ((None, [0, 1, 0]), (4096, [0, 0, 0])):
        slots = pool(count=2, limit=limit, rotate=True)
        found = []
        for _ in range(3):
            taken = slots.take(4096, 1.0)
            assert taken is not None
            found.append(taken[0])
            slots.let_go(taken[0])
            slots.give_back(taken[0])
        assert found == numbers


def test_a_slot_may_be_asked_for_without_waiting_for_it() -> None:
    slots = pool("wait")
    assert slots.take(4096, 1.0) is not None
    assert slots.take(4096, 1.0, wait=False) is None
