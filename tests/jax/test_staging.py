"""Staging from devices, with arrays of the CPU backend and a driver that minds the rules."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import Checkpointer, journal
from holdfast.arrays import flatten_tree
from holdfast.checkpoint import SaveHandle, SaveState
from holdfast.checkpoint.captures import filled_upto, split
from holdfast.checkpoint.saving import SavePlanner
from holdfast.clock import Deadline
from holdfast.errors import (
    DeadlineError,
    HoldfastError,
    NoCheckpointError,
    StagingError,
    TreeError,
    UsageError,
)
from holdfast.format import BLOCK
from holdfast.jax.engine import Copy, CopyEngine, batches
from holdfast.jax.pins import PinBudget
from holdfast.jax.routes import ARENA, PAGEABLE, PINNED_HOST
from holdfast.jax.settings import pin_limit, setting
from holdfast.jax.snapshots import Headroom, sample, snapshot
from holdfast.jax.staging import DeviceStager, StagedCopies
from holdfast.supervise.saving import RunSaver
from holdfast.testing.cuda import FakeDriver, Misuse
from holdfast.vault import Slot, ThreadWriter

CPU = frozenset({"cpu"})
Roomy = {"bytes_limit": 1 << 40, "bytes_in_use": 0, "peak_bytes_in_use": 0}


def state(scale: float = 1.0) -> dict[str, Any]:
    return {
        "a": jnp.arange(30_000, dtype=jnp.float32) * scale,
        "b": {"half": jnp.arange(7_001, dtype=jnp.bfloat16), "one": jnp.float32(scale)},
        "key": jax.random.key(3),
        "host": np.arange(1000.0) * scale,
        "step": 7,
    }


def same(left: Any, right: Any) -> bool:
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            return False
    return True


def kept(array: Any) -> Any:
    """A view of an array, for as long as a copy may read it once it is deleted: a device's memory stays."""
    return np.asarray(array)


def sharded(array: Any, *spec: str | None) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    where: Any = jax.sharding.PartitionSpec(*spec)  # type: ignore[no-untyped-call]
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, where))


def checkpointer(path: Path, **options: Any) -> Checkpointer:
    return Checkpointer(path, writer="thread", **{"threads": 1, **options})


def routes(path: Path) -> list[tuple[str, str]]:
    found = [record.event for record in journal.read(path / "journal.jsonl")]
    return [(one.route, one.reason) for one in found if isinstance(one, journal.StagingRoute)]


# ---- through a checkpointer


def test_what_was_copied_from_the_device_comes_back(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    stager = use(driver)
    tree = state()
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare(tree)
        assert stager.pinned == ckpt.host_bytes
        for step in range(5):
            tree = state(float(step))
            handle = ckpt.save(step, tree, fenced=bool(step % 2))
            handle.fence()
            assert handle.state is not SaveState.CAPTURING
            handle.durable(30.0)
        assert same(ckpt.load(into=tree), tree)
    stager.close()
    driver.check()
    assert driver.calls["register"] == 1, "the slot is pinned once"
    assert routes(tmp_path) == [(ARENA, "")]


def test_a_fenced_save_returns_before_the_copies_and_the_fence_waits_for_them(
    use: Any, tmp_path: Path
) -> None:
    driver = FakeDriver()
    use(driver)
    tree = state()
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare(tree)
        driver.first_copy.clear()
        driver.gate.clear()
        handle = ckpt.save(1, tree, fenced=True)
        assert handle.state is SaveState.CAPTURING
        waiting = threading.Thread(target=handle.fence)
        waiting.start()
        assert driver.first_copy.wait(10.0)
        assert waiting.is_alive()
        driver.gate.set()
        waiting.join(10.0)
        assert not waiting.is_alive()
        handle.durable(30.0)
        assert same(ckpt.load(into=tree), tree)


def test_without_a_fence_a_snapshot_is_copied_from_if_there_is_room(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    use(driver, stats=lambda _device: Roomy)
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(200_000)
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare({"x": x})
        driver.first_copy.clear()
        driver.gate.clear()
        handle = ckpt.save(1, {"x": x})
        assert handle.state is SaveState.CAPTURED, "captured, and nothing was copied to the host"
        x = donate(x)
        driver.gate.set()
        handle.durable(30.0)
        assert not np.asarray(ckpt.load(into={"x": x})["x"]).any()


def test_without_a_fence_and_without_room_save_copies_before_it_returns(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    use(driver)
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(200_000)
    with checkpointer(tmp_path, keep=None) as ckpt:
        for step in range(3):
            handle = ckpt.save(step, {"x": x})
            assert handle.state is not SaveState.CAPTURING
            assert not driver.under_way
            x = donate(x)
        ckpt.wait(30.0)
        for step in range(3):
            assert (np.asarray(ckpt.load(step=step)["x"]) == step).all()


def test_an_array_donated_before_the_fence_fails_the_save(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    stager = use(driver)
    x = jnp.zeros(200_000)
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare({"x": x})
        driver.first_copy.clear()
        driver.gate.clear()
        handle = ckpt.save(1, {"x": x}, fenced=True)
        assert driver.first_copy.wait(10.0)
        memory = kept(x)
        x.delete()  # what donating does to it; and then the next step writes there
        ctypes.memset(memory.ctypes.data, 1, memory.nbytes)
        driver.gate.set()
        with pytest.raises(TreeError, match="donated"):
            handle.durable(30.0)
        handle.fence()
        assert ckpt.steps() == []
        assert stager.route == ARENA, "the route did nothing wrong"
        ckpt.save(2, {"x": jnp.ones(200_000)}).durable(30.0)


def test_a_save_fails_if_only_one_of_several_devices_has_given_its_shard_away(
    use: Any, tmp_path: Path
) -> None:
    """JAX gives them away one after the other, and says of an array what it knows of its first shard."""
    driver = FakeDriver()
    use(driver)
    cut = sharded(jnp.zeros((8, 50_000)), "x")
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare({"cut": cut})
        driver.first_copy.clear()
        driver.gate.clear()
        handle = ckpt.save(1, {"cut": cut}, fenced=True)
        assert driver.first_copy.wait(10.0)
        shard = cut.addressable_shards[3].data
        memory = kept(shard)
        shard.delete()
        assert not cut.is_deleted()
        driver.gate.set()
        with pytest.raises(TreeError, match="donated"):
            handle.durable(30.0)
        assert ckpt.steps() == []
        del memory


@pytest.mark.parametrize("first", [0, 2], ids=[ARENA, PAGEABLE])
def test_nothing_of_a_donated_array_is_committed_once_saves_are_not_compared_any_more(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """The writer commits when it is told of the last byte, so that must not happen before the last look."""
    driver = FakeDriver()
    stager = use(driver, first=first)
    stager._compared = 3
    x = jnp.zeros(200_000)
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare({"x": x})
        check, advance = StagedCopies._check_kept, ThreadWriter.advance
        looks: list[int] = []
        told = [0]

        def gone(self: StagedCopies) -> None:
            looks.append(told[-1])
            if len(looks) == 2:  # the first is before the copies, this one after them
                x.delete()
            check(self)

        def noting(self: ThreadWriter, seq: int, upto: int) -> None:
            told.append(upto)
            advance(self, seq, upto)

        monkeypatch.setattr(StagedCopies, "_check_kept", gone)
        monkeypatch.setattr(ThreadWriter, "advance", noting)
        handle = ckpt.save(1, {"x": x}, fenced=True)
        with pytest.raises(TreeError, match="donated"):
            handle.durable(30.0)
        ckpt.wait(30.0)
        assert ckpt.steps() == []
        assert looks[1] < x.nbytes, "the writer knew of all bytes before the last look"


def test_a_rank_whose_copies_fail_tells_the_others(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    use(driver)
    # Replicated, so that each rank writes some of them.
    trees = [{name: jnp.zeros(200_000) for name in "abcd"} for _ in range(2)]
    ckpts = [checkpointer(tmp_path, rank=rank, world=2, deadline_s=60.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: ckpts[rank].prepare(trees[rank]), range(2)))
        driver.gate.clear()
        handles = list(pool.map(lambda rank: ckpts[rank].save(1, trees[rank], fenced=True), range(2)))
        memory = [kept(array) for array in trees[1].values()]
        for array in trees[1].values():
            array.delete()
        driver.gate.set()
        with pytest.raises(TreeError, match="donated"):
            handles[1].durable(30.0)
        with pytest.raises(HoldfastError, match="donated"):
            handles[0].durable(30.0)
        list(pool.map(lambda rank: ckpts[rank].close(30.0), range(2)))
    assert ckpts[0].steps() == []
    del memory


def test_closing_ends_copies_that_are_under_way(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver(delay_s=0.02)
    stager = use(driver, drain_s=20.0)
    tree = [jnp.full(9_000_000, number, jnp.float32) for number in range(3)]
    ckpt = checkpointer(tmp_path)
    ckpt.prepare(tree)
    driver.first_copy.clear()
    driver.gate.clear()
    handle = ckpt.save(1, tree, fenced=True)
    assert driver.first_copy.wait(10.0)
    threading.Timer(0.2, driver.gate.set).start()
    with pytest.raises(DeadlineError):
        ckpt.close(0.0)
    assert handle.state is SaveState.FAILED
    assert not driver.under_way, "memory was unmapped under a copy"
    assert driver.registered == 0
    stager.close()
    driver.check()


def test_a_slot_that_is_too_small_is_unpinned_before_it_goes(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    stager = use(driver)
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": jnp.zeros(1000)}, fenced=True).durable(30.0)
        ckpt.save(2, {"x": jnp.zeros(900_000)}, fenced=True).durable(30.0)
        assert driver.calls["register"] == 2
        assert driver.calls["unregister"] == 1
        assert stager.pinned == ckpt.host_bytes
    stager.close()
    driver.check()


def test_sharded_arrays_and_shards_that_others_write(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    use(driver)
    cut = sharded(jnp.arange(64.0 * 64).reshape(64, 64), None, "x")
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"cut": cut}, fenced=True).durable(30.0)
        assert same(ckpt.load(into={"cut": cut}), {"cut": cut})


# ---- routes

CALLS = ["bind", "register", "make_stream", "make_event", "copy_out", "record", "happened"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("late", [False, True], ids=["at the self-check", "in a save"])
def test_a_driver_that_refuses_costs_the_route_and_not_the_save(
    use: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, late: bool
) -> None:
    driver = FakeDriver(fail={} if late else {call: 1})
    stager = use(driver)
    tree = state()
    with checkpointer(tmp_path) as ckpt, caplog.at_level(logging.WARNING, "holdfast.jax"):
        if late:
            ckpt.prepare(tree)
            driver._fail[call] = driver.calls[call] + 1
        handle = ckpt.save(1, tree, fenced=True)
        handle.durable(30.0)
        assert same(ckpt.load(into=tree), tree)
        ckpt.save(2, tree, fenced=True).durable(30.0)
    used_in_saves = call not in ("register", "make_stream", "make_event")
    if not late or used_in_saves:
        assert stager.route != ARENA
        told = routes(tmp_path)
        assert f"{call} failed" in told[-1][1] or f"{call} failed" in told[-2][1]
        assert sum("by way of" in message for message in caplog.messages) in (1, 2), "each route is said once"
    assert driver.registered == 0


def test_a_driver_that_lies_in_the_self_check_is_not_used(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver(damage=0)
    stager = use(driver)
    tree = state()
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree, fenced=True).durable(30.0)
        assert same(ckpt.load(into=tree), tree)
    assert stager.route != ARENA
    assert "a known pattern came through wrong" in routes(tmp_path)[0][1]


def test_a_driver_that_lies_later_is_found_by_the_comparison_and_the_save_is_right(
    use: Any, tmp_path: Path
) -> None:
    driver = FakeDriver()
    stager = use(driver)
    tree = {"x": jnp.arange(100_000.0)}
    with checkpointer(tmp_path) as ckpt:
        ckpt.prepare(tree)
        driver._damage = 0
        ckpt.save(1, tree, fenced=True).durable(30.0)
        assert same(ckpt.load(into=tree), tree)
        assert ckpt.verify(1) == []
    assert stager.route != ARENA
    assert "compared came through wrong" in routes(tmp_path)[1][1]


def test_copies_that_never_end_fail_the_save_and_their_slot_is_never_used_again(
    use: Any, tmp_path: Path
) -> None:
    driver = FakeDriver()
    stager = use(driver, drain_s=0.1)
    tree = {"x": jnp.arange(100_000.0)}
    ckpt = checkpointer(tmp_path, deadline_s=30.0)
    ckpt.prepare(tree)
    assert ckpt._saver is not None
    captures = ckpt._saver._captures
    driver.first_copy.clear()
    driver.gate.clear()
    captures._deadline_s = 0.1
    handle = ckpt.save(1, tree, fenced=True)
    with pytest.raises(StagingError, match="cannot be shown to be over"):
        handle.durable(30.0)
    captures._deadline_s = 30.0
    before = ckpt.host_bytes
    ckpt.save(2, tree, fenced=True).durable(30.0)
    assert ckpt.host_bytes > before, "the lost slot is counted, and another was made"
    assert same(ckpt.load(into=tree), tree)
    assert stager.route != ARENA
    ckpt.close(30.0)
    assert driver.registered, "what a device may write to stays pinned and mapped"
    driver.gate.set()
    driver.check(leaks=False)


@pytest.mark.parametrize(("chosen", "route"), [("pinned_host", PINNED_HOST), ("pageable", PAGEABLE)])
def test_a_setting_chooses_the_route(use: Any, tmp_path: Path, chosen: str, route: str) -> None:
    driver = FakeDriver()
    use(driver, first=setting({"HOLDFAST_STAGING": chosen}))
    tree = state()
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree, fenced=True).durable(30.0)
        assert same(ckpt.load(into=tree), tree)
    assert routes(tmp_path)[0] == (route, "HOLDFAST_STAGING says so")
    assert not driver.calls


def test_settings_off_and_wrong(use: Any) -> None:
    off = use(FakeDriver(), first=setting({"HOLDFAST_STAGING": "off"}))
    assert not off.takes(jnp.zeros(3))
    with pytest.raises(UsageError, match="HOLDFAST_STAGING"):
        setting({"HOLDFAST_STAGING": "fast"})
    assert pin_limit({"HOLDFAST_PIN_LIMIT": "4096"}) == 4096
    assert pin_limit({}) > 1 << 28
    with pytest.raises(UsageError, match="HOLDFAST_PIN_LIMIT"):
        pin_limit({"HOLDFAST_PIN_LIMIT": "4 GB"})


def test_pinning_has_a_limit(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    use(driver, pins=PinBudget(lambda: 4096))
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(), fenced=True).durable(30.0)
    assert "over the limit of 4,096" in routes(tmp_path)[0][1]
    assert not driver.calls["register"]


def test_arrays_of_other_devices_and_packed_ones_are_left_to_jax() -> None:
    stager = DeviceStager(FakeDriver)
    assert not stager.takes(jnp.zeros(3)), "on CPU"
    here = DeviceStager(FakeDriver, platforms=CPU)
    assert here.takes(jnp.zeros(3))
    assert here.takes(jax.random.key(1))
    assert not here.takes(jnp.zeros(4, jnp.int4)), "packed on a device"


# ---- parts


def test_a_plan_is_split_in_the_order_of_the_file(use: Any) -> None:
    use(FakeDriver())
    tree: dict[str, Any] = {
        "big": jnp.zeros(5 * BLOCK // 4 + 1),
        "host": np.zeros(BLOCK // 8),
        "z": jnp.zeros(1000),
    }
    flat = flatten_tree(tree)
    plan = SavePlanner(0, 1).plan(flat)
    found = split(plan, flat.leaves)
    copies = found.device
    assert [copy.target for copy in copies] == sorted(copy.target for copy in copies)
    assert sum(copy.nbytes for copy in copies) == tree["big"].nbytes + tree["z"].nbytes
    assert all(copy.nbytes <= 32 << 20 for copy in copies)
    assert {copy.leaf for block in found.host.blocks for copy in block} == {1}
    assert filled_upto(copies, 0, plan.size) == copies[0].target // BLOCK * BLOCK
    assert filled_upto(copies, len(copies), plan.size) == plan.size
    upto = [filled_upto(copies, done, plan.size) for done in range(len(copies) + 1)]
    assert upto == sorted(upto)


def test_copies_are_cut_into_batches_of_one_device() -> None:
    copies = [Copy(device, 0, 0, 10) for device in (0, 0, 0, 1, 0)]
    assert [(b.device, b.begin, b.end) for b in batches(copies, 20)] == [
        (0, 0, 2), (0, 2, 3), (1, 3, 4), (0, 4, 5),
    ]  # fmt: skip
    assert list(batches([])) == []


def test_the_engine_copies_only_into_registered_memory() -> None:
    driver = FakeDriver()
    engine = CopyEngine(driver, PinBudget())
    source = np.arange(256, dtype=np.uint8)
    slot = Slot.make(4096)
    copies = [Copy(0, source.ctypes.data, slot.address + 16, 256)]
    told: list[int] = []

    def run(stop: threading.Event | None = None) -> None:
        engine.run(copies, filled=told.append, stop=stop or threading.Event(), deadline=Deadline(10.0))

    with pytest.raises(StagingError, match="not registered"):
        run()
    engine.register(slot.address, slot.size, 0)
    run()
    assert told == [1]
    assert bytes(slot.view[16:272]) == source.tobytes()
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StagingError, match="cancelled"):
        run(stopped)
    assert engine.unregister(slot.address, 0)
    engine.close()
    slot.close()
    driver.check()


def test_memory_may_be_unpinned_while_copies_to_other_memory_wait_for_it() -> None:
    """Who drops a slot holds the writer's lock; copies that run tell that writer how far they are."""
    driver = FakeDriver()
    engine = CopyEngine(driver, PinBudget())
    source, slots, writer = np.zeros(64, np.uint8), [Slot.make(4096), Slot.make(4096)], threading.Lock()
    for slot in slots:
        engine.register(slot.address, slot.size, 0)
    copies = [Copy(0, source.ctypes.data, slots[0].address, 64)]

    def filled(_done: int) -> None:
        with writer:
            pass

    running = threading.Thread(
        target=lambda: engine.run(copies, filled=filled, stop=threading.Event(), deadline=Deadline(10.0))
    )
    with writer:
        running.start()
        assert driver.first_copy.wait(10.0)
        assert engine.unregister(slots[1].address, 0)
        assert not engine.unregister(slots[0].address, 0), "it is being copied to"
    running.join(10.0)
    assert engine.unregister(slots[0].address, 0)
    engine.close()
    driver.check()
    for slot in slots:
        slot.close()


def test_a_snapshot_is_memory_of_its_own() -> None:
    arrays = [jnp.arange(10.0), jnp.zeros((3, 4), jnp.bfloat16)]
    taken = snapshot(arrays)
    for one, other in zip(arrays, taken, strict=True):
        assert one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
        assert (np.asarray(one) == np.asarray(other)).all()


def test_room_for_a_snapshot_is_what_the_largest_step_leaves() -> None:
    gib = 1 << 30
    room = Headroom()
    assert not room.fits(None, 1), "a device that says nothing has no room"
    stats = {"bytes_limit": 80 * gib, "bytes_in_use": 20 * gib, "peak_bytes_in_use": 60 * gib}
    assert room.fits(stats, 18 * gib)
    assert not room.fits(stats, 20 * gib), "no margin"
    # A snapshot lived beside the largest step: the peak has grown by it, and the step has not.
    assert room.fits({**stats, "peak_bytes_in_use": 78 * gib}, 18 * gib)
    # The step itself has grown: 61.9 GiB.
    assert not room.fits({**stats, "peak_bytes_in_use": 80 * gib - gib // 10}, 18 * gib)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint8, jnp.bool_])
def test_a_sample_is_a_piece_of_the_array(dtype: Any) -> None:
    array = (jnp.arange(1003) % 2).astype(dtype).reshape(17, 59)
    whole = np.asarray(array).tobytes()
    found = sample(array, 101, 500)
    assert found is not None
    piece, at = found
    data = np.asarray(piece).tobytes()
    assert 101 <= at <= at + len(data) <= 601
    assert len(data) > 490
    assert data == whole[at : at + len(data)]
    assert sample(array, 3, 0) is None


def test_the_driver_that_is_none_minds_the_rules() -> None:
    driver = FakeDriver()
    with pytest.raises(Misuse, match="no context"):
        driver.make_stream()
    with driver.bind(0):
        stream, source = driver.make_stream(), np.zeros(64, np.uint8)
        with pytest.raises(Misuse, match="not registered"):
            driver.copy_out(source.ctypes.data, source.ctypes.data, 64, stream)
        target = np.zeros(64, np.uint8)
        driver.register(target.ctypes.data, 64)
        driver.gate.clear()
        driver.copy_out(target.ctypes.data, source.ctypes.data, 64, stream)
        with pytest.raises(Misuse, match="under way"):
            driver.unregister(target.ctypes.data)
        with pytest.raises(Misuse, match="work in it"):
            driver.destroy_stream(stream)
        with pytest.raises(Misuse, match="never recorded"):
            driver.happened(driver.make_event())
    with pytest.raises(Misuse, match="no context"):
        driver.make_event()
    with pytest.raises(Misuse):
        driver.check()


def test_the_driver_that_is_none_counts_events() -> None:
    driver = FakeDriver()
    with driver.bind(0):
        driver.make_event()
    with pytest.raises(Misuse, match=r"events \[1\]"):
        driver.check()


def test_a_handle_may_be_fenced_many_times() -> None:
    handle = SaveHandle(1)
    handle._advance(SaveState.CAPTURED)
    handle.fence()
    handle.fence()


def test_a_run_that_fences_before_its_state_changes_is_copied_meanwhile(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeDriver())
    promised: list[bool] = []
    save = Checkpointer.save

    def noting(self: Checkpointer, *args: Any, fenced: bool = False, **options: Any) -> SaveHandle:
        promised.append(fenced)
        return save(self, *args, fenced=fenced, **options)

    monkeypatch.setattr(Checkpointer, "save", noting)
    with journal.Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(tmp_path / "ckpt", run="r", writer="thread", events=events)
        saver._settings |= {"slots": 1, "serve": None}
        for step, fences in enumerate((False, True, True, False)):
            if fences:
                saver.fence()
            saver.save(step, {"x": jnp.zeros(100)}, {})
        saver.settle(30.0)
        saver.hand_over()
    assert promised == [False, True, True, False]


def ended(program: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of this folder, at its end."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.jax.{program}", *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120.0,
    )


@pytest.mark.process
@pytest.mark.parametrize("how", ["delete", "donate"])
def test_arrays_that_go_at_any_moment_cost_the_save_and_not_the_process(how: str) -> None:
    done = ended("staging_gone", how, 100)
    assert done.returncode == 0, done.stderr
    assert "saved before" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(("how", "steps"), [("slow", [1]), pytest.param("stuck", [], marks=pytest.mark.full)])
def test_a_program_may_end_with_copies_under_way(tmp_path: Path, how: str, steps: list[int]) -> None:
    """Copies that end in time are saved by the vault; those that do not hold nobody up."""
    done = ended("staging_exit", tmp_path / "ckpt", how)
    assert done.returncode == 0, done.stderr
    assert "leaving" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    with Checkpointer(tmp_path / "ckpt") as ckpt:
        if steps:
            loaded = ckpt.load(wait_s=30.0)
            assert (loaded["x"] == np.arange(3_000_000.0, dtype=np.float32)).all()
        assert ckpt.steps() == steps


@pytest.mark.process
@pytest.mark.full
def test_a_program_killed_before_its_last_bytes_are_told_of_leaves_no_step(tmp_path: Path) -> None:
    done = ended("staging_exit", tmp_path / "ckpt", "slow", HOLDFAST_FAULTS="trainer.stage.device:kill")
    assert done.returncode == -signal.SIGKILL, done.stderr
    with Checkpointer(tmp_path / "ckpt") as ckpt:
        with pytest.raises(NoCheckpointError):
            ckpt.load(wait_s=30.0)
        ckpt.save(2, {"x": np.zeros(10)}).durable(30.0)
        assert ckpt.steps() == [2]
