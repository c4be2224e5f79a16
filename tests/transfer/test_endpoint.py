"""Publishing and taking, in one process: every transport, many runs, versions, leases and what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast.clock import Deadline
from holdfast.errors import (
    DeadlineError,
    HandshakeError,
    HoldfastError,
    IntegrityError,
    MismatchError,
    PeerLostError,
    StalledError,
    TransferCancelled,
    TransferError,
    TreeError,
    UsageError,
    VersionGoneError,
)
from holdfast.transfer import Endpoint, Shard
from holdfast.transfer.legs import Leg

WAYS = {"process": ("process",), "memfd": ("memfd", "tcp"), "tcp": ("tcp",)}
TOKEN = b"0123456789abcdef0123456789abcdef"

Make = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes endpoints that are closed afterwards."""
    made: list[Endpoint] = []

    def one(**settings: Any) -> Endpoint:
        made.append(Endpoint(**{"chunk_bytes": 1 << 16, **settings}))
        return made[-1]

    yield one
    for endpoint in made:
        endpoint.close()


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, make: Make) -> tuple[Endpoint, Endpoint]:
    """A source and a target, over each transport."""
    ways = WAYS[request.param]
    return make(transports=ways, name="source"), make(transports=ways, name="target")


def tree(version: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(version)
    return {
        "w": rng.standard_normal((300, 70)),
        "half": rng.standard_normal((64, 33)).astype(ml_dtypes.bfloat16),
        "many": {f"{n:03}": rng.integers(0, 9, n, np.int32) for n in range(60)},
        "flag": np.array(True),
        "step": version,
        "rate": 0.5 * version,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return type(a) is type(b) and bool(a == b)


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether it comes true in time; for what has no event of its own."""
    deadline, tick = Deadline(timeout_s), threading.Event()
    while not condition():
        if deadline.expired():
            return False
        tick.wait(0.005)
    return True


# ---- bytes


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_tree_arrives_bit_by_bit(pair: tuple[Endpoint, Endpoint], checked: bool) -> None:
    source, target = pair
    source.publish("policy", tree(1), 1)
    plan = target.prepare(source.address, "policy")
    before = plan.current
    assert before is None
    found = plan.run(checked=checked).result(20)
    assert same(found.tree, tree(1))
    assert (found.version, found.nbytes, found.checked) == (1, plan.nbytes, checked)
    assert set(found.transports.values()) == {source.settings.transports[0]}
    assert plan.current is not None
    assert plan.current[0] == 1
    assert plan.current[1] is found.tree


def test_from_the_second_run_on_nothing_is_allocated_or_connected(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    source.publish("policy", tree(0), 0)
    plan = target.prepare(source.address, "policy")
    fresh = []
    for version in range(1, 8):
        source.publish("policy", tree(version), version)
        result = plan.run(version).result(20)
        assert same(result.tree, tree(version))
        assert result.connects == 0
        fresh.append(result.fresh_buffers)
    assert fresh == [1, 1, 0, 0, 0, 0, 0]


def test_trees_that_are_held_never_change(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    source.publish("policy", tree(0), 0)
    plan = target.prepare(source.address, "policy")
    held = []
    for version in range(1, 6):
        source.publish("policy", tree(version), version)
        held.append(plan.run(version).result(20).tree)
    assert all(same(found, tree(version)) for version, found in enumerate(held, 1))
    # One small array is enough to keep its memory.
    last = held[0]["many"]["059"]
    held.clear()
    for version in range(6, 12):
        source.publish("policy", tree(version), version)
        plan.run(version).result(20)
    assert np.array_equal(last, tree(1)["many"]["059"])


def test_slices_of_two_sources_come_together_in_other_slices(make: Make) -> None:
    whole = np.arange(96 * 40, dtype=np.float32).reshape(96, 40)
    sources = []
    for n, ways in enumerate((("tcp",), ("memfd",))):
        source = make(transports=ways, name=f"source{n}")
        mine = Shard(whole[48 * n : 48 * (n + 1)].copy(), whole.shape, (48 * n, 0))
        source.publish("policy", {"w": mine, "both": np.arange(5)}, 3)
        sources.append(source)
    for column in range(2):
        target = make(transports=("memfd", "tcp"))
        want = Shard(np.empty((96, 20), np.float32), whole.shape, (0, 20 * column))
        plan = target.prepare([s.address for s in sources], "policy", {"w": want, "both": np.empty(5, int)})
        result = plan.run().result(20)
        assert np.array_equal(result.tree["w"], whole[:, 20 * column : 20 * (column + 1)])
        assert np.array_equal(result.tree["both"], np.arange(5))
        assert result.transports == {sources[0].address: "tcp", sources[1].address: "memfd"}
        assert sum(result.peer_bytes.values()) == 96 * 20 * 4 + 5 * 8  # not a byte more
        assert "2 peers" in plan.explain()


def test_peers_agree_on_the_newest_version_that_all_have(make: Make) -> None:
    sources = [make(name=f"s{n}") for n in range(2)]
    whole = np.arange(20)
    for n, source in enumerate(sources):
        for version in (1, 2, 3)[: 3 - n]:
            source.publish(
                "w", {"w": Shard(whole[10 * n : 10 * n + 10] + version, (20,), (10 * n,))}, version
            )
    plan = make().prepare([s.address for s in sources], "w")
    result = plan.run().result(20)
    assert result.version == 2
    assert np.array_equal(result.tree["w"], whole + 2)
    # With none in common it is waited for.
    sources[0].publish("w", {"w": Shard(whole[:10] + 9, (20,), (0,))}, 9)
    sources[0].publish("w", {"w": Shard(whole[:10] + 10, (20,), (0,))}, 10)
    transfer = plan.run()
    sources[1].publish("w", {"w": Shard(whole[10:] + 10, (20,), (10,))}, 10)
    assert transfer.result(20).version == 10


def test_casts_and_renames_only_when_asked_for(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    source.publish("policy", {"w": np.arange(10, dtype=np.float64), "n": 3}, 1)
    want = {"weights": np.empty(10, np.float32), "n": 0}
    with pytest.raises(MismatchError) as caught:
        target.prepare(source.address, "policy", want)
    assert len(caught.value.problems) == 2
    with pytest.raises(MismatchError, match="dtype float32 wanted"):
        target.prepare(source.address, "policy", want, rename={"weights": "w"})
    plan = target.prepare(source.address, "policy", want, rename={"weights": "w"}, cast=True)
    found = plan.run().result(20).tree
    assert found["weights"].dtype == np.float32
    assert np.array_equal(found["weights"], np.arange(10))
    assert "cast here: weights from float64" in plan.explain()


def test_a_shard_must_lie_within_its_array() -> None:
    for shape, start in [((4,), (2,)), ((4, 4), (0,)), ((8,), (-1,))]:
        with pytest.raises(TreeError, match="is no slice of"):
            Shard(np.zeros(3), shape, start)


def test_an_endpoint_can_take_from_itself(make: Make) -> None:
    endpoint = make()
    endpoint.publish("w", {"w": np.arange(9)}, 1)
    result = endpoint.prepare(endpoint.address, "w").run().result(20)
    assert np.array_equal(result.tree["w"], np.arange(9))
    assert list(result.transports.values()) == ["process"]


# ---- versions and leases


def test_versions_only_grow(make: Make) -> None:
    source = make()
    source.publish("w", tree(), 4)
    for version in (4, 3, -1):
        with pytest.raises(UsageError):
            source.publish("w", tree(), version)


def test_a_run_waits_for_its_version_and_knows_one_that_is_gone(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    transfer = plan.run(2)
    with pytest.raises(DeadlineError, match="goes on"):
        transfer.result(0.05)
    source.publish("w", tree(2), 2)
    assert same(transfer.result(20).tree, tree(2))
    for version in (3, 4):
        source.publish("w", tree(version), version)
    with pytest.raises(VersionGoneError, match="version 1 of 'w' is not there; there are: 3, 4"):
        plan.run(1).result(20)
    with pytest.raises(VersionGoneError, match="version 9 "):
        plan.run(9, deadline_s=0.2).result(20)
    assert plan.current is not None
    assert plan.current[0] == 2


def test_prepare_waits_for_the_first_publication(make: Make) -> None:
    source, target = make(), make()
    source.publish("other", tree(0), 0)
    target.prepare(source.address, "other")  # connected: what follows bounds nothing but the wait
    with pytest.raises(VersionGoneError, match="'w' was never published"):
        target.prepare(source.address, "w", timeout_s=0.1)
    timer = threading.Timer(0.1, lambda: source.publish("w", tree(1), 1))
    timer.start()
    assert target.prepare(source.address, "w", timeout_s=10).nbytes > 0
    timer.join()


def test_memory_goes_when_it_is_superseded_and_nobody_reads_it(make: Make) -> None:
    source = make()
    first = source.publish("w", tree(1), 1, keep=1)
    assert not first.wait_released(0)
    source.publish("w", tree(2), 2, keep=1)
    assert first.wait_released(0)
    with source.publish("w", tree(3), 3) as third:
        assert not third.wait_released(0)
    assert third.wait_released(0)


def test_the_source_learns_what_became_of_it(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    published = source.publish("w", tree(1), 1)
    assert published.targets() == {}
    target.prepare(source.address, "w").run().result(20)
    assert until(lambda: published.targets() == {"target": "committed"})
    assert until(lambda: published.readers == 0)


def test_a_lease_ends_and_cuts_readers_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make(transports=("tcp",)), make(transports=("tcp",), window_bytes=1 << 16)
    lease_s = 600.0
    published = source.publish("w", {"w": np.zeros(1 << 20)}, 1, lease_s=lease_s)
    plan = target.prepare(source.address, "w")
    # A target that gives no credit back reads for ever.
    monkeypatch.setattr(Leg, "owed", lambda *_: 0)
    transfer = plan.run()
    assert until(lambda: published.readers == 1)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + lease_s)
    monkeypatch.setattr("holdfast.transfer.timers.time", later)
    source.timers.after(-lease_s, lambda: None)  # has it look at the clock
    with pytest.raises(VersionGoneError, match="its lease ran out"):
        transfer.result(20)
    assert published.wait_released(5)
    assert set(published.targets().values()) == {"aborted"}


# ---- waiting, cancelling, asyncio


def test_cancelling_while_waiting_and_afterwards(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    transfer = plan.run(5)
    ended = threading.Event()
    transfer.add_done_callback(lambda _: ended.set())
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.result(5)
    assert ended.wait(5)
    assert (transfer.outcome, transfer.done()) == ("aborted", True)
    found = plan.run()
    assert same(found.result(20).tree, tree(1))
    found.cancel()  # too late
    assert found.outcome == "committed"
    assert found.progress() == (plan.nbytes, plan.nbytes)


def test_asyncio_awaits_many_and_cancels(make: Make) -> None:
    source, target = make(), make()
    source.publish("w", tree(1), 1)

    async def main() -> None:
        plan = await target.prepare_async(source.address, "w")
        results = await asyncio.gather(*(plan.run().wait() for _ in range(8)))
        assert all(same(result.tree, tree(1)) for result in results)
        assert (await plan.run()).version == 1
        waiting = plan.run(7)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting.wait(), 0.05)
        assert await asyncio.to_thread(until, waiting.done)
        with pytest.raises(TransferCancelled):
            await waiting

    asyncio.run(main())


def test_many_runs_of_many_plans_share_the_connections(make: Make) -> None:
    source, target = make(transports=("tcp",)), make(transports=("tcp",), window_bytes=1 << 17)
    for name in "abc":
        source.publish(name, {name: np.full((200, 300), ord(name))}, 1)
    plans = {name: target.prepare(source.address, name) for name in "abc"}
    running = [(name, plans[name].run()) for _ in range(4) for name in "abc"]
    for name, transfer in running:
        assert (transfer.result(20).tree[name] == ord(name)).all()
    assert len(source._links) == 1


# ---- what goes wrong


def test_a_restarted_source_works_at_the_next_run(make: Make) -> None:
    target = make()
    source = make(transports=("memfd", "tcp"))
    address = source.address
    source.publish("w", tree(1), 1)
    plan = target.prepare(address, "w")
    assert plan.run().result(20).version == 1
    source.close()
    assert until(lambda: bool(plan.ties[0].open_link().lost))  # else it is this run that finds out
    with pytest.raises(PeerLostError, match="cannot connect"):
        plan.run().result(20)
    assert plan.current is not None
    assert same(plan.current[1], tree(1))
    again = make(bind=address)
    again.publish("w", tree(2), 2)
    result = plan.run().result(20)
    assert (result.version, result.connects) == (2, 1)
    assert same(result.tree, tree(2))
    again.close()
    assert until(lambda: bool(plan.ties[0].open_link().lost))
    other = make(bind=address)
    other.publish("w", {"w": np.zeros((3, 3)), "step": 2}, 3)
    with pytest.raises(MismatchError, match=r"w: planned as float64\[300, 70\], now float64\[3, 3\]"):
        plan.run().result(20)


def test_a_version_with_other_arrays_is_refused_and_listed(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    source.publish("w", {"a": np.zeros(3), "b": np.zeros(3)}, 1)
    plan = target.prepare(source.address, "w")
    source.publish("w", {"a": np.zeros(4), "c": np.zeros(3)}, 2)
    with pytest.raises(MismatchError) as caught:
        plan.run().result(20)
    assert len(caught.value.problems) == 3
    assert plan.run(1).result(20).version == 1


def test_an_address_can_name_the_incarnation_it_means(make: Make) -> None:
    source, target = make(), make()
    source.publish("w", tree(1), 1)
    target.prepare(f"{source.address}#{source.incarnation}", "w").run().result(20)
    with pytest.raises(PeerLostError, match="the peer that is meant is gone"):
        target.prepare(f"{source.address}#{'0' * 32}", "w")


def test_only_who_knows_the_token_takes_part(make: Make) -> None:
    source = make(token=TOKEN)
    source.publish("w", tree(1), 1)
    for token in (None, TOKEN[::-1]):
        with pytest.raises((HandshakeError, PeerLostError)):
            make(token=token).prepare(source.address, "w")
    with pytest.raises(HandshakeError, match="another run"):
        make(token=TOKEN, run="else").prepare(source.address, "w")
    assert make(token=TOKEN).prepare(source.address, "w").run().result(20).version == 1
    with pytest.raises(UsageError, match="without a token"):
        Endpoint("0.0.0.0:0")


def test_nobody_there_and_somebody_else_there(make: Make) -> None:
    target = make(connect_s=0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(StalledError, match="no greeting"):
            target.prepare(f"127.0.0.1:{port}", "w")
    with pytest.raises(PeerLostError, match="cannot connect"):
        target.prepare(f"127.0.0.1:{port}", "w")
    with pytest.raises(UsageError, match="is no address"):
        target.prepare("nonsense", "w")


def test_what_goes_wrong_at_the_end_aborts_and_the_next_run_works(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    published = source.publish("w", tree(1), 1)
    plan = target.prepare(source.address, "w")
    with monkeypatch.context() as patch:
        patch.setattr(Leg, "leave", _broken(Leg.leave))
        with pytest.raises(HoldfastError):
            plan.run(deadline_s=5).result(20)
    assert until(lambda: "committed" not in published.targets().values())
    assert same(plan.run().result(20).tree, tree(1))


def _broken(leave: Callable[..., None]) -> Callable[..., None]:
    def fail(leg: Leg, chunks: Any) -> None:
        leave(leg, ())
        raise RuntimeError("broken on purpose")

    return fail


@pytest.mark.parametrize(
    "settings",
    [{"streams": 0}, {"window_bytes": 0}, {"chunk_bytes": 0}, {"idle_s": 0}, {"transports": ("carrier",)}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Endpoint(**settings)


def test_an_array_that_is_changed_while_it_is_published_is_noticed(make: Make) -> None:
    for way in ("memfd", "tcp"):
        source, targets = make(transports=(way,)), [make(transports=(way,)) for _ in range(2)]
        array = np.zeros(100_000)
        source.publish("w", {"w": array}, 1)
        plans = [target.prepare(source.address, "w") for target in targets]
        plans[0].run().result(20)
        array[70_000] = 1
        with pytest.raises(IntegrityError, match=r"arrived damaged; it holds w") as caught:
            plans[1].run().result(20)
        assert "while it was published" in str(caught.value)
        source.publish("w", {"w": array}, 2)
        assert plans[1].run().result(20).tree["w"][70_000] == 1


# ---- the end


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    gc.collect()
    threads, before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    found: Any = None
    for ways in WAYS.values():
        with Endpoint(transports=ways) as source, Endpoint(transports=ways) as target:
            source.publish("w", tree(1), 1)
            plan = target.prepare(source.address, "w")
            found = plan.run().result(20).tree
            waiting = plan.run(9)
        with pytest.raises(TransferError):
            waiting.result(5)
        assert same(found, tree(1)), "what was handed out stays"
        with pytest.raises(TransferError, match="closed"):
            target.prepare(source.address, "w")
        with pytest.raises(UsageError, match="closed"):
            plan.run()
    del found
    gc.collect()
    assert until(lambda: set(threading.enumerate()) <= threads)
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_memory_returns_when_a_plan_is_closed(make: Make) -> None:
    source, target = make(), make()
    source.publish("w", {"w": np.zeros(1 << 18)}, 1)
    gc.collect()
    before = _memfds()
    for _ in range(3):
        with target.prepare(source.address, "w") as plan:
            plan.run().result(20)
    gc.collect()
    assert until(lambda: _memfds() <= before)


def test_versions_that_are_gone_leave_nothing_for_the_rest_of_their_lease(make: Make) -> None:
    source = make()
    for version in range(500):
        source.publish("w", {"w": np.zeros(8)}, version, lease_s=7 * 86400.0, keep=1)
    assert len(source.timers._due) < 200


def _memfds() -> int:
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("memfd:holdfast-transfer" in line for line in file)
