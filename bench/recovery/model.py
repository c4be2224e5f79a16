"""The model of the recovery benchmarks: two transformer layers, about a million parameters, f32, Adam.

Data are counted, not read: row r of step s is the same whoever makes it. HOLDFAST_BENCH_SCALE=large makes it
956 million parameters, for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

LARGE = os.environ.get("HOLDFAST_BENCH_SCALE") == "large"
VOCAB, WIDTH, LAYERS, HEADS, LENGTH = (32_768, 2048, 16, 16, 1024) if LARGE else (256, 192, 2, 4, 64)
MLP = 9440 if LARGE else 4 * WIDTH
ROWS, LANES = (8, 4) if LARGE else (12, 6)
"""Rows and lanes of a global batch."""
RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8

Tree = Any


def init() -> Tree:
    """Parameters and Adam's state, of seed 0.

    Moved, not computed: a call of jnp would be a program for every shape, to be compiled or loaded.
    """
    return jax.device_put(host_init())


def host_init() -> Tree:
    """The same in numpy arrays."""
    random = np.random.default_rng(0)

    def weight(*shape: int) -> NDArray[np.float32]:
        made: NDArray[np.float32] = random.standard_normal(shape, dtype=np.float32)
        made /= np.float32(np.sqrt(shape[0]))
        return made

    params = _params(weight, lambda size: np.ones(size, np.float32))
    zeros = jax.tree.map(np.zeros_like, params)
    return {"params": params, "m": zeros, "v": zeros, "step": np.int32(0)}


def described(where: jax.sharding.Sharding) -> Tree:
    """The same as shapes and dtypes, for `run.restore(into=)`: no number of it is made."""

    def shape(*dims: int, kind: type = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind, sharding=where)  # type: ignore[no-untyped-call]

    params = _params(shape, shape)
    return {"params": params, "m": params, "v": params, "step": shape(kind=np.int32)}


def _params(weight: Callable[..., Any], ones: Callable[[int], Any]) -> dict[str, Any]:
    params: dict[str, Any] = {"embed": weight(VOCAB, WIDTH), "places": weight(LENGTH, WIDTH)}
    for layer in range(LAYERS):
        params[f"layer{layer}"] = {
            "qkv": weight(WIDTH, 3 * WIDTH),
            "out": weight(WIDTH, WIDTH),
            "up": weight(WIDTH, MLP),
            "down": weight(MLP, WIDTH),
            "norm1": ones(WIDTH),
            "norm2": ones(WIDTH),
        }
    return params


def rows(step: int, first: int, count: int) -> NDArray[np.int32]:
    """Rows of a step's batch, LENGTH + 1 tokens each."""
    made = [
        np.random.Generator(np.random.Philox(key=[step, first + n])).integers(0, VOCAB, LENGTH + 1)
        for n in range(count)
    ]
    return np.stack(made).astype(np.int32)


def lane_batch(step: int, lane: int) -> NDArray[np.int32]:
    """The rows of one lane."""
    share = ROWS // LANES
    return rows(step, lane * share, share)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """The sum of the cross entropies of a batch."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs] + params["places"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in range(LAYERS):
        p = params[f"layer{layer}"]
        q, k, v = jnp.split(_norm(x, p["norm1"]) @ p["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH / HEADS)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ p["out"]
        x = x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]
    logits = jax.nn.log_softmax(x @ params["embed"].T, axis=-1)
    return -jnp.take_along_axis(logits, targets[..., None], axis=-1).sum()


@jax.jit
def lane_grads(state: Tree, tokens: jax.Array) -> Tree:
    """The sums of gradients and losses over a lane."""
    value, grads = jax.value_and_grad(loss)(state["params"], tokens)
    return {"grads": grads, "loss": value}


@jax.jit
def apply(state: Tree, total: Tree) -> Tree:
    """One step of Adam with the sums of a whole batch."""
    count = state["step"] + 1
    grads = jax.tree.map(lambda g: g / (ROWS * LENGTH), total["grads"])
    m = jax.tree.map(lambda a, g: BETA1 * a + (1 - BETA1) * g, state["m"], grads)
    v = jax.tree.map(lambda a, g: BETA2 * a + (1 - BETA2) * g * g, state["v"], grads)
    fix1, fix2 = 1 - BETA1**count, 1 - BETA2**count
    params = jax.tree.map(
        lambda p, a, b: p - RATE * (a / fix1) / (jnp.sqrt(b / fix2) + EPSILON), state["params"], m, v
    )
    return {"params": params, "m": m, "v": v, "step": count}
