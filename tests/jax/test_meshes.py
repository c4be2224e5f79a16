"""Saved on one mesh, loaded on another, equal to the bit: random trees, meshes and shardings."""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

from holdfast.checkpoint import Checkpointer

# JAX ships these without types.
P: Any = jax.sharding.PartitionSpec
Struct: Any = jax.ShapeDtypeStruct

DTYPES = ["float32", "bfloat16", "int8", "uint32", "bool", "float16", "float8_e4m3fn", "complex64"]
SHAPES = [(1,), (2,), (3,), (8,), (2, 4), (4, 2), (3, 2), (1, 5), (2, 2, 2), (2, 1, 3)]
DIMS = [0, 1, 5, 12, 24, 48, 120]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.sampled_from(SHAPES))
    order = draw(st.permutations(range(8)))
    devices = np.array([jax.devices()[at] for at in order[: int(np.prod(shape))]]).reshape(shape)
    return Mesh(devices, ("x", "y", "z")[: len(shape)])


def spec(draw: st.DrawFn, over: Mesh, shape: tuple[int, ...]) -> Any:
    """A legal sharding: every axis cuts one dimension that it divides, or replicates."""
    axes: list[list[str]] = [[] for _ in shape]
    ways = [1] * len(shape)
    for axis in draw(st.permutations(over.axis_names)):
        size = over.shape[axis]
        able = [at for at, dim in enumerate(shape) if dim % (ways[at] * size) == 0]
        at = draw(st.sampled_from([None, *able]))
        if at is not None:
            axes[at].append(axis)
            ways[at] *= size
    return P(*(tuple(a) if len(a) > 1 else a[0] if a else None for a in axes))


@st.composite
def moves(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tree on one mesh, and descriptions of the same tree on another."""
    source, target = draw(meshes()), draw(meshes())
    tree, template = {}, {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.sampled_from(DIMS), max_size=3)))
        dtype = np.dtype(jax.numpy.dtype(draw(st.sampled_from(DTYPES))))
        raw = np.random.default_rng(number).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        values = (raw & 1 if dtype.kind == "b" else raw).view(dtype).reshape(shape)
        name = f"a{number}"
        tree[name] = jax.device_put(values, NamedSharding(source, spec(draw, source, shape)))
        where = NamedSharding(target, spec(draw, target, shape))
        template[name] = Struct(shape, dtype, sharding=where)
    return tree, template


def check(tree: dict[str, Any], template: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        with Checkpointer(root, writer="thread", journal=False, threads=2) as ckpt:
            ckpt.save(1, tree).durable(60.0)
            found = ckpt.load(into=template)
            assert ckpt.info(1).nbytes == sum(array.nbytes for array in tree.values())
            assert ckpt.verify(1) == []
        for name, array in tree.items():
            assert found[name].dtype == array.dtype
            assert found[name].sharding == template[name].sharding
            want = np.asarray(array)
            # Every copy on every device, not only those that a gather would look at.
            for shard in found[name].addressable_shards:
                assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), name


_SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@given(moves())
@settings(_SETTINGS, max_examples=60)
def test_any_mesh_to_any_mesh(move: tuple[dict[str, Any], dict[str, Any]]) -> None:
    check(*move)


@pytest.mark.full
@pytest.mark.timeout(800)
@given(moves())
@settings(_SETTINGS, max_examples=1500, derandomize=False)
def test_any_mesh_to_any_mesh_at_length(move: tuple[dict[str, Any], dict[str, Any]]) -> None:
    check(*move)


@pytest.mark.parametrize("threads", [1, 4])
def test_large_arrays_cross_blocks(threads: int, tmp_path: Any) -> None:
    """Shards whose rows are scattered over many blocks of the part files."""
    devices = np.array(jax.devices())
    source = NamedSharding(Mesh(devices.reshape(2, 4), ("x", "y")), P(None, "y"))
    target = NamedSharding(Mesh(devices[:6].reshape(3, 2), ("x", "y")), P("y", "x"))
    values = np.random.default_rng(1).integers(0, 2**31, (1536, 6144), np.int32)
    tree = {"x": jax.device_put(values, source)}
    with Checkpointer(tmp_path, writer="thread", journal=False, threads=threads) as ckpt:
        ckpt.save(1, tree).durable(60.0)
        found = ckpt.load(into={"x": Struct(values.shape, values.dtype, sharding=target)})
    for shard in found["x"].addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index])
