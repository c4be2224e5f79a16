"""Trees on a GPU: published through pinned staging, taken back to a device, donated meanwhile.

Needs a GPU: `HOLDFAST_REQUIRE_GPU=1 pytest tests/gpu`. Continuous integration has none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.jax.landing import runtime_pins
from holdfast.transfer import Endpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transport", ["process", "memfd", "tcp"])
def test_gpu_arrays_arrive_bit_by_bit(gpu: jax.Device, transport: str) -> None:
    tree = {
        "w": jax.device_put(jax.random.normal(jax.random.key(0), (512, 512)), gpu),
        "half": jax.device_put(jnp.arange(1000, dtype=jnp.bfloat16), gpu),
        "packed": jax.device_put(jnp.arange(-8, 8).astype(jnp.int4), gpu),
        "key": jax.device_put(jax.random.key(3), gpu),
        "step": 7,
    }
    with Endpoint() as source, Endpoint(transports=[transport]) as target:
        source.publish("state", tree, 1)
        found = target.prepare(source.address, "state", into=tree).run().result()
        assert set(found.transports.values()) == {transport}
        for name in ("w", "half", "packed"):
            assert found.tree[name].devices() == {gpu}
            assert np.asarray(found.tree[name]).tobytes() == np.asarray(tree[name]).tobytes(), name
        assert jnp.array_equal(jax.random.key_data(found.tree["key"]), jax.random.key_data(tree["key"]))
        assert found.tree["step"] == 7


def test_what_is_published_may_be_donated(gpu: jax.Device) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jax.device_put(jnp.zeros((1024, 1024)), gpu)
    with Endpoint() as source, Endpoint() as target:
        plan = None
        for version in range(4):
            source.publish("state", {"x": state}, version)
            state = step(state)
            plan = plan or target.prepare(source.address, "state")
            found = plan.run(version=version).result().tree["x"]
            assert (np.asarray(found) == version).all()


def test_buffers_are_pinned_while_the_plan_is_open(gpu: jax.Device) -> None:
    before = runtime_pins().pinned
    tree = {"x": jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), gpu)}
    with Endpoint() as source, Endpoint(transports=["tcp"]) as target:
        source.publish("state", tree, 1)
        with target.prepare(source.address, "state", into=tree) as plan:
            for _ in range(3):
                found = plan.run().result().tree["x"]
                assert np.asarray(found).tobytes() == np.asarray(tree["x"]).tobytes()
            assert before + (4 << 20) <= runtime_pins().pinned <= before + (9 << 20)
    assert runtime_pins().pinned == before
