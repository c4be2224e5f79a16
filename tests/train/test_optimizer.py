"""The optimizer against optax itself, and norms against numpy, under every sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.errors import LayoutError
from holdfast.train.flat import FlatShards
from holdfast.train.norms import clip_factor, global_norm
from holdfast.train.optimizer import OptimizerConfig

RNG = np.random.default_rng(1)
TOKENS = 12.0


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    made = {"embed": (5, 4), "layers": {"0": {"norm": (4,), "w": (4, 8), "qkv_bias": (8,)}}, "norm": (4,)}
    filled: dict[str, Any] = jax.tree.map(
        lambda shape: jnp.asarray(RNG.standard_normal(shape), dtype),
        made,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return filled


def grads(like: Any, scale: float = 1.0) -> Any:
    return jax.tree.map(lambda p: jnp.asarray(RNG.standard_normal(p.shape) * scale, jnp.float32), like)


def test_it_is_optax_adamw_with_clipping_and_a_mask() -> None:
    config = OptimizerConfig(clip=0.7, weight_decay=0.3)
    optimizer = config.build()
    mine = theirs = params()
    state = optimizer.init(mine)
    mask = optimizer.decayed(mine)
    assert mask == {
        "embed": True,
        "layers": {"0": {"norm": False, "w": True, "qkv_bias": False}},
        "norm": False,
    }
    rates = [0.0, 1e-2, 5e-3]
    reference = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask),
    )
    their_state = reference.init(theirs)
    update = jax.jit(optimizer.update)
    for rate in rates:
        sums = grads(mine, scale=20.0)
        mine, state, found = update(mine, state, sums, TOKENS, rate, config.weight_decay)
        means = jax.tree.map(lambda g: g / TOKENS, sums)
        steps, their_state = reference.update(means, their_state, theirs)
        theirs = jax.tree.map(lambda p, s, r=rate: p - r * s, theirs, steps)
        assert found["grad_norm"] == pytest.approx(float(optax.tree.norm(means)), rel=1e-5)
        assert found["clipped"] == 1.0
        assert found["skipped"] == 0.0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), mine, theirs)


def test_the_sum_over_tokens_is_divided_once() -> None:
    optimizer = OptimizerConfig(clip=0.0).build(optax.sgd(1.0))
    start = params()
    after, _, found = optimizer.update(start, optimizer.init(start), start, 4.0, 0.5, 0.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b * (1 - 0.5 / 4), rtol=1e-6), after, start)
    assert found["clipped"] == 0.0
    same, _, _ = optimizer.update(
        start, optimizer.init(start), jax.tree.map(jnp.zeros_like, start), 0.0, 1.0, 0.0
    )
    jax.tree.map(np.testing.assert_array_equal, same, start)  # a batch without tokens changes nothing


@pytest.mark.parametrize("transformation", [optax.lion(1.0, weight_decay=0.0), optax.sgd(1.0, momentum=0.9)])
def test_any_optax_transformation_takes_its_place(transformation: Any) -> None:
    optimizer = OptimizerConfig(weight_decay=0.0).build(transformation)
    start = params()
    state = optimizer.init(start)
    after, state, _ = jax.jit(optimizer.update)(start, state, grads(start), TOKENS, 1e-3, 0.0)
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), after, start)
    assert all(0 < one < 1 for one in jax.tree.leaves(moved))


def test_parameters_of_16_bits_have_main_copies_of_32() -> None:
    optimizer = OptimizerConfig(clip=0.0, weight_decay=0.0).build(optax.sgd(1.0))
    start = {**params(jnp.bfloat16), "norm": jnp.ones(4)}
    state = optimizer.init(start)
    assert state.main["norm"] is None
    assert state.main["embed"].dtype == jnp.float32
    tiny = jax.tree.map(lambda p: jnp.full(p.shape, 1e-4, jnp.float32), start)
    now = start
    for _ in range(300):  # each step is too small for bfloat16 to notice
        now, state, _ = optimizer.update(now, state, tiny, 1.0, 1.0, 0.0)
    moved = np.asarray(start["embed"], np.float32) - np.asarray(now["embed"], np.float32)
    np.testing.assert_allclose(moved, 0.03, atol=0.01)
    np.testing.assert_allclose(np.asarray(now["embed"], np.float32), state.main["embed"], rtol=1e-2)
    shapes = jax.eval_shape(lambda: start)
    names = jax.tree.map(lambda p: str(p.shape), start)
    like = optimizer.like(shapes, names, "other")
    assert like.main == {**names, "norm": None}
    jax.tree.map(lambda a, b: None, like, state)  # of one structure


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    start = params()
    broken = {**grads(start), "norm": jnp.asarray([0, bad, 0, 0], jnp.float32)}
    optimizer = OptimizerConfig().build()
    state = optimizer.init(start)
    after, kept, found = optimizer.update(start, state, broken, TOKENS, 1e-2, 0.1)
    jax.tree.map(np.testing.assert_array_equal, (after, kept), (start, state))
    assert found["skipped"] == 1.0
    through, _, _ = (
        OptimizerConfig(skip_nonfinite=False).build().update(start, state, broken, TOKENS, 1e-2, 0.1)
    )
    assert not np.isfinite(np.asarray(through["norm"])).all()


def test_mistakes_are_named() -> None:
    wrong = OptimizerConfig(b1=1.0, b2=-0.1, eps=0.0, weight_decay=-1, clip=-1, no_decay=("[b-a]",))
    assert [one.setting for one in wrong.problems()] == [
        f"optimizer.{name}" for name in ("b1", "b2", "eps", "weight_decay", "clip", "no_decay")
    ]
    assert not OptimizerConfig().problems()


def test_norms_are_right_under_every_sharding() -> None:
    tree = {
        "w": RNG.standard_normal((16, 8)).astype(np.float32),
        "b": RNG.standard_normal(8).astype(np.float32),
    }
    expected = np.sqrt(sum(np.sum(np.square(one.astype(np.float64))) for one in tree.values()))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    norm = jax.jit(global_norm)
    for w, b in [
        ((), ()),
        (("fsdp",), ()),
        ((None, "tensor"), ("tensor",)),
        (("fsdp", "tensor"), ("fsdp",)),
        ((("fsdp", "tensor"),), (("fsdp", "tensor"),)),
    ]:
        specs = {"w": PartitionSpec(*w), "b": PartitionSpec(*b)}  # type: ignore[no-untyped-call]
        placed = {name: jax.device_put(tree[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}
        assert float(norm(placed)) == pytest.approx(expected, rel=1e-6), (w, b)
    half = {name: jnp.asarray(one, jnp.bfloat16) for name, one in tree.items()}
    assert global_norm(half).dtype == jnp.float32


def test_the_clip_factor_is_megatrons() -> None:
    assert float(clip_factor(jnp.float32(2.0), 1.0)) == pytest.approx(1 / (2 + 1e-6))
    assert float(clip_factor(jnp.float32(0.5), 1.0)) == 1.0
    assert float(clip_factor(jnp.float32(2.0), 0.0)) == 1.0


def test_flat_moments_change_nothing_but_where_they_lie() -> None:
    start, num_shards = params(), 3
    plain, flat = (OptimizerConfig(flat_shards=shards).build() for shards in (0, num_shards))
    mine, theirs = (start, plain.init(start)), (start, flat.init(start))
    for _ in range(3):
        sums = grads(start)
        mine = jax.jit(plain.update)(*mine, sums, TOKENS, 1e-2, 0.1)[:2]
        theirs = jax.jit(flat.update)(*theirs, sums, TOKENS, 1e-2, 0.1)[:2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), theirs[0], mine[0])
    shards = FlatShards(start, num_shards)
    moments = theirs[1].inner[0].mu
    assert {name: one.size % num_shards for name, one in moments.items()} == {"dense": 0}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        shards.unpacked(moments),
        mine[1].inner[0].mu,
    )


def test_flat_moments_are_shared_evenly_by_a_mesh_of_their_size() -> None:
    start = {"odd": jnp.ones((5, 7)), "experts": {"w": jnp.ones((3, 3))}}
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    where = jax.tree.map(lambda _: whole, start)
    optimizer = OptimizerConfig(flat_shards=4).build()
    shardings = optimizer.like(jax.eval_shape(lambda: start), where, whole)
    state = jax.jit(optimizer.init, out_shardings=shardings)(start)
    sizes = {name: (one.size, one.addressable_shards[0].data.size) for name, one in state.inner[0].mu.items()}
    assert sizes == {"dense": (128, 32), "experts": (128, 32)}
    with pytest.raises(LayoutError, match=r"mesh\.fsdp has 4 members"):
        OptimizerConfig(flat_shards=8).build().like(start, where, whole)
