"""A little host memory that arrays go through on their way to devices, used again when they have arrived."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from holdfast.arrays import Bytes1D, Landing, Placement
from holdfast.checkpoint.memory import Runway
from holdfast.errors import UsageError
from holdfast.jax import landing as landings
from holdfast.jax.adapter import ADAPTER, JaxAdapter
from holdfast.jax.placing import Made
from tests.jax.landings import MIB, WAIT_S, FakeRuntime, Flights, Flying, Struct, address


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
