"""The change of the parameters in one step. Pure and jittable: no clock, no file, no random number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax

from holdfast.arrays import flatten_tree, match
from holdfast.train.flat import FlatShards, first_sharding
from holdfast.train.norms import clip_factor, global_norm

if TYPE_CHECKING:
    from holdfast.train.optimizer import OptimizerConfig


class OptimizerState(NamedTuple):
    """What an optimizer remembers: float32 copies of parameters that are not, and what optax keeps."""

    main: Any
    """As the parameters, None where the parameter itself is float32."""
    inner: Any


@final
class Optimizer:
    """Clips, asks optax for a direction, decays, and steps along it; all in float32."""

    def __init__(self, config: OptimizerConfig, transformation: Any = None) -> None:
        self.config = config
        self._inner = transformation if transformation is not None else _adam(config)

    def init(self, params: Any) -> OptimizerState:
        """The state before the first step."""
        main = jax.tree.map(lambda p: None if p.dtype == jnp.float32 else p.astype(jnp.float32), params)
        flat = self._flat(params)
        moments = _in_float32(params) if flat is None else flat.packed(params)
        return OptimizerState(main, self._inner.init(moments))

    def like(self, params: Any, per_param: Any, other: Any) -> Any:
        """A tree like the state: `per_param`'s leaf where it belongs to a parameter, else `other`.

        `params` may be shapes; `per_param` is a tree like them, of shardings for example.
        """
        state = jax.eval_shape(self.init, params)
        main = jax.tree.map(lambda p, one: None if p.dtype == jnp.float32 else one, params, per_param)
        flat = self._flat(params)
        if flat is None:
            owned = owners(state.inner, params)
            values = flatten_tree(per_param).leaves
        else:
            owned = owners(state.inner, jax.eval_shape(flat.packed, params))
            values = flatten_tree(flat.shardings(first_sharding(per_param))).leaves
        leaves = [other if owner is None else values[owner] for owner in owned]
        return OptimizerState(main, flatten_tree(state.inner).rebuild(leaves))

    def update(
        self, params: Any, state: OptimizerState, grad_sum: Any, token_count: Any, rate: Any, decay: Any
    ) -> tuple[Any, OptimizerState, dict[str, jax.Array]]:
        """Parameters and state after a step, and what there is to know of it.

        `grad_sum` is the sum over all tokens of the batch, of which there are `token_count`. Metrics:
        grad_norm (before clipping), param_norm (before the step), clipped and skipped (0 or 1).
        """
        old = jax.tree.map(lambda p, main: p if main is None else main, params, _full(params, state.main))
        scale = 1.0 / jnp.maximum(jnp.asarray(token_count, jnp.float32), 1.0)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grad_sum)
        norm = global_norm(grads)
        factor = clip_factor(norm, self.config.clip)
        updates, inner = self._direction(jax.tree.map(lambda g: g * factor, grads), state.inner, old)
        new = jax.tree.map(
            lambda p, u, decays: p + rate * (u - decay * p if decays else u),
            old,
            updates,
            self.decayed(params),
        )
        finite = jnp.isfinite(norm)
        if self.config.skip_nonfinite:
            new = _where(finite, new, old)
            inner = _where(finite, inner, state.inner)
        metrics = {
            "grad_norm": norm,
            "param_norm": global_norm(old),
            "clipped": (factor < 1.0).astype(jnp.float32),
            "skipped": 1.0 - finite.astype(jnp.float32),
        }
        after = jax.tree.map(lambda p, one: one.astype(p.dtype), params, new)
        main = jax.tree.map(lambda p, one: None if p.dtype == jnp.float32 else one, params, new)
        return after, OptimizerState(main, inner), metrics

    def _direction(self, grads: Any, inner: Any, old: Any) -> tuple[Any, Any]:
        """What optax would add to the parameters at a rate of one, and its state after that."""
        flat = self._flat(old)
        if flat is None:
            updates, inner = self._inner.update(grads, inner, old)
            return updates, inner
        updates, inner = self._inner.update(flat.packed(grads), inner, flat.packed(old))
        return flat.unpacked(updates), inner

    def _flat(self, params: Any) -> FlatShards | None:
        return FlatShards(params, self.config.flat_shards) if self.config.flat_shards else None

    def decayed(self, params: Any) -> Any:
        """A tree like the parameters: whether each decays."""
        return matching(params, self.config.no_decay, found=False)


def matching(tree: Any, patterns: tuple[str, ...], *, found: bool = True) -> Any:
    """A tree of the same structure: `found` where the leaf's name matches a pattern, else the contrary."""
    flat = flatten_tree(tree)
    return flat.rebuild([match(patterns, name) == found for name in flat.names()])


def owners(state: Any, params: Any) -> list[int | None]:
    """For each leaf of optax's state, the number of the parameter that it lies beside; None: of none.

    It is one that has the parameter's shape and whose name ends in the parameter's: `0/mu/layers/3/up`. So it
    is found in every transformation, whatever that wraps it in; what is factored or counted is nobody's.
    """
    flat, own = flatten_tree(state), flatten_tree(params)
    by_name = {tuple(name.split("/")): number for number, name in enumerate(own.names())}
    found: list[int | None] = []
    for name, leaf in zip(flat.names(), flat.leaves, strict=True):
        parts = tuple(name.split("/"))
        ends = (by_name.get(parts[at:]) for at in range(len(parts)))
        alike = (one for one in ends if one is not None and own.leaves[one].shape == leaf.shape)
        found.append(next(alike, None))
    return found


def _adam(config: OptimizerConfig) -> Any:
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=jnp.float32)
    return optax.chain(adam, optax.scale(-1.0))


def _in_float32(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


def _full(params: Any, main: Any) -> Any:
    """`main` with a place for every parameter: None is no leaf to JAX."""
    leaves = jax.tree.leaves(main, is_leaf=lambda one: one is None)
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _where(condition: jax.Array, these: Any, those: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), these, those)
