"""JAX arrays in and out: donation, dtypes, keys, layouts, and every kind of template."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from holdfast.arrays.dtypes import TABLE
from holdfast.checkpoint import Checkpointer
from holdfast.errors import MismatchError, TreeError

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

# JAX ships these without types.
P: Any = jax.sharding.PartitionSpec
Struct: Any = jax.ShapeDtypeStruct
WRITERS = [pytest.param("vault", marks=pytest.mark.process), "thread"]


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("x", "y", "z")[: len(shape)])


def sharded(array: Any, over: Mesh, *spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(over, P(*spec)))


def save(root: Path, tree: Any, **settings: Any) -> Checkpointer:
    ckpt = Checkpointer(root, **{"writer": "thread", "journal": False, **settings})
    ckpt.save(1, tree).durable(60.0)
    ckpt.close()
    return ckpt


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


# ---- capture and donation


@pytest.mark.parametrize("writer", WRITERS)
def test_donation_is_neither_denied_nor_seen_by_a_save(writer: str, root: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.zeros(6 << 20, jnp.float32))
    with Checkpointer(root, writer=writer, journal=False, keep=None) as ckpt:
        handles = []
        for number in range(1, 5):
            address = x.unsafe_buffer_pointer()
            handle = ckpt.save(number, {"x": x})
            handle.fence()
            old, x = x, step(x)
            assert old.is_deleted()
            assert x.unsafe_buffer_pointer() == address, "the save kept the buffer from being reused"
            handles.append(handle)
        for handle in handles:
            handle.durable(60.0)
        for number in range(1, 5):
            assert (ckpt.load(step=number)["x"] == number).all()


def test_a_save_waits_for_the_values(root: Path) -> None:
    """What is still being computed is saved as what it becomes."""
    x = jnp.ones((700, 700))
    for _ in range(12):
        x = (x @ x) / 700.0
    found = save(root, {"x": x}).load()["x"]
    assert np.array_equal(found, np.asarray(x))


@pytest.mark.parametrize("before", [False, True], ids=["first save", "known tree"])
def test_a_donated_array_is_a_clear_error(before: bool, root: Path) -> None:
    x, y = jnp.ones(8), jnp.ones(8)
    with Checkpointer(root, writer="thread", journal=False) as ckpt:
        if before:
            ckpt.save(1, {"x": y}).durable(60.0)
        x.delete()
        with pytest.raises(TreeError, match="was donated or deleted"):
            ckpt.save(2, {"x": x})
        ckpt.save(3, {"x": y}).durable(60.0)


def test_a_description_cannot_be_saved(root: Path) -> None:
    with Checkpointer(root, writer="thread", journal=False) as ckpt, pytest.raises(TreeError, match="x"):
        ckpt.save(1, {"x": Struct((3,), jnp.float32)})


def test_what_was_compiled_for_a_template_fits_what_is_loaded(root: Path) -> None:
    """An array that JAX may move elsewhere comes back as one, and one that it may not as one of those."""
    free, bound = jnp.arange(8.0), jax.device_put(jnp.arange(8.0), jax.devices()[0])
    ckpt = Checkpointer(root, rank=0, world=1)
    ckpt.save(1, {"free": free, "bound": bound}).durable(60.0)
    compiled: list[int] = []

    @jax.jit
    def twice(x: jax.Array) -> jax.Array:
        compiled.append(1)
        return 2 * x

    twice(free)
    found = ckpt.load(into={"free": jnp.zeros(8), "bound": jax.device_put(jnp.zeros(8), jax.devices()[0])})
    ckpt.close()
    assert (found["free"].committed, found["bound"].committed) == (False, True)
    assert np.array_equal(twice(found["free"]), 2 * np.arange(8.0))
    assert len(compiled) == 1


def test_loaded_arrays_survive_donation(root: Path) -> None:
    """Loaded memory may be an alias; a donating step must neither fail nor change a sibling."""
    over = mesh(4)
    x = jnp.arange(1 << 20, dtype=jnp.float32)
    template = {
        "one": x,
        "replicated": sharded(x, over),
        "cut": sharded(x, over, "x"),
        "small": jnp.arange(5.0),
    }
    ckpt = save(root, template)
    step = jax.jit(lambda a: a * 2 + 1, donate_argnums=0)
    first, second = ckpt.load(into=template), ckpt.load(into=template)
    after = {name: step(step(array)) for name, array in first.items()}
    for name, array in template.items():
        want = (np.asarray(array) * 2 + 1) * 2 + 1
        for shard in after[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), want[shard.index])
        assert np.array_equal(np.asarray(second[name]), np.asarray(array))


# ---- values


@pytest.mark.parametrize("kind", TABLE)
def test_every_dtype_that_jax_has(kind: str, root: Path) -> None:
    size = TABLE[kind].itemsize
    raw = np.random.default_rng(3).integers(0, 256, 24 * 16 * size, np.uint8)
    if kind == "bool":
        raw &= 1
    with jax.enable_x64(True):
        try:
            values = raw.view(TABLE[kind].numpy).reshape(24, 16)
            x = jax.device_put(values)
        except (TypeError, jax.errors.JaxRuntimeError):
            pytest.skip("not a dtype of JAX")
        tree = {
            "x": x,
            "cut": sharded(values, mesh(4), None, "x"),
            "scalar": jax.device_put(values[0, 0]),
            "none": jax.device_put(values[:0]),
        }
        ckpt = save(root, tree)
        found = ckpt.load(into=tree)
        for name, array in tree.items():
            assert found[name].dtype == array.dtype
            assert found[name].sharding == array.sharding
            assert bits(found[name]) == bits(array), name
        # The same bytes, seen without JAX.
        assert bits(ckpt.load()["x"]) == bits(x)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(impl: str, root: Path) -> None:
    over = mesh(2, 2)
    keys = jax.random.split(jax.random.key(7, impl=impl), 4)
    tree = {
        "one": jax.random.key(5, impl=impl),
        "many": keys,
        "cut": jax.device_put(keys.reshape(2, 2), NamedSharding(over, P("x"))),
        "replicated": jax.device_put(keys, NamedSharding(over, P())),
        "old": jax.random.key_data(keys),
    }
    ckpt = save(root, tree)
    described = jax.tree.map(lambda x: Struct(x.shape, x.dtype, sharding=x.sharding), tree)
    found: Any = None
    for template in (tree, described):
        found = ckpt.load(into=template)
        for name, key in tree.items():
            assert found[name].dtype == key.dtype
            assert found[name].sharding.is_equivalent_to(key.sharding, key.ndim)
            if name != "old":
                assert bits(jax.random.key_data(found[name])) == bits(jax.random.key_data(key))
    assert float(jax.random.uniform(found["one"])) == float(jax.random.uniform(tree["one"]))
    other = next(name for name in ("threefry2x32", "rbg") if name != impl)
    with pytest.raises(MismatchError, match=f"a {other} PRNG key, the checkpoint has a {impl} PRNG key"):
        ckpt.load(into={**tree, "one": jax.random.key(1, impl=other)})
    with pytest.raises(MismatchError, match="a plain array, the checkpoint has"):
        ckpt.load(into={**tree, "one": jnp.zeros(2, jnp.uint32)})


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_other_dimension_orders(order: tuple[int, ...], root: Path) -> None:
    from jax.experimental.layout import Format, Layout

    values = np.arange(6 * 8 * 10, dtype=np.float32).reshape(6, 8, 10)
    sharding = SingleDeviceSharding(jax.devices()[0])
    try:
        x = jax.device_put(values, Format(Layout(order), sharding))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        pytest.skip(f"not creatable here: {error}")
    assert x.format.layout.major_to_minor == order
    ckpt = save(root, {"x": x})
    assert np.array_equal(ckpt.load()["x"], values)
    assert np.array_equal(np.asarray(ckpt.load(into={"x": x})["x"]), values)


def test_program_outputs_with_other_dimension_orders(root: Path) -> None:
    """A jitted transposition may leave its result in place and only change the order."""
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    x = jax.jit(lambda a: a.T)(values)
    y = jax.device_put(values).T
    found = save(root, {"x": x, "y": y}).load()
    assert np.array_equal(found["x"], values.T)
    assert np.array_equal(found["y"], values.T)


# ---- templates


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    b: Any
    name: str = dataclasses.field(metadata={"static": True}, default="m")


def test_containers(root: Path) -> None:
    tree = {
        "model": Model(w=jnp.ones((2, 3)), b=[jnp.zeros(3), np.ones(2, np.float16)]),
        "pair": Pair(jnp.arange(4), (1, 2.5, "text", True)),
        "nothing": None,
    }
    ckpt = save(root, tree)
    found = ckpt.load(into=tree)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(tree))
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    assert isinstance(found["model"].b[1], np.ndarray)
    assert isinstance(found["model"].w, jax.Array)
    names = ckpt.load()
    assert names["model"]["w"].shape == (2, 3)
    assert names["pair"]["right"]["2"] == "text"


def test_optimizer_state(root: Path) -> None:
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 5, 50)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    for _ in range(3):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    tree = {"params": params, "opt": state}
    described = jax.eval_shape(lambda: tree)
    ckpt = save(root, tree)
    found: Any = None
    for template in (tree, described):
        found = ckpt.load(into=template)
        assert str(jax.tree.structure(found)) == str(jax.tree.structure(tree))
        jax.tree.map(np.testing.assert_array_equal, found, tree)
    again, _ = optimizer.update(grads, found["opt"], found["params"])
    expected, _ = optimizer.update(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, again, expected)


def test_descriptions_with_and_without_sharding(root: Path) -> None:
    values = np.arange(24 * 4, dtype=np.float32).reshape(24, 4)
    ckpt = save(root, {"x": sharded(values, mesh(8), "x")})
    plain = ckpt.load(into={"x": Struct(values.shape, values.dtype)})["x"]
    assert plain.sharding.device_set == {jax.devices()[0]}
    assert np.array_equal(np.asarray(plain), values)
    wanted = NamedSharding(mesh(2, 3), P("y", "x"))
    placed = ckpt.load(into={"x": Struct(values.shape, values.dtype, sharding=wanted)})["x"]
    assert placed.sharding == wanted
    assert np.array_equal(np.asarray(placed), values)
    host = ckpt.load(into={"x": np.zeros((24, 4), np.float32)})["x"]
    assert isinstance(host, np.ndarray)
    assert np.array_equal(host, values)


def test_cast_onto_devices(root: Path) -> None:
    values = np.arange(32, dtype=np.float32)
    ckpt = save(root, {"x": jnp.asarray(values)})
    wanted = Struct((32,), jnp.bfloat16, sharding=NamedSharding(mesh(4), P("x")))
    with pytest.raises(MismatchError, match="dtype bfloat16 wanted, float32 saved"):
        ckpt.load(into={"x": wanted})
    found = ckpt.load(into={"x": wanted}, cast=True)["x"]
    assert found.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(found).astype(np.float32), values)


def test_replicas_are_written_once(root: Path) -> None:
    over = mesh(2, 4)
    tree = {
        "replicated": sharded(np.ones(1 << 18, np.float32), over),
        "half": sharded(np.ones((8, 1 << 15), np.float32), over, "y"),
        "cut": sharded(np.ones((8, 1 << 15), np.float32), over, "y", "x"),
    }
    ckpt = save(root, tree)
    assert ckpt.info(1).nbytes == 3 << 20
    (part,) = (root / "step-00000001").glob("*.safetensors")
    assert 3 << 20 <= part.stat().st_size <= (3 << 20) + 8192


def test_arrays_on_many_devices_are_made_by_one_call_each(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = mesh(2, 4)
    tree = {
        "whole": sharded(np.arange(12.0, dtype=np.float32).reshape(3, 4), over),
        "scalar": sharded(np.float32(3), over),
        "large": sharded(np.arange(1 << 20, dtype=np.float32), over),
        "empty": sharded(np.zeros((0, 8), np.int8), over, None, "y"),
        "key": jax.device_put(jax.random.key(5), NamedSharding(over, P())),
        "cut": sharded(np.arange(16.0, dtype=np.float32), over, "x"),
    }
    ckpt = save(root, tree)
    make, made = jax.make_array_from_callback, []

    def counted(shape: Any, *rest: Any) -> Any:
        made.append(shape)
        return make(shape, *rest)

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("shards were put one by one"))
    found = ckpt.load(into=tree)
    monkeypatch.undo()
    assert len(made) == len(tree), "shards and all"
    for name, array in tree.items():
        assert found[name].sharding == array.sharding
        assert found[name].committed
        assert found[name].is_fully_addressable
        pairs = zip(found[name].addressable_shards, array.addressable_shards, strict=True)
        for ours, theirs in pairs if name != "key" else ():
            assert ours.device == theirs.device
            assert bits(ours.data) == bits(theirs.data)
    assert bits(jax.random.key_data(found["key"])) == bits(jax.random.key_data(tree["key"]))


def test_only_the_blocks_of_the_wanted_shards_are_read(root: Path) -> None:
    ckpt = save(root, {"x": jnp.zeros((32, 1 << 18), jnp.float32), "y": jnp.zeros(3)})
    ckpt.load(into={"y": jnp.zeros(3)}, parts="y")
    assert ckpt.last_load is not None
    assert ckpt.last_load.bytes_read <= 8 << 20
