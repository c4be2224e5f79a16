"""The token loss: cross entropy as two sums, which may be added up over any split of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import jax
import jax.numpy as jnp
from jax import Array, lax

from holdfast.train.model.decoder import Decoder, Params
from holdfast.train.model.embedding import TABLE
from holdfast.train.model.projection import cast_weight, wide
from holdfast.train.placement import NOWHERE, Place


def loss_sums(
    model: Decoder, params: Params, batch: Mapping[str, Array], place: Place = NOWHERE
) -> tuple[Array, Array]:
    """The sum of the losses of all tokens whose mask is 1, and how many they are; both float32.

    `batch` has `tokens`, `targets` and `mask`, and may have `positions` and `segments`: with segments a token
    attends only to its own document. Gradients are those of the sum: whoever has all sums divides once.
    """
    features = model.features(params, batch["tokens"], batch.get("positions"), batch.get("segments"), place)
    head = model.head(params)
    spec = _Spec(place, model.config.loss_chunk)
    cast = cast_weight(head, model.config.compute_dtype)
    mask = batch["mask"].astype(jnp.float32)
    return _cross_entropy(spec, features, head, cast, batch["targets"], mask), jnp.sum(mask)


_Pieces = tuple[Array, Array, Array]


@final
@dataclass(frozen=True, slots=True)
class _Spec:
    place: Place
    chunk: int


def _logits(spec: _Spec, x: Array, cast: Array) -> Array:
    """[samples, positions, vocabulary] in the compute dtype: the one copy of that size."""
    place = spec.place
    logits = lax.dot_general(place(x, "batch", None, None), place(cast, *TABLE), (((2,), (1,)), ((), ())))
    return place(logits, "batch", None, "vocab")


def _losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """The loss of each token, and the logarithm of its sum of exponentials; float32."""
    full = logits.astype(wide(logits.dtype))
    total = jax.nn.logsumexp(full, axis=-1)
    # A sum over a comparison and no gather: it fuses, and works where the vocabulary is split.
    return total - jnp.sum(jnp.where(_is_target(logits, targets), full, 0), axis=-1), total


def _is_target(logits: Array, targets: Array) -> Array:
    return lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]


def _grads(
    spec: _Spec, x: Array, cast: Array, logits: Array, total: Array, targets: Array, scale: Array
) -> tuple[Array, Array]:
    """The gradients of `x` and of the head (float32), from the logits."""
    place = spec.place
    full = jnp.exp(logits.astype(total.dtype) - total[..., None])
    full = (full - _is_target(logits, targets)) * scale[..., None]
    of_logits = place(full.astype(logits.dtype), "batch", None, "vocab")
    of_x = lax.dot_general(of_logits, place(cast, *TABLE), (((2,), (0,)), ((), ())))
    of_head = lax.dot_general(
        of_logits,
        place(x, "batch", None, None),
        (((0, 1), (0, 1)), ((), ())),
        preferred_element_type=total.dtype,
    )
    return of_x, place.grad(of_head, *TABLE)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(spec: _Spec, x: Array, head: Array, cast: Array, targets: Array, mask: Array) -> Array:
    del head
    if not spec.chunk:
        return jnp.sum(_losses(_logits(spec, x, cast), targets)[0] * mask)

    def chunk(total: Array, piece: _Pieces) -> tuple[Array, None]:
        x, targets, mask = piece
        return total + jnp.sum(_losses(_logits(spec, x, cast), targets)[0] * mask), None

    return lax.scan(chunk, jnp.zeros((), wide(x.dtype)), _pieces(spec, x, targets, mask))[0]


def _forward(
    spec: _Spec, x: Array, head: Array, cast: Array, targets: Array, mask: Array
) -> tuple[Array, tuple[Array, ...]]:
    if spec.chunk:
        return _forward_chunked(spec, x, head, cast, targets, mask)
    logits = _logits(spec, x, cast)
    losses, total = _losses(logits, targets)
    return jnp.sum(losses * mask), (x, head, cast, targets, mask, logits, total)


def _forward_chunked(
    spec: _Spec, x: Array, head: Array, cast: Array, targets: Array, mask: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Gradients of a chunk are made beside its loss, for a factor of 1: its logits exist once, briefly."""

    def chunk(sums: tuple[Array, Array], piece: _Pieces) -> tuple[tuple[Array, Array], Array]:
        x, targets, mask = piece
        logits = _logits(spec, x, cast)
        losses, total = _losses(logits, targets)
        of_x, of_head = _grads(spec, x, cast, logits, total, targets, mask)
        return (sums[0] + jnp.sum(losses * mask), sums[1] + of_head), of_x

    zero = (jnp.zeros((), wide(x.dtype)), spec.place.grad(jnp.zeros(head.shape, wide(head.dtype)), *TABLE))
    (loss, of_head), of_x = lax.scan(chunk, zero, _pieces(spec, x, targets, mask))
    return loss, (jnp.moveaxis(of_x, 0, 1).reshape(x.shape), of_head, head)


def _pieces(spec: _Spec, x: Array, targets: Array, mask: Array) -> _Pieces:
    """Each array cut along the sequence into chunks, which lead."""
    length = x.shape[1]
    size = min(spec.chunk, length)
    if length % size:
        size = next(n for n in range(size, 0, -1) if length % n == 0)
    x = spec.place(x, "batch", None, None)

    def cut(one: Array) -> Array:
        return jnp.moveaxis(one.reshape(one.shape[0], length // size, size, *one.shape[2:]), 1, 0)

    return cut(x), cut(targets), cut(mask)


def _backward(
    spec: _Spec, residuals: tuple[Array, ...], grad: Array
) -> tuple[Array, Array, None, None, None]:
    place = spec.place
    if spec.chunk:
        of_x, of_head, head = residuals
        of_x, of_head = (of_x * grad.astype(of_x.dtype)), of_head * grad
    else:
        x, head, cast, targets, mask, logits, total = residuals
        of_x, of_head = _grads(spec, x, cast, logits, total, targets, mask * grad)
    return place(of_x, "batch", "sequence", None), of_head.astype(head.dtype), None, None, None


_cross_entropy.defvjp(_forward, _backward)
