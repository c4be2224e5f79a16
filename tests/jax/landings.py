"""Landings for tests: a runtime that registers memory, arrays that fly, and loads by way of them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from holdfast import Checkpointer
from holdfast.arrays import Bytes1D, Placement
from holdfast.checkpoint.memory import Runway
from holdfast.jax import landing as landings
from holdfast.jax.adapter import ADAPTER
from holdfast.jax.landing import JaxLanding, RuntimePins
from holdfast.jax.placing import Made

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


def address(data: Any) -> int:
    return int(data.__array_interface__["data"][0])


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
