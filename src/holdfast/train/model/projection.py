"""Matrix products with stored weights: the one place where precision, sharding and recomputation are decided.

Autodiff alone would make a weight's gradient in the compute dtype, place every gradient like the value it
belongs to (so that a gathered weight gets a whole gradient), and keep the normalised input of each product.
Here instead:

- a weight's gradient is made in float32 unless asked otherwise, and lies where gradients rest
  (`Place.grad`), so that the sum over copies is a reduce-scatter from ZeRO 2 on;
- an input whose sequence is split rests in its shards and is gathered for each of the two products that read
  it; its gradient is scattered again (sequence parallelism, as in Korthikanti et al. 2022);
- of what is applied before the products (a norm, SwiGLU) the result is kept or computed again, as asked;
  the float32 values inside of it are never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import Array, lax

from holdfast.train.mesh import Logical
from holdfast.train.placement import Place

Arrays = tuple[Array, ...]

barrier: Any = lax.optimization_barrier
"""What comes out is computed before anything that needs any of it; the compiler does not look through."""


class Cut(NamedTuple):
    """Where a weight is cut for its products."""

    dim: int
    sizes: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Projection:
    """`before(x) @ weight` for each of several weights, over the dims of `x` after batch and sequence.

    A weight that is cut has a product for each part, but is stored and gathered as one.
    """

    place: Place
    inputs: Logical
    """Logical dims of what is multiplied, where it rests; `sequence` is gathered for the product."""
    weights: tuple[Logical, ...]
    outputs: tuple[Logical, ...]
    """Logical dims of each result, where it rests; those of a weight's parts follow each other."""
    before: Callable[..., Array] | None = None
    """Applied first: `before(x, *extra)`."""
    recompute: bool = True
    """Whether the result of `before` is computed again in the backward pass, or kept."""
    rounded: bool = False
    """Whether the gradients of the weights are products in the compute dtype, as autodiff would make them."""
    cut: Cut | None = None
    """How each weight is cut; None: it is not."""

    def __call__(self, x: Array, weights: Sequence[Array], cast: Sequence[Array], *extra: Array) -> Arrays:
        """The products. `cast` are the weights in the compute dtype (see `cast_weight`)."""
        return _project(self, x, tuple(weights), tuple(cast), extra)

    def applied(self, x: Array, extra: Arrays) -> Array:
        """What is multiplied, where it rests."""
        return x if self.before is None else self.before(x, *extra)

    def gathered(self, applied: Array) -> Array:
        """What is multiplied, with its whole sequence.

        It is placed where it rests first: the compiler would else gather the float32 values inside of
        `before`, which are twice the bytes.
        """
        resting = self.place(applied, *self.inputs)
        return self.place(resting, *_whole(self.inputs)) if "sequence" in self.inputs else resting

    def parts(self, weight: Array) -> Sequence[Array]:
        """The parts of a weight that are multiplied one by one."""
        return [weight] if self.cut is None else lax.split(weight, self.cut.sizes, axis=self.cut.dim)

    def joined(self, parts: Sequence[Array]) -> Array:
        """The weight that has these parts."""
        return parts[0] if self.cut is None else lax.concatenate(parts, self.cut.dim)


def cast_weight(weight: Array, dtype: str) -> Array:
    """`weight` in the dtype of the products; no gradient flows through it: `Projection` makes its own."""
    return lax.stop_gradient(weight).astype(dtype)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype that statistics and sums over tokens are made in: float32, or wider if `dtype` is."""
    return jnp.promote_types(dtype, jnp.float32)


def _whole(logical: Logical) -> Logical:
    return tuple(None if name == "sequence" else name for name in logical)


def _dims(start: int, stop: int) -> tuple[int, ...]:
    return tuple(range(start, stop))


def _products(one: Projection, applied: Array, cast: Arrays) -> Arrays:
    place = one.place
    left = one.gathered(applied)
    dims = ((_dims(2, left.ndim), _dims(0, left.ndim - 2)), ((), ()))
    weights = (place(right, *logical) for right, logical in zip(cast, one.weights, strict=True))
    parts = [part for weight in weights for part in one.parts(weight)]
    return tuple(
        place(lax.dot_general(left, part, dims), *out) for part, out in zip(parts, one.outputs, strict=True)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(one: Projection, x: Array, weights: Arrays, cast: Arrays, extra: Arrays) -> Arrays:
    del weights
    return _products(one, one.applied(x, extra), cast)


_Residuals = tuple[Array, Array | None, Arrays, Arrays, Arrays]


def _forward(
    one: Projection, x: Array, weights: Arrays, cast: Arrays, extra: Arrays
) -> tuple[Arrays, _Residuals]:
    applied = one.applied(x, extra)
    kept = None if one.recompute or one.before is None else applied
    # The weights themselves are arguments of the step: as residuals they cost nothing, and say their dtype.
    return _products(one, applied, cast), (x, kept, weights, cast, extra)


def _backward(
    one: Projection, residuals: _Residuals, grads: Arrays
) -> tuple[Array, Arrays, tuple[None, ...], Arrays]:
    x, kept, weights, cast, extra = residuals
    place = one.place
    if one.before is not None and one.recompute:
        # Without the barrier the compiler would find the forward pass's value to be the same, and keep it.
        x, grads = barrier((x, grads))
    if place.gathers:
        # Likewise: a gathered weight would stay from the forward pass on, of every layer at once.
        cast, grads = barrier((cast, grads))
    applied, pull = jax.vjp(one.applied, x, extra)
    left = one.gathered(applied if kept is None else kept)
    of_applied: Array | None = None
    of_weights = []
    coming = iter(zip(grads, one.outputs, strict=True))
    for weight, right, logical in zip(weights, cast, one.weights, strict=True):
        parts, of_parts = one.parts(place(right, *logical)), []
        for part, (grad, out) in zip(parts, islice(coming, len(parts)), strict=True):
            grad = place(grad, *_whole(out))
            dims = ((_dims(2, grad.ndim), _dims(left.ndim - 2, weight.ndim)), ((), ()))
            of_left = lax.dot_general(grad, part, dims)
            of_applied = of_left if of_applied is None else of_applied + of_left
            of_part = lax.dot_general(
                left,
                grad,
                (((0, 1), (0, 1)), ((), ())),
                preferred_element_type=None if one.rounded else wide(weight.dtype),
            )
            of_parts.append(of_part)
        of_weights.append(place.grad(one.joined(of_parts).astype(weight.dtype), *logical))
    assert of_applied is not None
    of_x, of_extra = pull(place(of_applied.astype(applied.dtype), *one.inputs))
    return of_x, tuple(of_weights), (None,) * len(cast), of_extra


_project.defvjp(_forward, _backward)
