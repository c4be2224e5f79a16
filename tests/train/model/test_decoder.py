"""The whole model against plain numpy, in every form it can take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.train.loss import loss_sums
from holdfast.train.model.config import ModelConfig
from tests.train.model import reference
from tests.train.model.small import batch, small

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied, biased, remat none": {"tied": False, "qkv_bias": True, "remat": "none"},
    "qk norm, scanned, chunked loss": {"qk_norm": True, "layers": "scanned", "loss_chunk": 4, "repeats": 2},
    "another pattern, remat full": {"pattern": "-**", "remat": "full", "num_kv_heads": 1},
}


def test_the_number_of_parameters() -> None:
    for form in FORMS.values():
        config = small(**form)
        shapes = config.build().shapes()
        assert sum(one.size for one in jax.tree.leaves(shapes)) == config.num_params


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_plain_numpy(form: str) -> None:
    # In float64, but for the softmax of attention, which JAX always makes in float32: hence 1e-8 and 1e-5.
    config = small(**FORMS[form], param_dtype="float64", compute_dtype="float64")
    data = batch()
    with jax.enable_x64(True):
        model = config.build()
        params = jax.tree.map(
            lambda one: one + 0.1, jax.jit(model.init)(jax.random.key(1))
        )  # no bias is zero
        run = jax.jit(jax.value_and_grad(lambda p: loss_sums(model, p, data), has_aux=True))
        (loss, count), grads = run(params)
        host = jax.tree.map(np.asarray, params)
    assert float(loss) == pytest.approx(reference.loss_sum(config, unrolled(config, host), data), rel=1e-8)
    assert float(count) == data["mask"].sum()
    random = np.random.default_rng(0)
    tree: Any
    leaves, tree = jax.tree.flatten(host)
    for at, grad in enumerate(jax.tree.leaves(grads)):
        move = random.normal(size=leaves[at].shape)

        def moved(step: float, at: int = at, move: Any = move) -> float:
            there = tree.unflatten([one + step * move if i == at else one for i, one in enumerate(leaves)])
            return reference.loss_sum(config, unrolled(config, there), data)

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        assert float((np.asarray(grad) * move).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-5)


def unrolled(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with one entry for each block."""
    if config.layers == "unrolled":
        return params
    unit = len(config.pattern)
    layers = {
        str(at): jax.tree.map(lambda one, at=at: one[at // unit], params["layers"][str(at % unit)])
        for at in range(len(config.symbols))
    }
    return {**params, "layers": layers}


def test_scanned_and_unrolled_layers_begin_with_the_same_values() -> None:
    config = small(repeats=2)
    plain = jax.jit(config.build().init)(jax.random.key(5))
    changed = small(repeats=2, layers="scanned")
    stacked = unrolled(changed, jax.jit(changed.build().init)(jax.random.key(5)))
    jax.tree.map(np.testing.assert_array_equal, plain, stacked)


def test_what_goes_back_into_the_stream_begins_smaller() -> None:
    config = small(hidden=64, num_heads=8, head_dim=16, mlp_hidden=128, repeats=2)
    params = jax.jit(config.build().init)(jax.random.key(0))
    assert np.std(params["layers"]["1"]["gate"]) == pytest.approx(0.2, rel=0.05)
    assert np.std(params["layers"]["1"]["down"]) == pytest.approx(0.2 / 2, rel=0.05)
    assert np.std(params["layers"]["2"]["out"]) == pytest.approx(0.2 / 2, rel=0.05)


def test_bfloat16_compute_is_near_float32_and_has_float32_gradients() -> None:
    data = batch()
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = small(compute_dtype=dtype, init_std=0.02).build()
        run = jax.jit(jax.value_and_grad(lambda p, model=model: loss_sums(model, p, data), has_aux=True))
        found[dtype] = run(jax.jit(model.init)(jax.random.key(0)))
        assert {one.dtype for one in jax.tree.leaves(found[dtype][1])} == {jnp.dtype("float32")}
    (exact, _), grads = found["float32"]
    (near, _), near_grads = found["bfloat16"]
    assert float(near) == pytest.approx(float(exact), rel=1e-3)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(near_grads), strict=True):
        assert np.linalg.norm(one - other) < 0.03 * np.linalg.norm(one)


def test_segments_keep_documents_apart() -> None:
    # A token of the first document changes nothing in the second.
    config = small()
    model, data = config.build(), batch(samples=1, length=9)
    params = jax.jit(model.init)(jax.random.key(2))
    run = jax.jit(lambda tokens: model.apply(params, tokens, data["positions"], data["segments"]))
    other = data["tokens"].copy()
    other[0, 0] = (other[0, 0] + 1) % config.vocab_size
    first, second = run(data["tokens"]), run(other)
    assert np.array_equal(first[:, 3:], second[:, 3:])
    assert not np.array_equal(first[:, :3], second[:, :3])
    assert first.shape == (1, 9, config.vocab_size)


def _temporary(config: ModelConfig, samples: int, length: int) -> int:
    """Bytes that the compiled gradient takes beside its inputs and outputs."""
    model, data = config.build(), batch(samples, length, config.vocab_size)
    run = jax.jit(jax.grad(lambda p: loss_sums(model, p, data)[0]))
    stats = run.lower(model.shapes()).compile().memory_analysis()
    assert stats is not None
    return int(stats.temp_size_in_bytes)


def test_a_chunked_loss_takes_less_memory() -> None:
    # The logits are 64 x 2,048 x 4 bytes = 512 KiB, and dominate.
    whole = _temporary(small(vocab_size=2048, pattern="-"), 1, 64)
    parts = _temporary(small(vocab_size=2048, pattern="-", loss_chunk=8), 1, 64)
    assert whole - parts > 700_000, (whole, parts)


@pytest.mark.full
def test_recomputation_takes_less_memory() -> None:
    shape: dict[str, Any] = {"pattern": "-", "repeats": 3, "mlp_hidden": 256}
    none, light, full = (_temporary(small(**shape, remat=how), 2, 64) for how in ("none", "light", "full"))
    one = 2 * 64 * 256 * 4  # a product of gate and up; gate and up themselves are two more
    assert none - light >= 2 * one, (none, light)
    assert none - full >= 3 * one, (none, full)
