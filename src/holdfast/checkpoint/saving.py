"""From a tree to a part file: the plan of a save, and the copy that captures it.

The plan depends only on names, shapes, dtypes and shardings, so it is made once and found again at every
later save of the same tree. Capturing is one pass of memory copies in file order; the writer is told as
blocks fill up, and writes them while the rest is still being copied.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np

from holdfast import faults
from holdfast.arrays import (
    Adapter,
    ArrayLayout,
    Description,
    FlatTree,
    Layout,
    Memory,
    Move,
    adapter_of,
    adapters,
    cuts,
    encode_scalar,
    move,
    spread,
)
from holdfast.arrays.copying import Batch, copy_bytes
from holdfast.errors import HoldfastError, TreeError
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Piece,
    ScalarEntry,
    Slice,
    encode_owners,
    lay_out,
    num_blocks,
)
from holdfast.vault import Crew

_FIRST: Final = 1 / 16
_UNTOLD: Final = 0.25
"""The shares of a state that fill up before the writer is told, at first and then again and again. Awake it
takes processors from the copying, if few since it hashes later. Measured on two slow cores: 0.298 s blocked
and 0.874 s durable when told of every quarter, 0.277 and 0.955 s after three of them; with faster copies
0.213 and 0.703 s of every quarter, 0.215 and 0.665 s of a sixteenth before."""
_MOST_UNTOLD: Final = 128
"""Blocks that fill up before it is told in any case."""


class StagedCopy(NamedTuple):
    """Bytes of one leaf that go into one block of the part file."""

    leaf: int
    adapter: Adapter
    ordinal: int
    move: Move


@dataclass(frozen=True)
class SavePlan:
    """Everything about saving a tree that does not change from step to step.

    `blocks` has the copies for each block of the part file.
    """

    size: int
    header: bytes
    slices: tuple[Slice, ...]
    arrays: tuple[ArrayEntry, ...]
    blocks: tuple[tuple[StagedCopy, ...], ...]
    scalars: tuple[tuple[int, str], ...]

    @cached_property
    def copied(self) -> list[tuple[Adapter, list[int]]]:
        """The leaves that are copied, by adapter."""
        found: dict[int, tuple[Adapter, dict[int, None]]] = {}
        for copy in itertools.chain.from_iterable(self.blocks):
            found.setdefault(id(copy.adapter), (copy.adapter, {}))[1][copy.leaf] = None
        return [(adapter, list(leaves)) for adapter, leaves in found.values()]


class SavePlanner:
    """Makes save plans, and finds the one for a tree that looks like an earlier one."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._last: tuple[Hashable, list[Hashable], SavePlan] | None = None

    def plan(self, flat: FlatTree) -> SavePlan:
        """The plan for a tree; cheap if the tree looks like the one before it."""
        signatures = self._signatures(flat)
        if self._last is not None:
            structure, known, plan = self._last
            if structure == flat.structure and known == signatures:
                return plan
        plan = self._make(flat)
        self._last = (flat.structure, signatures, plan)
        return plan

    def _signatures(self, flat: FlatTree) -> list[Hashable]:
        known = adapters()
        found: list[Hashable] = []
        for at, leaf in enumerate(flat.leaves):
            try:
                adapter = adapter_of(leaf, known)
            except TreeError as error:
                raise TreeError(f"{flat.names()[at]}: {error.message}", hint=error.hint) from None
            found.append(type(leaf).__name__ if adapter is None else adapter.signature(leaf))
        return found

    def _make(self, flat: FlatTree) -> SavePlan:
        known = adapters()
        scalars: list[tuple[int, str]] = []
        described: dict[str, tuple[int, Adapter, Description]] = {}
        names = flat.names()
        _check_unique(names)
        for at, (name, leaf) in enumerate(zip(names, flat.leaves, strict=True)):
            adapter = adapter_of(leaf, known)
            if adapter is None:
                scalars.append((at, name))
                continue
            try:
                description = adapter.describe(leaf, self._rank, self._world)
            except HoldfastError as error:
                raise TreeError(f"{name}: {error.message}", hint=error.hint) from error
            described[name] = (at, adapter, description)
        # By name: frameworks order the same tree differently, and equal trees should give equal files.
        described = dict(sorted(described.items()))
        scalars.sort(key=lambda scalar: scalar[1])
        layout = Layout((name, found.layout) for name, (_, _, found) in described.items())
        written = spread(layout)
        return self._lay_out(described, written, tuple(scalars))

    def _lay_out(
        self,
        described: dict[str, tuple[int, Adapter, Description]],
        written: Layout,
        scalars: tuple[tuple[int, str], ...],
    ) -> SavePlan:
        pieces: list[Piece] = []
        sources: list[tuple[int, Adapter, Description]] = []
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
                sources.append((at, adapter, description))
        part = lay_out(self._rank, pieces)
        blocks: list[list[StagedCopy]] = [[] for _ in range(num_blocks(part.size))]
        for index in part.order:
            at, adapter, description = sources[index]
            _add_copies(blocks, part.slices[index], at, adapter, description)
        return SavePlan(
            size=part.size,
            header=part.header,
            slices=part.slices,
            arrays=tuple(entries),
            blocks=tuple(map(tuple, blocks)),
            scalars=scalars,
        )


def _add_copies(
    blocks: list[list[StagedCopy]], piece: Slice, at: int, adapter: Adapter, description: Description
) -> None:
    """Add the copies that bring one slice into the blocks of the part file it touches."""
    layout = description.layout
    box = _containing(layout, piece, description.local)
    image = tuple(zip(piece.start, piece.stop, strict=True))
    # Planned backwards, from file to array: `clip` cuts by source, and the cuts are those of the file.
    back = move(piece.start, piece.stop, image, layout.boxes[box], layout.itemsize)
    if back is None:
        return  # nothing in it
    back = back.shifted(source=piece.offset)
    for block in range(piece.offset // BLOCK, num_blocks(piece.offset + piece.nbytes)):
        for cut in back.clip(block * BLOCK, (block + 1) * BLOCK):
            blocks[block].append(StagedCopy(at, adapter, description.local[box], _reversed(cut)))


def _reversed(one: Move) -> Move:
    dims = tuple((count, target, source) for count, source, target in one.dims)
    return Move(one.target, one.source, one.run, dims)


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


def ready(plan: SavePlan, flat: FlatTree) -> None:
    """Return once every array that is to be copied has been computed.

    Fails: TreeError naming an array that was donated or deleted.
    """
    for adapter, found in plan.copied:
        try:
            adapter.ready([flat.leaves[at] for at in found])
        except TreeError:
            for at in found:
                _ready_alone(adapter, flat.leaves[at], flat, at)
            raise


def _ready_alone(adapter: Adapter, leaf: Any, flat: FlatTree, at: int) -> None:
    try:
        adapter.ready([leaf])
    except TreeError as error:
        raise TreeError(f"{flat.names()[at]}: {error.message}", hint=error.hint) from error


@final
class Capture:
    """Copies a state into a slot, block by block, on several threads."""

    def __init__(
        self, plan: SavePlan, leaves: Sequence[Any], address: int, advance: Callable[[int], None]
    ) -> None:
        self._plan = plan
        self._leaves = leaves
        self._address = address
        self._advance = advance
        self._next = itertools.count()
        self._done = [False] * len(plan.blocks)
        self._whole = 0
        self._told = 0
        self._first, self._tell = (
            min(_MOST_UNTOLD, math.ceil(share * len(plan.blocks))) for share in (_FIRST, _UNTOLD)
        )
        self._lock = threading.Lock()

    def run(self, crew: Crew, helpers: int) -> None:
        """Return when all is copied; `advance(upto)` was called as blocks filled up from the front.

        Blocks: one memory copy of what this rank writes. Afterwards no later step can change the copy.
        """
        ctypes.memmove(self._address, self._plan.header, len(self._plan.header))
        helping = [crew.submit(self._work) for _ in range(min(helpers, len(self._done) - 1))]
        try:
            self._work()
        finally:
            # No thread may still read the caller's arrays when this returns, in whatever way.
            wait(helping)
        for future in helping:
            future.result(0)

    def _work(self) -> None:
        for block in self._next:  # `next` on a counter is atomic
            if block >= len(self._done):
                return
            self._copy(self._plan.blocks[block])
            # Before the block is told: who dies here has not told all of them, whatever the other threads do.
            faults.site("trainer.stage.block")
            self._finished(block)

    def _copy(self, copies: Sequence[StagedCopy]) -> None:
        """Fill a block. One call: with one for each of hundreds of arrays, the threads queue for the GIL."""
        plain: list[tuple[int, int, int]] = []
        found: dict[tuple[int, int], Memory] = {}  # once for each: it may be a copy of the leaf
        for copy in copies:
            key = (copy.leaf, copy.ordinal)
            memory = found.get(key)
            if memory is None:
                memory = found[key] = copy.adapter.memory(self._leaves[copy.leaf], copy.ordinal)
            one = copy.move
            if one.dims:
                _copy_strided(one, memory.address, self._address)
            else:
                plain.append((one.target, memory.address + one.source, one.run))
        if len(plain) == 1:
            at, source, nbytes = plain[0]
            copy_bytes(self._address + at, source, nbytes)
        elif plain:
            Batch(self._address, *np.array(plain, np.uint64).T).stream(0, len(plain))

    def _finished(self, block: int) -> None:
        with self._lock:
            self._done[block] = True
            while self._whole < len(self._done) and self._done[self._whole]:
                self._whole += 1
            enough = self._tell if self._told else self._first
            if self._whole - self._told >= enough or self._whole == len(self._done):
                self._told = self._whole
                self._advance(min(self._whole * BLOCK, self._plan.size))


def _copy_strided(one: Move, source: int, target: int) -> None:
    # Only the stretches in question are wrapped: what lies around them is not ours to look at.
    (begin, end), (first, last) = one.target_span(), one.source_span()
    into = memoryview((ctypes.c_uint8 * (end - begin)).from_address(target + begin))
    out_of = memoryview((ctypes.c_uint8 * (last - first)).from_address(source + first))
    one.shifted(source=-first, target=-begin).apply(
        np.frombuffer(out_of, np.uint8), np.frombuffer(into, np.uint8)
    )
