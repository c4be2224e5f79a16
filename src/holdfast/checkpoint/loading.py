"""From a committed step to a tree of arrays on any mesh.

Template -> names and wanted layouts -> one plan against the layout on disk -> the blocks that hold the needed
bytes -> arrays, placed as they become whole. Problems of the template are found before anything is read, and
listed all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import numpy as np

from holdfast.arrays import (
    Adapter,
    ArrayLayout,
    ArrayPlan,
    Bytes1D,
    Holders,
    Landing,
    Layout,
    Move,
    Placement,
    Plan,
    Rename,
    Selection,
    Template,
    Wanted,
    decode_scalar,
    landed,
    move,
    plan,
)
from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.memory import Allocator
from holdfast.checkpoint.reading import (
    BadBlock,
    BlockKey,
    BlockPipeline,
    BlockRead,
    Destination,
    in_turn,
)
from holdfast.errors import FormatError, HoldfastError
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Manifest,
    PartEntry,
    PartIndex,
    Slice,
    check_slice,
    num_cells,
    owner_array,
    read_some,
    step_folder,
)
from holdfast.storage import Store

log = logging.getLogger("holdfast.checkpoint")

_MANY: Final = 16
"""Blocks with at least this many arrays in them are read first."""
READERS: Final = 16
"""Most wait for the disk while some copy and hash, also where there are fewer cores: for two of them eight
readers are a fifth slower, when the disk is slow."""
_FILES: Final = 256
"""Arrays are made whole one after the other only if so many open files are enough for it."""
_NOTHING: Final[Bytes1D] = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What to load and how."""

    parts: Sequence[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    cast: bool = False
    verify: bool = True
    threads: int = READERS


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did."""

    step: int
    nbytes: int
    bytes_read: int
    seconds: float
    hash_s: float
    blocks: Mapping[str, int] = field(default_factory=dict)
    """How many blocks came from which place: the folder, a copy, the mirror."""
    repaired: int = 0
    """Blocks that a nearer place had wrong, or not at all."""


class ReadPlan(NamedTuple):
    """The blocks to read in order, the indexes of the parts they lie in, and where the bytes go."""

    blocks: list[BlockRead]
    indexes: dict[int, PartIndex]
    destinations: dict[str, dict[int, Destination]]


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
        self._indexes: dict[int, PartIndex] = {}
        """Of the parts that are needed, as far as they were read."""
        self._landings: dict[int, Landing] = {}
        """By the id of the adapter whose arrays are put together there."""
        self._by_name = {one.name: one for one in self._wanted}
        self.nbytes = sum(self._entries[one.stored].nbytes for one in self._wanted if one.sink)

    # ---- reading

    def run(self, stores: Iterable[Store], on_bad: BadBlock) -> tuple[Any, BlockPipeline]:
        """The loaded tree. Fails: CorruptError if a block is bad in every copy."""
        leaves = list(self._flat.leaves)
        with BlockPipeline(
            stores,
            step_folder(self._manifest.save.step),
            self._indexes,
            # Ranges from far away are waited for, not worked on: more of them than there are cores.
            threads=max(self._options.threads, next(iter(stores)).at_once),
            verify=self._options.verify,
            on_bad=on_bad,
        ) as pipeline:
            if self._wants_everything():
                self._read_indexes(stores, {entry.part for entry in self._manifest.parts})
                pipeline.read_ahead()
            planned, _, destinations = self.planned(stores)
            with self._landed(planned, destinations):
                self._allocate(destinations)
                blocks = in_turn(planned) if self._landings else planned
                self._place(pipeline, blocks, destinations, leaves)
        for one in self._wanted:
            if one.sink is None:
                scalar = self._scalars[one.stored]
                leaves[one.at] = decode_scalar(scalar.type, scalar.value)
        return self._flat.rebuild(leaves), pipeline

    def planned(self, stores: Iterable[Store]) -> ReadPlan:
        """What this rank reads, and where it goes; reads the indexes of the parts that it needs, no other.

        Blocks: while those are read, several at a time where the store is far away.
        """
        stored = _StoredLayouts()
        whole: list[tuple[Wanted, int]] = []
        cut: list[Wanted] = []
        for one in self._wanted:
            if one.sink is not None:
                owner = self._owner_of_whole(one, stored)
                cut.append(one) if owner is None else whole.append((one, owner))
        target = Layout((one.name, one.layout()) for one in cut)
        source = Layout((one.name, stored.of(self._entries[one.stored])) for one in cut)
        copies = plan(source, target, ranks={self._rank})
        nothing = np.empty(0, np.int64)
        parts = np.unique(np.concatenate([nothing, *(array.source_holder for array in copies.values())]))
        self._read_indexes(stores, {*parts.tolist(), *(owner for _, owner in whole)})
        destinations = self._destinations()
        slices, blocks = _Slices(self._indexes), _Blocks()
        for one, owner in whole:
            piece = slices.whole(owner, self._entries[one.stored])
            if piece.nbytes:
                copy = Move(piece.offset, 0, piece.nbytes)
                blocks.add(owner, piece.file, copy, destinations[one.name][0])
        self._add_cut(copies, source, target, slices, blocks, destinations)
        return ReadPlan(blocks.in_order(), self._indexes, destinations)

    def _owner_of_whole(self, one: Wanted, stored: _StoredLayouts) -> int | None:
        """Who has all of an array, if this process wants all of it, in one piece on both sides.

        Most arrays are like that, and none of them needs a plan: that of 2,300 took longer than their first
        128 MiB.
        """
        assert one.sink is not None
        entry, wanted = self._entries[one.stored], one.sink.description
        if len(wanted.local) > 1 or wanted.local[0] < 0:
            return None
        return stored.only_owner(entry)

    def _add_cut(
        self,
        copies: Plan,
        source: Layout,
        target: Layout,
        slices: _Slices,
        blocks: _Blocks,
        destinations: Mapping[str, Mapping[int, Destination]],
    ) -> None:
        """The copies of those arrays that are cut on either side."""
        moves = _Moves()
        for name, array in copies.items():
            stored, found = self._by_name[name].stored, moves.of(array, source[name], target[name])
            parts, boxes = array.source_holder.tolist(), array.target_box.tolist()
            for part, box, (start, stop, copy) in zip(parts, boxes, found, strict=True):
                piece = slices.get(part, stored, start, stop, array.itemsize)
                if copy is not None:
                    shifted = copy.shifted(source=piece.offset)
                    blocks.add(part, piece.file, shifted, destinations[name][box])

    def _wants_everything(self) -> bool:
        """Whether every byte of the step goes to this process, whichever way it is cut."""
        return self._world == 1 and self._entries.keys() <= {one.stored for one in self._wanted}

    def _read_indexes(self, stores: Iterable[Store], parts: set[int]) -> None:
        """Have the indexes of these parts, those that were read before among them."""
        entries = [e for e in self._manifest.parts if e.part in parts and e.part not in self._indexes]
        folder = step_folder(self._manifest.save.step)
        at_once = min(next(iter(stores)).at_once, len(entries))
        if at_once < 2:
            self._indexes.update((entry.part, self._read_index(stores, folder, entry)) for entry in entries)
            return
        with ThreadPoolExecutor(at_once, thread_name_prefix="holdfast-index") as pool:
            found = pool.map(lambda entry: self._read_index(stores, folder, entry), entries)
            self._indexes.update((entry.part, index) for entry, index in zip(entries, found, strict=True))

    def _read_index(self, stores: Iterable[Store], folder: str, entry: PartEntry) -> PartIndex:
        """The index of a part, from the first copy in which it is right."""
        problem: HoldfastError | None = None
        for store in stores:
            if problem is not None:
                log.warning("reading the copy in %s instead: %s", store.root, problem.message)
            try:
                return read_some(store, folder, self._manifest, entry)
            except HoldfastError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _destinations(self) -> dict[str, dict[int, Destination]]:
        """Every local box of every wanted array, still without memory."""
        found: dict[str, dict[int, Destination]] = {}
        for number, one in enumerate(self._wanted):
            if one.sink is not None:
                local = one.sink.description.local
                boxes = [box for box, ordinal in enumerate(local) if ordinal >= 0]
                found[one.name] = {box: Destination(number, box, _NOTHING, False) for box in boxes}
        return found

    @contextmanager
    def _landed(
        self, blocks: Sequence[BlockRead], destinations: Mapping[str, Mapping[int, Destination]]
    ) -> Iterator[None]:
        """Landings for those arrays that go to devices, until all have arrived there."""
        self._landings.clear()
        sinks: dict[int, tuple[Adapter, list[Any]]] = {}
        if len({(block.part, block.file) for block in blocks}) <= _FILES:
            for one in self._wanted:
                if one.sink is not None:
                    sinks.setdefault(id(one.adapter), (one.adapter, []))[1].append(one.sink)
        with landed(self._landings.values()):
            for key, (adapter, some) in sinks.items():
                if (landing := adapter.landing(some)) is not None:
                    self._landings[key] = landing
            try:
                yield
            except BaseException:
                for destination in (box for boxes in destinations.values() for box in boxes.values()):
                    destination.data = _NOTHING  # the error may be held for long
                raise

    def _allocate(self, destinations: Mapping[str, Mapping[int, Destination]]) -> None:
        """Memory for every box; those of a landing get theirs when they are first read into."""
        allocator = Allocator()
        for name, boxes in destinations.items():
            one = self._by_name[name]
            layout, landing = one.layout(), self._landings.get(id(one.adapter))
            for box, destination in boxes.items():
                nbytes = layout.box_nbytes(box)
                if landing is not None:
                    destination.landing, destination.nbytes = landing, nbytes
                    continue
                memory = allocator.allocate(nbytes)
                destination.data, destination.owned = memory.data, memory.owned

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
        with closing(pipeline.run(blocks)) as batches:
            for batch in batches:
                whole = []
                for destination in batch:
                    name = self._wanted[destination.array].name
                    waiting[name] -= 1
                    if not waiting[name]:
                        whole.append(name)
                pipeline.runway.placed(self._finish(whole, destinations, leaves))

    def _finish(
        self, names: list[str], destinations: dict[str, dict[int, Destination]], leaves: list[Any]
    ) -> int:
        """Make arrays; how many bytes of landings they were put together in."""
        landed = 0
        batches: dict[int, tuple[Adapter, list[int], list[Placement]]] = {}
        for name in names:
            boxes = destinations.pop(name)  # drops the loader's hold: the array owns its memory now
            one = self._by_name[name]
            _, at, batch = batches.setdefault(id(one.adapter), (one.adapter, [], []))
            at.append(one.at)
            batch.append(self._placement(one, boxes))
            for destination in boxes.values():
                destination.data = _NOTHING  # blocks have the destination still
                landed += destination.nbytes
        for key, (adapter, at, batch) in batches.items():
            place = self._landings.get(key, adapter).place
            for index, leaf in zip(at, place(batch), strict=True):
                leaves[index] = leaf
        return landed

    def _placement(self, one: Wanted, boxes: dict[int, Destination]) -> Placement:
        assert one.sink is not None
        data = {number: box.data for number, box in boxes.items()}
        if one.cast_from is None:
            return Placement(one.sink, data, all(box.owned for box in boxes.values()))
        wanted = dtype_of(one.sink.description.layout.dtype).numpy
        stored = dtype_of(one.cast_from).numpy
        cast = {n: d.view(stored).astype(wanted).view(np.uint8) for n, d in data.items()}
        return Placement(one.sink, cast, alias=False)


class _Blocks:
    """The blocks to read, with the copies out of each."""

    def __init__(self) -> None:
        self._found: dict[BlockKey, BlockRead] = {}

    def add(self, part: int, file: int, copy: Move, destination: Destination) -> None:
        """Add a copy out of a file, to every block that has bytes of it."""
        for block in _blocks_of(copy):
            key = (part, file, block)
            read = self._found.get(key)
            if read is None:
                read = self._found[key] = BlockRead(*key)
            read.copies.append((copy, destination))

    def in_order(self) -> list[BlockRead]:
        """Those full of small arrays first: making them then overlaps with reading the rest."""
        ordered = sorted(self._found.items(), key=lambda item: (-(len(item[1].copies) // _MANY), item[0]))
        return [read for _, read in ordered]


class _Slices:
    """The slices of the parts that are read, found by what they hold; each is checked when it is used."""

    def __init__(self, indexes: Mapping[int, PartIndex]) -> None:
        self._indexes = indexes
        self._found = {
            part: {(piece.name, piece.start): piece for piece in index.slices}
            for part, index in indexes.items()
        }

    def get(
        self, part: int, name: str, start: tuple[int, ...], stop: tuple[int, ...], itemsize: int
    ) -> Slice:
        """The slice that the manifest says is there. Fails: FormatError."""
        piece = self._found[part].get((name, start))
        if piece is None:
            raise FormatError(
                f"{self._indexes[part].files[0].name}: its index lacks slice {start} to {stop} of {name!r}"
                if self._indexes[part].files
                else f"part {part} has no file",
                hint="the index is from another save; load another copy or an earlier step",
            )
        check_slice(self._indexes[part], piece, stop, itemsize)
        return piece

    def whole(self, part: int, entry: ArrayEntry) -> Slice:
        """The slice that has all of an array. Fails: FormatError."""
        return self.get(
            part, entry.name, (0,) * len(entry.shape), entry.shape, dtype_of(entry.dtype).itemsize
        )


class _Moves:
    """The copies of an array's plan; arrays that are cut alike on both sides share them."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], list[_Copy]] = {}

    def of(self, array: ArrayPlan, source: ArrayLayout, target: ArrayLayout) -> list[_Copy]:
        """For each row the cell it reads, and the copy out of that; no copy where there is nothing in it."""
        # A plan gives such arrays the very same rows, and keeps them alive.
        key = (id(array.lo), id(array.hi), array.itemsize)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _copies(array, source, target)
        return found


_Copy = tuple[tuple[int, ...], tuple[int, ...], Move | None]


def _copies(array: ArrayPlan, source: ArrayLayout, target: ArrayLayout) -> list[_Copy]:
    cells, boxes = source.boxes[array.source_box], target.boxes[array.target_box]
    found: list[_Copy] = []
    for row, (cell, box) in enumerate(zip(cells.tolist(), boxes.tolist(), strict=True)):
        start, stop = tuple(lo for lo, _ in cell), tuple(hi for _, hi in cell)
        found.append((start, stop, move(array.lo[row], array.hi[row], cell, box, array.itemsize)))
    return found


class _StoredLayouts:
    """The layouts of arrays over the parts of a checkpoint; a model repeats few of them many times.

    Arrays of one manifest share equal cuts and owners: their identity is enough.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[object, ...], ArrayLayout] = {}
        self._holders: dict[tuple[int, int], Holders] = {}
        self._only: dict[tuple[int, int], int | None] = {}

    def of(self, entry: ArrayEntry) -> ArrayLayout:
        """The layout of one array. Fails: FormatError."""
        key = (entry.dtype, entry.shape, id(entry.cuts), id(entry.owners))
        layout = self._layouts.get(key)
        if layout is None:
            holders = self._holders_of(entry)
            layout = self._layouts[key] = ArrayLayout.grid(entry.dtype, entry.shape, entry.cuts, holders)
        return layout

    def only_owner(self, entry: ArrayEntry) -> int | None:
        """The part that has all of an array in one slice; None where it is cut. Fails: FormatError."""
        key = (id(entry.cuts), id(entry.owners))
        if key not in self._only:
            alone = num_cells(entry.cuts) == 1
            self._only[key] = self._holders_of(entry).tuples[0][0] if alone else None
        return self._only[key]

    def _holders_of(self, entry: ArrayEntry) -> Holders:
        cells = num_cells(entry.cuts)
        found = self._holders.get((id(entry.owners), cells))
        if found is None:
            found = self._holders[id(entry.owners), cells] = Holders.alone(owner_array(entry.owners, cells))
        return found


def _blocks_of(copy: Move) -> Sequence[int]:
    """The blocks that hold the bytes a copy reads."""
    if copy.dims:
        found: list[int] = copy.blocks(BLOCK).tolist()
        return found
    return range(copy.source // BLOCK, (copy.source + copy.run - 1) // BLOCK + 1)
