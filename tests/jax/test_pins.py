"""Host memory is registered with the runtime as far as it may be, and given back."""

from __future__ import annotations

import logging

import jax
import pytest

from holdfast.arrays.pages import region
from holdfast.jax.engine import CopyEngine
from holdfast.jax.landing import JaxLanding, RuntimePins
from holdfast.jax.pins import PinBudget
from holdfast.testing.cuda import FakeDriver
from holdfast.vault import Slot
from tests.jax.landings import MIB, FakeRuntime, cpu


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
