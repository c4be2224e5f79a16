"""Who is in the next generation, where, and with which lanes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coord.membership import Candidate, compact, lanes_of, slots_of, usable, verdict
from holdfast.coord.settings import Settings
from holdfast.errors import UsageError


def asks(*sids: int, slot: int = -1, spare: bool = False) -> list[Candidate]:
    return [Candidate(sid, slot, 0.0, spare) for sid in sids]


def decide(settings: Settings, candidates: list[Candidate], previous: dict[int, int], **how: float) -> object:
    times = {"since": 0.0, "enough_since": 0.0, "now": 0.0, **how}
    outsiders, again = int(times.pop("outsiders", 0)), bool(times.pop("again", False))
    return verdict(settings, candidates, previous, outsiders, again=again, **times)


def test_a_full_first_generation_forms_at_once() -> None:
    assert decide(Settings(min_size=2, max_size=3), asks(1, 2, 3), {}) == ((1, 2, 3), math.inf)


def test_a_first_generation_waits_for_the_last_call() -> None:
    settings = Settings(min_size=2, max_size=3, last_call_s=1.5)
    assert decide(settings, asks(1), {}) == (None, math.inf)
    assert decide(settings, asks(1, 2), {}, enough_since=4.0, now=4.0) == (None, 5.5)
    assert decide(settings, asks(1, 2), {}, enough_since=4.0, now=5.5) == ((1, 2), math.inf)


def test_after_a_loss_of_all_whoever_is_ready_waits_only_shortly_for_the_others() -> None:
    settings = Settings(min_size=1, max_size=3, last_call_s=30.0, recall_s=0.25)
    assert decide(settings, asks(7), {}, enough_since=4.0, now=4.0) == (None, 34.0)
    assert decide(settings, asks(7), {}, enough_since=4.0, now=4.0, again=True) == (None, 4.25)
    assert decide(settings, asks(7, 8), {}, enough_since=4.0, now=4.25, again=True) == ((7, 8), math.inf)
    everybody = decide(settings, asks(7, 8, 9), {}, enough_since=4.0, now=4.0, again=True)
    assert everybody == ((7, 8, 9), math.inf)


def test_survivors_go_on_at_once_if_nobody_else_could_come() -> None:
    assert decide(Settings(min_size=1, max_size=4), asks(1, 2, 3), {1: 0, 2: 1, 3: 2}) == (
        (1, 2, 3),
        math.inf,
    )


def test_survivors_wait_a_last_call_for_a_spare_that_is_alive() -> None:
    settings = Settings(min_size=1, max_size=4, last_call_s=1.0)
    found = decide(settings, asks(1, 2, 3), {1: 0, 2: 1, 3: 2}, outsiders=1)
    assert found == (None, 1.0)


def test_members_of_the_last_generation_come_before_spares() -> None:
    settings = Settings(min_size=2, max_size=2, straggler_s=7.0)
    # 2 was a member and is alive but has not come; 9 is there in its stead, and waits for it.
    assert decide(settings, asks(1, 9), {1: 0, 2: 1}) == (None, 7.0)
    assert decide(settings, asks(9, 1, 2), {1: 0, 2: 1}) == ((1, 2), math.inf)
    assert decide(settings, [*asks(1), *asks(9, spare=True), *asks(10)], {1: 0}) == ((1, 10), math.inf)


def test_half_of_those_alive_are_no_quorum() -> None:
    settings = Settings(min_size=1, max_size=4, straggler_s=1.0)
    previous = {1: 0, 2: 1, 3: 2, 4: 3}
    assert decide(settings, asks(1, 2), previous, now=100.0) == (None, math.inf)
    assert decide(settings, asks(1, 2, 3), previous, now=100.0) == ((1, 2, 3), math.inf)


def test_shrink_only_takes_nobody_new() -> None:
    settings = Settings(min_size=1, max_size=4, shrink_only=True)
    assert decide(settings, asks(1, 2, 9), {1: 0, 2: 1}) == ((1, 2), math.inf)
    assert decide(settings, asks(1, 9), {}, now=1.0) == ((1, 9), math.inf)


def test_sizes_are_multiples() -> None:
    settings = Settings(min_size=2, max_size=9, divisible_by=4)
    assert [usable(n, settings) for n in (0, 3, 4, 7, 8, 11)] == [0, 0, 4, 4, 8, 8]


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_size": 0},
        {"min_size": 3, "max_size": 2},
        {"divisible_by": 0},
        {"min_size": 5, "max_size": 7, "divisible_by": 4},
        {"suspect_s": 9.0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]


members = st.lists(st.integers(1, 30), unique=True, min_size=1, max_size=12)


@given(before=members, chosen=members, data=st.data())
def test_slots_are_dense_and_survivors_stay(
    before: list[int], chosen: list[int], data: st.DataObject
) -> None:
    previous = {sid: slot for slot, sid in enumerate(before)}
    wanted = {sid: data.draw(st.integers(-1, 12)) for sid in chosen}
    found = slots_of(chosen, previous, wanted)
    assert sorted(found) == list(range(len(chosen)))
    assert sorted(found.values()) == sorted(chosen)
    for sid in chosen:
        if previous.get(sid, len(chosen)) < len(chosen):
            assert found[previous[sid]] == sid


@given(chosen=members)
def test_who_asks_for_a_free_slot_gets_it(chosen: list[int]) -> None:
    wanted = {sid: slot for slot, sid in enumerate(reversed(chosen))}
    found = slots_of(chosen, {}, wanted)
    assert {sid: slot for slot, sid in found.items()} == wanted


@given(lanes=st.integers(0, 40), before=members, after=members)
def test_lanes_are_even_complete_and_move_little(lanes: int, before: list[int], after: list[int]) -> None:
    first = lanes_of(lanes, dict(enumerate(before)), {})
    had = {sid: first[slot] for slot, sid in enumerate(before)}
    found = lanes_of(lanes, dict(enumerate(after)), had)
    assert sorted(lane for mine in found.values() for lane in mine) == list(range(lanes))
    sizes = [len(mine) for mine in found.values()]
    assert max(sizes) - min(sizes) <= 1
    for slot, sid in enumerate(after):
        # Nobody gives up a lane and takes another one for it.
        kept = set(found[slot]) & set(had.get(sid, ()))
        assert len(kept) == min(len(found[slot]), len(had.get(sid, ())))


def test_compact() -> None:
    assert compact([7, 0, 1, 2, 3, 9, 10, 1]) == "0-3, 7, 9-10"
    assert compact([]) == ""
