"""The parameters of a model as a table, without JAX: names, shapes, and what of each a device holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.train.mesh import Logical, MeshConfig, Split
from holdfast.train.model.config import ModelConfig
from holdfast.train.model.pattern import ATTENTION

WIDTHS: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


class Parameter(NamedTuple):
    """One array of a model's parameters."""

    name: str
    """Its path in the tree: `layers/0/qkv`."""
    shape: tuple[int, ...]
    logical: Logical

    @property
    def size(self) -> int:
        """Numbers in all."""
        return math.prod(self.shape)

    def is_matrix(self, *, scanned: bool) -> bool:
        """Whether products are made with it, in the compute dtype; norms and biases are not."""
        return len(self.shape) > 1 + scanned


def parameters(model: ModelConfig) -> list[Parameter]:
    """Every array, in the order of the model: the same that `Decoder.init` makes."""
    table = ((model.vocab_size, model.hidden), ("vocab", "embed"))
    found = [Parameter("embed", *table)]
    scanned = model.layers == "scanned"
    for at, symbol in enumerate(model.pattern if scanned else model.symbols):
        for name, (shape, logical) in _block(model, symbol).items():
            lead, axis = ((model.repeats,), ("layers",)) if scanned else ((), ())
            found.append(Parameter(f"layers/{at}/{name}", (*lead, *shape), (*axis, *logical)))
    found.append(Parameter("norm", (model.hidden,), ("embed",)))
    return found if model.tied else [*found, Parameter("head", *table)]


def _block(model: ModelConfig, symbol: str) -> dict[str, tuple[tuple[int, ...], Logical]]:
    hidden, head, shared = model.hidden, model.head_size, model.kv_heads
    found: dict[str, tuple[tuple[int, ...], Logical]] = {"norm": ((hidden,), ("embed",))}
    if symbol != ATTENTION:
        found["gate"] = found["up"] = ((hidden, model.mlp_hidden), ("embed", "mlp"))
        found["down"] = ((model.mlp_hidden, hidden), ("mlp", "embed"))
        return found
    group = model.num_heads // shared + 2
    found["qkv"] = ((hidden, shared, group, head), ("embed", "kv_heads", None, "head_dim"))
    found["out"] = ((model.num_heads, head, hidden), ("heads", "head_dim", "embed"))
    if model.qkv_bias:
        found["qkv_bias"] = ((shared, group, head), ("kv_heads", None, "head_dim"))
    if model.qk_norm:
        found["q_norm"] = found["k_norm"] = ((head,), ("head_dim",))
    return found


def split_of(parameter: Parameter, mesh: MeshConfig, *, stored: bool) -> Split:
    """The mesh axes that each dim lies on, at rest in shards or as it is computed with."""
    rules = mesh.rules
    return rules.stored(parameter.logical, parameter.shape) if stored else rules.computed(parameter.logical)


def held(found: Iterable[Parameter], mesh: MeshConfig, *, stored: bool) -> int:
    """How many numbers of these parameters each device holds."""
    return sum(one.size // _pieces(split_of(one, mesh, stored=stored), mesh) for one in found)


def _pieces(split: Split, mesh: MeshConfig) -> int:
    sizes = dict(mesh.rules.sizes)
    axes = [
        axis for axes in split if axes is not None for axis in ((axes,) if isinstance(axes, str) else axes)
    ]
    return math.prod(sizes[axis] for axis in axes)
