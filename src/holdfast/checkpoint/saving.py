"""From a tree to a part file: the plan of a save, and the copy that captures it.

The plan depends only on names, shapes, dtypes and shardings, so it is made once and found again at every
later save of the same tree. Capturing is one pass of memory copies in file order; the writer is told as
blocks fill up, and writes them while the rest is still being copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from holdfast import faults
from holdfast.arrays import (
    NUMPY,
    Adapter,
    ArrayLayout,
    Description,
    FlatTree,
    Layout,
    Move,
    adapters,
    cuts,
    move,
    spread,
)
from holdfast.errors import HoldfastError, TreeError
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Piece,
    ScalarEntry,
    Slice,
    encode_owners,
    encode_scalar,
    lay_out,
)

_SCALARS: Final = (bool, int, float, complex, str, bytes)


def adapter_of(leaf: Any, known: Sequence[Adapter]) -> Adapter | None:
    """The adapter that claims a leaf, or None for a Python scalar."""
    if type(leaf) in _SCALARS:
        return None
    for adapter in known:
        if adapter.claims(leaf):
            return adapter
    if NUMPY.claims(leaf):
        return NUMPY
    raise TreeError(
        f"a leaf of type {type(leaf).__name__} cannot be stored",
        hint="store arrays and Python scalars, in containers that are registered as pytrees if JAX is in "
        "use; other state belongs into meta= as JSON",
    )


def flatten_tree(tree: Any) -> FlatTree:
    """The tree taken apart by the framework in use, so that its own containers are understood."""
    for adapter in adapters():
        return adapter.flatten(tree)
    return NUMPY.flatten(tree)


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """One slice this rank writes: which leaf it comes from, and the copy into the part file."""

    leaf: int
    adapter: Adapter
    ordinal: int
    move: Move


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything about saving a tree that does not change from step to step."""

    size: int
    header: bytes
    slices: tuple[Slice, ...]
    arrays: tuple[ArrayEntry, ...]
    pieces: tuple[StagedPiece, ...]
    scalars: tuple[tuple[int, str], ...]


class SavePlanner:
    """Makes save plans, and finds the one for a tree that looks like an earlier one."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._last: tuple[Hashable, list[Hashable], SavePlan] | None = None

    def plan(self, flat: FlatTree) -> SavePlan:
        """The plan for a tree; cheap if the tree looks like the one before it."""
        signatures = self._signatures(flat.leaves)
        if self._last is not None:
            structure, known, plan = self._last
            if structure == flat.structure and known == signatures:
                return plan
        plan = self._make(flat)
        self._last = (flat.structure, signatures, plan)
        return plan

    def _signatures(self, leaves: Sequence[Any]) -> list[Hashable]:
        known = adapters()
        found: list[Hashable] = []
        for leaf in leaves:
            adapter = adapter_of(leaf, known)
            found.append(type(leaf).__name__ if adapter is None else adapter.signature(leaf))
        return found

    def _make(self, flat: FlatTree) -> SavePlan:
        known = adapters()
        scalars: list[tuple[int, str]] = []
        described: dict[str, tuple[int, Adapter, Description]] = {}
        names = flat.names()
        _check_unique(names)
        for at, (name, leaf) in enumerate(zip(names, flat.leaves, strict=True)):
            adapter = self._adapter(name, leaf, known)
            if adapter is None:
                scalars.append((at, name))
                continue
            try:
                description = adapter.describe(leaf, self._rank, self._world)
            except HoldfastError as error:
                raise TreeError(f"{name}: {error.message}", hint=error.hint) from error
            described[name] = (at, adapter, description)
        layout = Layout((name, found.layout) for name, (_, _, found) in described.items())
        written = spread(layout)
        return self._lay_out(described, written, tuple(scalars))

    def _adapter(self, name: str, leaf: Any, known: Sequence[Adapter]) -> Adapter | None:
        try:
            return adapter_of(leaf, known)
        except TreeError as error:
            raise TreeError(f"{name}: {error.message}", hint=error.hint) from None

    def _lay_out(
        self,
        described: dict[str, tuple[int, Adapter, Description]],
        written: Layout,
        scalars: tuple[tuple[int, str], ...],
    ) -> SavePlan:
        pieces: list[Piece] = []
        sources: list[tuple[int, Adapter, Description, int]] = []
        entries: list[ArrayEntry] = []
        for name, (at, adapter, description) in described.items():
            array = written[name]
            entries.append(_entry(name, description, array))
            for box, holders in enumerate(array.holders):
                if holders[0] != self._rank:
                    continue
                rows = array.boxes[box].tolist()
                start, stop = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
                pieces.append(Piece(name, array.dtype, array.shape, start, stop))
                sources.append((at, adapter, description, box))
        part = lay_out(self._rank, pieces)
        staged: list[StagedPiece] = []
        for index in part.order:
            at, adapter, description, _ = sources[index]
            piece = self._staged(part.slices[index], at, adapter, description)
            if piece is not None:
                staged.append(piece)
        return SavePlan(
            size=part.size,
            header=part.header,
            slices=part.slices,
            arrays=tuple(entries),
            pieces=tuple(staged),
            scalars=scalars,
        )

    def _staged(
        self, piece: Slice, at: int, adapter: Adapter, description: Description
    ) -> StagedPiece | None:
        layout = description.layout
        box = _containing(layout, piece, description.local)
        target = tuple(zip(piece.start, piece.stop, strict=True))
        copy = move(piece.start, piece.stop, layout.boxes[box], target, layout.itemsize)
        if copy is None:
            return None  # nothing in it
        shifted = copy.shifted(target=piece.offset)
        return StagedPiece(at, adapter, description.local[box], shifted)


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TreeError(
            f"two leaves have the same name: {', '.join(twice[:5])}",
            hint="dict keys must differ as text: 1 and '1' are the same name",
        )


def _entry(name: str, description: Description, written: ArrayLayout) -> ArrayEntry:
    grid = cuts(written)
    if grid is None:
        raise TreeError(
            f"{name}: its shards form no grid",
            hint="use a sharding that cuts each dimension on its own, such as a NamedSharding",
        )
    order = written.geometry.order
    cells = range(len(written.holders)) if order is None else order.tolist()
    return ArrayEntry(
        name=name,
        dtype=written.dtype,
        shape=written.shape,
        kind=description.kind,
        impl=description.impl,
        axes=description.axes,
        cuts=grid,
        owners=encode_owners([written.holders[cell][0] for cell in cells]),
    )


def _containing(layout: ArrayLayout, piece: Slice, local: Sequence[int]) -> int:
    """The local box of the source that a written slice lies in."""
    start, stop = np.array(piece.start, np.int64), np.array(piece.stop, np.int64)
    inside = (layout.boxes[:, :, 0] <= start).all(1) & (layout.boxes[:, :, 1] >= stop).all(1)
    for box in np.flatnonzero(inside).tolist():
        if local[box] >= 0:
            return int(box)
    raise TreeError(f"{piece.name}: this process was to write a slice that it does not hold")


def scalar_entries(plan: SavePlan, leaves: Sequence[Any]) -> tuple[ScalarEntry, ...]:
    """The Python scalars of a tree, as they stand now."""
    return tuple(ScalarEntry(name, *encode_scalar(leaves[at])) for at, name in plan.scalars)


def ready(plan: SavePlan, leaves: Sequence[Any]) -> None:
    """Return once every array that is to be copied has been computed."""
    by_adapter: dict[int, tuple[Adapter, list[Any]]] = {}
    for piece in plan.pieces:
        by_adapter.setdefault(id(piece.adapter), (piece.adapter, []))[1].append(leaves[piece.leaf])
    for adapter, mine in by_adapter.values():
        adapter.ready(mine)


def capture(plan: SavePlan, leaves: Sequence[Any], address: int, advance: Callable[[int], None]) -> None:
    """Copy the state into the slot at `address`; `advance(upto)` is called as blocks fill up.

    Blocks: one memory copy of what this rank writes. Afterwards no later step can change the copy.
    """
    ctypes.memmove(address, plan.header, len(plan.header))
    told = 0
    for piece in plan.pieces:
        copy = piece.move
        memory = piece.adapter.memory(leaves[piece.leaf], piece.ordinal)
        if copy.dims:
            _copy_strided(copy, memory.address, address)
            done = copy.target_span()[1]
            if done - told >= BLOCK:
                told = done
                advance(told)
                faults.site("trainer.stage.block")
            continue
        source, target, left = memory.address + copy.source, address + copy.target, copy.run
        while left:
            # Up to the next block boundary of the file, so that the writer is never kept waiting.
            step = min(left, BLOCK - (target - address) % BLOCK)
            ctypes.memmove(target, source, step)
            source, target, left = source + step, target + step, left - step
            if target - address - told >= BLOCK:
                told = target - address
                advance(told)
                faults.site("trainer.stage.block")


def _copy_strided(copy: Move, source: int, target: int) -> None:
    # Only the stretch in the file is wrapped, not the slot: the target offset is moved to its start.
    begin, end = copy.target_span()
    _, last = copy.source_span()
    into = memoryview((ctypes.c_uint8 * (end - begin)).from_address(target + begin))
    out_of = memoryview((ctypes.c_uint8 * last).from_address(source))
    copy.shifted(target=-begin).apply(np.frombuffer(out_of, np.uint8), np.frombuffer(into, np.uint8))
