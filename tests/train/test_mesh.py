"""Which mesh axis each dim lies on, and what is said of a mesh that does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from holdfast.errors import ConfigError
from holdfast.train.mesh import MeshConfig
from holdfast.train.placement import NOWHERE
from tests.train.model.small import small

sizes = st.integers(1, 17)


def test_dims_lie_where_the_table_says() -> None:
    rules = MeshConfig(data=2, fsdp=2, tensor=2).rules
    assert rules.computed(("batch", "sequence", None)) == (("data", "fsdp"), "tensor", None)
    assert rules.computed(("embed", "mlp")) == (None, "tensor")
    assert rules.stored(("embed", "mlp"), (8, 8)) == ("fsdp", "tensor")
    assert MeshConfig(tensor=2, sequence_parallel=False).rules.computed(("batch", "sequence")) == (None, None)
    assert MeshConfig(fsdp=4).rules.computed(("batch", "mlp")) == ("fsdp", None)


@pytest.mark.parametrize(
    ("logical", "shape", "split"),
    [
        (("embed", "mlp"), (8, 16), ("fsdp", None)),
        # 4 does not divide `embed`: the largest dim that it divides, the first of equals.
        (("embed", "mlp"), (6, 16), (None, "fsdp")),
        (("embed", "kv_heads", None, "head_dim"), (6, 4, 8, 8), (None, None, "fsdp", None)),
        # Layers that are stacked are never split: each is used on every device.
        (("layers", "embed"), (8, 6), (None, None)),
        (("embed",), (6,), (None,)),
        (("head_dim",), (8,), ("fsdp",)),
    ],
)
def test_a_dim_that_does_not_divide_falls_back(logical: Any, shape: Any, split: Any) -> None:
    assert MeshConfig(fsdp=4).rules.stored(logical, shape) == split


@given(fsdp=sizes, tensor=sizes, embed=sizes, mlp=sizes)
def test_every_element_is_stored_once_among_the_copies(fsdp: int, tensor: int, embed: int, mlp: int) -> None:
    split = MeshConfig(fsdp=fsdp, tensor=tensor).rules.stored(("embed", "mlp"), (embed, mlp * tensor))
    assert split[1] in ("tensor", None) if tensor > 1 else True
    if "fsdp" in split:
        assert (embed, mlp * tensor)[split.index("fsdp")] % fsdp == 0
    elif fsdp > 1:
        assert embed % fsdp
        assert tensor > 1 or mlp % fsdp


def test_zero_says_what_rests_in_shares() -> None:
    model = small().build()
    axes, shapes = model.axes(), model.shapes()
    spec: Any = PartitionSpec
    whole, share = spec(None, None), spec("fsdp", None)
    for zero, want in ((1, (whole, whole, share)), (2, (whole, share, share)), (3, (share, share, share))):
        layout = MeshConfig(fsdp=4, zero=zero).build(jax.devices()[:4])
        trees = (layout.params(axes, shapes), layout.grads(axes, shapes), layout.optimizer(axes, shapes))
        assert tuple(tree["layers"]["1"]["up"].spec for tree in trees) == want


def test_one_device_has_no_constraints() -> None:
    layout = MeshConfig().build()
    assert layout.place == NOWHERE
    assert layout.mesh.size == 1


@pytest.mark.parametrize(
    ("mesh", "given", "setting", "hint"),
    [
        ({"zero": 4}, {}, "mesh.zero", "choose 1, 2 or 3"),
        ({"data": 0}, {}, "mesh.data", "it must be 1 or more"),
        ({"tensor": 3}, {"num_devices": 8}, "mesh", "make the product one of 1, 2, 4, 8"),
        ({"fsdp": 16}, {"num_devices": 8}, "mesh", "set mesh.data=1 mesh.fsdp=8"),
        ({"data": 4, "tensor": 4}, {"num_devices": 8}, "mesh", "set mesh.data=2"),
        ({"tensor": 8}, {"model": small()}, "mesh.tensor", "mesh.tensor may be 1, 2, 4"),
        ({"tensor": 4}, {"model": small(vocab_size=50)}, "mesh.tensor", "model.vocab_size=52"),
        ({"tensor": 4}, {"model": small(), "seq_len": 6}, "mesh.tensor", "mesh.sequence_parallel=false"),
    ],
)
def test_a_mesh_that_does_not_fit_says_what_would(mesh: Any, given: Any, setting: str, hint: str) -> None:
    problems = MeshConfig(**mesh).problems(**given)
    assert [problem.setting for problem in problems] == [setting]
    assert hint in problems[0].hint


def test_a_mesh_that_fits_has_no_problems() -> None:
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    assert mesh.problems(model=small(), seq_len=8, num_devices=8) == []
    assert MeshConfig(tensor=2, sequence_parallel=False).problems(model=small(), seq_len=7) == []


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({}, r"has 1 of 4 devices.*2 processes: process 1 would have none; mesh\.data=4"),
        ({"fsdp": 2}, r"has 2 of 4 devices.*--workers-per-replica 1"),
    ],
)
def test_no_process_of_a_world_is_left_without_devices(
    mesh: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = [SimpleNamespace(process_index=number // 2) for number in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: world)
    with pytest.raises(ConfigError, match=says):
        MeshConfig(**mesh).build()


def test_which_boxes_each_process_has() -> None:
    owners = (0, 0, 1, 1)
    assert MeshConfig(data=2, fsdp=2).boxes(("fsdp", None), owners) == [{(0,), (1,)}] * 2
    assert MeshConfig(fsdp=4).boxes(("fsdp",), owners) == [{(0,), (1,)}, {(2,), (3,)}]
    assert MeshConfig(fsdp=4).boxes((None,), owners) == [{()}] * 2
    mesh = MeshConfig(fsdp=2, tensor=2)  # tensor innermost
    assert mesh.boxes(("fsdp", "tensor"), owners) == [{(0, 0), (0, 1)}, {(1, 0), (1, 1)}]
    assert mesh.boxes((("data", "fsdp"), None), owners) == [{(0, 0)}, {(0, 1)}]


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="16 devices, and here are 8"):
        MeshConfig(fsdp=16).build()
    with pytest.raises(ConfigError, match="here are 1"):
        MeshConfig(tensor=2).build(jax.devices()[:1])
