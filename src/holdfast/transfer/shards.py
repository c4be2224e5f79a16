"""Slices of larger arrays, for trees whose arrays do not know how they are sharded.

A JAX array knows its sharding. A numpy array does not: wrapped in a Shard, it says which slice of which array
it is. Published, it is what this process has; in a template, it is what this process wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from holdfast.arrays import ArrayLayout, Bytes1D, Description
from holdfast.arrays import dtype as dtype_of
from holdfast.errors import TreeError


@final
class Shard:
    """`array` is the slice that begins at `start` of an array of `shape`.

    In a template only the shape and dtype of `array` count; what comes back is a numpy array of that slice.
    """

    __slots__ = ("array", "shape", "start")

    def __init__(self, array: Any, shape: Sequence[int], start: Sequence[int]) -> None:
        self.array = array
        self.shape = tuple(int(dim) for dim in shape)
        self.start = tuple(int(at) for at in start)
        same = len(self.shape) == len(self.start) == len(array.shape)
        if not same or not all(map(_fits, self.start, array.shape, self.shape)):
            raise TreeError(
                f"an array of shape {tuple(array.shape)} at {self.start} is no slice of one of {self.shape}"
            )

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) in each dimension."""
        return tuple((at, at + int(size)) for at, size in zip(self.start, self.array.shape, strict=True))


def _fits(at: int, size: int, dim: int) -> bool:
    return at >= 0 and at + size <= dim and (size > 0 or dim == 0)


@final
class ShardSink:
    """Asks for one slice of an array."""

    def __init__(self, shard: Shard, rank: int) -> None:
        box = shard.box
        cuts = tuple(
            tuple(sorted({0, lo, hi, dim})) if dim else (0, 0)
            for (lo, hi), dim in zip(box, shard.shape, strict=True)
        )
        num_cells = int(np.prod([len(points) - 1 for points in cuts]))
        at = 0
        for (lo, _), points in zip(box, cuts, strict=True):
            at = at * (len(points) - 1) + points.index(lo)
        holders = tuple((rank,) if cell == at else () for cell in range(num_cells))
        layout = ArrayLayout.grid(dtype_of(shard.dtype).name, shard.shape, cuts, holders)
        self.description = Description(layout, tuple(0 if cell == at else -1 for cell in range(num_cells)))
        self.extents = tuple(shard.array.shape)
        self.cell = at

    def placed(self, boxes: dict[int, Bytes1D]) -> Any:
        """The slice as a numpy array, without a copy."""
        return boxes[self.cell].view(dtype_of(self.description.layout.dtype).numpy).reshape(self.extents)
