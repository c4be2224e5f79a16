"""Trees as flat buffers that a group shares evenly, whatever the shapes of its arrays.

Where no dim of a parameter is divided by the axis that shares the optimizer's state, every member would hold
all of it. As flat, padded buffers everything divides. The layout is that of `holdfast.arrays.BucketLayout`,
which the sums between replicas use as well.
"""

from __future__ import annotations

import math
from typing import Any, Final, final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.arrays import BucketLayout, BucketRules, FlatArray, flatten_tree, match
from holdfast.train.mesh import FSDP

_EXPERTS: Final = ("**/experts",)
Buffers = dict[str, Any]


@final
class FlatShards:
    """How float32 trees like `params` (arrays, or shapes) lie in buffers that `num_shards` share."""

    def __init__(self, params: Any, num_shards: int) -> None:
        flat = flatten_tree(params)
        self._shapes = [leaf.shape for leaf in flat.leaves]
        self._rebuild = flat.rebuild
        # In reverse: the gradients of the last layers are there first.
        self._order = list(reversed(range(len(flat.leaves))))
        names = flat.names()
        arrays = [
            FlatArray(names[at], "float32", math.prod(self._shapes[at]), match(_EXPERTS, names[at]))
            for at in self._order
        ]
        self.layout = BucketLayout(arrays, BucketRules(num_shards=num_shards))

    def packed(self, tree: Any) -> Buffers:
        """The tree as buffers; padding is zero. Jittable."""
        leaves = flatten_tree(tree).leaves
        found: Buffers = {}
        for buffer in self.layout.buffers:
            parts, at = [], 0
            for number, span in zip(buffer.arrays, buffer.spans, strict=True):
                parts.append(jnp.zeros(span.start - at, jnp.float32))
                parts.append(leaves[self._order[number]].reshape(-1).astype(jnp.float32))
                at = span.stop
            parts.append(jnp.zeros(buffer.numel - at, jnp.float32))
            found[_name(buffer.key.expert)] = jnp.concatenate(parts)
        return found

    def unpacked(self, buffers: Buffers) -> Any:
        """The tree that lies in buffers. Jittable."""
        leaves: list[Any] = [None] * len(self._shapes)
        for buffer in self.layout.buffers:
            memory = buffers[_name(buffer.key.expert)]
            for number, span in zip(buffer.arrays, buffer.spans, strict=True):
                leaf = self._order[number]
                leaves[leaf] = memory[span.start : span.stop].reshape(self._shapes[leaf])
        return self._rebuild(leaves)

    def shardings(self, example: NamedSharding) -> dict[str, NamedSharding]:
        """Where the buffers rest: an equal slice of each for every member of the fsdp axis of a mesh.

        Fails: LayoutError, if the axis has another size than the layout.
        """
        mesh = example.mesh
        for buffer in self.layout.buffers:
            buffer.check_group(mesh.shape[FSDP], "mesh.fsdp")
        where = NamedSharding(mesh, PartitionSpec(FSDP))  # type: ignore[no-untyped-call]
        return {_name(buffer.key.expert): where for buffer in self.layout.buffers}


def _name(expert: bool) -> str:
    return "experts" if expert else "dense"


def first_sharding(tree: Any) -> Any:
    """One of the shardings of a tree of them: they are all of one mesh."""
    return jax.tree.leaves(tree, is_leaf=lambda one: isinstance(one, NamedSharding))[0]
