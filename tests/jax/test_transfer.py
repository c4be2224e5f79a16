"""JAX arrays through transfers: any mesh to any mesh, without copies on CPU, and safe against donation."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from holdfast.errors import MismatchError
from holdfast.jax.adapter import ADAPTER
from holdfast.jax.landing import RuntimePins
from holdfast.transfer import Endpoint, TransferPlan
from tests.jax.landings import FakeRuntime

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

P: Any = jax.sharding.PartitionSpec
Struct: Any = jax.ShapeDtypeStruct
WAYS = {"process": ("process",), "memfd": ("memfd", "tcp"), "tcp": ("tcp",)}


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("x", "y", "z")[: len(shape)])


def sharded(array: Any, over: Mesh, *spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(over, P(*spec)))


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Endpoint, Endpoint]]:
    ways = WAYS[request.param]
    with (
        Endpoint(transports=ways, chunk_bytes=1 << 14) as source,
        Endpoint(transports=ways, chunk_bytes=1 << 14) as target,
    ):
        yield source, target


MESHES = [((8,), ("x", None)), ((2, 4), ("x", "y")), ((4, 2), (None, "y")), ((8,), (None, "x")), ((2,), ())]


def test_any_mesh_to_any_mesh(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    whole = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    for n, (a, b) in enumerate(itertools.product(MESHES, MESHES)):
        tree = {"w": sharded(whole + n, mesh(*a[0]), *a[1]), "step": n}
        source.publish("policy", tree, n)
        into = {
            "w": Struct(whole.shape, jnp.float32, sharding=NamedSharding(mesh(*b[0]), P(*b[1]))),
            "step": 0,
        }
        with target.prepare(source.address, "policy", into) as plan:
            found = plan.run(n).result(30).tree
        assert found["w"].sharding == into["w"].sharding
        assert found["step"] == n
        assert np.array_equal(np.asarray(found["w"]), whole + n)
        # A replica takes its bytes once.
        assert plan.nbytes == whole.nbytes


def test_kinds_of_arrays(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    tree = {
        "half": jnp.arange(100, dtype=jnp.bfloat16),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8, impl="rbg"), 5),
        "scalar": jnp.float32(3),
        "empty": jnp.zeros((0, 4)),
        "host": np.arange(4),
        "int4": jnp.arange(6, dtype=jnp.int4),
    }
    source.publish("tree", tree, 1)
    plan = target.prepare(source.address, "tree", tree)
    found = plan.run().result(30).tree
    for name, leaf in tree.items():
        assert type(found[name]) is type(leaf), name
        assert found[name].dtype == leaf.dtype, name
        a, b = found[name], leaf
        if name.startswith("key"):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(np.asarray(a), np.asarray(b)), name
    with pytest.raises(MismatchError, match="key: the template wants"):
        target.prepare(source.address, "tree", tree | {"key": jax.random.key(0, impl="rbg")})
    plain = target.prepare(source.address, "tree").run().result(30).tree
    assert isinstance(plain["half"], np.ndarray)


def test_arrays_alias_the_buffer_they_came_in(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    tree = {"w": jnp.arange(1 << 16, dtype=jnp.float32)}
    source.publish("w", tree, 1)
    plan = target.prepare(source.address, "w", tree)
    found = plan.run().result(30).tree
    address = found["w"].unsafe_buffer_pointer()
    base = address_of(plan)
    assert any(start <= address < start + size for start, size in base)


def address_of(plan: TransferPlan) -> list[tuple[int, int]]:
    return [(one.memory.__array_interface__["data"][0], one.nbytes) for one in plan.buffers._sets]


def test_what_is_published_survives_donation(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.zeros(1 << 16, jnp.float32))
    source.publish("x", {"x": x}, 0)
    plan = target.prepare(source.address, "x", {"x": x})
    for version in range(1, 5):
        published = source.publish("x", {"x": x}, version)
        x = step(x)  # donates what is published
        x.block_until_ready()
        found = plan.run(version).result(30).tree
        assert (np.asarray(found["x"]) == version).all()
        published.release()


def test_what_was_taken_can_be_donated_and_the_next_versions_are_right(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    source, target = pair
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    source.publish("x", {"x": jnp.zeros(1 << 16)}, 0)
    plan = target.prepare(source.address, "x", {"x": jnp.zeros(1 << 16)})
    outs = []
    for version in range(1, 8):
        source.publish("x", {"x": jnp.full(1 << 16, float(version))}, version)
        result = plan.run(version).result(30)
        outs.append(step(result.tree["x"]))
        if version > 3:
            assert result.fresh_buffers == 0
        del result
        gc.collect()
    for version, out in enumerate(outs, 1):
        assert (np.asarray(out) == 2 * version).all()


def test_old_trees_stay_right_while_new_versions_come(pair: tuple[Endpoint, Endpoint]) -> None:
    source, target = pair
    layout = NamedSharding(mesh(4), P("x"))
    source.publish("x", {"x": jnp.zeros(1 << 15)}, 0)
    plan = target.prepare(source.address, "x", {"x": Struct((1 << 15,), jnp.float32, sharding=layout)})
    held = []
    for version in range(1, 6):
        source.publish("x", {"x": jnp.full(1 << 15, float(version))}, version)
        held.append(plan.run(version).result(30).tree["x"])
    for version, array in enumerate(held, 1):
        assert (np.asarray(array) == version).all()


def test_buffers_for_devices_are_pinned_once_and_until_the_plan_is_closed(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    runtime = FakeRuntime()
    pins = RuntimePins(lambda _device: runtime)
    monkeypatch.setattr(ADAPTER, "_hosts", frozenset())
    monkeypatch.setattr("holdfast.jax.adapter.runtime_pins", lambda: pins)
    ready = Awaited(monkeypatch)
    tree = {"w": jnp.arange(1 << 16, dtype=jnp.float32), "b": jnp.ones(3)}
    source.publish("policy", tree, 0)
    with target.prepare(source.address, "policy", tree) as plan:
        found = None
        for version in range(1, 6):
            source.publish("policy", jax.tree.map(lambda x, v=version: x + v, tree), version)
            found = plan.run(version).result(30).tree
            assert (np.asarray(found["w"]) == np.asarray(tree["w"]) + version).all()
            assert ready.last == 2, "a run that ends has its arrays on their devices"
        assert pins.pinned >= 4 << 16
        assert runtime.most <= 2 * pins.pinned
        before = dict(runtime.mapped)
        del found
        gc.collect()
        plan.run(5).result(30)
        assert runtime.mapped == before
    assert not runtime.mapped


class Awaited:
    """How many arrays were waited for at once, the last time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last = 0
        wait = ADAPTER.ready

        def ready(leaves: Any) -> None:
            self.last = len(leaves)
            wait(leaves)

        monkeypatch.setattr(ADAPTER, "ready", ready)
