"""Each layer against plain numpy, forward and (by its vector-Jacobian product) backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.train.model.attention import attend, implementation
from holdfast.train.model.config import RopeScaling
from holdfast.train.model.embedding import embed, row_sums
from holdfast.train.model.layer import Scope
from holdfast.train.model.mlp import swiglu
from holdfast.train.model.norm import rms_norm
from holdfast.train.model.projection import Cut, Projection
from holdfast.train.model.rope import frequencies, turned, turns
from holdfast.train.placement import NOWHERE
from tests.train.model import reference
from tests.train.model.small import Numpy, small

STEP = 1e-6


def drawn(*shape: int, seed: int = 1) -> Numpy:
    return np.random.default_rng(seed).normal(size=shape)


def check(
    ours: Callable[..., Any], theirs: Callable[..., Numpy], *values: Numpy, exact: float = 1e-12
) -> None:
    """Values to `exact`, and gradients to 1e-7 or that: against central differences, in float64."""
    near = max(exact, 1e-7)
    with jax.enable_x64(True):

        @jax.jit
        def both(along: jax.Array, *values: jax.Array) -> tuple[jax.Array, Any]:
            out, pull = jax.vjp(ours, *values)
            return out, pull(along)

        along = drawn(*theirs(*values).shape, seed=2)
        out, grads = both(along, *values)
        np.testing.assert_allclose(out, theirs(*values), rtol=exact, atol=exact)
        for at, grad in enumerate(grads):
            move = drawn(*values[at].shape, seed=3 + at)
            up, down = (
                theirs(*(v + sign * STEP * move if i == at else v for i, v in enumerate(values)))
                for sign in (1, -1)
            )
            slope = ((up - down) * along).sum() / (2 * STEP)
            assert float((np.asarray(grad) * move).sum()) == pytest.approx(slope, rel=near, abs=near)


def test_rms_norm() -> None:
    check(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: reference.rms_norm(x, w, 1e-5),
        drawn(2, 3, 8),
        drawn(8),
    )


def test_rms_norm_has_float32_statistics() -> None:
    # The squares of these overflow float16, and their mean loses most of its bits in bfloat16.
    x = jnp.full((1, 1, 64), 300.0, jnp.float16)
    assert np.all(np.asarray(rms_norm(x, jnp.ones(64), 0.0)) == 1)


def test_swiglu() -> None:
    check(swiglu, reference.swiglu, drawn(2, 3, 5), drawn(2, 3, 5, seed=9))


def test_rope() -> None:
    positions = np.array([0, 1, 5, 300])

    def ours(x: jax.Array) -> jax.Array:
        cos, sin = turns(jnp.asarray(positions)[None], frequencies(8, 50.0, None), jnp.dtype("float64"))
        return turned(x[None], cos, sin)[0]

    check(ours, lambda x: reference.rotate(x, positions, 50.0), drawn(4, 3, 8))


def test_rope_scaling_stretches_low_frequencies_only() -> None:
    scaling = RopeScaling(factor=8.0, original_positions=64)
    plain, scaled = frequencies(16, 10_000.0, None), frequencies(16, 10_000.0, scaling)
    length = 2 * np.pi / plain
    assert np.array_equal(scaled[length < 16], plain[length < 16])
    assert np.allclose(scaled[length > 64], plain[length > 64] / 8)
    between = (length > 16) & (length < 64)
    assert between.any()
    assert np.all((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8))


@pytest.mark.parametrize("remat", ["light", "none"])
def test_attention(remat: str) -> None:
    segments = np.array([0, 0, 1, 1, 1, 2])
    config = small(remat=remat, compute_dtype="float64")

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        unused = (jnp.zeros(()), jnp.zeros(()))
        scope = Scope(config, NOWHERE, unused, jnp.asarray(segments)[None])
        return attend(scope, q[None], k[None], v[None])[0]

    def theirs(q: Numpy, k: Numpy, v: Numpy) -> Numpy:
        return reference.attention(q, k, v, segments)

    # JAX makes the softmax in float32, whatever it is given.
    check(ours, theirs, drawn(6, 4, 8), drawn(6, 2, 8, seed=5), drawn(6, 2, 8, seed=6), exact=1e-6)


def test_the_fused_kernel_is_for_16_bit_compute_on_a_gpu() -> None:
    assert implementation(small(compute_dtype="bfloat16", head_dim=64), "gpu") == "cudnn"
    assert implementation(small(compute_dtype="bfloat16", head_dim=64), "cpu") == "xla"
    assert implementation(small(compute_dtype="float32", head_dim=64), "gpu") == "xla"
    assert implementation(small(compute_dtype="bfloat16", head_dim=66), "gpu") == "xla"
    assert implementation(small(compute_dtype="bfloat16", head_dim=64, attention="xla"), "gpu") == "xla"


@pytest.mark.parametrize("recompute", [True, False])
def test_projection(recompute: bool) -> None:
    one = Projection(
        NOWHERE, ("batch", "sequence", None), ((None, None), (None, None, None)), ((), ()), swiglu, recompute
    )

    def ours(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        first, second = one(x, [a, b], [a, b], y)
        return jnp.concatenate([first, second.reshape(*first.shape[:2], -1)], -1)

    def theirs(x: Numpy, y: Numpy, a: Numpy, b: Numpy) -> Numpy:
        inner = reference.swiglu(x, y)
        return np.concatenate([inner @ a, inner @ b.reshape(len(b), -1)], -1)

    check(ours, theirs, drawn(2, 3, 5), drawn(2, 3, 5, seed=4), drawn(5, 4), drawn(5, 2, 3))


@pytest.mark.parametrize("recompute", [True, False])
def test_a_weight_that_is_cut_has_a_product_for_each_part(recompute: bool) -> None:
    outputs = (("batch", None, None, None),) * 4
    one = Projection(
        NOWHERE,
        ("batch", "sequence", None),
        ((None, None, None),) * 2,
        outputs,
        swiglu,
        recompute,
        cut=Cut(1, (3, 1)),
    )

    def ours(x: jax.Array, y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        parts = one(x, [a, b], [a, b], y)
        assert [part.shape[2] for part in parts] == [3, 1, 3, 1]
        return jnp.concatenate(parts, 2)

    def theirs(x: Numpy, y: Numpy, a: Numpy, b: Numpy) -> Numpy:
        both = np.concatenate([a, b], 1)
        return np.tensordot(reference.swiglu(x, y), both, (2, 0))

    check(ours, theirs, drawn(2, 3, 5), drawn(2, 3, 5, seed=4), drawn(5, 4, 2), drawn(5, 4, 2, seed=6))


def test_a_weights_gradient_is_float32_and_not_rounded() -> None:
    # 4,096 ones sum to 4,096 in float32; bfloat16 would also round each partial sum.
    x, w = jnp.ones((1, 4097, 1), jnp.bfloat16), jnp.ones((1, 1), jnp.float32)
    one = Projection(NOWHERE, ("batch", None, None), ((None, None),), (("batch", None, None),))
    grad = jax.grad(lambda w: one(x, [w], [w.astype(jnp.bfloat16)])[0].astype(jnp.float32).sum())(w)
    assert grad.dtype == jnp.float32
    assert float(grad[0, 0]) == 4097.0


def test_embedding() -> None:
    tokens = np.array([[3, 0, 3, 3], [1, 3, 0, 3]])
    check(lambda w: embed(NOWHERE, w, w, jnp.asarray(tokens)), lambda w: w[tokens], drawn(5, 6))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 40]))
def test_rows_are_summed_in_order(data: st.DataObject, num_rows: int) -> None:
    # One shape for each number of rows: each of them is compiled. 300 is more than two blocks.
    ids = data.draw(st.lists(st.integers(-1, num_rows), min_size=300, max_size=300))
    tokens, grad = np.array(ids, np.int32), drawn(300, 2).astype(np.float32)
    want = np.zeros((num_rows, 2))
    for token, row in zip(tokens, grad, strict=True):
        if 0 <= token < num_rows:
            want[token] += row
    got = _row_sums(tokens, grad, num_rows)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _row_sums(tokens: Numpy, grad: Numpy, num_rows: int) -> Numpy:
    run = jax.jit(row_sums, static_argnums=(2, 3))
    return np.asarray(run(tokens, grad, num_rows, jnp.dtype("float32")))
