"""State on a GPU: saved through the host, loaded back to the device, donated as before.

These need a GPU and are skipped without one; continuous integration has none. To run them:
`HOLDFAST_REQUIRE_GPU=1 pytest tests/gpu`. Passed on an H200 with jax 0.11.2 on 2026-11-15.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import Checkpointer

pytestmark = pytest.mark.gpu


def test_gpu_state_comes_back_to_its_devices_bit_by_bit(gpu: jax.Device, tmp_path: Path) -> None:
    cpu = jax.devices("cpu")[0]
    tree = {
        "w": jax.device_put(jax.random.normal(jax.random.key(0), (512, 512)), gpu),
        "half": jax.device_put(jnp.arange(1000, dtype=jnp.bfloat16), gpu),
        "packed": jax.device_put(jnp.arange(-8, 8).astype(jnp.int4), gpu),
        "host": jax.device_put(np.arange(10.0, dtype=np.float32), cpu),
        "key": jax.device_put(jax.random.key(3), gpu),
    }
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree).durable()
        loaded = ckpt.load(into=tree)
    for name in ("w", "half", "packed", "host"):
        assert loaded[name].devices() == tree[name].devices()
        assert np.asarray(loaded[name]).tobytes() == np.asarray(tree[name]).tobytes(), name
    assert jnp.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(tree["key"]))


def test_gpu_state_may_be_donated_right_after_save(gpu: jax.Device, tmp_path: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.device_put(jnp.zeros((1024, 1024)), gpu)
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for number in range(4):
            ckpt.save(number, {"x": state})
            pointer = state.unsafe_buffer_pointer()
            state = step(state)
            assert state.unsafe_buffer_pointer() == pointer, "the save denied donation"
        ckpt.wait()
        for number in range(4):
            assert (ckpt.load(step=number)["x"] == number).all()
