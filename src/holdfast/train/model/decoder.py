"""The decoder: embedding, residual blocks in the order of a pattern, a last norm, the output projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import Array

from holdfast.train.model import attention, mlp
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.embedding import TABLE, embed
from holdfast.train.model.layer import STREAM, Kind, Scope, Shapes, normal, ones
from holdfast.train.model.norm import rms_norm
from holdfast.train.model.pattern import ATTENTION, MLP
from holdfast.train.model.projection import Projection, barrier, cast_weight, wide
from holdfast.train.model.rope import frequencies, turns
from holdfast.train.placement import NOWHERE, Place

KINDS: Mapping[str, Kind] = {ATTENTION: attention, MLP: mlp}
"""What builds the layer of each symbol."""

Params = dict[str, Any]
"""Arrays in nested dicts: `embed`, `layers` by number, `norm`, and `head` unless it is tied."""


@final
class Decoder:
    """A decoder language model. It holds no arrays: parameters are given to each call."""

    __slots__ = ("config",)

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def init(self, key: Array) -> Params:
        """New parameters. The same key gives the same values, on any mesh and however layers are compiled."""
        config = self.config
        ends = _named(self._ends(), jax.random.fold_in(key, 0), config.param_dtype)
        keys = [jax.random.fold_in(key, 1 + layer) for layer in range(len(config.symbols))]
        if config.layers == "unrolled":
            layers = {
                str(at): _named(KINDS[symbol].shapes(config), keys[at], config.param_dtype)
                for at, symbol in enumerate(config.symbols)
            }
        else:
            unit = len(config.pattern)
            layers = {
                str(at): jax.vmap(partial(_named, KINDS[symbol].shapes(config), dtype=config.param_dtype))(
                    jnp.stack(keys[at::unit])
                )
                for at, symbol in enumerate(config.pattern)
            }
        return {**ends, "layers": layers}

    def axes(self) -> Params:
        """The logical dims of each parameter, in the shape of the parameters."""
        config = self.config
        scanned = config.layers == "scanned"
        layers = {
            str(at): {
                name: ("layers", *logical) if scanned else logical
                for name, (_, logical, _) in KINDS[symbol].shapes(config).items()
            }
            for at, symbol in enumerate(config.pattern if scanned else config.symbols)
        }
        return {**{name: logical for name, (_, logical, _) in self._ends().items()}, "layers": layers}

    def shapes(self) -> Params:
        """Shape and dtype of each parameter; nothing is computed."""
        shapes: Params = jax.eval_shape(self.init, jax.random.key(0))
        return shapes

    def features(
        self,
        params: Params,
        tokens: Array,
        positions: Array | None = None,
        segments: Array | None = None,
        place: Place = NOWHERE,
    ) -> Array:
        """The residual stream after the last norm: [samples, sequence, hidden] in the compute dtype."""
        config = self.config
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]
        rates = frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        scope = Scope(config, place, turns(positions, rates, wide(jnp.dtype(config.compute_dtype))), segments)
        x = embed(place, params["embed"], cast_weight(params["embed"], config.compute_dtype), tokens)
        run = self._scanned if config.layers == "scanned" else self._unrolled
        x = run(scope, params["layers"], x)
        return rms_norm(x, params["norm"], config.norm_eps)

    def apply(
        self,
        params: Params,
        tokens: Array,
        positions: Array | None = None,
        segments: Array | None = None,
        place: Place = NOWHERE,
    ) -> Array:
        """Logits [samples, sequence, vocabulary] in the compute dtype.

        `positions` default to 0, 1, 2, ...; with `segments` a token attends only to its own segment.
        """
        features = self.features(params, tokens, positions, segments, place)
        head = self.head(params)
        cast = cast_weight(head, self.config.compute_dtype)
        project = Projection(place, STREAM, (TABLE[::-1],), (("batch", None, "vocab"),))
        return project(features, [head.T], [cast.T])[0]

    def head(self, params: Params) -> Array:
        """The output projection [vocabulary, hidden]: the embedding itself if they are tied."""
        head: Array = params["embed" if self.config.tied else "head"]
        return head

    def _ends(self) -> Shapes:
        config = self.config
        table = ((config.vocab_size, config.hidden), TABLE, normal(config.init_std))
        ends: Shapes = {"embed": table, "norm": ((config.hidden,), ("embed",), ones)}
        return ends if config.tied else {**ends, "head": table}

    def _unrolled(self, scope: Scope, layers: Params, x: Array) -> Array:
        for at, symbol in enumerate(self.config.symbols):
            weights = layers[str(at)]
            x = self._block(scope, symbol)(weights, self._cast(weights), x)
        return x

    def _scanned(self, scope: Scope, layers: Params, x: Array) -> Array:
        blocks = [(str(at), self._block(scope, symbol)) for at, symbol in enumerate(self.config.pattern)]

        def unit(x: Array, both: tuple[Params, Params]) -> tuple[Array, None]:
            weights, cast = both
            for at, block in blocks:
                x = block(weights[at], cast[at], x)
            return x, None

        cast = {at: self._cast(weights, lead=1) for at, weights in layers.items()}
        return jax.lax.scan(unit, x, (layers, cast))[0]

    def _cast(self, weights: Mapping[str, Array], *, lead: int = 0) -> dict[str, Array]:
        """Matrices in the compute dtype, once for both passes; norms and biases stay as they are."""
        dtype = self.config.compute_dtype
        return {name: cast_weight(one, dtype) for name, one in weights.items() if one.ndim > 1 + lead}

    def _block(self, scope: Scope, symbol: str) -> Callable[[Params, Mapping[str, Array], Array], Array]:
        kind = KINDS[symbol]

        def block(weights: Params, cast: Mapping[str, Array], x: Array) -> Array:
            # On a GPU the product would add into a copy of `x`, which is needed later; it is cheaper to add
            # where the next norm reads both. The barrier keeps the two apart.
            added = barrier(kind.apply(scope, weights, cast, x))
            return scope.place(x + added, *STREAM)

        return jax.checkpoint(block) if self.config.remat == "full" else block


def _named(shapes: Shapes, key: Array, dtype: str) -> dict[str, Array]:
    """New values for the parameters of a layer, each from its own key."""
    return {
        name: init(jax.random.fold_in(key, at), shape, dtype)
        for at, (name, (shape, _, init)) in enumerate(sorted(shapes.items()))
    }
