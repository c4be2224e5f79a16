"""From a committed step to a tree of arrays on any mesh.

Template -> names and wanted layouts -> one plan against the layout on disk -> the blocks that hold the needed
bytes -> arrays, placed as they become whole. Problems of the template are found before anything is read, and
listed all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final

import numpy as np

from holdfast.arrays import (
    NUMPY,
    Adapter,
    ArrayLayout,
    Description,
    FlatTree,
    Layout,
    Move,
    Placement,
    Sink,
    adapters,
    match,
    move,
    plan,
    unflatten,
)
from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.memory import Allocator
from holdfast.checkpoint.reading import BadBlock, BlockPipeline, BlockRead, Destination
from holdfast.checkpoint.saving import adapter_of, flatten_tree
from holdfast.errors import HoldfastError, MismatchError, UsageError
from holdfast.format import (
    BLOCK,
    ArrayEntry,
    Manifest,
    PartIndex,
    ScalarEntry,
    Slice,
    decode_owners,
    decode_scalar,
    num_cells,
    read_index,
    step_folder,
)
from holdfast.storage import LocalStore

log = logging.getLogger("holdfast.checkpoint")

_MANY: Final = 16
"""Blocks with at least this many arrays in them are read first."""

Rename = Mapping[str, str] | Callable[[str], str]


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


class _Stored:
    """An array of the checkpoint as its own template."""

    def __init__(self, entry: ArrayEntry) -> None:
        self.shape = entry.shape
        self.dtype = dtype_of(entry.dtype).numpy


class _Wanted:
    """One leaf of the template that is to be loaded."""

    __slots__ = ("adapter", "at", "cast_from", "entry", "name", "scalar", "sink")

    def __init__(self, at: int, name: str) -> None:
        self.at = at
        self.name = name
        self.entry: ArrayEntry | None = None
        self.scalar: ScalarEntry | None = None
        self.sink: Sink | None = None
        self.adapter: Adapter = NUMPY
        self.cast_from: str | None = None


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
        self._arrays = {entry.name: entry for entry in manifest.arrays}
        self._scalars = {entry.name: entry for entry in manifest.scalars}
        self._flat = flatten_tree(template) if template is not None else self._own_tree()
        self._wanted = self._match_template(template is None)
        self._by_name = {one.name: one for one in self._wanted}
        self.nbytes = sum(w.entry.nbytes for w in self._wanted if w.entry is not None)

    # ---- what is wanted

    def _own_tree(self) -> FlatTree:
        names = [
            name
            for name in (*self._arrays, *self._scalars)
            if self._options.parts is None or match(self._options.parts, name)
        ]
        return FlatTree(
            list(names),
            None,
            lambda: names,
            lambda leaves: unflatten(dict(zip(names, leaves, strict=True))),
        )

    def _match_template(self, own: bool) -> list[_Wanted]:
        problems: list[str] = []
        wanted: list[_Wanted] = []
        known = adapters()
        used: set[str] = set()
        for at, (name, leaf) in enumerate(zip(self._flat.names(), self._flat.leaves, strict=True)):
            if not self._selected(name):
                continue
            one = _Wanted(at, name)
            stored = self._stored_name(name)
            used.add(stored)
            one.entry, one.scalar = self._arrays.get(stored), self._scalars.get(stored)
            if one.entry is None and one.scalar is None:
                if self._options.strict:
                    shown = stored if stored == name else f"{stored} (wanted as {name})"
                    problems.append(f"{shown}: not in the checkpoint")
                continue
            problem = self._attach(one, leaf, known, own)
            if problem is not None:
                problems.append(f"{name}: {problem}")
            wanted.append(one)
        if self._options.strict:
            extra = [n for n in (*self._arrays, *self._scalars) if n not in used]
            if self._options.rename is None:
                extra = [name for name in extra if self._selected(name)]
                problems += [f"{name}: in the checkpoint, not in the template" for name in extra]
        if problems:
            raise MismatchError(
                problems,
                hint="parts= loads a subset, rename= maps names, cast=True converts dtypes, "
                "strict=False ignores missing and extra arrays",
            )
        return wanted

    def _selected(self, name: str) -> bool:
        return self._options.parts is None or match(self._options.parts, name)

    def _stored_name(self, name: str) -> str:
        rename = self._options.rename
        if rename is None:
            return name
        if isinstance(rename, Mapping):
            return rename.get(name, name)
        renamed = rename(name)
        if not isinstance(renamed, str):
            raise UsageError(f"rename({name!r}) returned {renamed!r}, not a name")
        return renamed

    def _attach(self, one: _Wanted, leaf: Any, known: Sequence[Adapter], own: bool) -> str | None:
        """Give `one` its sink; returns what is wrong with the template leaf."""
        if own:
            # Without a template everything comes back in numpy, as stored; a key as its data.
            if one.entry is not None:
                one.sink = NUMPY.sink(_Stored(one.entry), self._rank, self._world)
            return None
        adapter = adapter_of(leaf, known)
        if (adapter is None) != (one.entry is None):
            kinds = ("a Python scalar", "an array")
            wants, has = kinds if adapter is None else kinds[::-1]
            return f"the template has {wants}, the checkpoint {has}"
        if adapter is None or one.entry is None:
            return None
        one.adapter = adapter
        one.sink = adapter.sink(leaf, self._rank, self._world)
        return self._compare(one, one.sink.description, one.entry)

    def _compare(self, one: _Wanted, want: Description, entry: ArrayEntry) -> str | None:
        layout = want.layout
        if (want.kind, want.impl) != (entry.kind, entry.impl):
            return (
                f"the template wants {_kind(want.kind, want.impl)}, the checkpoint has "
                f"{_kind(entry.kind, entry.impl)}"
            )
        if layout.shape != entry.shape:
            return f"shape {layout.shape} wanted, {entry.shape} saved"
        if layout.dtype != entry.dtype:
            if not self._options.cast or want.kind == "key":
                return f"dtype {layout.dtype} wanted, {entry.dtype} saved (cast=True converts)"
            one.cast_from = entry.dtype
        return None

    # ---- reading

    def run(self, stores: Sequence[LocalStore], on_bad: BadBlock) -> tuple[Any, BlockPipeline]:
        """The loaded tree. Fails: CorruptError if a block is bad in every copy."""
        folder = step_folder(self._manifest.save.step)
        target = Layout((one.name, self._target(one)) for one in self._wanted if one.sink)
        source = Layout(
            (one.name, _stored_layout(one.entry)) for one in self._wanted if one.entry is not None
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
            if one.scalar is not None:
                leaves[one.at] = decode_scalar(one.scalar.type, one.scalar.value)
        return self._flat.rebuild(leaves), pipeline

    def _read_index(self, stores: Sequence[LocalStore], folder: str, part: int) -> PartIndex:
        """The index of a part, from the first copy in which it is right."""
        for store in stores[:-1]:
            try:
                return read_index(store, folder, self._manifest, part)
            except HoldfastError as error:
                log.warning("%s: reading a copy instead: %s", store.root, error.message)
        return read_index(stores[-1], folder, self._manifest, part)

    def _target(self, one: _Wanted) -> ArrayLayout:
        assert one.sink is not None
        layout = one.sink.description.layout
        if one.cast_from is None:
            return layout
        return ArrayLayout(one.cast_from, layout.shape, layout.boxes, layout.holders)

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
        stored = {one.name: one.entry.name for one in self._wanted if one.entry is not None}
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

    def _placement(self, one: _Wanted, boxes: dict[int, Destination]) -> Placement:
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


def _kind(kind: str, impl: str | None) -> str:
    return f"a {impl} PRNG key" if kind == "key" else "a plain array"
