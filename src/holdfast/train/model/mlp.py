"""The gated MLP: SwiGLU (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax import Array

from holdfast.train.model.config import ModelConfig
from holdfast.train.model.layer import STREAM, Scope, Shapes, normal, ones
from holdfast.train.model.projection import Projection, wide

UP = ("embed", "mlp")
DOWN = ("mlp", "embed")
INNER = ("batch", None, "mlp")


def shapes(config: ModelConfig) -> Shapes:
    """The parameters of an MLP block: shape, logical dims and how they begin."""
    hidden, inner = config.hidden, config.mlp_hidden
    return {
        "norm": ((hidden,), ("embed",), ones),
        "gate": ((hidden, inner), UP, normal(config.init_std)),
        "up": ((hidden, inner), UP, normal(config.init_std)),
        "down": ((inner, hidden), DOWN, normal(config.init_std, back=len(config.symbols))),
    }


def apply(scope: Scope, weights: Mapping[str, Array], cast: Mapping[str, Array], x: Array) -> Array:
    """What the block adds to the residual stream `x`."""
    place, asked = scope.place, (scope.recomputes, scope.rounded)
    widen = Projection(place, STREAM, (UP, UP), (INNER, INNER), scope.norm, *asked)
    both = ("gate", "up")
    gate, up = widen(x, [weights[name] for name in both], [cast[name] for name in both], weights["norm"])
    narrow = Projection(place, INNER, (DOWN,), (STREAM,), swiglu, *asked)
    return narrow(gate, [weights["down"]], [cast["down"]], up)[0]


def swiglu(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`, computed in float32."""
    full = gate.astype(wide(gate.dtype))
    return (jax.nn.silu(full) * up.astype(full.dtype)).astype(gate.dtype)
