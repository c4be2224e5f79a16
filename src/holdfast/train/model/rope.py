"""Rotary position embeddings, in the convention of Hugging Face: dim i is turned with dim i + half."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from holdfast.train.model.config import RopeScaling
from holdfast.train.model.projection import wide

Numpy = np.ndarray[Any, np.dtype[Any]]


def frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> Numpy:
    """Radians per position of each pair of dims, in float64."""
    plain: Numpy = theta ** -(np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if scaling is None:
        return plain
    length = 2 * math.pi / plain
    low = scaling.original_positions / scaling.low_freq_factor
    high = scaling.original_positions / scaling.high_freq_factor
    # Between the two wavelengths the stretch sets in linearly in the frequency.
    share = (scaling.original_positions / length - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - share) * plain / scaling.factor + share * plain
    return np.where(length > low, plain / scaling.factor, np.where(length < high, plain, between))


def turns(positions: Array, rates: Numpy, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Cosine and sine for each position and pair of dims: [batch, sequence, 1, head / 2]."""
    angles = positions.astype(dtype)[..., None, None] * jnp.asarray(rates, dtype)
    return jnp.cos(angles), jnp.sin(angles)


def turned(x: Array, cos: Array, sin: Array) -> Array:
    """`x` [batch, sequence, heads, head], each pair turned by its angle; computed in float32."""
    first, second = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
