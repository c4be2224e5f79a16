"""The jitted functions that a step is made of.

A batch goes through the model in microbatches of one fixed shape: `first` makes the sums of one, `more` adds
those of the next, in order, and `apply` changes the parameters by them. So a batch that grows changes how
often `more` runs, and compiles nothing. `fused` is all of it for a batch that is one microbatch, in one
program: XLA sees the whole step and keeps no gradients between two calls.

    first(params, micro)            sums
    more(sums, params, micro)       sums          the sums given are donated
    apply(state, sums, rate, decay) state, metrics    the state given is donated
    fused(state, micro, rate, decay) state, metrics   the state given is donated

Sums are over tokens, never means: whoever has all of them divides once, by the count of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.train.config import TrainConfig
from holdfast.train.determinism import compiler_options
from holdfast.train.loss import loss_sums
from holdfast.train.model.decoder import Decoder
from holdfast.train.placement import Layout
from holdfast.train.update import Optimizer, matching

KEYS: Final = ("tokens", "targets", "mask")
"""The arrays of a batch that every model reads."""
SEPARATE: Final = ("positions", "segments")
"""What it reads besides where documents are kept apart."""

Sums = dict[str, Any]
"""`grads` like the parameters, `loss` and `tokens`: all of them sums over tokens."""
State = dict[str, Any]
"""`params` and `opt`."""


@final
class Steps:
    """The programs of one run on one mesh. Nothing is compiled before it is called."""

    def __init__(
        self,
        config: TrainConfig,
        model: Decoder,
        layout: Layout,
        optimizer: Optimizer,
        *,
        separate: bool = False,
    ) -> None:
        self.config = config
        self.model = model
        self.layout = layout
        self.optimizer = optimizer
        self.keys = (*KEYS, *SEPARATE) if separate else KEYS
        platform = layout.mesh.devices.flat[0].platform
        options = compiler_options(platform, deterministic=config.deterministic)
        self.first = jax.jit(self._first, out_shardings=self.sums_shardings, compiler_options=options)
        self.more = jax.jit(
            self._more, out_shardings=self.sums_shardings, donate_argnums=0, compiler_options=options
        )
        after = (self.shardings, None)
        self.apply = jax.jit(self._apply, out_shardings=after, donate_argnums=0, compiler_options=options)
        self.fused = jax.jit(self._fused, out_shardings=after, donate_argnums=0, compiler_options=options)
        self.losses = jax.jit(self._losses, compiler_options=options)
        self.made = jax.jit(self._init, out_shardings=self.shardings)

    # ---- what goes in and comes out

    @cached_property
    def shapes(self) -> State:
        """Shape and dtype of each array of the state."""
        params = self.model.shapes()
        return {"params": params, "opt": jax.eval_shape(self.optimizer.init, params)}

    @cached_property
    def shardings(self) -> State:
        """Where each array of the state rests."""
        axes, params = self.model.axes(), self.shapes["params"]
        at_rest = self.layout.optimizer(axes, params)
        return {
            "params": self.layout.params(axes, params),
            "opt": self.optimizer.like(params, at_rest, self.layout.replicated()),
        }

    @cached_property
    def sums_shardings(self) -> Sums:
        """Where each array of the sums rests."""
        whole = self.layout.replicated()
        grads = self.layout.grads(self.model.axes(), self.shapes["params"])
        return {"grads": grads, "loss": whole, "tokens": whole}

    @cached_property
    def sums_shapes(self) -> Sums:
        """Shape and dtype of each array of the sums."""
        copies = self.layout.config.data * self.layout.config.fsdp  # the fewest samples that they can share
        sums: Sums = jax.eval_shape(self._first, self.shapes["params"], self._micro_shapes(copies))
        return sums

    @property
    def described(self) -> State:
        """Shape, dtype and place of each array of the state: what one is brought into."""
        described: State = _placed(self.shapes, self.shardings)
        return described

    def examples(self, num_samples: int) -> dict[str, tuple[Any, ...]]:
        """Arguments for each program, without values, for microbatches of `num_samples`: to compile ahead."""
        state = self.described
        sums = _placed(self.sums_shapes, self.sums_shardings)
        micro = self._micro_shapes(num_samples)
        number = _shaped((), np.float32, None)
        return {
            "made": (jax.random.key(0),),
            "first": (state["params"], micro),
            "more": (sums, state["params"], micro),
            "apply": (state, sums, number, number),
            "fused": (state, micro, number, number),
            "losses": (state["params"], micro),
        }

    def _micro_shapes(self, num_samples: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape, where = (num_samples, self.config.seq_len), self.layout.batch()
        return {key: _shaped(shape, np.float32 if key == "mask" else np.int32, where) for key in self.keys}

    # ---- called by the loop

    def init(self, key: jax.Array) -> State:
        """The state before the first step, made where it rests: no device ever holds all of it."""
        state: State = self.made(key)
        return state

    def new_optimizer(self, params: Any) -> Any:
        """What the optimizer remembers before the first step with these parameters.

        It may be made of them: float32 copies of narrower ones, averages that begin where they are.
        """
        return jax.jit(self.optimizer.init, out_shardings=self.shardings["opt"])(params)

    def local_rows(self, num_samples: int) -> slice:
        """Which samples of a microbatch the devices of this process read: what it has to load."""
        where = self.layout.batch().addressable_devices_indices_map((num_samples, self.config.seq_len))
        rows = [index[0].indices(num_samples) for index in where.values() if index is not None]
        return slice(min(start for start, _, _ in rows), max(stop for _, stop, _ in rows))

    def put(self, batch: Mapping[str, np.ndarray[Any, Any]], num_samples: int) -> dict[str, jax.Array]:
        """A microbatch of `num_samples` on the devices; `batch` has this process's `local_rows` of it."""
        where, shape = self.layout.batch(), (num_samples, self.config.seq_len)
        placed: Any = jax.make_array_from_process_local_data
        return {key: placed(where, np.ascontiguousarray(batch[key]), shape) for key in self.keys}

    # ---- what is compiled

    def _init(self, key: jax.Array) -> State:
        params = self.model.init(key)
        return {"params": params, "opt": self.optimizer.init(params)}

    def _losses(self, params: Any, micro: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return loss_sums(self.model, params, micro, self.layout.place)

    def _first(self, params: Any, micro: Mapping[str, jax.Array]) -> Sums:
        (loss, tokens), grads = jax.value_and_grad(self._losses, has_aux=True)(params, micro)
        return {"grads": self._widened(grads), "loss": loss, "tokens": tokens}

    def _more(self, sums: Sums, params: Any, micro: Mapping[str, jax.Array]) -> Sums:
        added: Sums = jax.tree.map(jnp.add, sums, self._first(params, micro))
        return added

    def _apply(self, state: State, sums: Sums, rate: Any, decay: Any) -> tuple[State, dict[str, jax.Array]]:
        params, opt, metrics = self.optimizer.update(
            state["params"], state["opt"], sums["grads"], sums["tokens"], rate, decay
        )
        loss = sums["loss"] / jnp.maximum(sums["tokens"], 1)
        return {"params": params, "opt": opt}, {"loss": loss, "tokens": sums["tokens"], **metrics}

    def _fused(
        self, state: State, micro: Mapping[str, jax.Array], rate: Any, decay: Any
    ) -> tuple[State, dict[str, jax.Array]]:
        return self._apply(state, self._first(state["params"], micro), rate, decay)

    def _widened(self, grads: Any) -> Any:
        """Gradients in the dtype that they are added in."""
        chosen = matching(grads, self.config.optimizer.fp32_accumulation)
        return jax.tree.map(lambda grad, wide: grad.astype(jnp.float32) if wide else grad, grads, chosen)


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda one, where: _shaped(one.shape, one.dtype, where), shapes, shardings)


def _shaped(shape: tuple[int, ...], dtype: Any, where: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]
