"""The state as JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from bench.checkpoint.state import StateSpec, host_arrays


def ready(tree: Any) -> Any:
    """The tree, once all its arrays are computed."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def on_device(spec: StateSpec) -> dict[str, jax.Array]:
    """The state on the default device, in memory of JAX's own."""
    found: dict[str, jax.Array] = ready({n: jax.numpy.array(a, copy=True) for n, a in host_arrays(spec)})
    return found


def described(state: Mapping[str, jax.Array], shardings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Shape, dtype and sharding of every array: what a loader is asked for."""
    return {
        name: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            a.shape, a.dtype, sharding=a.sharding if shardings is None else shardings[name]
        )
        for name, a in state.items()
    }
