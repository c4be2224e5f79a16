"""What the tests of staging and landing share: a stager whose driver minds the rules, and landings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.jax.landing import JaxLanding, RuntimePins
from holdfast.jax.staging import DeviceStager, install
from holdfast.testing.cuda import FakeDriver
from tests.jax.landings import FakeRuntime, Landed, cpu


@pytest.fixture
def use() -> Iterator[Callable[..., DeviceStager]]:
    """Has this process stage CPU arrays through a driver, until the end of the test."""
    made: list[tuple[DeviceStager, FakeDriver]] = []
    before = install(None)

    def using(driver: FakeDriver, **options: Any) -> DeviceStager:
        options = {"platforms": frozenset({"cpu"}), "stats": lambda _device: None, "drain_s": 2.0, **options}
        stager = DeviceStager(lambda: driver, **options)
        install(stager)
        made.append((stager, driver))
        return stager

    yield using
    install(before)
    for stager, driver in made:
        driver.gate.set()
        stager.close()
        assert not driver.broken


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


@pytest.fixture
def landed(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> Landed:
    return Landed(monkeypatch, runtime)
