"""Loads through a little host memory that is used again, with arrays of the CPU backend and no driver."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from holdfast import Checkpointer, load_hub
from holdfast.arrays import Bytes1D, Landing, Placement
from holdfast.arrays.pages import region
from holdfast.checkpoint.hub import loading as hub_loading
from holdfast.checkpoint.memory import Runway
from holdfast.errors import CorruptError, FormatError, UsageError
from holdfast.jax import landing as landings
from holdfast.jax.adapter import ADAPTER, JaxAdapter
from holdfast.jax.engine import CopyEngine
from holdfast.jax.landing import JaxLanding, RuntimePins
from holdfast.jax.pins import PinBudget
from holdfast.jax.placing import Made, put
from holdfast.testing.cuda import FakeDriver
from holdfast.vault import Slot, restore
from tests.checkpoint.folder import damage, part_file
from tests.checkpoint.hub.repositories import single

MIB = 1 << 20
WAIT_S = 20.0

# JAX ships these without types.
P: Any = jax.sharding.PartitionSpec
Struct: Any = jax.ShapeDtypeStruct


def cpu() -> Any:
    return jax.devices("cpu")[0]


class FakeRuntime:
    """What registers memory."""

    def __init__(self, refuse: str = "") -> None:
        self.mapped: dict[int, int] = {}
        self.most = 0
        self.refuse = refuse
        self.keeps = False

    def dma_map(self, address: int, size: int) -> None:
        if self.refuse:
            raise RuntimeError(self.refuse)
        assert address not in self.mapped
        self.mapped[address] = size
        self.most = max(self.most, sum(self.mapped.values()))

    def dma_unmap(self, address: int) -> None:
        if self.keeps:
            raise RuntimeError("INTERNAL: not now")
        del self.mapped[address]


class Flying:
    """An array on its way: it arrives when it is told to, also its clones."""

    def __init__(self, error: Exception | None = None) -> None:
        self.arrived = threading.Event()
        self.awaited = threading.Event()
        self.error = error
        self.deleted = threading.Event()
        self.cloned = False

    def clone(self) -> Flying:
        found = copy.copy(self)
        found.cloned = True
        return found

    def is_deleted(self) -> bool:
        return self.deleted.is_set()

    def is_ready(self) -> bool:
        assert self.cloned, "where the other one is deleted meanwhile, JAX ends the process"
        if self.deleted.is_set():
            raise RuntimeError("deleted")
        return self.arrived.is_set()

    def block_until_ready(self) -> None:
        self.awaited.set()
        assert self.arrived.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if self.deleted.is_set():
            raise RuntimeError("deleted")


class Flights:
    """Stands in for `put`: arrays that arrive when they are told to, in the order of their boxes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next: list[list[Flying]] = []
        monkeypatch.setattr(landings, "put", self.put)

    def put(self, batch: list[Placement], made: list[Made], *, kept: bool) -> list[Any]:
        assert kept
        for placement, some in zip(batch, self.next, strict=True):
            made += [Made(box.view(np.int16), shard) for box in placement.boxes.values() for shard in some]
        return self.next

    def place(self, landing: JaxLanding, data: Bytes1D, *shards: Flying) -> None:
        self.next = [list(shards)]
        landing.place([Placement(None, {0: data}, alias=False)])


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def land(runtime: FakeRuntime) -> Iterator[Callable[..., JaxLanding]]:
    """Makes landings with pins of their own; all have given everything back at the end of the test."""
    pins = RuntimePins(lambda _device: runtime)
    made: list[JaxLanding] = []

    def landing(nbytes: int) -> JaxLanding:
        made.append(JaxLanding(cpu(), pins=pins, nbytes=nbytes))
        return made[-1]

    yield landing
    for one in made:
        one.close()
        assert one.nbytes == 0
    assert not runtime.mapped
    assert pins.pinned == 0


def address(data: Any) -> int:
    return int(data.__array_interface__["data"][0])


# ---- pins


def test_a_runtime_that_refuses_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime("UNIMPLEMENTED: DmaMap")
    pins = RuntimePins(lambda _device: runtime)
    with caplog.at_level(logging.WARNING, "holdfast.jax"):
        landing = JaxLanding(cpu(), pins=pins)
        assert [landing.take(2 * MIB).size for _ in range(3)] == [2 * MIB] * 3
        landing.close()
    assert [record.getMessage() for record in caplog.records] == [
        "arrays are loaded from pageable memory: UNIMPLEMENTED: DmaMap"
    ]


def test_a_pattern_that_comes_through_wrong_ends_pinning(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    device_put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda host, *some, **more: device_put(host ^ 1, *some, **more))
    pins = RuntimePins(lambda _device: runtime)
    with caplog.at_level(logging.WARNING, "holdfast.jax"):
        pins.pin(region(2 * MIB), cpu())
    assert "a known pattern came through wrong" in caplog.text
    assert not runtime.mapped


def test_pins_have_a_limit_and_can_be_off(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    host = region(2 * MIB)
    limited = RuntimePins(lambda _device: runtime, pins=PinBudget(lambda: MIB))
    with caplog.at_level(logging.INFO, "holdfast.jax"):
        limited.pin(host, cpu())
        limited.pin(host, cpu())
    RuntimePins(lambda _device: runtime, enabled=False).pin(host, cpu())
    assert not runtime.mapped, "over the limit, or off"
    assert len(caplog.records) == 1
    assert "HOLDFAST_PIN_LIMIT" in caplog.text


def test_slots_and_loads_have_one_limit(runtime: FakeRuntime) -> None:
    pins, driver = PinBudget(lambda: 3 * MIB), FakeDriver()
    engine, slot = CopyEngine(driver, pins), Slot.make(2 * MIB)
    assert engine.register(slot.address, slot.size, 0)
    loads, host = RuntimePins(lambda _device: runtime, pins=pins), region(2 * MIB)
    loads.pin(host, cpu())
    assert not runtime.mapped
    assert engine.unregister(slot.address, 0)
    loads.pin(host, cpu())
    assert pins.pinned == loads.pinned == 2 * MIB
    assert not engine.register(slot.address, slot.size, 0)
    loads.unpin(host)
    assert pins.pinned == 0
    assert not runtime.mapped
    slot.close()
    driver.check()


def test_memory_that_cannot_be_unpinned_stays_mapped_and_counted(runtime: FakeRuntime) -> None:
    budget = PinBudget()
    pins = RuntimePins(lambda _device: runtime, pins=budget)
    landing = JaxLanding(cpu(), pins=pins)
    landing.take(2 * MIB)
    runtime.keeps = True
    landing.close()
    assert budget.pinned == pins.pinned == 2 * MIB


def test_no_log_is_written_with_the_lock_held() -> None:
    pins = RuntimePins(lambda _device: object())  # type: ignore[arg-type, return-value]
    held: list[bool] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.append(pins._lock.locked())

    handler, logger = Noting(), logging.getLogger("holdfast.jax")
    logger.addHandler(handler)
    try:
        pins.pin(region(2 * MIB), cpu())
    finally:
        logger.removeHandler(handler)
    assert held == [False]


# ---- memory that is used again


def test_memory_is_used_again_when_its_arrays_have_arrived(
    land: Any, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, flights = land(8 * MIB), Flights(monkeypatch)
    first = landing.take(2 * MIB - 100)
    flying = [Flying(), Flying()]
    flights.place(landing, first, *flying)
    flying[0].arrived.set()
    second = landing.take(2 * MIB)
    assert address(second) != address(first), "the box goes to two devices, and one has it"
    flying[1].arrived.set()
    assert address(landing.take(2 * MIB - 5)) == address(first)
    assert landing.nbytes == 4 * MIB
    assert sorted(runtime.mapped.values()) == [2 * MIB] * 2


def test_small_boxes_are_not_kept(land: Any, runtime: FakeRuntime) -> None:
    landing = land(8 * MIB)
    assert landing.take(MIB - 1).size == MIB - 1
    assert landing.take(0).size == 0
    assert landing.nbytes == 0
    assert not runtime.mapped


def test_what_is_dropped_unplaced_is_free_whatever_views_there_were(land: Any) -> None:
    landing = land(8 * MIB)
    data = landing.take(2 * MIB)
    start, view = address(data), data[100:].view(np.float32)
    del data
    other = landing.take(2 * MIB)
    assert address(other) != start, "there is a view of it"
    del view
    assert address(landing.take(2 * MIB)) == start


def test_the_oldest_arrays_are_waited_for_when_the_memory_is_used_up(
    land: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, flights = land(8 * MIB), Flights(monkeypatch)
    starts, flying = [], [Flying() for _ in range(4)]
    for one in flying:
        data = landing.take(2 * MIB)
        starts.append(address(data))
        flights.place(landing, data, one)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(landing.take, 2 * MIB)
        assert flying[0].awaited.wait(WAIT_S)
        second = pool.submit(landing.take, 2 * MIB)
        assert flying[1].awaited.wait(WAIT_S), "two threads wait for two arrays"
        for one in flying:
            one.arrived.set()
        taken = [first.result(WAIT_S), second.result(WAIT_S)]
    assert {address(one) for one in taken} <= set(starts)
    assert landing.nbytes == 8 * MIB


def test_who_fills_boxes_is_never_waited_for(land: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory is held by boxes that are being filled, perhaps by who asks for more."""
    landing, flights = land(8 * MIB), Flights(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lambda: [landing.take(2 * MIB) for _ in range(6)]).result(WAIT_S)
    assert landing.nbytes == 12 * MIB
    assert len({address(data) for data in taken}) == 6
    flying = Flying()
    flying.arrived.set()
    for data in taken:
        flights.place(landing, data, flying)
    del taken, data
    last = landing.take(2 * MIB)
    assert landing.nbytes == 8 * MIB, "what was too much is given back"
    assert last.size == 2 * MIB


def test_an_array_wider_than_the_budget_makes_it_wider(land: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    landing, flights = land(4 * MIB), Flights(monkeypatch)
    flying = [Flying() for _ in range(5)]
    for one in flying:
        one.arrived.set()
        data = landing.take(16 * MIB)
        flights.place(landing, data, one)
    assert landing.nbytes <= 32 * MIB


def test_free_memory_in_the_wrong_sizes_makes_room(land: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    landing, flights = land(16 * MIB), Flights(monkeypatch)
    arrived = Flying()
    arrived.arrived.set()
    small = [landing.take(MIB) for _ in range(16)]
    for data in small:
        flights.place(landing, data, arrived)
    large = landing.take(8 * MIB)
    assert large.size == 8 * MIB
    assert landing.nbytes == 16 * MIB


def test_what_an_array_failed_with_is_told_and_all_is_given_back(
    land: Any, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, flights = land(4 * MIB), Flights(monkeypatch)
    bad, good = Flying(ValueError("the device is gone")), Flying()
    flights.place(landing, landing.take(2 * MIB), bad)
    flights.place(landing, landing.take(2 * MIB), good)
    bad.arrived.set()
    with pytest.raises(ValueError, match="the device is gone"):
        landing.take(2 * MIB)
    good.arrived.set()
    with pytest.raises(ValueError, match="the device is gone"):
        landing.close()
    assert landing.nbytes == 0
    assert not runtime.mapped
    landing.close()
    with pytest.raises(UsageError, match="is closed"):
        landing.take(2 * MIB)


def test_close_waits_for_arrays_before_it_unpins(
    land: Any, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, flights = land(4 * MIB), Flights(monkeypatch)
    flying = Flying()
    flights.place(landing, landing.take(2 * MIB), flying)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(landing.close)
        assert flying.awaited.wait(WAIT_S)
        assert runtime.mapped
        flying.arrived.set()
        closing.result(WAIT_S)
    assert not runtime.mapped


def test_deleted_arrays_leave_their_memory_when_jax_has_let_go_of_it(
    land: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing, flights = land(8 * MIB), Flights(monkeypatch)
    flying = Flying()
    data = landing.take(2 * MIB)
    start = address(data)
    flights.place(landing, data, flying)
    flying.deleted.set()
    flying.arrived.set()
    other = landing.take(2 * MIB)
    assert address(other) != start, "JAX may be reading it"
    del data
    assert address(landing.take(2 * MIB)) == start


def test_a_batch_that_fails_half_way_is_waited_for(land: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    landing, flying = land(4 * MIB), Flying()

    def put(batch: list[Placement], made: list[Made], **_: Any) -> list[Any]:
        made.append(Made(batch[0].boxes[0], flying))
        raise MemoryError

    monkeypatch.setattr(landings, "put", put)
    data = landing.take(2 * MIB)
    with pytest.raises(MemoryError):
        landing.place([Placement(ADAPTER.sink(jnp.zeros(3), 0, 1), {0: data}, alias=False)])
    del data
    gc.collect()
    landing.take(2 * MIB)
    assert not flying.awaited.is_set()
    assert landing.nbytes == 4 * MIB, "the first box is on its way"
    flying.arrived.set()


def test_nothing_is_unpinned_before_what_a_failed_call_sent_has_arrived(
    land: Any, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call sends many arrays: if it fails, nobody has those that are on their way."""
    landing = land(4 * MIB)
    pinned: list[int] = []
    device_put = jax.device_put

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def last(value: Any, device: Any = None, **options: Any) -> Any:
        pinned.append(len(runtime.mapped))
        return device_put(value, device, **options)

    data = landing.take(2 * MIB)
    template = Struct((2 * MIB,), jnp.uint8, sharding=SingleDeviceSharding(jax.devices()[1]))
    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        landing.place([Placement(ADAPTER.sink(template, 0, 1), {0: data}, alias=False)])
    monkeypatch.setattr(jax, "device_put", last)
    landing.close()
    assert pinned == [1], "something was sent to the device, and waited for, while the memory was pinned"
    assert not runtime.mapped


def test_arrays_go_to_the_device_of_their_sink_whatever_the_default_is(root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(5)
    tree = {f"{number}": jnp.asarray(values(rng, (MIB,), np.float32)) for number in range(12)}
    assert not tree["0"].committed
    ckpt = save(root, tree)
    with jax.default_device(jax.devices()[1]):
        found = ckpt.load(into=tree)
    for name, value in tree.items():
        assert same(found[name], value)
        assert found[name].devices() == value.devices()
        assert not found[name].committed
    landed.check_over()


def test_only_devices_with_memory_of_their_own_have_a_landing() -> None:
    sink = ADAPTER.sink(jnp.zeros(3), 0, 1)
    assert JaxAdapter().landing([sink]) is None
    elsewhere = JaxAdapter(hosts=frozenset())
    assert elsewhere.landing([]) is None
    made = elsewhere.landing([sink])
    assert made is not None
    made.close()


def test_settings_turn_pinning_off_and_keep_the_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landings, "_PINS", None)
    monkeypatch.setenv("HOLDFAST_STAGING", "pageable")
    made = JaxAdapter(hosts=frozenset()).landing([ADAPTER.sink(jnp.zeros(3), 0, 1)])
    assert made is not None
    data = made.take(2 * MIB)
    assert made.nbytes == 2 * MIB
    assert landings.runtime_pins().pinned == 0
    start = address(data)
    del data
    assert address(made.take(2 * MIB)) == start
    made.close()


# ---- readers and who places


def test_readers_do_not_run_ahead_of_placing() -> None:
    class Plain:
        def take(self, nbytes: int) -> Bytes1D:
            return np.empty(nbytes, np.uint8)

    plain: Landing = Plain()  # type: ignore[assignment]
    runway = Runway(10)
    runway.take(plain, 8)
    assert runway.take(plain, 8).size == 8, "nothing is waiting to be placed: it is all being filled"
    runway.handed()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(runway.take, plain, 8)
        with pytest.raises(TimeoutError):
            taking.result(0.05)
        runway.placed(8)
        with pytest.raises(TimeoutError):
            taking.result(0.05)
        runway.seen()
        taking.result(WAIT_S)
        runway.handed()
        taking = pool.submit(runway.take, plain, 8)
        runway.stop()
        taking.result(WAIT_S)


# ---- loads


class Landed:
    """Has JAX arrays on CPUs loaded through landings, and remembers them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.pins = RuntimePins(lambda _device: runtime)
        self.budget = 16 * MIB
        self.made: list[JaxLanding] = []
        monkeypatch.setattr(ADAPTER, "_hosts", frozenset())
        monkeypatch.setattr("holdfast.jax.adapter.JaxLanding", self._make)
        monkeypatch.setattr("holdfast.checkpoint.reading.Runway", lambda: Runway(self.budget // 2))

    def _make(self, device: Any) -> JaxLanding:
        self.made.append(JaxLanding(device, pins=self.pins, nbytes=self.budget))
        return self.made[-1]

    def check_over(self, loads: int = 1) -> None:
        assert len(self.made) == loads
        assert not any(one.nbytes for one in self.made)
        assert not self.runtime.mapped


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> Landed:
    return Landed(monkeypatch, runtime)


def save(root: Path, tree: Any, **settings: Any) -> Checkpointer:
    ckpt = Checkpointer(root, **{"writer": "thread", "journal": False, **settings})
    ckpt.save(1, tree).durable(60.0)
    ckpt.close()
    return ckpt


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    numpy_dtype = np.dtype(dtype)
    raw = rng.integers(0, 256, int(np.prod(shape)) * numpy_dtype.itemsize, np.uint8)
    return (raw & 1 if numpy_dtype.kind == "b" else raw).view(numpy_dtype).reshape(shape)


def same(found: Any, expected: Any) -> bool:
    return np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_and_shardings_come_back_to_the_bit(seed: int, root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(seed)
    landed.budget = int(rng.choice([2, 6, 40])) * MIB
    shape = [(8,), (2, 4), (4, 2), (2, 2, 2)][seed]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), ("x", "y", "z")[: len(shape)])
    specs = [P(), P("x"), P(None, "x"), P(("x",), None), *([P("y", "x"), P(None, "y")] if seed else [])]
    tree: dict[str, Any] = {"host": values(rng, (1000,), np.float32), "free": jnp.arange(2 * MIB), "step": 7}
    tree |= {"none": jnp.zeros((0, 3)), "key": jax.random.key(seed)}
    template = dict(tree)
    for number in range(16):
        dtype = rng.choice(["float32", "bfloat16", "int8", "bool", "uint32"])
        dims = (8 * int(rng.integers(1, 200)), 8 * int(rng.integers(1, 200)))
        array = values(rng, dims, jnp.dtype(dtype))
        where = [NamedSharding(mesh, specs[int(rng.integers(len(specs)))]) for _ in range(2)]
        tree[f"{number}"] = jax.device_put(array, where[0])
        template[f"{number}"] = Struct(dims, jnp.dtype(dtype), sharding=where[1])
    found = save(root, tree).load(into=template)
    for name in set(tree) - {"step", "key"}:
        assert same(found[name], tree[name]), name
    assert same(jax.random.key_data(found["key"]), jax.random.key_data(tree["key"]))
    assert found["step"] == 7
    assert not found["free"].committed
    for number in range(16):
        assert found[f"{number}"].sharding == template[f"{number}"].sharding
    landed.check_over()


def test_a_tree_of_20_times_the_budget_never_has_more(root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(1)
    tree = {f"{number}": values(rng, (4, MIB), np.uint8) for number in range(80)}
    ckpt = save(root, tree, threads=1)
    template = {name: Struct(value.shape, value.dtype) for name, value in tree.items()}
    found = ckpt.load(into=template)
    landed.check_over()
    assert landed.runtime.most <= landed.budget, "pinned"
    # All at the end: memory that was used again would show in an array that came before.
    assert all(same(found[name], value) for name, value in tree.items())


def test_a_box_wider_than_the_budget_and_one_for_all_devices(root: Path, landed: Landed) -> None:
    landed.budget = 2 * MIB
    rng = np.random.default_rng(2)
    tree = {name: values(rng, (12, MIB), np.uint8) for name in "abc"}
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    template = {
        name: Struct((12, MIB), np.uint8, sharding=NamedSharding(mesh, spec))
        for name, spec in zip("abc", (P(), P(None, "x"), P()), strict=True)
    }
    found = save(root, tree).load(into=template)
    landed.check_over()
    assert all(same(shard.data, tree["a"]) for shard in found["a"].addressable_shards)
    assert all(same(found[name], value) for name, value in tree.items())


def test_casts_leave_the_landing_at_once(root: Path, landed: Landed) -> None:
    tree = {f"{n}": np.random.default_rng(n).standard_normal((MIB,), np.float32) for n in range(20)}
    ckpt = save(root, tree, threads=1)
    template = {name: Struct((MIB,), jnp.bfloat16) for name in tree}
    found = ckpt.load(into=template, cast=True)
    landed.check_over()
    assert landed.runtime.most <= landed.budget
    for name, value in tree.items():
        assert same(found[name], value.astype(jnp.bfloat16)), name


def test_a_read_that_fails_in_the_middle_gives_the_memory_back(root: Path, landed: Landed) -> None:
    tree = {f"{n}": np.random.default_rng(n).integers(0, 256, 4 * MIB, np.uint8) for n in range(20)}
    ckpt = save(root, tree)
    damage(part_file(root, 1), 50 * MIB)
    with pytest.raises(CorruptError, match="block") as caught:
        ckpt.load(into={name: Struct((4 * MIB,), np.uint8) for name in tree}, step=1)
    landed.check_over()
    assert caught.value.block == 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_what_fails_while_it_is_placed_is_told_and_readers_have_ended(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"{n}": np.zeros(4 * MIB, np.uint8) for n in range(20)}
    ckpt = save(root, tree)
    placed = [0]

    def failing(*_: Any, **__: Any) -> list[Any]:
        placed[0] += 1
        raise MemoryError(f"device {placed[0]}")

    monkeypatch.setattr(landings, "put", failing)
    with pytest.raises(MemoryError, match="device 1"):
        ckpt.load(into={name: Struct((4 * MIB,), np.uint8) for name in tree})
    landed.check_over()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-read")]


def test_an_array_that_fails_on_its_way_fails_the_load(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"a": np.zeros(4 * MIB, np.uint8)}
    ckpt = save(root, tree)
    lost = Flying(ValueError("the device is gone"))
    lost.arrived.set()

    def losing(batch: list[Placement], made: list[Made], *, kept: bool) -> list[Any]:
        arrays = put(batch, made, kept=kept)
        made.append(Made(made[0].host, lost))
        return arrays

    monkeypatch.setattr(landings, "put", losing)
    with pytest.raises(ValueError, match="the device is gone"):
        ckpt.load(into={"a": Struct((4 * MIB,), np.uint8)})
    landed.check_over()


def test_a_step_of_many_files_is_loaded_into_memory_of_its_own(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"a": jnp.arange(MIB)}
    ckpt = save(root, tree)
    monkeypatch.setattr("holdfast.checkpoint.loading._FILES", 0)
    assert same(ckpt.load(into=tree)["a"], tree["a"])
    assert not landed.made


# ---- weights of a repository, and states of a vault


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "cut short"])
def test_weights_of_a_repository_land_too(
    root: Path, landed: Landed, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    monkeypatch.setattr(hub_loading, "LANDED", landed.budget // 2)
    rng = np.random.default_rng(3)
    tensors = {f"w{number}": values(rng, (2, MIB), np.float32) for number in range(12)}
    folder = single(root / "repository", tensors)
    if broken:
        read = hub_loading.HubLoad._read

        def failing(self: Any, chunk: Any, buffer: Any) -> None:
            if chunk.entry.tensor.name == "w7":
                raise FormatError("cut short")
            read(self, chunk, buffer)

        monkeypatch.setattr(hub_loading.HubLoad, "_read", failing)
    template = {name: Struct(value.shape, value.dtype) for name, value in tensors.items()}
    if broken:
        with pytest.raises(FormatError, match="cut short"):
            load_hub(folder, into=template)
    else:
        found = load_hub(folder, into=template)
        assert all(same(found[name], value) for name, value in tensors.items())
        assert landed.runtime.most <= landed.budget, "pinned"
    landed.check_over()


@pytest.mark.process
def test_a_state_of_a_vault_lands_on_any_mesh(root: Path, landed: Landed) -> None:
    rng = np.random.default_rng(4)
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    tree = {
        name: jax.device_put(values(rng, (16, MIB // 2), np.float32), NamedSharding(mesh, spec))
        for name, spec in zip("abcd", (P(), P("x"), P(None, "x"), P("x")), strict=True)
    }
    with Checkpointer(
        root, serve="127.0.0.1:0", token=b"a token of the run, for tests", journal=False
    ) as ckpt:
        ckpt.save(3, tree).durable(60.0)
        template = {
            name: Struct(tree[name].shape, tree[name].dtype, sharding=NamedSharding(mesh, spec))
            for name, spec in zip("abcd", (P("x"), P("x"), P("x"), P()), strict=True)
        }
        found = restore([ckpt.vault_address], template, token=b"a token of the run, for tests")
    assert found.step == 3
    for name, value in tree.items():
        assert same(found.tree[name], value)
        assert found.tree[name].sharding == template[name].sharding
    made = [one for one in landed.made if one.nbytes]
    assert not made
    assert landed.runtime.most, "nothing was landed"
    assert not landed.runtime.mapped
