"""The adapter for numpy arrays and for trees without a framework."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np

from holdfast.arrays.dtypes import dtype as dtype_of
from holdfast.arrays.layout import ArrayLayout
from holdfast.arrays.names import flatten
from holdfast.arrays.protocols import Bytes1D, Description, FlatTree, Memory


def _describe(leaf: Any, world: int) -> Description:
    # A host array has no sharding. With several processes it counts as replicated: every process is
    # expected to hold the same values, and one of them writes each byte.
    layout = ArrayLayout.whole(dtype_of(leaf.dtype).name, tuple(leaf.shape), holders=tuple(range(world)))
    return Description(layout, local=(0,))


@final
class NumpySink:
    """Makes a numpy array, or a numpy scalar where the template has one."""

    def __init__(self, leaf: Any, world: int) -> None:
        self.description = _describe(leaf, world)
        self._scalar = isinstance(leaf, np.generic)

    def place(self, boxes: dict[int, Bytes1D], *, alias: bool) -> Any:
        layout = self.description.layout
        array = boxes[0].view(dtype_of(layout.dtype).numpy).reshape(layout.shape)
        if self._scalar:
            return array[()]
        return array if alias else array.copy()


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
        return Memory(array.__array_interface__["data"][0], array)

    def sink(self, leaf: Any, rank: int, world: int) -> NumpySink:
        return NumpySink(leaf, world)


NUMPY = NumpyAdapter()
