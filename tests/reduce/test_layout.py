"""Flat memory for trees: every array once, aligned, in blocks that do not depend on who adds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.errors import TreeError, UsageError
from holdfast.reduce import Reducer
from holdfast.reduce.layout import ALIGN, BLOCK, GRAIN, Entry, FlatLayout
from holdfast.reduce.leaves import Structure, rebuilt
from tests.reduce.crew import unchecked

entries = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "float64", "int8"]),
        st.lists(st.integers(0, 300), max_size=2).map(tuple),
    ),
    max_size=8,
).map(lambda found: [Entry(f"a{at}", *one) for at, one in enumerate(found)])


@given(entries, st.integers(1, 9))
def test_every_element_lies_in_one_block_and_every_block_has_one_owner(
    made: list[Entry], num_owners: int
) -> None:
    layout = FlatLayout(made[::-1], None)
    assert layout.digest == FlatLayout(made, None).digest
    seen = [0] * len(layout.entries)
    for block in layout.blocks:
        assert 0 < block.hi - block.lo <= BLOCK
        assert (block.hi - block.lo) % GRAIN == 0
        for entry, lo, hi, at in block.pieces:
            assert layout.starts[entry] % ALIGN == 0
            size = layout.wires[entry].itemsize
            assert layout.starts[entry] + lo * size == block.lo + at * size
            assert at * size + (hi - lo) * size <= block.hi - block.lo
            assert seen[entry] == lo
            seen[entry] = hi
    assert seen == [int(np.prod(entry.shape)) for entry in layout.entries]
    shares = layout.shares(num_owners)
    assert [at for share in shares for at in share] == list(range(len(layout.blocks)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_wire_dtype_must_be_a_floating_point_one() -> None:
    made = [Entry("a", "float32", (3,)), Entry("n", "int64", ()), Entry("h", "float16", (2,))]
    assert [one.name for one in FlatLayout(made, "bfloat16").wires] == ["bfloat16", "float16", "int64"]
    with pytest.raises(UsageError, match="no floating-point dtype"):
        FlatLayout(made, "int8")
    with pytest.raises(TreeError, match="unknown dtype"):
        Reducer(wire_dtype="float5")


def test_an_outline_rebuilds_plain_containers_only() -> None:
    tree = {"b": [np.ones(1), None], "a": (np.zeros(2),), "": {3: np.int8(1)}}
    structure = Structure(tree)
    arrays = [np.full(1, at) for at in range(3)]
    again = rebuilt(structure.outline, arrays)
    assert again == structure.rebuild(arrays)
    for wrong in (b"", b"\x93", structure.outline[:-1]):
        with pytest.raises(TreeError, match="prepare"):
            rebuilt(wrong, arrays)
    with pytest.raises(TreeError, match="prepare"):
        rebuilt(structure.outline, arrays[:1])


def test_jax_arrays_are_added_wherever_they_lie() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    spread = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]
    reducer = Reducer(num_lanes=3)
    reducer.begin(0, {0: range(3)})
    for lane in range(3):
        values = jnp.arange(16.0) * (lane + 1)
        tree = {"one": values, "spread": jax.device_put(values, spread), "half": values.astype(jnp.bfloat16)}
        reducer.add(lane, tree)
    reducer.exchange(1.0, unchecked)
    total = reducer.total()
    expected = np.arange(16.0, dtype=np.float32) * 6
    for name in ("one", "spread", "half"):
        assert type(total[name]) is np.ndarray
        np.testing.assert_array_equal(total[name].astype(np.float32), expected)
    reducer.close()


def test_keys_have_no_sum() -> None:
    reducer = Reducer()
    with pytest.raises(TreeError, match="no sum"):
        reducer.prepare({"key": jax.random.key(0)})
    reducer.close()
