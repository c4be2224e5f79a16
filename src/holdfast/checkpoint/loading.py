"""From a committed step to a tree of arrays on any mesh.

Template -> names and wanted layouts -> one plan against the layout on disk -> the blocks that hold the needed
bytes -> arrays, placed as they become whole. Problems of the template are found before anything is read, and
listed all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final

import numpy as np

from holdfast.arrays import (
    Adapter,
    ArrayLayout,
    Layout,
    Move,
    Placement,
    Rename,
    Selection,
    Template,
    Wanted,
    decode_scalar,
    move,
    plan,
)
from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.memory import Allocator
from holdfast.checkpoint.reading import BadBlock, BlockPipeline, BlockRead, Destination
from holdfast.errors import HoldfastError
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Manifest,
    PartIndex,
    Slice,
    decode_owners,
    num_cells,
    read_index,
    step_folder,
)
from holdfast.storage import LocalStore

log = logging.getLogger("holdfast.checkpoint")

_MANY: Final = 16
"""Blocks with at least this many arrays in them are read first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What to load and how."""

    parts: Sequence[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    cast: bool = False
    verify: bool = True
    threads: int = 4


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did."""

    step: int
    nbytes: int
    bytes_read: int
    seconds: float
    hash_s: float


@final
class StepLoad:
    """The load of one step into one template; made first, so that mistakes show before any reading."""

    def __init__(
        self, manifest: Manifest, template: Any, options: LoadOptions, *, rank: int, world: int
    ) -> None:
        self._manifest = manifest
        self._options = options
        self._rank = rank
        self._world = world
        self._entries = {entry.name: entry for entry in manifest.arrays}
        self._scalars = {entry.name: entry for entry in manifest.scalars}
        selection = Selection(
            parts=options.parts, rename=options.rename, strict=options.strict, cast=options.cast
        )
        found = Template(
            template, self._entries, self._scalars, selection, rank=rank, world=world, source="checkpoint"
        )
        self._flat = found.flat
        self._wanted = found.wanted
        self._by_name = {one.name: one for one in self._wanted}
        self.nbytes = sum(self._entries[one.stored].nbytes for one in self._wanted if one.sink)

    # ---- reading

    def run(self, stores: Sequence[LocalStore], on_bad: BadBlock) -> tuple[Any, BlockPipeline]:
        """The loaded tree. Fails: CorruptError if a block is bad in every copy."""
        folder = step_folder(self._manifest.save.step)
        target = Layout((one.name, one.layout()) for one in self._wanted if one.sink)
        source = Layout(
            (one.name, _stored_layout(self._entries[one.stored])) for one in self._wanted if one.sink
        )
        copies = plan(source, target, ranks={self._rank})
        parts = {int(p) for array in copies.values() for p in np.unique(array.source_holder)}
        indexes = {part: self._read_index(stores, folder, part) for part in sorted(parts)}
        leaves = list(self._flat.leaves)
        destinations = self._destinations(source, target)
        blocks = self._blocks(copies, source, target, indexes, destinations)
        pipeline = BlockPipeline(
            stores,
            folder,
            indexes,
            threads=self._options.threads,
            verify=self._options.verify,
            on_bad=on_bad,
        )
        self._place(pipeline, blocks, destinations, leaves)
        for one in self._wanted:
            if one.sink is None:
                scalar = self._scalars[one.stored]
                leaves[one.at] = decode_scalar(scalar.type, scalar.value)
        return self._flat.rebuild(leaves), pipeline

    def _read_index(self, stores: Sequence[LocalStore], folder: str, part: int) -> PartIndex:
        """The index of a part, from the first copy in which it is right."""
        for store in stores[:-1]:
            try:
                return read_index(store, folder, self._manifest, part)
            except HoldfastError as error:
                log.warning("%s: reading a copy instead: %s", store.root, error.message)
        return read_index(stores[-1], folder, self._manifest, part)

    def _destinations(self, source: Layout, target: Layout) -> dict[str, dict[int, Destination]]:
        """Memory for every local box of every wanted array."""
        allocator = Allocator()
        found: dict[str, dict[int, Destination]] = {}
        for number, one in enumerate(self._wanted):
            if one.sink is None:
                continue
            layout = target[one.name]
            boxes: dict[int, Destination] = {}
            for box, ordinal in enumerate(one.sink.description.local):
                if ordinal >= 0:
                    memory = allocator.allocate(layout.box_nbytes(box))
                    boxes[box] = Destination(number, box, memory.data, memory.owned)
            found[one.name] = boxes
        return found

    def _blocks(
        self,
        copies: Any,
        source: Layout,
        target: Layout,
        indexes: Mapping[int, Any],
        destinations: Mapping[str, Mapping[int, Destination]],
    ) -> list[BlockRead]:
        slices: dict[tuple[int, str, tuple[int, ...]], Slice] = {
            (part, piece.name, piece.start): piece
            for part, index in indexes.items()
            for piece in index.slices
        }
        stored = {one.name: one.stored for one in self._wanted}
        blocks: dict[tuple[int, int, int], BlockRead] = {}
        for name, array in copies.items():
            from_boxes, to_boxes = source[name].boxes, target[name].boxes
            starts = [tuple(row) for row in from_boxes[:, :, 0].tolist()]
            unchanged = len(from_boxes) == len(to_boxes) == 1
            parts, boxes = array.source_holder.tolist(), array.source_box.tolist()
            for row, into in enumerate(array.target_box.tolist()):
                part, box = parts[row], boxes[row]
                piece = slices[part, stored[name], starts[box]]
                if unchanged:  # one box on both sides: all of it, in one run
                    copy: Move | None = Move(0, 0, piece.nbytes)
                else:
                    copy = move(array.lo[row], array.hi[row], from_boxes[box], to_boxes[into], array.itemsize)
                if copy is None:
                    continue
                copy = copy.shifted(source=piece.offset)
                for block in _blocks_of(copy):
                    key = (part, piece.file, block)
                    read = blocks.get(key)
                    if read is None:
                        read = blocks[key] = BlockRead(*key)
                    read.copies.append((copy, destinations[name][into]))
        # Blocks full of small arrays first: making those arrays then overlaps with reading the rest.
        ordered = sorted(blocks, key=lambda key: (-(len(blocks[key].copies) // _MANY), key))
        return [blocks[key] for key in ordered]

    def _place(
        self,
        pipeline: BlockPipeline,
        blocks: list[BlockRead],
        destinations: dict[str, dict[int, Destination]],
        leaves: list[Any],
    ) -> None:
        """Hand arrays to their adapters, in batches, as soon as all their boxes are whole."""
        waiting = {name: len(boxes) for name, boxes in destinations.items()}
        touched = {id(d) for block in blocks for _, d in block.copies}
        whole: list[str] = []
        for name, boxes in destinations.items():
            waiting[name] -= sum(id(box) not in touched for box in boxes.values())
            if not waiting[name]:  # zero-size: nothing will be read for it
                whole.append(name)
        self._finish(whole, destinations, leaves)
        for batch in pipeline.run(blocks):
            whole = []
            for destination in batch:
                name = self._wanted[destination.array].name
                waiting[name] -= 1
                if not waiting[name]:
                    whole.append(name)
            self._finish(whole, destinations, leaves)

    def _finish(
        self, names: list[str], destinations: dict[str, dict[int, Destination]], leaves: list[Any]
    ) -> None:
        batches: dict[int, tuple[Adapter, list[int], list[Placement]]] = {}
        for name in names:
            boxes = destinations.pop(name)  # drops the loader's hold: the array owns its memory now
            one = self._by_name[name]
            _, at, batch = batches.setdefault(id(one.adapter), (one.adapter, [], []))
            at.append(one.at)
            batch.append(self._placement(one, boxes))
        for adapter, at, batch in batches.values():
            for index, leaf in zip(at, adapter.place(batch), strict=True):
                leaves[index] = leaf

    def _placement(self, one: Wanted, boxes: dict[int, Destination]) -> Placement:
        assert one.sink is not None
        data = {number: box.data for number, box in boxes.items()}
        if one.cast_from is None:
            return Placement(one.sink, data, all(box.owned for box in boxes.values()))
        wanted = dtype_of(one.sink.description.layout.dtype).numpy
        stored = dtype_of(one.cast_from).numpy
        cast = {n: d.view(stored).astype(wanted).view(np.uint8) for n, d in data.items()}
        return Placement(one.sink, cast, alias=False)


def _stored_layout(entry: ArrayEntry) -> ArrayLayout:
    return _grid_of_parts(entry.dtype, entry.shape, entry.cuts, entry.owners)


@lru_cache(maxsize=4096)
def _grid_of_parts(
    dtype: str,
    shape: tuple[int, ...],
    cuts: tuple[tuple[int, ...], ...],
    owners: tuple[tuple[int, int, int], ...],
) -> ArrayLayout:
    """The layout of an array over the parts of a checkpoint; a model repeats few of them many times."""
    holders = tuple((owner,) for owner in decode_owners(owners, num_cells(cuts)))
    return ArrayLayout.grid(dtype, shape, cuts, holders)


def _blocks_of(copy: Move) -> Sequence[int]:
    """The blocks that hold the bytes a copy reads."""
    if copy.dims:
        found: list[int] = copy.blocks(BLOCK).tolist()
        return found
    return range(copy.source // BLOCK, (copy.source + copy.run - 1) // BLOCK + 1)
