"""What every kind of layer gets, and how its parameters begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
from jax import Array

from holdfast.train.mesh import Logical
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.norm import rms_norm
from holdfast.train.placement import Place

Init = Callable[[Array, tuple[int, ...], Any], Array]
"""New values for a parameter: `init(key, shape, dtype)`."""
Shapes = dict[str, tuple[tuple[int, ...], Logical, Init]]
"""The parameters of a layer by name: shape, logical dims, how they begin."""

STREAM: Logical = ("batch", "sequence", None)
"""The residual stream between two blocks."""


@final
@dataclass(frozen=True, slots=True)
class Scope:
    """What all layers of one pass share."""

    config: ModelConfig
    place: Place
    turns: tuple[Array, Array]
    """Cosine and sine of the rotary embedding at each position."""
    segments: Array | None
    """Which document each token is of; None: one attends to all before it."""

    @property
    def norm(self) -> Callable[[Array, Array], Array]:
        """The RMSNorm of this model."""
        return _norm(self.config.norm_eps)

    @property
    def recomputes(self) -> bool:
        """Whether what a product reads is computed again in the backward pass."""
        return self.config.remat == "light"

    @property
    def rounded(self) -> bool:
        """Whether weight gradients are made in the compute dtype."""
        return self.config.weight_grads == "compute"


class Kind(Protocol):
    """A module that makes a layer of a pattern: the parameters, and what it adds to the residual stream."""

    def shapes(self, config: ModelConfig) -> Shapes:
        """The parameters."""

    def apply(self, scope: Scope, weights: Mapping[str, Array], cast: Mapping[str, Array], x: Array) -> Array:
        """What the layer adds to the residual stream `x` [batch, sequence, hidden]; it norms its own input.

        `cast` has the same weights in the compute dtype.
        """


_NORMS: dict[float, Callable[[Array, Array], Array]] = {}


def _norm(eps: float) -> Callable[[Array, Array], Array]:
    # One object for each eps: it is part of the identity of a compiled product.
    return _NORMS.setdefault(eps, partial(rms_norm, eps=eps))


def ones(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Ones."""
    del key
    return jnp.ones(shape, dtype)


def zeros(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros."""
    del key
    return jnp.zeros(shape, dtype)


def normal(deviation: float, *, back: int = 1) -> Init:
    """Normal values, over the root of `back`: the blocks that add into the residual stream (as in GPT-2)."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        drawn: Array = jax.random.normal(key, shape, jnp.float32) * (deviation / back**0.5)
        return drawn.astype(dtype)

    return init
