"""Lanes that are folded beside the caller: the same bits, nothing half, nothing left."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast import faults
from holdfast.errors import ReplicaLateError, TreeError, UsageError
from holdfast.reduce import Group, Member, Reducer, intake, workers
from holdfast.reduce.layout import BLOCK, CHUNK
from holdfast.reduce.workers import MAX_THREADS, default_threads
from tests.reduce.crew import DEADLINE_S, Crew, unchecked
from tests.reduce.gated import Gated, fold_threads, framework
from tests.reduce.test_bits import lane_values

__all__ = ["framework"]
pytestmark = pytest.mark.usefixtures("framework")

LANES = 4
BIG = CHUNK * BLOCK
"""Bytes of a chunk."""
Make = Callable[..., Reducer]


@pytest.fixture
def make() -> Iterator[Make]:
    """Reducers of one member, which are closed, and leave no thread."""
    made: list[Reducer] = []

    def reducer(**options: Any) -> Reducer:
        made.append(Reducer(**{"num_lanes": LANES, "inline_bytes": 0, "num_threads": 2, **options}))
        return made[-1]

    yield reducer
    for one in made:
        one.close()
    assert not fold_threads()


def begun(reducer: Reducer, step: int = 0) -> Reducer:
    reducer.begin(step, {0: range(LANES)})
    return reducer


def added(reducer: Reducer, lane: int) -> None:
    reducer.add(lane, lane_of(lane))
    reducer.held()


def lane_of(lane: int, *, size: int = 1000, computed: bool = True) -> dict[str, Any]:
    """A lane with one array of the framework and one of numpy."""
    values = np.arange(size, dtype=np.float32) * (lane + 1)
    return {"a": Gated(values, computed=computed), "b": np.full(3, lane, np.int64)}


def expected(size: int = 1000) -> bytes:
    total = [np.arange(size, dtype=np.float32) * (lane + 1) for lane in range(LANES)]
    whole: bytes = ((total[0] + total[1]) + (total[2] + total[3])).tobytes()
    return whole + np.full(3, sum(range(LANES)), np.int64).tobytes()


def summed(reducer: Reducer) -> bytes:
    reducer.exchange(DEADLINE_S, unchecked)
    total = reducer.total()
    return b"".join(total[name].tobytes() for name in sorted(total))


def in_a_thread(act: Callable[[], Any]) -> Callable[[], Any]:
    """Begin something that blocks; the result waits for it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "it hangs"
        return found[0]

    return result


# ---- bits


@cache
def mixed(lane: int) -> dict[str, Any]:
    """Several dtypes, arrays that cross chunks, and some that share a block; numbers of every sort."""
    return {
        "large": lane_values("float32", BIG // 4 + 4321, lane),
        "half": lane_values("bfloat16", BIG // 8, lane + 10),
        "counts": lane_values("int32", 17, lane + 20),
        "wide": lane_values("float64", BLOCK // 8 + 3, lane + 30),
    }


def result(reducer: Reducer, order: Sequence[int], gated: bool) -> tuple[bytes, list[str]]:
    """The bytes of a total, and the digests of its lanes."""
    begun(reducer)
    for lane in order:
        tree = mixed(lane)
        reducer.add(lane, {name: Gated(values) for name, values in tree.items()} if gated else tree)
    return summed(reducer), [reducer.lane_digest(lane) for lane in range(LANES)]


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_the_same_bits_and_digests_in_the_call_and_beside_it(make: Make, wire: str | None) -> None:
    inline = result(make(inline_bytes=1 << 40, wire_dtype=wire), range(LANES), gated=True)
    assert len(set(inline[1])) == LANES
    for num_threads in (1, 4):
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
            for gated in (True, False):
                reducer = make(num_threads=num_threads, wire_dtype=wire)
                assert result(reducer, order, gated) == inline, (num_threads, order, gated)


def test_a_digest_is_of_every_byte(make: Make) -> None:
    reducer = begun(make())
    for lane, (name, at) in enumerate([("large", 0), ("large", -1), ("counts", 5), ("half", 3)]):
        tree = {key: values.copy() for key, values in mixed(0).items()}
        tree[name].view(np.uint8)[at] ^= 1
        reducer.add(lane, tree)
    digests = {reducer.lane_digest(lane) for lane in range(LANES)}
    begun(reducer, 1).add(0, mixed(0))
    assert len(digests | {reducer.lane_digest(0)}) == LANES + 1


# ---- beside the caller


def test_a_lane_is_taken_before_it_is_computed(make: Make) -> None:
    reducer = begun(make())
    for lane in range(LANES):
        tree = lane_of(lane, computed=False)
        reducer.add(lane, tree)
        assert tree["a"].asked.wait(DEADLINE_S)
        digest = in_a_thread(lambda lane=lane: reducer.lane_digest(lane))  # type: ignore[misc]
        tree["a"].computed.set()
        assert len(digest()) == 32
    assert reducer.held() == tuple(range(LANES))
    assert summed(reducer) == expected()


def test_one_lane_is_on_its_way_at_a_time(make: Make) -> None:
    reducer = begun(make())
    trees = [lane_of(lane, computed=False) for lane in range(LANES)]
    reducer.add(0, trees[0])
    for lane in range(1, LANES):
        added = in_a_thread(lambda lane=lane: reducer.add(lane, trees[lane]))  # type: ignore[misc]
        assert trees[lane - 1]["a"].asked.wait(DEADLINE_S)
        assert not trees[lane]["a"].asked.is_set()
        trees[lane - 1]["a"].computed.set()
        assert added() is None
    trees[-1]["a"].computed.set()
    assert summed(reducer) == expected()


def test_what_was_folded_is_not_held(make: Make) -> None:
    reducer = begun(make())
    tree = lane_of(0)
    held = weakref.ref(tree["a"]), weakref.ref(tree["a"].values)
    reducer.add(0, tree)
    assert reducer.held() == (0,)
    del tree
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_an_array_that_was_brought_is_let_go_while_the_next_is_computed(make: Make) -> None:
    """Else the memory of a device would be full of lanes."""
    reducer = begun(make())
    tree = lane_of(0) | {"c": Gated(np.zeros(3), computed=False)}
    reducer.add(0, tree)
    assert tree["c"].asked.wait(DEADLINE_S)
    first = weakref.ref(tree.pop("a"))
    gc.collect()
    assert first() is None
    tree["c"].computed.set()
    assert reducer.held() == (0,)


def test_small_lanes_need_no_thread(make: Make) -> None:
    reducer = begun(make(inline_bytes=intake.INLINE_BYTES))
    for lane in range(LANES):
        reducer.add(lane, lane_of(lane))
    assert not fold_threads()
    assert summed(reducer) == expected()


def test_the_number_of_threads_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert default_threads() == 6
    for given, number in (("2", 2), ("64", 6), ("0", 1), ("many", 6)):
        monkeypatch.setenv("NPROC", given)
        assert default_threads() == number
    monkeypatch.setenv("NPROC", "64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100)))
    assert default_threads() == MAX_THREADS
    with pytest.raises(UsageError, match="num_threads=0"):
        Reducer(num_threads=0)


# ---- what the caller does with its arrays


@pytest.mark.parametrize("size", [3, 3 * BIG // 8], ids=["copied", "folded at once"])
def test_numpy_arrays_may_be_changed_afterwards(make: Make, size: int) -> None:
    reducer = begun(make())
    for lane in range(LANES):
        awaited = Gated(np.full(9, lane, np.float32), computed=size > 3)
        writable = np.full(size, float(lane))
        reducer.add(lane, {"a": awaited, "b": writable})
        writable[:] = 1e9
        awaited.computed.set()
    reducer.exchange(DEADLINE_S, unchecked)
    assert (reducer.total()["b"] == sum(range(LANES))).all()


def test_who_is_interrupted_while_numpy_arrays_are_folded_has_added_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = begun(make())
    tree = lane_of(0, computed=False) | {"b": np.zeros(BIG // 4)}
    idle = reducer._intake._workers.idle

    def interrupted(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(reducer._intake._workers, "idle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reducer.add(0, tree)
    monkeypatch.setattr(reducer._intake._workers, "idle", idle)
    tree["a"].computed.set()
    assert reducer.held() == ()


CALLS: dict[str, Callable[[Reducer], Any]] = {
    "add": lambda one: one.add(3, lane_of(3)),
    "held": lambda one: one.held(),
    "lane_digest": lambda one: one.lane_digest(0),
    "reassign": lambda one: one.reassign({0: range(LANES)}),
    "exchange": lambda one: one.exchange(DEADLINE_S, unchecked),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_beside_the_caller_is_told_by_its_next_call(make: Make, call: str) -> None:
    reducer = begun(make())
    for lane in (0, 1):
        reducer.add(lane, lane_of(lane))
    bad = lane_of(2)
    bad["a"].error = ZeroDivisionError("the lane computed nonsense")
    reducer.add(2, bad)
    with pytest.raises(ZeroDivisionError, match="nonsense") as caught:
        CALLS[call](reducer)
    assert "lane 2" in caught.value.__notes__[0]
    # Told once. What the lane was not to be added to is held; nothing of lane 2 is.
    assert reducer.held() == (0, 1)
    for lane in (3, 2):
        reducer.add(lane, lane_of(lane))
    assert summed(reducer) == expected()


def test_a_lane_that_fails_takes_what_it_was_added_to_with_it(make: Make) -> None:
    reducer = begun(make())
    for lane in (0, 1, 2):
        reducer.add(lane, lane_of(lane))
    bad = lane_of(3)
    bad["a"].error = ZeroDivisionError("nonsense")
    reducer.add(3, bad)
    with pytest.raises(ZeroDivisionError):
        reducer.held()
    assert reducer.held() == ()
    for lane in range(LANES):
        reducer.add(lane, lane_of(lane))
    assert summed(reducer) == expected()
    assert len(reducer._shelf._banks) <= 4


@pytest.mark.parametrize("inline_bytes", [0, 1 << 40])
def test_a_deleted_array_is_an_error_and_never_a_sum(make: Make, inline_bytes: int) -> None:
    reducer = begun(make(inline_bytes=inline_bytes))
    reducer.add(0, lane_of(0))
    tree = lane_of(1, computed=bool(inline_bytes))
    tree["a"].deleted = bool(inline_bytes)

    def add() -> None:
        reducer.add(1, tree)
        tree["a"].deleted = True
        tree["a"].computed.set()
        reducer.held()

    with pytest.raises(TreeError, match=r"float32\[1000\] was donated or deleted before it was read"):
        add()
    assert 1 not in reducer.held()


@pytest.mark.parametrize("inline_bytes", [0, 1 << 40])
def test_the_fault_site_is_passed_once_for_each_lane(make: Make, inline_bytes: int) -> None:
    reducer = begun(make(inline_bytes=inline_bytes))
    faults.arm("reduce.folded:raise@3")
    try:
        for lane in (0, 1):
            reducer.add(lane, lane_of(lane))
            assert lane in reducer.held()
        with pytest.raises(RuntimeError, match="injected"):
            added(reducer, 2)
        reducer.add(3, lane_of(3))
        assert summed(reducer) == expected()
    finally:
        faults.disarm()


# ---- what happens meanwhile


def test_a_group_changes_while_a_lane_is_computed() -> None:
    """`regroup` does not wait; `reassign` does, and knows of the lane."""
    with Crew(2, num_lanes=LANES, inline_bytes=0) as crew:
        stays = crew.members[0]
        for one in crew.members.values():
            one.begin(0, {0: [0, 1], 1: [2, 3]})
        tree = lane_of(0, computed=False)
        stays.add(0, tree)
        assert tree["a"].asked.wait(DEADLINE_S)
        crew.lose(1)
        crew.regroup()
        with pytest.raises(UsageError, match="no members"):
            stays.reassign({1: range(LANES)})
        dealt = in_a_thread(lambda: stays.reassign({0: range(LANES)}))
        tree["a"].computed.set()
        assert dealt() is None
        assert stays.held() == (0,)
        for lane in (1, 2, 3):
            stays.add(lane, lane_of(lane))
        assert summed(stays) == expected()
    assert not fold_threads()


def test_a_lane_that_is_computed_cannot_be_dealt_to_another() -> None:
    with Crew(2, num_lanes=2, inline_bytes=0) as crew:
        for one in crew.members.values():
            one.begin(0, {0: [0], 1: [1]})
        tree = lane_of(0, computed=False)
        crew.members[0].add(0, tree)
        crew.regroup()
        stolen = in_a_thread(lambda: crew.members[0].reassign({1: [0, 1]}))
        tree["a"].computed.set()
        assert isinstance(error := stolen(), UsageError)
        assert "[0] are folded here" in str(error)


def test_a_step_begins_anew_while_a_lane_is_computed(make: Make) -> None:
    """The lane is dropped, with whatever it fails with; its memory is used again."""
    reducer = make()
    stale = lane_of(1)
    for generation in range(1, 6):
        members = (Member(0, reducer.incarnation, reducer.address),)
        reducer.regroup(Group(generation, 0, members))
        begin = in_a_thread(lambda: begun(reducer))
        stale["a"].error = ZeroDivisionError("of a step that is over") if generation % 2 else None
        stale["a"].computed.set()
        assert begin() is reducer
        assert reducer.held() == ()
        reducer.add(0, lane_of(0))
        reducer.add(1, stale := lane_of(1, computed=False))
        assert stale["a"].asked.wait(DEADLINE_S)
    stale["a"].computed.set()
    for lane in (2, 3):
        reducer.add(lane, lane_of(lane))
    assert summed(reducer) == expected()
    assert len(reducer._shelf._banks) <= 3


@pytest.mark.parametrize("end", [begun, Reducer.close], ids=["begin", "close"])
def test_a_lane_that_is_given_up_is_read_no_further(
    make: Make, monkeypatch: pytest.MonkeyPatch, end: Callable[[Reducer], Any]
) -> None:
    reducer = begun(make())
    tree = lane_of(0, computed=False) | {"c": Gated(np.zeros(3), computed=False)}
    reducer.add(0, tree)
    assert tree["a"].asked.wait(DEADLINE_S)
    give_up = reducer._intake._workers.give_up

    def given_up() -> None:
        give_up()
        tree["a"].computed.set()

    monkeypatch.setattr(reducer._intake._workers, "give_up", given_up)
    reducer.regroup(Group(1, 0, (Member(0, reducer.incarnation, reducer.address),)))
    end(reducer)
    assert tree["a"].computed.is_set()
    assert not tree["c"].asked.is_set()


def test_an_exchange_waits_for_the_last_lane_as_long_as_it_may(make: Make) -> None:
    reducer = begun(make())
    for lane in (0, 1, 2):
        reducer.add(lane, lane_of(lane))
    tree = lane_of(3, computed=False)
    reducer.add(3, tree)
    checked: list[int] = []
    with pytest.raises(ReplicaLateError, match=r"lane 3 was not folded here in 0.05 s"):
        reducer.exchange(0.05, lambda: checked.append(0))
    assert checked
    with pytest.raises(ZeroDivisionError):
        reducer.exchange(DEADLINE_S, lambda: 1 // 0)  # type: ignore[arg-type]
    tree["a"].computed.set()
    assert summed(reducer) == expected()


def test_a_close_while_a_lane_is_computed_leaves_no_thread(make: Make) -> None:
    reducer = begun(make())
    tree = lane_of(0, computed=False)
    reducer.add(0, tree)
    assert tree["a"].asked.wait(DEADLINE_S)
    closed = in_a_thread(reducer.close)
    tree["a"].computed.set()
    assert closed() is None
    assert not fold_threads()
    with pytest.raises(UsageError, match="closed"):
        reducer.add(1, lane_of(1))


def test_a_close_does_not_wait_for_a_device_that_is_stuck(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_S", 0.05)
    reducer = begun(make())
    tree = lane_of(0, computed=False)
    reducer.add(0, tree)
    assert tree["a"].asked.wait(DEADLINE_S)
    reducer.close()
    left = fold_threads()
    assert left
    tree["a"].computed.set()
    for thread in left:
        thread.join(DEADLINE_S)
    assert not fold_threads()


def test_dtypes_of_other_packages_are_folded_beside_the_caller_too(make: Make) -> None:
    reducer = begun(make())
    for lane in range(LANES):
        reducer.add(lane, {"a": Gated(np.full(BIG, lane, ml_dtypes.bfloat16))})
    reducer.exchange(DEADLINE_S, unchecked)
    assert (reducer.total()["a"] == sum(range(LANES))).all()
