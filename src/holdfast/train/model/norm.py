"""RMSNorm."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from holdfast.train.model.projection import wide


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """`x / rms(x) * scale` over the last dim, with float32 statistics, in the dtype of `x`."""
    full = x.astype(wide(x.dtype))
    mean = jnp.mean(jnp.square(full), axis=-1, keepdims=True)
    return (full * lax.rsqrt(mean + eps) * scale.astype(full.dtype)).astype(x.dtype)
