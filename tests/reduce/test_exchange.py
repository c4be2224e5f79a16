"""Members that sum lanes over real links, in one process."""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from holdfast.errors import (
    DeadlineError,
    MismatchError,
    ReduceError,
    ReplicaLateError,
    ReplicaLostError,
    TreeError,
    UsageError,
)
from holdfast.reduce import Group, Member, Reducer
from tests.checkpoint.children import open_files, within
from tests.reduce.crew import DEADLINE_S, Crew, alone, dealt, flat, grads, unchecked

LANES = 8
both_ways = pytest.mark.parametrize("transports", [("memfd", "tcp"), ("tcp",)], ids=["memfd", "tcp"])


class GenerationOver(Exception):
    """What a check raises when it hears of a loss."""


@both_ways
@pytest.mark.parametrize("num_members", [1, 2, 3, 5])
def test_every_member_has_the_same_total_as_one_alone(num_members: int, transports: tuple[str, ...]) -> None:
    with Crew(num_members, num_lanes=LANES, transports=transports) as crew:
        for step in range(4):
            found = crew.step(step, dealt(LANES, range(num_members)))
            assert set(found.values()) == {alone(step, LANES)}
            assert {one.decided for one in crew.members.values()} == {step}


@both_ways
def test_lanes_may_be_dealt_in_any_way_in_each_step(transports: tuple[str, ...]) -> None:
    deals: list[dict[int, list[int]]] = [
        {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]},
        {2: [0, 1, 2, 3, 4, 5, 6, 7]},
        {0: [7], 1: [], 2: [6, 5, 4, 3, 2, 1, 0]},
    ]
    with Crew(3, num_lanes=LANES, transports=transports) as crew:
        for step, deal in enumerate(deals):
            assert set(crew.step(step, deal).values()) == {alone(step, LANES)}


@both_ways
def test_both_transports_meet_in_one_group(transports: tuple[str, ...]) -> None:
    with Crew(2, num_lanes=LANES, transports=("memfd", "tcp")) as crew:
        crew.members[2] = Reducer(num_lanes=LANES, transports=("tcp",))
        crew.regroup()
        for step in range(3):
            assert set(crew.step(step, dealt(LANES, range(3))).values()) == {alone(step, LANES)}


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_wire_dtype_rounds_everywhere_alike(wire: str) -> None:
    with Crew(3, num_lanes=LANES, wire_dtype=wire) as crew:
        found = crew.step(0, {0: [0, 5], 1: [1, 2, 7], 2: [3, 4, 6]})
        assert set(found.values()) == {alone(0, LANES, wire_dtype=wire)}
        total = crew.members[0].total()
        assert total["w"].dtype == np.float32
        assert total["b"][1].dtype == np.int64
        assert total["tokens"] == sum(17 * lane for lane in range(LANES))


def test_totals_stay_until_the_step_after_next() -> None:
    with Crew(2, num_lanes=LANES) as crew:
        deal = dealt(LANES, range(2))
        crew.step(0, deal)
        kept = crew.members[0].total()
        crew.step(1, deal)
        crew.begin(2, deal)
        assert flat(kept) == alone(0, LANES)
        assert set(crew.exchange().values()) == {alone(2, LANES)}


# ---- losses


@both_ways
def test_a_lost_member_is_named_at_once_and_the_step_goes_on(transports: tuple[str, ...]) -> None:
    with Crew(3, num_lanes=LANES, transports=transports) as crew:
        deal = dealt(LANES, range(3))
        crew.step(0, deal)
        crew.begin(1, deal)
        lost = threading.Timer(0.05, crew.lose, [1])
        lost.start()
        with within(DEADLINE_S / 2):
            found = crew.exchange([0, 2])
        lost.join()
        for error in found.values():
            assert isinstance(error, ReplicaLostError), error
            assert error.slots == (1,)
        crew.regroup()
        new = {0: [*deal[0], deal[1][0]], 2: [*deal[1][1:], *deal[2]]}
        for reducer in crew.members.values():
            reducer.reassign(new)
        assert crew.members[0].held() == tuple(deal[0])
        crew.add(0, 1, deal[1][:1])
        crew.add(2, 1, deal[1][1:])
        assert set(crew.exchange().values()) == {alone(1, LANES)}
        assert set(crew.step(2, dealt(LANES, [0, 2])).values()) == {alone(2, LANES)}


def test_a_silent_member_is_named_at_the_deadline() -> None:
    with Crew(3, num_lanes=LANES) as crew:
        crew.step(0, dealt(LANES, range(3)))  # the links stand
        crew.begin(1, dealt(LANES, range(3)))
        crew.announced([0, 2])  # of each other they know: only one is silent
        with within(DEADLINE_S / 2):
            found = crew.exchange([0, 2], deadline_s=0.3)
        for error in found.values():
            assert isinstance(error, ReplicaLateError)
            assert isinstance(error, DeadlineError)
            assert error.slots == (1,)
        # It was only slow.
        assert set(crew.exchange().values()) == {alone(1, LANES)}


@both_ways
def test_one_that_is_closed_meanwhile_says_so(transports: tuple[str, ...]) -> None:
    with Crew(3, num_lanes=LANES, transports=transports) as crew:
        crew.step(0, dealt(LANES, range(3)))
        crew.begin(1, dealt(LANES, range(3)))
        closing = threading.Timer(0.05, crew.members[0].close)
        closing.start()
        with within(DEADLINE_S / 2):
            found = crew.exchange([0])
        closing.join()
        assert isinstance(found[0], UsageError), found
        assert "closed while it was used" in str(found[0])


def test_a_check_is_called_often_and_ends_the_wait() -> None:
    with Crew(2, num_lanes=LANES) as crew:
        crew.begin(0, dealt(LANES, range(2)))
        calls: list[float] = []

        def check() -> None:
            calls.append(time.monotonic())
            if len(calls) == 10:
                raise GenerationOver

        started = time.monotonic()
        with pytest.raises(GenerationOver):
            crew.members[0].exchange(DEADLINE_S, check)
        assert time.monotonic() - started < DEADLINE_S / 2
        crew.regroup()
        for reducer in crew.members.values():
            reducer.reassign(dealt(LANES, range(2)))
        assert set(crew.exchange().values()) == {alone(0, LANES)}


@both_ways
def test_a_laggard_fetches_the_total_that_others_have(transports: tuple[str, ...]) -> None:
    with Crew(3, num_lanes=LANES, transports=transports) as crew:
        deal = dealt(LANES, [0, 1])
        crew.begin(0, {**deal, 2: []})
        assert set(crew.exchange([0, 1]).values()) == {alone(0, LANES)}
        crew.regroup()
        crew.members[2].fetch(0, 1, DEADLINE_S, grads(0, 0))
        assert crew.members[2].decided == 0
        assert flat(crew.members[2].total()) == alone(0, LANES)
        assert set(crew.step(1, dealt(LANES, range(3))).values()) == {alone(1, LANES)}
        with pytest.raises(ReduceError, match="does not have the total of step 7"):
            crew.members[2].fetch(7, 0, DEADLINE_S, None)


@both_ways
def test_a_newcomer_without_lanes_comes_late_and_still_receives(transports: tuple[str, ...]) -> None:
    with Crew(2, num_lanes=LANES, transports=transports) as crew:
        crew.step(0, dealt(LANES, [0, 1]))
        newcomer = crew.join(2)
        crew.regroup()
        deal = dealt(LANES, [0, 1])
        for slot in (0, 1):
            crew.members[slot].begin(1, deal)
            crew.add(slot, 1, deal[slot])
        with within(5.0):  # nobody waits for it
            assert set(crew.exchange([0, 1]).values()) == {alone(1, LANES)}
        newcomer.begin(1, deal)
        assert set(crew.exchange([2]).values()) == {alone(1, LANES)}
        assert set(crew.step(2, dealt(LANES, range(3))).values()) == {alone(2, LANES)}


@both_ways
def test_a_newcomer_that_is_linked_when_the_others_are_a_step_ahead_still_receives(
    transports: tuple[str, ...],
) -> None:
    with Crew(2, num_lanes=LANES, transports=transports) as crew:
        crew.step(0, dealt(LANES, [0, 1]))
        newcomer = crew.join(2)
        groups, deal, later = crew.groups(), dealt(LANES, [0, 1]), dealt(LANES, range(3))
        for slot in (0, 1):
            crew.members[slot].regroup(groups[slot])
            crew.members[slot].begin(1, deal)
            crew.add(slot, 1, deal[slot])
        assert set(crew.exchange([0, 1]).values()) == {alone(1, LANES)}
        for slot in (0, 1):
            crew.members[slot].begin(2, later)
            crew.add(slot, 2, later[slot])
        newcomer.regroup(groups[2])  # only now it has links, and all is said of step 1
        newcomer.begin(1, deal)
        assert set(crew.exchange([2]).values()) == {alone(1, LANES)}
        newcomer.begin(2, later)
        crew.add(2, 2, later[2])
        assert set(crew.exchange().values()) == {alone(2, LANES)}


@both_ways
def test_nobody_goes_two_steps_ahead_of_a_newcomer_that_has_no_links_yet(transports: tuple[str, ...]) -> None:
    with Crew(2, num_lanes=2, transports=transports) as crew:
        newcomer = crew.join(2)
        groups, deal = crew.groups(), dealt(2, [0, 1])  # more members than lanes: slot 2 never has any
        found = {}
        for slot in (0, 1):
            crew.members[slot].regroup(groups[slot])
        for step in range(3):
            for slot in (0, 1):
                crew.members[slot].begin(step, deal)
                crew.add(slot, step, deal[slot])
            found = crew.exchange([0, 1], deadline_s=0.4 if step == 2 else DEADLINE_S)
        assert all(isinstance(error, ReplicaLateError) and error.slots == (2,) for error in found.values())
        newcomer.regroup(groups[2])
        for step in (0, 1):
            newcomer.begin(step, deal)
            assert set(crew.exchange([2]).values()) == {alone(step, 2)}
        newcomer.begin(2, deal)
        assert set(crew.exchange().values()) == {alone(2, 2)}


def test_receivers_are_never_more_than_a_step_behind() -> None:
    with Crew(3, num_lanes=LANES) as crew:
        deal = dealt(LANES, [0, 1])
        crew.begin(0, deal)
        found = crew.exchange([0, 1])
        for step in (1, 2):
            for slot in (0, 1):
                crew.members[slot].begin(step, deal)
                crew.add(slot, step, deal[slot])
            found = crew.exchange([0, 1], deadline_s=0.4 if step == 2 else DEADLINE_S)
        # Slot 2 has begun step 0 and not read it: its memory is not used again before it has.
        assert all(isinstance(error, ReplicaLateError) and error.slots == (2,) for error in found.values())
        assert set(crew.exchange([2]).values()) == {alone(0, LANES)}
        assert set(crew.exchange([0, 1]).values()) == {alone(2, LANES)}


@both_ways
def test_a_receiver_between_two_steps_is_waited_for(transports: tuple[str, ...]) -> None:
    with Crew(2, num_lanes=1, transports=transports) as crew:
        deal = dealt(1, [0])  # more members than lanes: slot 1 only receives
        crew.begin(0, deal)
        assert set(crew.exchange().values()) == {alone(0, 1)}
        found = {}
        for step in (1, 2, 3):  # slot 1 has step 0, and does not begin the next
            crew.members[0].begin(step, deal)
            crew.add(0, step, deal[0])
            found = crew.exchange([0], deadline_s=0.4 if step == 3 else DEADLINE_S)
        assert all(isinstance(error, ReplicaLateError) and error.slots == (1,) for error in found.values())
        for step in (1, 2):
            crew.members[1].begin(step, deal)
            assert set(crew.exchange([1]).values()) == {alone(step, 1)}
        crew.members[1].begin(3, deal)
        assert set(crew.exchange().values()) == {alone(3, 1)}


def test_one_that_receives_may_add_in_the_next_step_and_receive_again() -> None:
    with Crew(3, num_lanes=LANES) as crew:
        for step, owners in enumerate(([0, 1], [0, 1, 2], [1, 2], [0, 2], [0], [0], [1], [0, 1, 2])):
            assert set(crew.step(step, dealt(LANES, owners)).values()) == {alone(step, LANES)}


def test_a_member_that_ended_after_the_step_does_not_hold_up_the_others() -> None:
    with Crew(2, num_lanes=LANES) as crew:
        crew.begin(0, dealt(LANES, range(2)))
        crew.together(lambda one: one.exchange(DEADLINE_S, unchecked))
        crew.lose(1)
        assert flat(crew.members[0].total()) == alone(0, LANES)


@both_ways
def test_growing_and_shrinking_keeps_the_bits(transports: tuple[str, ...]) -> None:
    with Crew(1, num_lanes=LANES, transports=transports) as crew:
        for step, size in enumerate([1, 3, 2, 4, 1, 2]):
            for slot in [one for one in crew.members if one >= size]:
                crew.lose(slot)
            for slot in range(size):
                if slot not in crew.members:
                    crew.join(slot)
            crew.regroup()
            assert set(crew.step(step, dealt(LANES, range(size))).values()) == {alone(step, LANES)}


def test_a_step_can_be_done_anew_after_a_restore() -> None:
    with Crew(2, num_lanes=LANES) as crew:
        for step in (4, 5, 6, 5, 6):
            if step < crew.members[0].decided:
                with pytest.raises(UsageError, match="let all members regroup"):
                    crew.members[0].begin(step, dealt(LANES, range(2)))
                crew.regroup()
            assert set(crew.step(step, dealt(LANES, range(2))).values()) == {alone(step, LANES)}
            assert crew.members[0].decided == step


def test_what_was_read_of_a_member_that_went_on_is_void() -> None:
    """Slot 1 reads the roots of slot 0, which begins another step meanwhile: no total comes of it."""
    with Crew(2, num_lanes=LANES) as crew:
        deal = dealt(LANES, range(2))
        crew.step(0, deal)
        crew.begin(1, deal)
        crew.together(lambda one: one._announce(one._shelf.layout), [0])  # type: ignore[arg-type]
        crew.members[0].begin(2, deal)
        crew.add(0, 2, deal[0])
        found = crew.exchange([1], deadline_s=0.4)
        assert isinstance(found[1], ReplicaLateError)
        assert crew.members[1].decided == 0


# ---- strangers and disagreements


def test_arrays_that_differ_are_named() -> None:
    with Crew(2, num_lanes=2) as crew:
        for slot, tree in enumerate([{"a": np.zeros(3)}, {"a": np.zeros(4), "b": np.zeros(1)}]):
            crew.members[slot].begin(0, {0: [0], 1: [1]})
            crew.members[slot].add(slot, tree)
        found = crew.together(lambda one: one.exchange(DEADLINE_S, unchecked))
        assert isinstance(found[0], MismatchError)
        told = str(found[0])
        assert "a: float64[3]; the peer: float64[4]" in told
        assert "b: float64[1] (the peer); not here" in told


def test_another_deal_is_an_error_that_names_the_lanes() -> None:
    with Crew(2, num_lanes=4) as crew:
        crew.members[0].begin(0, {0: [0, 1], 1: [2, 3]})
        crew.members[1].begin(0, {0: [0], 1: [1, 2, 3]})
        crew.add(0, 0, [0, 1])
        crew.add(1, 0, [1, 2, 3])
        found = crew.together(lambda one: one.exchange(DEADLINE_S, unchecked))
        assert all(isinstance(error, ReduceError) for error in found.values())
        assert "dealt other lanes" in str(found[0])


@pytest.mark.parametrize(
    "other", [{"run": "another"}, {"token": b"x" * 16}], ids=["another run", "a token on one side"]
)
def test_strangers_are_turned_away_and_hurt_nobody(other: dict[str, Any]) -> None:
    with Crew(2, num_lanes=LANES) as crew:
        stranger = Reducer(num_lanes=LANES, **other)
        try:
            us = tuple(Member(slot, one.incarnation, one.address) for slot, one in crew.members.items())
            stranger.regroup(Group(9, 5, (*us, Member(5, stranger.incarnation, stranger.address))))
            stranger.begin(0, {0: range(4), 1: range(4, LANES)})
            with pytest.raises(ReplicaLostError, match=r"turned away|closed the connection"):
                stranger.exchange(DEADLINE_S, unchecked)
        finally:
            stranger.close()
        assert set(crew.step(0, dealt(LANES, range(2))).values()) == {alone(0, LANES)}


def test_another_life_of_a_member_is_no_member() -> None:
    with Crew(2, num_lanes=LANES) as crew:
        old, new = crew.members[0], crew.members[1]
        new.regroup(Group(9, 1, (Member(0, "0" * 32, old.address), Member(1, new.incarnation, new.address))))
        new.begin(0, dealt(LANES, [0, 1]))
        crew.add(1, 0, dealt(LANES, [0, 1])[1])
        with pytest.raises(ReplicaLostError) as caught:
            new.exchange(DEADLINE_S, unchecked)
        assert caught.value.slots == (0,)


def test_a_token_is_proven_on_both_sides() -> None:
    with Crew(2, num_lanes=LANES, token=b"sixteen bytes ok") as crew:
        assert set(crew.step(0, dealt(LANES, range(2))).values()) == {alone(0, LANES)}


# ---- use


def test_wrong_use_is_refused() -> None:
    with Crew(2, num_lanes=4) as crew:
        one = crew.members[0]
        with pytest.raises(UsageError, match="no step is decided"):
            one.total()
        one.begin(0, {0: [0, 1], 1: [2, 3]})
        with pytest.raises(UsageError, match="lane 2 is not dealt to slot 0"):
            one.add(2, grads(0, 2))
        one.add(0, grads(0, 0))
        with pytest.raises(UsageError, match=r"lanes \[1\] of step 0 are not added"):
            one.exchange(1.0, unchecked)
        with pytest.raises(UsageError, match=r"lanes \[0\] are folded here"):
            one.reassign({0: [1], 1: [0, 2, 3]})
        with pytest.raises(UsageError, match="are in"):
            one.add(0, grads(0, 0))
        with pytest.raises(MismatchError, match="tokens"):
            one.add(1, {**grads(0, 1), "tokens": 1.5})
        with pytest.raises(MismatchError, match="is new"):
            one.add(1, {**grads(0, 1), "more": 1})
        with pytest.raises(UsageError, match="generation 0 after 1"):
            one.regroup(Group(0, 0, (Member(0, one.incarnation, one.address),)))
        with pytest.raises(UsageError, match="not this member"):
            one.regroup(Group(9, 0, (Member(0, "somebody", one.address),)))
    with pytest.raises(UsageError, match="without a token"):
        Reducer(bind="0.0.0.0:0")
    with pytest.raises(TreeError, match="no sum"):
        alone_with({"flag": np.zeros(3, bool)})


def alone_with(tree: Any) -> Any:
    reducer = Reducer(num_lanes=1)
    try:
        reducer.begin(0, {0: [0]})
        reducer.add(0, tree)
        reducer.exchange(1.0, unchecked)
        return reducer.total()
    finally:
        reducer.close()


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "tree",
    [
        np.arange(5.0),
        {},
        {"empty": np.zeros((0, 3)), "none": None},
        [np.float32(1.5), (np.ones(2), {3: np.int8(7)})],
        Pair(np.ones(3), np.zeros((2, 2), np.float16)),
    ],
    ids=["leaf", "nothing", "empty", "nested", "namedtuple"],
)
def test_trees_come_back_in_their_structure(tree: Any) -> None:
    total = alone_with(tree)
    assert type(total) is type(tree) or isinstance(tree, np.generic)
    np.testing.assert_equal(total, tree)


def test_a_tree_may_change_after_it_was_added() -> None:
    reducer = Reducer(num_lanes=2)
    reducer.begin(0, {0: [0, 1]})
    tree = {"a": np.ones(4)}
    reducer.add(0, tree)
    first = reducer.lane_digest(0)
    tree["a"][:] = 5
    reducer.add(1, tree)
    assert reducer.lane_digest(0) == first != reducer.lane_digest(1)
    reducer.exchange(1.0, unchecked)
    assert reducer.total()["a"].tolist() == [6.0] * 4
    with pytest.raises(UsageError, match="was not added"):
        reducer.lane_digest(7)
    reducer.close()


def test_a_newcomer_needs_a_template_for_containers_of_its_own() -> None:
    with Crew(2, num_lanes=1) as crew:
        for reducer in crew.members.values():
            reducer.begin(0, {0: [0]})
        crew.members[0].add(0, Pair(np.ones(2), np.zeros(2)))
        crew.together(lambda one: one.exchange(DEADLINE_S, unchecked))
        with pytest.raises(TreeError, match="containers of its own"):
            crew.members[1].total()
        crew.members[1].prepare(Pair(np.empty(2), np.empty(2)))
        assert isinstance(crew.members[1].total(), Pair)


@both_ways
def test_nothing_is_left_behind(transports: tuple[str, ...]) -> None:
    def life() -> None:
        with Crew(3, num_lanes=LANES, transports=transports) as crew:
            crew.step(0, dealt(LANES, range(3)))
            crew.lose(1)
            crew.regroup()
            crew.step(1, dealt(LANES, [0, 2]))

    life()
    before, threads = len(open_files()), threading.active_count()
    for _ in range(10):
        life()
    assert len(open_files()) <= before
    assert threading.active_count() <= threads
