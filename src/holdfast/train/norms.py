"""Norms of trees of global arrays: right under every sharding, and every rank joins every reduction.

They are written over whole arrays and left to XLA to partition. So no rank can leave a sum out because it
holds no part of an array, and nothing is counted twice where an array is replicated: the two ways in which
norms that are put together by hand, group by group, have gone wrong.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def squares(tree: Any) -> jax.Array:
    """The sum of the squares of all elements, in float32, added array by array in the order of the tree."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(tree):
        total = total + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    return total


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all elements of a tree together, in float32."""
    return jnp.sqrt(squares(tree))


def clip_factor(norm: jax.Array, limit: float) -> jax.Array:
    """What to multiply a gradient of this norm by so that it is no longer than `limit`; 0: no limit.

    As megatron-core has it: limit / (norm + 1e-6), where that is below one.
    """
    if not limit:
        return jnp.ones((), jnp.float32)
    return jnp.minimum(1.0, limit / (norm + 1e-6))
