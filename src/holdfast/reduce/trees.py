"""What is added, seen as one kind of tree: its layout, and how a total becomes such a tree again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

from holdfast.arrays import Bytes1D
from holdfast.arrays import dtype as dtype_of
from holdfast.errors import MismatchError, ReduceError, UsageError
from holdfast.reduce.banks import available
from holdfast.reduce.layout import FlatLayout
from holdfast.reduce.leaves import Leaf, Reader, Structure, Values, rebuilt
from holdfast.reduce.messages import Shape


@final
class Trees:
    """All trees of a run have the same arrays; the first one, or a peer's word, says which.

    `shaped` is called once, when they are known.
    """

    def __init__(
        self, num_lanes: int, wire_dtype: str | None, shaped: Callable[[FlatLayout, Shape], None]
    ) -> None:
        self._num_lanes, self._wire_dtype, self._shaped = num_lanes, wire_dtype, shaped
        self._reader = Reader()
        self._layout: FlatLayout | None = None
        self._structure: Structure | None = None
        self._outline = b""

    def take(self, tree: Any) -> tuple[FlatLayout, list[Leaf]]:
        """The layout and the arrays of a tree. Waits for none of them. Fails: TreeError, MismatchError."""
        taken = self._reader.take(tree)
        structure = self._reader.structure
        assert structure is not None
        layout = self._layout
        if layout is None:
            layout = FlatLayout(taken.entries, self._wire_dtype)
            self._know(layout, structure.outline)
        elif taken.entries != layout.entries:
            raise MismatchError(
                layout.differences(taken.entries, self._wire_dtype, there="now"),
                source="what was added before",
                hint="add trees of the same arrays, dtypes and shapes every time",
            )
        self._structure = structure
        return layout, taken.leaves

    def adopt(self, shape: Shape) -> None:
        """Believe a peer, having added nothing. Fails: ReduceError, TreeError."""
        if (shape.wire_dtype, shape.num_lanes) != (self._wire_dtype, self._num_lanes):
            raise ReduceError(
                f"a peer has num_lanes={shape.num_lanes}, wire_dtype={shape.wire_dtype}; here are "
                f"{self._num_lanes} and {self._wire_dtype}",
                hint="give all members the same settings",
            )
        self._check_size(shape)
        self._know(FlatLayout(shape.entries, shape.wire_dtype), shape.outline)

    def _check_size(self, shape: Shape) -> None:
        """Raise ReduceError, before anything is taken for it, if a peer's arrays cannot be."""
        nbytes = sum(math.prod(entry.shape) * dtype_of(entry.dtype).itemsize for entry in shape.entries)
        there = available()
        if any(dim < 0 for entry in shape.entries for dim in entry.shape):
            raise ReduceError("a peer has arrays of a negative size")
        if there is not None and nbytes > there:
            raise ReduceError(f"a peer has arrays of {nbytes:,} bytes; {there:,} are available here")

    def _know(self, layout: FlatLayout, outline: bytes) -> None:
        self._layout, self._outline = layout, outline
        self._shaped(layout, Shape(layout.entries, self._wire_dtype, self._num_lanes, outline))

    def rebuilt(self, memory: Bytes1D) -> Any:
        """The tree that lies in a flat memory: views of it, or copies where the wire had another dtype."""
        layout = self._layout
        if layout is None:
            raise UsageError("nothing is known of the arrays")
        arrays: list[Values] = []
        for entry, wire, start in zip(layout.entries, layout.wires, layout.starts, strict=True):
            flat = memory[start : start + math.prod(entry.shape) * wire.itemsize].view(wire)
            own = dtype_of(entry.dtype).numpy
            flat = flat if wire == own else flat.astype(own)
            flat.flags.writeable = False
            arrays.append(flat.reshape(entry.shape))
        return rebuilt(self._outline, arrays) if self._structure is None else self._structure.rebuild(arrays)


def disagreement(layout: FlatLayout, shape: Shape | None, slot: int) -> MismatchError:
    """What a peer's arrays have otherwise."""
    told = [] if shape is None else layout.differences(shape.entries, shape.wire_dtype, there="the peer")
    return MismatchError(
        told or ["the arrays differ"], source=f"slot {slot}", hint="all replicas add the same arrays"
    )
