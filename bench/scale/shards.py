"""A framework of its own: leaves that say how they are sharded and hold no bytes.

With it the engine's own planners and loaders run for any rank of any world, on one machine, without arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from holdfast.arrays import ArrayLayout, Bytes1D, Description, FlatTree, Memory, Placement, protocols
from holdfast.arrays.names import flatten


@final
class Shard:
    """One array of a state that is spread over many ranks."""

    __slots__ = ("layout",)

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout


def _described(leaf: Shard, rank: int) -> Description:
    local = np.full(len(leaf.layout.geometry.volumes), -1)
    table = leaf.layout.table
    local[table.boxes[table.ids == rank]] = 0
    return Description(leaf.layout, tuple(local.tolist()))


@final
class ShardSink:
    """Asks for the boxes that one rank holds."""

    def __init__(self, leaf: Shard, rank: int) -> None:
        self.description = _described(leaf, rank)


@final
class ShardAdapter:
    """The adapter of `Shard`."""

    def identity(self) -> tuple[int, int]:
        return 0, 1

    def claims(self, leaf: Any) -> bool:
        return isinstance(leaf, Shard)

    def flatten(self, tree: Any) -> FlatTree:
        pairs, rebuild = flatten(tree)
        names = [name for name, _ in pairs]
        return FlatTree([leaf for _, leaf in pairs], tuple(names), lambda: names, rebuild)

    def signature(self, leaf: Shard) -> Hashable:
        return id(leaf.layout)

    def describe(self, leaf: Shard, rank: int, world: int) -> Description:
        return _described(leaf, rank)

    def ready(self, leaves: Sequence[Any]) -> None:
        pass

    def memory(self, leaf: Any, ordinal: int) -> Memory:
        raise NotImplementedError("a Shard has no bytes to read")

    def host(self, leaf: Any, ordinal: int) -> Bytes1D:
        raise NotImplementedError("a Shard has no bytes to read")

    def sink(self, leaf: Shard, rank: int, world: int) -> ShardSink:
        return ShardSink(leaf, rank)

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        return [placement.boxes for placement in batch]

    def landing(self, sinks: Sequence[Any]) -> None:
        return None


ADAPTER = ShardAdapter()


@contextmanager
def known() -> Iterator[None]:
    """Let the engine know this framework for a while; it finds frameworks among the imported modules."""
    frameworks: Any = protocols._FRAMEWORKS
    assert __name__ in sys.modules
    before = dict(frameworks)
    frameworks[__name__] = __name__
    try:
        yield
    finally:
        frameworks.clear()
        frameworks.update(before)
