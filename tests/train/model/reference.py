"""The decoder in plain numpy, float64, one loop for each thing: what the real one is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.train.model.config import ModelConfig

Numpy = np.ndarray[Any, np.dtype[Any]]


def rms_norm(x: Numpy, scale: Numpy, eps: float) -> Numpy:
    out: Numpy = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
    return out


def rotate(x: Numpy, positions: Numpy, theta: float) -> Numpy:
    """`x` [sequence, heads, head], each pair (i, i + half) turned as a complex number."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) / half))[:, None]
    pairs = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], -1)


def attention(q: Numpy, k: Numpy, v: Numpy, segments: Numpy) -> Numpy:
    """One sample: [sequence, heads, head] and fewer key/value heads; causal, within segments."""
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for at in range(len(q)):
            seen = [other for other in range(at + 1) if segments[other] == segments[at]]
            scores = k[seen, head // group] @ q[at, head] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[at, head] = weights / weights.sum() @ v[seen, head // group]
    return out


def swiglu(gate: Numpy, up: Numpy) -> Numpy:
    out: Numpy = gate / (1 + np.exp(-gate)) * up
    return out


def logits(config: ModelConfig, params: dict[str, Any], batch: dict[str, Numpy]) -> Numpy:
    """[samples, sequence, vocabulary]."""
    samples = zip(batch["tokens"], batch["positions"], batch["segments"], strict=True)
    return np.stack([_sample(config, params, *one) for one in samples])


def _sample(
    config: ModelConfig, params: dict[str, Any], tokens: Numpy, positions: Numpy, segments: Numpy
) -> Numpy:
    x: Numpy = params["embed"][tokens]
    for at, symbol in enumerate(config.symbols):
        weights = params["layers"][str(at)]
        normed = rms_norm(x, weights["norm"], config.norm_eps)
        if symbol == "-":
            inner = swiglu(normed @ weights["gate"], normed @ weights["up"])
            x = x + inner @ weights["down"]
            continue
        qkv = np.einsum("sh,hkgd->skgd", normed, weights["qkv"])
        if config.qkv_bias:
            qkv = qkv + weights["qkv_bias"]
        q = qkv[:, :, :-2].reshape(len(x), config.num_heads, config.head_size)
        k, v = qkv[:, :, -2], qkv[:, :, -1]
        if config.qk_norm:
            q = rms_norm(q, weights["q_norm"], config.norm_eps)
            k = rms_norm(k, weights["k_norm"], config.norm_eps)
        q, k = (rotate(one, positions, config.rope_theta) for one in (q, k))
        x = x + np.einsum("snd,ndh->sh", attention(q, k, v, segments), weights["out"])
    head = params["embed" if config.tied else "head"]
    out: Numpy = rms_norm(x, params["norm"], config.norm_eps) @ head.T
    return out


def loss_sum(config: ModelConfig, params: dict[str, Any], batch: dict[str, Numpy]) -> float:
    """The sum of masked token losses."""
    out = logits(config, params, batch)
    top = out.max(-1, keepdims=True)
    total = np.log(np.exp(out - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(out, batch["targets"][..., None], -1)[..., 0]
    return float(((total - picked) * batch["mask"]).sum())
