"""State copied from a GPU into the vault's arena by the driver, under the step; and the ways around it.

These need a GPU and are skipped without one; continuous integration has none. To run them:
`HOLDFAST_REQUIRE_GPU=1 pytest tests/gpu/test_staging.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import Checkpointer, journal
from holdfast.checkpoint import SaveState
from holdfast.checkpoint.memory import Runway
from holdfast.jax.cuda import CudaDriver
from holdfast.jax.engine import CopyEngine
from holdfast.jax.landing import JaxLanding, RuntimePins
from holdfast.jax.pins import PinBudget
from holdfast.jax.routes import ARENA
from holdfast.jax.settings import setting
from holdfast.jax.shards import check_way
from holdfast.jax.staging import DeviceStager, install
from holdfast.vault import Slot

pytestmark = pytest.mark.gpu


@pytest.fixture
def stager(gpu: jax.Device) -> Iterator[DeviceStager]:
    made = DeviceStager()
    before = install(made)
    yield made
    install(before)
    made.close()


def routes(path: Path) -> list[tuple[str, str]]:
    found = [record.event for record in journal.read(path / "journal.jsonl")]
    return [(one.route, one.reason) for one in found if isinstance(one, journal.StagingRoute)]


def tree_on(gpu: jax.Device, scale: float) -> dict[str, Any]:
    return {
        "w": jax.device_put(jax.random.normal(jax.random.key(0), (4096, 1023)) * scale, gpu),
        "half": jax.device_put(jnp.arange(70_001, dtype=jnp.bfloat16), gpu),
        "bool": jax.device_put(jnp.arange(999) % 3 == 0, gpu),
        "packed": jax.device_put(jnp.arange(-8, 8).astype(jnp.int4), gpu),
        "scalar": jax.device_put(jnp.float32(scale), gpu),
        "key": jax.device_put(jax.random.key(3), gpu),
        "host": np.arange(10.0) * scale,
    }


def test_the_driver_copies_a_pattern_into_registered_memory(gpu: jax.Device) -> None:
    engine = CopyEngine(CudaDriver(), PinBudget())
    slot = Slot.make(64 << 20)
    slot.populate()
    assert engine.register(slot.address, slot.size, 0)
    assert engine.registered == slot.size
    check_way(engine, slot, gpu)
    assert engine.unregister(slot.address, 0)
    engine.close()
    slot.close()


@pytest.mark.parametrize("fenced", [True, False])
def test_state_comes_back_by_way_of_the_pinned_arena(
    gpu: jax.Device, stager: DeviceStager, tmp_path: Path, fenced: bool
) -> None:
    with Checkpointer(tmp_path, keep=None) as ckpt:
        ckpt.prepare(tree_on(gpu, 1.0))
        for step in range(5):
            tree = tree_on(gpu, float(step))
            handle = ckpt.save(step, tree, fenced=fenced)
            handle.fence()
            handle.durable(60.0)
            loaded = ckpt.load(into=tree)
            for name in ("w", "half", "bool", "packed", "scalar", "host"):
                assert np.asarray(loaded[name]).tobytes() == np.asarray(tree[name]).tobytes(), name
            assert jnp.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(tree["key"]))
        assert ckpt.verify() == []
    assert routes(tmp_path) == [(ARENA, "")]
    assert not stager.pinned, "the memory is unpinned with its slot"


def test_a_donating_step_after_the_fence_changes_nothing_that_was_saved(
    gpu: jax.Device, stager: DeviceStager, tmp_path: Path
) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.device_put(jnp.zeros((4096, 4096)), gpu)
    with Checkpointer(tmp_path, keep=None, slots=2) as ckpt:
        ckpt.prepare({"x": state})
        for number in range(6):
            handle = ckpt.save(number, {"x": state}, fenced=bool(number % 2))
            handle.fence()
            pointer = state.unsafe_buffer_pointer()
            state = step(state)
            assert state.unsafe_buffer_pointer() == pointer, "the save denied donation"
        ckpt.wait(120.0)
        for number in range(6):
            assert (ckpt.load(step=number)["x"] == number).all()
    assert routes(tmp_path) == [(ARENA, "")]


def test_save_returns_while_the_step_before_it_runs(
    gpu: jax.Device, stager: DeviceStager, tmp_path: Path
) -> None:
    a = jax.device_put(jnp.ones((8192, 8192), jnp.bfloat16), gpu)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: (y @ a) / 8192, x))
    tree = {"x": jax.block_until_ready(slow(a))}  # type: ignore[no-untyped-call]
    with Checkpointer(tmp_path) as ckpt:
        ckpt.prepare(tree)
        ckpt.save(1, tree, fenced=True).durable(60.0)
        tree = {"x": slow(tree["x"])}
        started = time.perf_counter()
        handle = ckpt.save(2, tree, fenced=True)
        called = time.perf_counter() - started
        assert handle.state is SaveState.CAPTURING
        handle.fence()
        fenced = time.perf_counter() - started
        print(f"save() {1e3 * called:.2f} ms, fence after {1e3 * fenced:.1f} ms")
        assert called < fenced / 2
        handle.durable(60.0)
        assert ckpt.load(into=tree)["x"].tobytes() == np.asarray(tree["x"]).tobytes()
    assert routes(tmp_path) == [(ARENA, "")]


@pytest.mark.parametrize("chosen", ["pinned_host", "pageable"])
def test_the_other_routes_give_the_same_bytes(gpu: jax.Device, tmp_path: Path, chosen: str) -> None:
    before = install(DeviceStager(first=setting({"HOLDFAST_STAGING": chosen})))
    try:
        tree = tree_on(gpu, 2.0)
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, tree, fenced=True).durable(60.0)
            loaded = ckpt.load(into=tree)
        assert np.asarray(loaded["w"]).tobytes() == np.asarray(tree["w"]).tobytes()
        assert routes(tmp_path)[0][0] == chosen
    finally:
        install(before)


def test_loads_go_through_a_little_pinned_memory(
    gpu: jax.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pins, most = RuntimePins(), [0]
    made: list[JaxLanding] = []

    def noting(device: Any) -> JaxLanding:
        made.append(JaxLanding(device, pins=pins, nbytes=256 << 20))
        return made[-1]

    take = JaxLanding.take

    def measured(self: JaxLanding, nbytes: int) -> Any:
        data = take(self, nbytes)
        most[0] = max(most[0], pins.pinned)
        return data

    monkeypatch.setattr("holdfast.jax.adapter.JaxLanding", noting)
    monkeypatch.setattr("holdfast.checkpoint.reading.Runway", lambda: Runway(128 << 20))
    monkeypatch.setattr(JaxLanding, "take", measured)
    rng = np.random.default_rng(0)
    values = {f"{n}": rng.integers(0, 256, (16, 1 << 20), np.uint8) for n in range(64)}
    tree = {name: jax.device_put(value, gpu) for name, value in values.items()}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree).durable(120.0)
        loaded = ckpt.load(into=tree)
    for name, value in values.items():
        assert np.asarray(loaded[name]).tobytes() == value.tobytes(), name
    assert len(made) == 1
    assert not [record for record in caplog.records if record.name == "holdfast.jax"], "the runtime refused"
    assert 0 < most[0] <= 256 << 20
    assert not pins.pinned
