"""Arrays cut in any way over any processes, without a framework: what the transfer tests publish and ask for.

Imported, this module is an adapter of its own, found like any framework's.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np

from holdfast.arrays import NUMPY, ArrayLayout, Bytes1D, Description, FlatTree, Memory, Placement, protocols
from holdfast.arrays import dtype as dtype_of

Box = tuple[tuple[int, int], ...]
Host = np.ndarray[Any, Any]


@final
class Slices:
    """Some boxes of an array. `holders[n]` are the ranks with box n; `data` has the boxes that are here."""

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        boxes: Sequence[Box],
        holders: Sequence[Sequence[int]],
        data: dict[int, Host] | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.boxes = [tuple((int(lo), int(hi)) for lo, hi in box) for box in boxes]
        self.holders = tuple(tuple(ranks) for ranks in holders)
        self.data = data or {}
        self.wanted: frozenset[int] | None = None
        """The boxes that a transfer had to bring."""

    def layout(self) -> ArrayLayout:
        table = np.array(self.boxes, np.int64).reshape(len(self.boxes), len(self.shape), 2)
        return ArrayLayout(self.dtype, self.shape, table, self.holders)

    def filled(self, whole: Host, rank: int) -> Slices:
        """The same with the boxes of a rank cut out of the whole array."""
        data = {
            n: np.ascontiguousarray(whole[tuple(slice(lo, hi) for lo, hi in box)])
            for n, box in enumerate(self.boxes)
            if rank in self.holders[n]
        }
        return Slices(self.dtype, self.shape, self.boxes, self.holders, data)

    def differs(self, whole: Host) -> bool:
        """Whether a box is missing, or is not that of the whole array, bit by bit."""
        if self.wanted is not None and self.wanted != self.data.keys():
            return True
        return any(
            host.tobytes() != whole[tuple(slice(lo, hi) for lo, hi in self.boxes[n])].tobytes()
            for n, host in self.data.items()
        )


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes of a grid: `cuts[d]` are the places where dimension d is cut."""
    spans = [
        list(itertools.pairwise(sorted({0, size, *(c for c in at if 0 < c < size)}))) or [(0, 0)]
        for size, at in zip(shape, cuts, strict=True)
    ]
    return list(itertools.product(*spans))


def values(name: str, dtype: str, shape: Sequence[int], version: int) -> Host:
    """The whole array of a version: any process can compute it."""
    kind = dtype_of(dtype).numpy
    count = int(np.prod(shape, dtype=np.int64))
    rng = np.random.default_rng([zlib.crc32(name.encode()), version])
    if dtype == "bool":
        return rng.integers(0, 2, count, np.uint8).view(kind).reshape(tuple(shape))
    return np.frombuffer(rng.bytes(count * kind.itemsize), kind).reshape(tuple(shape))


@final
class SlicesSink:
    """Asks for the boxes of a rank."""

    def __init__(self, leaf: Slices, rank: int) -> None:
        self.leaf = leaf
        local = tuple(0 if rank in ranks else -1 for ranks in leaf.holders)
        self.description = Description(leaf.layout(), local)


@final
class SlicesAdapter:
    """The adapter."""

    def identity(self) -> tuple[int, int]:
        return 0, 1

    def claims(self, leaf: Any) -> bool:
        return isinstance(leaf, Slices)

    def flatten(self, tree: Any) -> FlatTree:
        return NUMPY.flatten(tree)

    def signature(self, leaf: Any) -> Hashable:
        return leaf.dtype, leaf.shape, tuple(leaf.boxes), leaf.holders, tuple(leaf.data)

    def describe(self, leaf: Any, rank: int, world: int) -> Description:
        return Description(leaf.layout(), tuple(n if n in leaf.data else -1 for n in range(len(leaf.boxes))))

    def ready(self, leaves: Sequence[Any]) -> None:
        pass

    def memory(self, leaf: Any, ordinal: int) -> Memory:
        host = leaf.data[ordinal]
        return Memory(host.__array_interface__["data"][0], host)

    def host(self, leaf: Any, ordinal: int) -> Bytes1D:
        found: Bytes1D = leaf.data[ordinal].reshape(-1).view(np.uint8)
        return found

    def sink(self, leaf: Any, rank: int, world: int) -> SlicesSink:
        return SlicesSink(leaf, rank)

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        return [_placed(one.sink, one.boxes, one.alias) for one in batch]

    def landing(self, sinks: Sequence[Any]) -> None:
        return None

    def pin(self, memory: Bytes1D, sinks: Sequence[Any]) -> None:
        return None


def _placed(sink: SlicesSink, boxes: dict[int, Bytes1D], alias: bool) -> Slices:
    leaf = sink.leaf
    data = {}
    for n, memory in boxes.items():
        shape = [hi - lo for lo, hi in leaf.boxes[n]]
        host = memory.view(dtype_of(leaf.dtype).numpy).reshape(shape)
        data[n] = host if alias else host.copy()
    found = Slices(leaf.dtype, leaf.shape, leaf.boxes, leaf.holders, data)
    found.wanted = frozenset(n for n, ordinal in enumerate(sink.description.local) if ordinal >= 0)
    return found


ADAPTER = SlicesAdapter()
protocols._FRAMEWORKS[__name__] = __name__
