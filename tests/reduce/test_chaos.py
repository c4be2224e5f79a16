"""Members come and go at any moment of a step, many times over; every total has the bits of one alone."""

from __future__ import annotations

import random
import threading

import pytest

from holdfast.errors import ReduceError
from tests.reduce.crew import DEADLINE_S, Crew, alone, dealt, flat, grads

LANES = 6
STEPS = 12


def lose_one(crew: Crew, chance: random.Random) -> tuple[int, threading.Timer]:
    """A member that ends at some moment of the exchange that is about to begin."""
    slot = chance.choice(sorted(crew.members))
    victim = crew.members[slot]
    timer = threading.Timer(chance.random() * 0.02, victim.close)
    timer.start()
    return slot, timer


def go_on(crew: Crew, step: int, decided: set[int]) -> None:
    """End a step as a run would: fetch the total if somebody has it, else deal out what is missing."""
    crew.regroup()
    if decided:
        for slot in sorted(set(crew.members) - decided):
            crew.members[slot].fetch(step, min(decided), DEADLINE_S, grads(step, 0))
        return
    deal = {slot: list(one.held()) for slot, one in crew.members.items()}
    orphans = sorted(set(range(LANES)) - {lane for mine in deal.values() for lane in mine})
    for at, lane in enumerate(orphans):
        deal[sorted(deal)[at % len(deal)]].append(lane)
    for slot, reducer in crew.members.items():
        held = reducer.held()
        reducer.reassign(deal)
        crew.add(slot, step, [lane for lane in deal[slot] if lane not in held])
    found = crew.exchange()
    assert all(isinstance(one, bytes) for one in found.values()), found


@pytest.mark.parametrize("transports", [("memfd", "tcp"), ("tcp",)], ids=["memfd", "tcp"])
@pytest.mark.parametrize("inline_bytes", [1 << 30, 0], ids=["folded in the call", "beside it"])
@pytest.mark.parametrize("seed", range(3))
def test_no_loss_at_any_moment_changes_a_bit(
    seed: int, inline_bytes: int, transports: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    with Crew(3, num_lanes=LANES, transports=transports, inline_bytes=inline_bytes) as crew:
        for step in range(STEPS):
            crew.begin(step, dealt(LANES, sorted(crew.members)))
            slot, timer = lose_one(crew, chance)
            found = crew.exchange(deadline_s=0.3)
            timer.join()
            del crew.members[slot], found[slot]
            for one in found.values():
                assert isinstance(one, bytes | ReduceError), one
            decided = {one for one in crew.members if crew.members[one].decided == step}
            go_on(crew, step, decided)
            assert {flat(one.total()) for one in crew.members.values()} == {alone(step, LANES)}
            crew.join(slot)
            crew.regroup()
