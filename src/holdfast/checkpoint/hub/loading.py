"""From a repository to a tree of arrays on any mesh.

Template and mapping -> leaves as grids of strided views -> one plan against the layout that is wanted -> the
byte ranges that this process needs -> arrays, placed as they become whole. A range of up to 8 MiB is read
past the page cache into a small reused buffer and copied, reordered or cast from there to where it belongs:
into the memory that becomes the array. Beside that memory a load takes one such buffer per thread.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np

from holdfast.arrays import (
    NUMPY,
    Adapter,
    Bytes1D,
    DType,
    Landing,
    Layout,
    Move,
    Placement,
    Plan,
    adapters,
    copying,
    join,
    landed,
    plan,
    unflatten,
)
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.pages import region
from holdfast.arrays.scattering import Scatter
from holdfast.checkpoint.hub.copying import copy
from holdfast.checkpoint.hub.mapping import NameMap
from holdfast.checkpoint.hub.matching import Matched, MatchedLeaf
from holdfast.checkpoint.hub.packed import PACKED, STEP, file_bytes, unpacked
from holdfast.checkpoint.hub.repository import Entry, Repository
from holdfast.checkpoint.loading import READERS
from holdfast.checkpoint.memory import Allocator
from holdfast.checkpoint.reading import PIECE
from holdfast.errors import FormatError, StorageError, UsageError
from holdfast.storage import ALIGN, PartReader, StoreOptions

log = logging.getLogger("holdfast.checkpoint")

CHUNK: Final = 8 << 20
"""Bytes that are read at once."""
_UNIT: Final = 128 << 10
"""Gaps shorter than this are read along: seeking over them would take longer."""
_RUN: Final = 256
"""Runs of fewer bytes, as where dims are turned around, are copied by numpy, many at a time."""
WINDOW: Final = 2 << 30
"""Bytes of leaves that are being read: none of the next is begun before some of them are whole."""
LANDED: Final = 512 << 20
"""The same where they are put together on their way to devices."""


def load_hub(
    place: str | os.PathLike[str],
    into: Any = None,
    mapping: NameMap | None = None,
    *,
    cast: bool | Sequence[str] = False,
    strict: bool = True,
    threads: int = READERS,
    options: StoreOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """The weights of a Hugging Face repository (safetensors files) in the shape of a template, on any mesh.

        params = holdfast.load_hub("models/llama", into=template, mapping=rules)

    `into` is a tree of arrays or of shape/dtype/sharding descriptions; each process reads the byte ranges of
    its own shards. Without it the result is nested dicts of numpy arrays, one level for each dot of a name.
    `mapping` says which tensors make up which leaf; without it a leaf is the tensor that its keys name, with
    dots between them.
    dtypes are converted where `cast` says so: True, or patterns of leaf names. Missing and extra tensors,
    shapes and dtypes that do not fit are listed all at once before any data is read; `strict=False` leaves
    missing leaves as they are in the template and passes over extra tensors.

    Called by: each process for itself. Blocks: while reading. Takes, beside the arrays, 8 MiB of memory for
    each thread; where devices are not the host, up to 512 MiB, or one leaf, of arrays on their way. Fails:
    MismatchError, FormatError, StorageError. `progress` is told the bytes read so far.
    """
    if threads < 1:
        raise UsageError(f"threads={threads}", hint="a load needs at least one thread")
    if into is None and mapping is not None:
        raise UsageError("mapping= without into=", hint="a mapping fills the leaves of a template")
    known = adapters()
    rank, world = (known[0] if known else NUMPY).identity()
    repository = Repository(place, options)
    into = _own_tree(repository) if into is None else into
    names = mapping if mapping is not None else NameMap(rest=True)
    matched = Matched(repository, into, names, cast=cast, strict=strict, rank=rank, world=world)
    load = HubLoad(repository, matched, rank=rank, threads=threads, progress=progress)
    started = time.monotonic()
    tree = load.run()
    log.info(
        "%s: %d leaves, %d bytes read in %.2f s",
        repository.place, len(matched.leaves), load.bytes_read, time.monotonic() - started,
    )  # fmt: skip
    return tree


def _own_tree(repository: Repository) -> Any:
    return unflatten(
        {
            join(name.split(".")): _Described(entry.tensor.shape, entry.dtype.numpy)
            for name, entry in repository.tensors.items()
        }
    )


class _Described:
    """A tensor as its own template; no container, so that trees take it for a leaf."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype


@dataclass(slots=True, eq=False)
class _Box:
    """The memory of one box of one leaf, and the chunks still missing for it."""

    leaf: int
    number: int
    data: Bytes1D
    owned: bool
    dtype: DType
    missing: int = 0


@dataclass(slots=True, eq=False)
class _Chunk:
    """A range of elements of one tensor, and the copies out of it."""

    entry: Entry
    lo: int
    hi: int
    copies: list[tuple[Move, _Box]]


class _Failed(NamedTuple):
    error: BaseException


@final
class HubLoad:
    """One load; `bytes_read` tells afterwards what was read."""

    def __init__(
        self,
        repository: Repository,
        matched: Matched,
        *,
        rank: int,
        threads: int = READERS,
        window: int = WINDOW,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._repository = repository
        self._flat = matched.flat
        self._leaves = matched.leaves
        self._rank = rank
        self._threads = max(threads, repository.at_once)
        self._window = window
        self._progress = progress
        self._allocator = Allocator()
        self._landings: dict[int, Landing | None] = {}
        """By the id of the adapter whose arrays are put together there."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._readers: dict[str, PartReader] = {}
        self._done: queue.SimpleQueue[list[_Box] | _Failed] = queue.SimpleQueue()
        self._todo: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self.bytes_read = 0

    def run(self) -> Any:
        """The tree. Fails: FormatError if a file is shorter than its header said; StorageError."""
        copies = self._plan()
        leaves = list(self._flat.leaves)
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="holdfast-hub")
        try:
            with self._landed():
                for _ in range(self._threads):
                    pool.submit(self._work)
                self._fill(copies, leaves)
        finally:
            self._stop.set()
            for _ in range(self._threads):
                self._todo.put(None)
            pool.shutdown()
            for reader in self._readers.values():
                reader.close()
        return self._flat.rebuild(leaves)

    @contextmanager
    def _landed(self) -> Iterator[None]:
        """Landings for those leaves that go to devices, until all have arrived there."""
        sinks: dict[int, tuple[Adapter, list[Any]]] = {}
        for leaf in self._leaves:
            sinks.setdefault(id(leaf.adapter), (leaf.adapter, []))[1].append(leaf.sink)
        self._landings = {key: adapter.landing(some) for key, (adapter, some) in sinks.items()}
        if any(one is not None for one in self._landings.values()):
            self._window = min(self._window, LANDED)
        with landed(self._landings.values()):
            yield

    def _plan(self) -> Plan:
        """Which part of which cell goes into which box; dtypes are those that are wanted on both sides."""
        target = Layout((leaf.name, leaf.sink.description.layout) for leaf in self._leaves)
        source = Layout((leaf.name, leaf.woven.layout(leaf.dtype)) for leaf in self._leaves)
        return plan(source, target, ranks={self._rank})

    # ---- the caller's thread: memory for leaves, and arrays made of them

    def _fill(self, copies: Plan, leaves: list[Any]) -> None:
        """Start leaves that share tensors together, as many as the window holds; place what is whole."""
        waiting = deque(self._groups())
        boxes: dict[int, list[_Box]] = {}
        missing: dict[int, int] = {}
        held = 0
        while waiting or boxes:
            whole: list[int] = []
            while waiting and (not boxes or held + self._nbytes(waiting[0]) <= self._window):
                group = waiting.popleft()
                held += self._nbytes(group)
                for number in group:
                    boxes[number] = self._allocated(number)
                chunks = self._chunks(group, copies, boxes)
                for number in group:
                    missing[number] = sum(box.missing > 0 for box in boxes[number])
                    if not missing[number]:  # without elements: nothing will be read for it
                        whole.append(number)
                for chunk in chunks:
                    self._todo.put(chunk)
            if not whole:
                for box in self._finished():
                    missing[box.leaf] -= 1
                    if not missing[box.leaf]:
                        whole.append(box.leaf)
            self._place(whole, boxes, leaves)
            held -= self._nbytes(whole)

    def _finished(self) -> list[_Box]:
        """Boxes that have become whole: those of the next chunk, and of all that are done by then.

        Arrays that are made together cost a third of what each costs alone.
        """
        found: list[_Box] = []
        item = self._done.get()  # a reader hands on every box that is whole, or the error that ended it
        with suppress(queue.Empty):
            while True:
                if isinstance(item, _Failed):
                    raise item.error
                found += item
                item = self._done.get_nowait()
        return found

    def _groups(self) -> list[list[int]]:
        """Leaves that share a tensor, in the order of the files: what is read once serves all of them."""
        owner: dict[str, int] = {}
        groups: dict[int, list[int]] = {}
        for number, leaf in enumerate(self._leaves):
            met = {owner[one.tensor] for one in leaf.woven.strands if one.tensor in owner}
            first = min(met, default=number)
            groups[first] = [*(n for one in sorted(met) for n in groups.pop(one)), number]
            owner |= {one.tensor: first for n in groups[first] for one in self._leaves[n].woven.strands}
        return sorted(groups.values(), key=lambda group: min(map(self._place_in_file, group)))

    def _place_in_file(self, number: int) -> tuple[str, int]:
        entries = [self._repository.tensors[one.tensor] for one in self._leaves[number].woven.strands]
        return min(((entry.file, entry.offset) for entry in entries), default=("", 0))

    def _nbytes(self, group: Sequence[int]) -> int:
        return sum(
            layout.box_nbytes(box)
            for number in group
            for layout, local in [self._wanted(number)]
            for box, ordinal in enumerate(local)
            if ordinal >= 0
        )

    def _wanted(self, number: int) -> tuple[Any, tuple[int, ...]]:
        description = self._leaves[number].sink.description
        return description.layout, description.local

    def _allocated(self, number: int) -> list[_Box]:
        layout, local = self._wanted(number)
        landing = self._landings[id(self._leaves[number].adapter)]
        found = []
        for box, ordinal in enumerate(local):
            if ordinal >= 0:
                nbytes = layout.box_nbytes(box)
                if landing is None:
                    data, owned = self._allocator.allocate(nbytes)
                else:
                    data, owned = landing.take(nbytes), True
                found.append(_Box(number, box, data, owned, dtype_of(layout.dtype)))
        return found

    def _chunks(self, group: Sequence[int], copies: Plan, boxes: dict[int, list[_Box]]) -> list[_Chunk]:
        """The ranges that a group of leaves needs, tensor by tensor."""
        moves: dict[str, list[tuple[Move, _Box]]] = {}
        for number in group:
            leaf, rows = self._leaves[number], copies[self._leaves[number].name]
            layout = leaf.sink.description.layout
            own = {box.number: box for box in boxes[number]}
            extents = layout.boxes.tolist()
            lows, highs = rows.lo.tolist(), rows.hi.tolist()
            pairs = zip(rows.source_box.tolist(), rows.target_box.tolist(), strict=True)
            for row, (cell, box) in enumerate(pairs):
                piece = leaf.woven.cells[cell]
                move = piece.move(lows[row], highs[row], extents[box])
                moves.setdefault(piece.strand.tensor, []).append((move, own[box]))
        found = [
            chunk
            for tensor, some in moves.items()
            for chunk in _ranges(self._repository.tensors[tensor], some)
        ]
        for chunk in found:
            for box in {id(box): box for _, box in chunk.copies}.values():
                box.missing += 1
        return sorted(found, key=lambda chunk: (chunk.entry.file, chunk.entry.offset, chunk.lo))

    def _place(self, whole: Sequence[int], boxes: dict[int, list[_Box]], leaves: list[Any]) -> None:
        batches: dict[int, tuple[Adapter, list[MatchedLeaf], list[Placement]]] = {}
        for number in whole:
            leaf = self._leaves[number]
            memory = boxes.pop(number)  # drops the loader's hold: the array owns its memory now
            data = {box.number: box.data for box in memory}
            _, some, batch = batches.setdefault(id(leaf.adapter), (leaf.adapter, [], []))
            some.append(leaf)
            batch.append(Placement(leaf.sink, data, all(box.owned for box in memory)))
        for adapter, some, batch in batches.values():
            landing = self._landings[id(adapter)]
            if landing is None:
                made = adapter.place(batch)
                adapter.ready(made)  # only then is host memory free for the next leaf
            else:
                made = landing.place(batch)
            for leaf, array in zip(some, made, strict=True):
                leaves[leaf.at] = array

    # ---- the readers

    def _work(self) -> None:
        try:
            buffer = region(CHUNK + 2 * ALIGN)
            while not self._stop.is_set():
                chunk = self._todo.get()
                if chunk is None:
                    return
                self._read(chunk, buffer)
                if whole := self._completed(chunk):
                    self._done.put(whole)
        # Whatever ends a reader must reach the caller, who is waiting for it.
        except BaseException as error:
            self._done.put(_Failed(error))

    def _completed(self, chunk: _Chunk) -> list[_Box]:
        whole = []
        with self._lock:
            for box in {id(box): box for _, box in chunk.copies}.values():
                box.missing -= 1
                if not box.missing:
                    whole.append(box)
        return whole

    def _read(self, chunk: _Chunk, buffer: Bytes1D) -> None:
        entry, word = chunk.entry, chunk.entry.tensor.dtype
        begin = entry.offset + file_bytes(word, chunk.lo)
        nbytes = file_bytes(word, chunk.hi - chunk.lo)
        start = begin // ALIGN * ALIGN
        reader = self._reader(entry.file)
        fd = reader.descriptor() if _is_plain(chunk) else None
        if fd is not None:
            scattered = Scatter((_in_bytes(move, entry), box.data) for move, box in chunk.copies)
            got = self._scattered(scattered, fd, start, begin + nbytes - start, buffer, reader.path)
            self._check_there(entry, start + got, begin + nbytes)
        else:
            end = -(-(begin + nbytes) // ALIGN) * ALIGN
            got = reader.read_into(buffer[: end - start].data, start)
            self._check_there(entry, start + got, begin + nbytes)
            data = buffer[begin - start : begin - start + nbytes]
            if word in PACKED:
                data = unpacked(word, data, chunk.hi - chunk.lo)
            for move, box in chunk.copies:
                copy(move.shifted(source=-chunk.lo), data, entry.dtype, box.data, box.dtype)
        with self._lock:
            self.bytes_read += nbytes
            if self._progress is not None:
                self._progress(self.bytes_read)

    def _scattered(
        self, scattered: Scatter, fd: int, start: int, nbytes: int, buffer: Bytes1D, path: str
    ) -> int:
        try:
            return scattered.read(fd, start, nbytes, buffer[:PIECE], None).nbytes
        except OSError as error:
            raise StorageError.from_os(error, doing="read", path=path) from error

    def _check_there(self, entry: Entry, seen: int, wanted: int) -> None:
        if seen < wanted:
            raise FormatError(
                f"{self._repository.place}/{entry.file} ends at {seen}, inside of the tensor "
                f"{entry.tensor.name!r} that ends at {entry.offset + entry.nbytes}",
                hint="the file became shorter while it was read; is it still being downloaded?",
            )

    def _reader(self, name: str) -> PartReader:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = self._repository.reader(name)
            return self._readers[name]


def _is_plain(chunk: _Chunk) -> bool:
    """Whether its elements go to their boxes as they are, in runs that are worth a copy of their own."""
    size = chunk.entry.dtype.itemsize
    return (
        copying.library is not None
        and chunk.entry.tensor.dtype not in PACKED
        and all(box.dtype is chunk.entry.dtype and move.run * size >= _RUN for move, box in chunk.copies)
    )


def _in_bytes(move: Move, entry: Entry) -> Move:
    """A copy that counts elements of a tensor as one that counts bytes of its file."""
    size = entry.dtype.itemsize
    dims = tuple((count, size * at, size * to) for count, at, to in move.dims)
    return Move(entry.offset + size * move.source, size * move.target, size * move.run, dims)


def _ranges(entry: Entry, moves: list[tuple[Move, _Box]]) -> Iterator[_Chunk]:
    """The ranges of one tensor that hold what is copied, none longer than a chunk."""
    word = entry.tensor.dtype
    bits = PACKED.get(word, 8 * entry.dtype.itemsize)
    unit = _UNIT // bits * 8  # ends on a byte
    units = np.unique(np.concatenate([move.blocks(unit) for move, _ in moves]))
    breaks = np.flatnonzero(np.diff(units) > 1) + 1
    for stretch in np.split(units, breaks):
        first, last = int(stretch[0]), int(stretch[-1]) + 1
        for start in range(first, last, CHUNK // _UNIT):
            lo, hi = start * unit, min(start + CHUNK // _UNIT, last) * unit
            copies = [(piece, box) for move, box in moves for piece in move.clip(lo, hi)]
            lo = min(move.source for move, _ in copies)
            hi = max(move.source_span()[1] for move, _ in copies)
            if word in PACKED:
                lo, hi = lo // STEP * STEP, min(-(-hi // STEP) * STEP, math.prod(entry.tensor.shape))
            yield _Chunk(entry, lo, hi, copies)
