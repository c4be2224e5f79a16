"""Causal attention with grouped keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
from jax import Array, lax

from holdfast.train.model.config import ModelConfig
from holdfast.train.model.layer import STREAM, Scope, Shapes, normal, ones, zeros
from holdfast.train.model.projection import Cut, Projection
from holdfast.train.model.rope import turned

QKV = ("embed", "kv_heads", None, "head_dim")
"""For each key/value head its query heads, the key and the value side by side: one array to store and to
gather, and the tensor axis splits whole groups."""
OUT = ("heads", "head_dim", "embed")
Q_HEADS = ("batch", None, "heads", "head_dim")
KV_HEADS = ("batch", None, "kv_heads", "head_dim")


def shapes(config: ModelConfig) -> Shapes:
    """The parameters of an attention block: shape, logical dims and how they begin."""
    hidden, head, heads, kv = config.hidden, config.head_size, config.num_heads, config.kv_heads
    group = heads // kv + 2
    found: Shapes = {
        "norm": ((hidden,), ("embed",), ones),
        "qkv": ((hidden, kv, group, head), QKV, normal(config.init_std)),
        "out": ((heads, head, hidden), OUT, normal(config.init_std, back=len(config.symbols))),
    }
    if config.qkv_bias:
        found["qkv_bias"] = ((kv, group, head), QKV[1:], zeros)
    if config.qk_norm:
        found["q_norm"] = ((head,), ("head_dim",), ones)
        found["k_norm"] = ((head,), ("head_dim",), ones)
    return found


def apply(scope: Scope, weights: Mapping[str, Array], cast: Mapping[str, Array], x: Array) -> Array:
    """What the block adds to the residual stream `x`."""
    config, place = scope.config, scope.place
    queries = weights["qkv"].shape[2] - 2
    # A product for each: to take a joint result apart, and to join what its gradient is made of, costs more.
    project = Projection(
        place,
        inputs=STREAM,
        weights=(QKV,),
        outputs=(("batch", None, *QKV[1:]),) * 3,
        before=scope.norm,
        recompute=scope.recomputes,
        rounded=scope.rounded,
        cut=Cut(2, (queries, 1, 1)),
    )
    q, k, v = project(x, [weights["qkv"]], [cast["qkv"]], weights["norm"])
    if config.qkv_bias:
        bias = lax.split(weights["qkv_bias"].astype(q.dtype), (queries, 1, 1), axis=1)
        q, k, v = (one + its for one, its in zip((q, k, v), bias, strict=True))
    q = place(q.reshape(*x.shape[:2], config.num_heads, config.head_size), *Q_HEADS)
    k, v = place(k.squeeze(-2), *KV_HEADS), place(v.squeeze(-2), *KV_HEADS)
    if config.qk_norm:
        q, k = scope.norm(q, weights["q_norm"]), scope.norm(k, weights["k_norm"])
    q, k = turned(q, *scope.turns), turned(k, *scope.turns)
    mixed = place(attend(scope, q, k, v), *Q_HEADS)
    close = Projection(place, Q_HEADS, (OUT,), (STREAM,), rounded=scope.rounded)
    return close(mixed, [weights["out"]], [cast["out"]])[0]


def attend(scope: Scope, q: Array, k: Array, v: Array) -> Array:
    """Attention of each position to itself and those before it, inside its own segment if there are any."""
    config = scope.config
    kernel = implementation(config, scope.place.platform)
    mask = None
    if scope.segments is not None:
        mask = scope.segments[:, None, :, None] == scope.segments[:, None, None, :]
    run: Callable[..., Array] = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)
    if kernel == "xla" and config.remat == "light":
        # The scores of all pairs of positions are not kept: the fused kernel does not keep them either.
        run = jax.checkpoint(run)
    return run(q, k, v, mask=mask)


def implementation(config: ModelConfig, platform: str) -> Literal["xla", "cudnn"]:
    """The kernel for a model on a kind of device."""
    if config.attention != "auto":
        return config.attention
    fits = (
        config.compute_dtype in ("bfloat16", "float16")
        and config.head_size % 8 == 0
        and config.head_size <= 128
    )
    return "cudnn" if fits and platform in ("gpu", "cuda") else "xla"
