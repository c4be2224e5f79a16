"""What the tests of staging share: a stager with a driver that minds the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.jax.staging import DeviceStager, install
from holdfast.testing.cuda import FakeDriver


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
