"""Token embeddings: a row for each token, and a gradient that is the same bits every time.

The usual gradient adds rows into the table as they come, which on a GPU is in no fixed order. Here tokens are
sorted, the rows of equal tokens are summed in that order, and each sum is written once. Under a mesh both
directions say themselves what each device does: the compiler's own way through a split table may gather it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from holdfast.train.mesh import DATA, FSDP, TENSOR, Rules
from holdfast.train.model.projection import wide
from holdfast.train.placement import Place

TABLE = ("vocab", "embed")

# Untyped in JAX.
_spec: Any = PartitionSpec
_psum: Any = lax.psum
_psum_scatter: Any = lax.psum_scatter

_BLOCK = 128
"""Sorted tokens whose rows are summed by one small matrix product."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def embed(place: Place, table: Array, cast: Array, tokens: Array) -> Array:
    """Rows of `cast`, which is `table` in the compute dtype; the gradient is `table`'s."""
    del table
    return _rows(place, cast, tokens)


def _forward(place: Place, table: Array, cast: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows(place, cast, tokens), (table, tokens)


def _backward(place: Place, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, None, None]:
    table, tokens = residuals
    return _table_grad(place, table, tokens, grad).astype(table.dtype), None, None


embed.defvjp(_forward, _backward)


def _rows(place: Place, cast: Array, tokens: Array) -> Array:
    if place.mesh is None:
        return cast[tokens]
    rules = place.rules
    split = rules.computed(("batch", "sequence", None))

    def local(cast: Array, tokens: Array) -> Any:
        # Each device of the tensor axis has some rows of the table; of all but one, the rows are zeros.
        row = tokens - cast.shape[0] * lax.axis_index(TENSOR)
        found: Array = jnp.where(((row >= 0) & (row < cast.shape[0]))[..., None], cast[row], 0)
        if rules.sequence_parallel:
            return _psum_scatter(found, TENSOR, scatter_dimension=1, tiled=True)
        return _sum(found, TENSOR, rules)

    specs = _spec(*rules.computed(TABLE)), _spec(*rules.computed(("batch", None)))
    run = jax.shard_map(local, mesh=place.mesh, in_specs=specs, out_specs=_spec(*split), check_vma=False)
    rows: Array = run(cast, tokens)
    return rows


def _table_grad(place: Place, table: Array, tokens: Array, grad: Array) -> Array:
    if place.mesh is None:
        return row_sums(tokens, grad, table.shape[0], wide(table.dtype))
    rules = place.rules
    resting = rules.computed(TABLE) if place.zero == 1 else rules.stored(TABLE, table.shape)
    num_rows = table.shape[0] // rules.size(TENSOR)

    def local(tokens: Array, grad: Array) -> Any:
        row = tokens - num_rows * lax.axis_index(TENSOR)
        sums = _sum(row_sums(row, grad, num_rows, wide(table.dtype)), DATA, rules)
        if FSDP in resting:
            return _psum_scatter(sums, FSDP, scatter_dimension=resting.index(FSDP), tiled=True)
        return _sum(sums, FSDP, rules)

    batch = _spec(*rules.computed(("batch", None, None)))
    run = jax.shard_map(
        local, mesh=place.mesh, in_specs=(batch, batch), out_specs=_spec(*resting), check_vma=False
    )
    sums: Array = run(tokens[..., None], grad)
    return sums


def _sum(x: Array, axis: str, rules: Rules) -> Any:
    return _psum(x, axis) if rules.size(axis) > 1 else x  # XLA would keep a sum over one


def row_sums(tokens: Array, grad: Array, num_rows: int, dtype: jnp.dtype) -> Array:
    """[num_rows, hidden]: for each row the sum of `grad` where `tokens` is it; other tokens are left out."""
    flat, rows = tokens.reshape(-1), grad.reshape(-1, grad.shape[-1])
    flat = jnp.where((flat >= 0) & (flat < num_rows), flat, num_rows)
    more = -flat.size % _BLOCK
    ids, order = lax.sort_key_val(flat, jnp.arange(flat.size, dtype=jnp.int32))
    ids = jnp.concatenate([ids, jnp.full(more, num_rows, ids.dtype)]).reshape(-1, _BLOCK)
    rows = jnp.concatenate([rows[order], jnp.zeros((more, rows.shape[1]), rows.dtype)])
    rows = rows.reshape(-1, _BLOCK, rows.shape[1])
    sums = _running(ids, rows, dtype)
    flat, sums = ids.reshape(-1), sums.reshape(-1, rows.shape[2])
    last = jnp.concatenate([flat[1:] != flat[:-1], jnp.ones(1, bool)])
    # Only the last of equal tokens has the whole sum. The others get rows beyond the table, each its own.
    target = jnp.where(last, flat, num_rows + 1 + jnp.arange(flat.size, dtype=flat.dtype))
    return jnp.zeros((num_rows, rows.shape[2]), dtype).at[target].set(sums, mode="drop", unique_indices=True)


def _running(ids: Array, rows: Array, dtype: jnp.dtype) -> Array:
    """For each place the sum of the rows of equal ids up to it; `ids` [blocks, block] are sorted."""
    before = (ids[:, :, None] == ids[:, None, :]) & jnp.tril(jnp.ones((_BLOCK, _BLOCK), bool))
    sums = lax.dot_general(
        before.astype(rows.dtype),
        rows,
        (((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
    # What a block begins with may have begun in the block before, or before that one if it is all of one id.
    joins = jnp.concatenate([jnp.zeros(1, bool), ids[1:, 0] == ids[:-1, -1]])
    through = joins & jnp.concatenate([jnp.zeros(1, bool), ids[:-1, 0] == ids[:-1, -1]])
    brought = jnp.concatenate([jnp.zeros_like(sums[:1, -1]), sums[:-1, -1]])
    brought = jnp.where(joins[:, None], brought, 0)

    def chain(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] & second[0], second[1] + jnp.where(second[0][:, None], first[1], 0)

    _, carried = lax.associative_scan(chain, (through, brought))
    return sums + jnp.where((ids == ids[:, :1])[..., None], carried[:, None], 0)
