"""The checker accepts histories that one coordinator could have given, and no others."""

from __future__ import annotations

import math
import random
import time

import pytest

from holdfast.coord.messages import (
    EXISTS,
    FENCED,
    LIMIT,
    Add,
    Count,
    Delete,
    Done,
    Get,
    Item,
    Items,
    Meet,
    Met,
    Op,
    Put,
    Refused,
    Result,
    Scan,
    Swap,
    Swapped,
    Value,
)
from holdfast.testing.linearizability import Operation, Vanish, check, group_of, meeting_problems

INF = math.inf


def did(
    process: str,
    op: Op | Vanish,
    result: Result | None,
    invoked: float,
    returned: float = INF,
    slot: int = -1,
) -> Operation:
    return Operation(process, op, result, invoked, returned, slot)


def put(process: str, value: bytes, invoked: float, returned: float = INF, key: str = "k") -> Operation:
    return did(process, Put(key, value), Done(1) if returned < INF else None, invoked, returned)


def got(process: str, value: bytes | None, invoked: float, returned: float, key: str = "k") -> Operation:
    return did(process, Get(key), Value(value, 1), invoked, returned)


GOOD = {
    "nothing": [],
    "a read after a write": [put("a", b"1", 0, 1), got("b", b"1", 2, 3)],
    "a read beside a write sees the old value": [put("a", b"1", 0, 5), got("b", None, 1, 2)],
    "a read beside a write sees the new value": [put("a", b"1", 0, 5), got("b", b"1", 1, 2)],
    "two readers, the write falls between": [
        put("a", b"1", 0, 10), got("b", None, 1, 2), got("c", b"1", 3, 4)
    ],
    "writes side by side, read in either order": [
        put("a", b"1", 0, 5), put("b", b"2", 0, 5), got("c", b"1", 6, 7)
    ],
    "a write that nobody heard of took effect much later": [
        put("a", b"1", 0), got("b", None, 1, 2), got("b", b"1", 50, 51)
    ],
    "a write that nobody heard of never took effect": [put("a", b"1", 0), got("b", None, 50, 51)],
    "a swap that failed shows what was there": [
        put("a", b"1", 0, 1),
        did("b", Swap("k", b"0", b"2"), Swapped(False, b"1", 1), 2, 3),
        got("b", b"1", 4, 5),
    ],
    "one of two swaps wins": [
        did("a", Swap("k", None, b"a"), Swapped(True, b"a", 1), 0, 5),
        did("b", Swap("k", None, b"b"), Swapped(False, b"a", 1), 0, 5),
    ],
    "create after a delete": [
        put("a", b"1", 0, 1),
        did("a", Delete("k"), Count(1, 1), 2, 3),
        did("b", Put("k", b"2", create=True), Done(1), 4, 5),
    ],
    "a refused create": [
        put("a", b"1", 0, 1),
        did("b", Put("k", b"2", create=True), Refused(EXISTS, ""), 2, 3),
        got("c", b"1", 4, 5),
    ],
    "a refused write did nothing": [
        did("a", Put("k", b"1"), Refused(LIMIT, ""), 0, 1), got("b", None, 2, 3)
    ],
    "who is fenced in the middle of a write may have written": [
        did("a", Put("k", b"1"), Refused(FENCED, ""), 0, 1), got("b", b"1", 2, 3)
    ],
    "increments side by side": [
        did("a", Add("k", 1), Count(2, 1), 0, 5), did("b", Add("k", 1), Count(1, 1), 0, 5)
    ],
    "past 2**31 and 2**62": [
        did("a", Add("k", 2**31), Count(2**31, 1), 0, 1),
        did("a", Add("k", 2**62), Count(2**31 + 2**62, 1), 2, 3),
        did("a", Add("k", -(2**62)), Count(2**31, 1), 4, 5),
    ],
    "an increment that nobody heard of": [
        did("a", Add("k", 1), None, 0), did("b", Add("k", 1), Count(2, 1), 1, 2)
    ],
    "an owned key vanishes with its owner": [
        did("a", Put("k", b"1", owned=True), Done(1), 0, 1),
        did("-", Vanish("a"), Done(), 2, 6),
        got("b", b"1", 3, 4),
        got("b", None, 5, 8),
    ],
    "another's write keeps a key from vanishing": [
        did("a", Put("k", b"1", owned=True), Done(1), 0, 1),
        put("b", b"2", 2, 3),
        did("-", Vanish("a"), Done(), 4, 5),
        got("b", b"2", 6, 7),
    ],
    "a scan sees one moment": [
        put("a", b"1", 0, 1, "g/x"),
        put("a", b"2", 2, 6, "g/y"),
        did("b", Scan("g/"), Items((Item("g/x", b"1", 1),)), 3, 4),
        did("b", Delete("g/", prefix=True), Count(2, 1), 7, 8),
    ],
}  # fmt: skip

BAD = {
    "a lost write": [put("a", b"1", 0, 1), got("b", None, 2, 3)],
    "a stale read": [put("a", b"1", 0, 1), put("a", b"2", 2, 3), got("b", b"1", 4, 5)],
    "a value out of nowhere": [got("b", b"1", 0, 1)],
    "a write seen before it was made": [got("b", b"1", 0, 1), put("a", b"1", 2, 3)],
    "a write that nobody heard of, seen before it was made": [got("b", b"1", 0, 1), put("a", b"1", 2)],
    "readers that disagree on the order": [
        put("a", b"1", 0, 10),
        got("b", b"1", 1, 2),
        got("c", None, 3, 4),
    ],
    "a write that is there, gone and there again": [
        put("a", b"1", 0), got("b", b"1", 1, 2), got("b", None, 3, 4)
    ],
    "two swaps from the same value": [
        did("a", Swap("k", None, b"a"), Swapped(True, b"a", 1), 0, 5),
        did("b", Swap("k", None, b"b"), Swapped(True, b"b", 1), 0, 5),
    ],
    "a failed swap that fits": [did("a", Swap("k", None, b"a"), Swapped(False, None, 1), 0, 5)],
    "a failed swap that shows another value": [
        put("a", b"1", 0, 1), did("b", Swap("k", b"0", b"2"), Swapped(False, b"7", 1), 2, 3)
    ],
    "created twice": [
        did("a", Put("k", b"a", create=True), Done(1), 0, 5),
        did("b", Put("k", b"b", create=True), Done(1), 0, 5),
    ],
    "a create refused where nothing was": [did("b", Put("k", b"2", create=True), Refused(EXISTS, ""), 2, 3)],
    "a repeated call that was carried out twice": [
        did("a", Add("k", 1), Count(1, 1), 0, 5), did("b", Get("k"), Value(b"2", 1), 6, 7)
    ],
    "two increments to the same count": [
        did("a", Add("k", 1), Count(1, 1), 0, 5), did("b", Add("k", 1), Count(1, 1), 0, 5)
    ],
    "a counter of 32 bits": [
        did("a", Add("k", 2**31), Count(-(2**31), 1), 0, 1),
    ],
    "a delete that counts wrong": [put("a", b"1", 0, 1), did("a", Delete("k"), Count(0, 1), 2, 3)],
    "an owned key outlives its owner": [
        did("a", Put("k", b"1", owned=True), Done(1), 0, 1),
        did("-", Vanish("a"), Done(), 2, 3),
        got("b", b"1", 4, 5),
    ],
    "an owned key vanishes before its owner": [
        did("a", Put("k", b"1", owned=True), Done(1), 0, 1),
        got("b", None, 2, 3),
        did("-", Vanish("a"), Done(), 4, 5),
    ],
    "a key that is not owned vanishes": [
        put("a", b"1", 0, 1), did("-", Vanish("a"), Done(), 2, 3), got("b", None, 4, 5)
    ],
    "the write of a dead incarnation": [
        did("-", Vanish("a"), Done(), 0, 1), put("a", b"1", 2, 3)
    ],
    "the write of a dead incarnation, heard of by others only": [
        did("-", Vanish("a"), Done(), 0, 1), put("a", b"1", 2), got("b", b"1", 3, 4)
    ],
    "a scan that mixes two moments": [
        put("a", b"1", 0, 1, "g/x"),
        put("a", b"2", 2, 3, "g/x"),
        put("a", b"1", 4, 5, "g/y"),
        did("b", Scan("g/"), Items((Item("g/x", b"1", 1), Item("g/y", b"1", 1))), 0, 9),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_histories(name: str) -> None:
    assert check(GOOD[name]).problem == ""


@pytest.mark.parametrize("name", BAD)
def test_bad_histories(name: str) -> None:
    verdict = check(BAD[name])
    assert not verdict
    assert "not linearizable" in verdict.problem


def test_the_account_names_the_call_that_does_not_fit() -> None:
    verdict = check(BAD["a stale read"])
    assert (
        "none of these fits:\n    [4, 5] b: Get(key='k', timeout_s=0.0) -> Value(value=b'1'"
        in verdict.problem
    )
    assert "b'2'" in verdict.problem


def test_groups_are_checked_on_their_own() -> None:
    assert (group_of("k"), group_of("g/x"), group_of("g/h/x")) == ("k", "g/", "g/h/")
    history = [put("a", b"1", 0, 1, "one"), put("a", b"2", 2, 3, "two"), got("b", None, 4, 5, "three")]
    assert check(history)
    assert "keys 'one'" in check([*history, got("b", None, 6, 7, "one")]).problem


def recorded(
    seed: int, *, num_calls: int, num_clients: int, lost: float, wrong: bool = False
) -> list[Operation]:
    """A history of a true register, with calls that overlap; `wrong` makes one read lie."""
    rng = random.Random(seed)
    clocks = [0.0] * num_clients
    calls: list[tuple[float, float, float, int]] = []
    for _ in range(num_calls):
        client = min(range(num_clients), key=clocks.__getitem__)
        invoked = clocks[client] + rng.random()
        returned = invoked + rng.random() * 4
        calls.append((rng.uniform(invoked, returned), invoked, returned, client))
        clocks[client] = returned
    value, history = 0, []
    lie = rng.randrange(num_calls // 2, num_calls) if wrong else -1
    for index, (_, invoked, returned, client) in enumerate(sorted(calls)):
        unknown = rng.random() < lost
        if rng.random() < 0.5 and index != lie:
            op: Op = Add("k", 1)
            value += not (unknown and rng.random() < 0.5)
            result: Result = Count(value, 1)
        else:
            op, result = (
                Get("k"),
                Value(b"%d" % (value + (num_calls if index == lie else 0)) if value else None, 1),
            )
            unknown = unknown and index != lie
        end = INF if unknown else returned
        history.append(did(f"c{client}", op, None if unknown else result, invoked, end))
    return history


@pytest.mark.parametrize("seed", range(20))
def test_true_registers_pass_and_liars_are_caught(seed: int) -> None:
    assert check(recorded(seed, num_calls=60, num_clients=6, lost=0.1)).problem == ""
    assert not check(recorded(seed, num_calls=60, num_clients=6, lost=0.05, wrong=True))


def test_hundreds_of_calls_on_one_key_take_no_time() -> None:
    history = recorded(7, num_calls=600, num_clients=8, lost=0.05)
    start = time.monotonic()
    assert check(history).problem == ""
    assert time.monotonic() - start < 5


def test_a_search_without_end_is_called_undecided() -> None:
    history = [did(f"c{i}", Swap("k", b"%d" % i, b"%d" % (i + 1)), None, 0) for i in range(30)]
    history += [put("z", b"0", 1, 2), got("z", b"nothing", 3, 4)]
    assert "undecided" in check(history, max_states=20).problem


# ---- meetings


def met(
    slot: int, epoch: int, invoked: float, returned: float, *, slots: tuple[int, ...] = (0, 1),
    absent: tuple[int, ...] = (), name: str = "b",
) -> Operation:  # fmt: skip
    op = Meet("barrier", name, 10.0)
    return Operation(f"m{slot}", op, Met(epoch, absent), invoked, returned, slot, slots)


def pending(slot: int, invoked: float) -> Operation:
    return did(f"m{slot}", Meet("barrier", "b", 10.0), None, invoked, INF, slot)


def test_good_meetings() -> None:
    assert meeting_problems([met(0, 1, 0, 5), met(1, 1, 4, 6), met(0, 2, 6, 9), met(1, 2, 7, 9)]) == []
    assert meeting_problems([met(0, 1, 0, 5), pending(1, 4)]) == []
    assert meeting_problems([met(0, 1, 0, 5, absent=(1,))]) == []
    failed = Refused("deadline", "")
    history = [did(f"m{i}", Meet("barrier", "b", 1.0), failed, 0, 2, i) for i in range(2)]
    assert meeting_problems([*history, met(0, 2, 3, 5), met(1, 2, 4, 5)]) == []


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ([met(0, 1, 0, 3), met(1, 1, 4, 6)], "before slot 1 had come"),
        ([met(0, 1, 0, 5)], "before slot 1 had come"),
        ([met(0, 1, 0, 3), pending(1, 4)], "before slot 1 had come"),
        ([met(0, 1, 0, 5), met(1, 1, 0, 5, absent=(0,))], "two outcomes"),
        ([met(0, 1, 0, 5), met(1, 1, 0, 5), met(0, 1, 6, 7)], "had epoch 1 of it before"),
        ([met(0, 2, 0, 5), met(1, 2, 0, 5), met(0, 1, 6, 7), met(1, 1, 6, 7)], "had epoch 2 of it before"),
        ([met(0, 1, 0, 5), met(1, 1, 0, 5), met(2, 1, 0, 5)], "its slots are (0, 1)"),
        (
            [met(0, 1, 0, 5), did("m1", Meet("barrier", "b", 1.0), Refused("failed", ""), 1, 5, 1)],
            "before slot 1 had come",
        ),
    ],
)  # fmt: skip
def test_bad_meetings(history: list[Operation], problem: str) -> None:
    assert any(problem in text for text in meeting_problems(history)), meeting_problems(history)
