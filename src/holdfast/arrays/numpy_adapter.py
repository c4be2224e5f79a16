"""The adapter for numpy arrays and for trees without a framework."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np

from holdfast.arrays.copying import address_of
from holdfast.arrays.dtypes import dtype as dtype_of
from holdfast.arrays.layout import ArrayLayout
from holdfast.arrays.names import flatten
from holdfast.arrays.protocols import Bytes1D, Description, FlatTree, Memory, Placement, Stager


def _describe(leaf: Any, world: int) -> Description:
    # A host array has no sharding. With several processes it counts as replicated: every process is
    # expected to hold the same values, and one of them writes each byte.
    layout = ArrayLayout.whole(dtype_of(leaf.dtype).name, tuple(leaf.shape), holders=tuple(range(world)))
    return Description(layout, local=(0,))


@final
class NumpySink:
    """Asks for a numpy array, or for a numpy scalar where the template has one."""

    def __init__(self, leaf: Any, world: int) -> None:
        self.description = _describe(leaf, world)
        self.scalar = isinstance(leaf, np.generic)
        # Looked up once: small arrays are placed by the thousand.
        self.dtype = dtype_of(self.description.layout.dtype).numpy
        self.shape = self.description.layout.shape


def _placed(placement: Placement) -> Any:
    sink = placement.sink
    array = placement.boxes[0].view(sink.dtype).reshape(sink.shape)
    if sink.scalar:
        return array[()]
    return array if placement.alias else array.copy()


@final
class NumpyAdapter:
    """numpy arrays and scalars, and anything with a shape and a dtype as a template."""

    def identity(self) -> tuple[int, int]:
        return 0, 1

    def claims(self, leaf: Any) -> bool:
        return isinstance(leaf, np.ndarray | np.generic) or (
            hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        )

    def flatten(self, tree: Any) -> FlatTree:
        pairs, rebuild = flatten(tree)
        names = [name for name, _ in pairs]
        return FlatTree([leaf for _, leaf in pairs], tuple(names), lambda: names, rebuild)

    def signature(self, leaf: Any) -> Hashable:
        return leaf.shape, leaf.dtype

    def describe(self, leaf: Any, rank: int, world: int) -> Description:
        return _describe(leaf, world)

    def ready(self, leaves: Sequence[Any]) -> None:
        pass

    def memory(self, leaf: Any, ordinal: int) -> Memory:
        array = np.ascontiguousarray(leaf)
        return Memory(address_of(array), array)

    def host(self, leaf: Any, ordinal: int) -> Bytes1D:
        # Its owner must not change it while it is held; numpy frees nothing that is looked at.
        found: Bytes1D = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return found

    def sink(self, leaf: Any, rank: int, world: int) -> NumpySink:
        return NumpySink(leaf, world)

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        return [_placed(placement) for placement in batch]

    def landing(self, sinks: Sequence[Any]) -> None:
        return None

    def pin(self, memory: Bytes1D, sinks: Sequence[Any]) -> None:
        return None

    def stager(self) -> Stager | None:
        return None


NUMPY = NumpyAdapter()
