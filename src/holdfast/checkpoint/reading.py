"""The pipeline that reads a load plan: block by block, verified, scattered to where the bytes belong.

A block (8 MiB of a part file) is the unit of reading and of trust. Each is read once, past the page cache,
into a small reused buffer, scattered to the arrays that need it, and hashed. An array is handed on only when
every block that touches it has verified. A block that does not verify is looked for in the other copies.

Where all blocks of a step are wanted, the first of them are read while it is still being planned where their
bytes go (`read_ahead`): the plan of thousands of arrays takes as long as a hundred megabytes of the disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Self, final

from holdfast.arrays import Bytes1D, Landing, Move
from holdfast.arrays.pages import region
from holdfast.arrays.scattering import Scatter, scatters
from holdfast.checkpoint.memory import Runway
from holdfast.errors import CorruptError, HoldfastError, StorageError
from holdfast.format import (
    BLOCK,
    PartIndex,
    arrays_in,
    block_digest,
    block_range,
    block_seed,
    check_digest,
    check_size,
    data_name,
)
from holdfast.storage import PartReader, Store

PIECE: Final = 1 << 20
"""Bytes that are read, copied and hashed at a time: a core's cache has them still when they are hashed."""
_EARLY: Final = 4
"""Threads that read ahead, unless the store is far away: a whole block each is enough for a disk."""

BadBlock = Callable[[CorruptError, str], None]
BlockKey = tuple[int, int, int]
"""Part, file in it, block in that."""


@dataclass(slots=True)
class Destination:
    """The memory of one box of one array, and the blocks still missing for it.

    With a landing, the memory is taken from there when the first block is read, as many bytes as `nbytes`.
    """

    array: int
    box: int
    data: Bytes1D
    owned: bool
    missing: int = 0
    landing: Landing | None = None
    nbytes: int = 0


@dataclass(slots=True)
class BlockRead:
    """One block of one file, and the copies out of it (source offsets are those of the file)."""

    part: int
    file: int
    block: int
    copies: list[tuple[Move, Destination]] = field(default_factory=list)

    @property
    def key(self) -> BlockKey:
        return self.part, self.file, self.block


@dataclass(slots=True)
class ReadStats:
    """What a load cost."""

    bytes_read: int = 0
    hash_s: float = 0.0
    blocks: dict[str, int] = field(default_factory=dict)
    """How many blocks came from which place."""
    repaired: int = 0
    """Blocks that a nearer place had wrong, or not at all."""


def in_turn(blocks: Sequence[BlockRead], least: int = 1 << 20) -> list[BlockRead]:
    """The blocks in an order that makes arrays of a landing whole one after the other.

    Part by part, an array that is cut over all parts would be whole with the last of them only, and all
    arrays would need memory at once. Blocks without a box of `least` bytes, which nobody waits for, go first.
    """
    arrays: dict[int, list[int]] = {}
    for at, block in enumerate(blocks):
        for array in {d.array for _, d in block.copies if d.landing is not None and d.nbytes >= least}:
            arrays.setdefault(array, []).append(at)

    def turn(some: list[int]) -> tuple[tuple[int, int], tuple[int, int], int]:
        # Parts have their slices in one order: all are then read from front to back.
        places = [(blocks[at].file, blocks[at].block) for at in some]
        return min(places), max(places), some[0]

    large = {at for some in arrays.values() for at in some}
    order = dict.fromkeys(at for at in range(len(blocks)) if at not in large)
    for some in sorted(arrays.values(), key=turn):
        order.update(dict.fromkeys(some))
    return [blocks[at] for at in order]


@final
class BlockPipeline:
    """Reads blocks on several threads and yields destinations as they become whole.

    A context, with which its threads end. `indexes` must have a part before a block of it is asked for.
    """

    def __init__(
        self,
        stores: Iterable[Store],
        folder: str,
        indexes: dict[int, PartIndex],
        *,
        threads: int,
        verify: bool,
        on_bad: BadBlock,
    ) -> None:
        self._stores = stores
        self._folder = folder
        self._indexes = indexes
        self._threads = threads
        self._verify = verify
        self._on_bad = on_bad
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-read")
        self._early: dict[BlockKey, Future[tuple[Bytes1D, int]]] = {}
        """Blocks that are read ahead: the buffer, and how much of it was read."""
        self._buffers: list[Bytes1D] = []
        """Those that nobody uses now. There is never more than one for each thread: what was read ahead is
        taken before anything else is read."""
        self._readers: dict[tuple[str, int, int], PartReader] = {}
        self._left: Counter[tuple[int, int]] = Counter()
        """Blocks that are still to be read, by part and file."""
        self._stop = threading.Event()
        self._opening = threading.Lock()
        """Held while memory is taken from a landing, which may wait: readers that need none go on."""
        self.runway = Runway()
        self.stats = ReadStats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.runway.stop()
        for early in self._early.values():
            early.cancel()
        self._pool.shutdown(cancel_futures=True)
        self._early.clear()
        self._buffers.clear()
        for reader in self._readers.values():
            reader.close()

    def read_ahead(self) -> None:
        """Begin to read the first blocks of the parts in `indexes`, one for each thread, wherever they go.

        Does not wait. What fails is read again in its turn, and fails there.
        """
        for key in islice(_blocks_in(self._indexes), self._threads):
            self._early[key] = Future()
        todo = deque(self._early.items())
        store = next(iter(self._stores))
        # Whoever starts a thread waits until it runs, and has a load to plan.
        for _ in range(min(max(_EARLY, store.at_once), len(todo))):
            self._pool.submit(self._read_early, store, todo)

    def run(self, blocks: Sequence[BlockRead]) -> Generator[list[Destination], None, None]:
        """The destinations of each block that completes any, as soon as all their bytes have verified.

        Nobody writes to a destination when this has ended, or is closed. Fails: CorruptError naming file,
        block and arrays, if no copy of a block verifies; StorageError.
        """
        for key in self._early.keys() - {block.key for block in blocks}:
            if (needless := self._taken_early(key)) is not None:  # a header larger than a block, perhaps
                self._give_back(needless[0])
        for block in blocks:
            self._left[block.part, block.file] += 1
            for _, destination in block.copies:
                destination.missing += 1
        done: queue.SimpleQueue[list[Destination] | BaseException | None] = queue.SimpleQueue()
        todo: queue.SimpleQueue[BlockRead] = queue.SimpleQueue()
        for block in sorted(blocks, key=lambda block: block.key not in self._early):
            todo.put(block)
        workers = max(1, min(self._threads, len(blocks)))
        # They start behind what is read ahead: whoever takes a block from there waits for no reader to come.
        working = [self._pool.submit(self._work, todo, done) for _ in range(workers)]
        try:
            running = workers
            while running:
                item = done.get()  # each worker always ends with None or an error
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
                    self.runway.seen()
        finally:
            self._stop.set()
            self.runway.stop()
            wait(working)

    def _work(
        self,
        todo: queue.SimpleQueue[BlockRead],
        done: queue.SimpleQueue[list[Destination] | BaseException | None],
    ) -> None:
        try:
            while not self._stop.is_set():
                try:
                    block = todo.get_nowait()
                except queue.Empty:
                    break
                self._open(block)
                self._read(block)
                self._release(block)
                if whole := self._finished(block):
                    self.runway.handed()
                    done.put(whole)
        # Whatever ends a reader must reach the caller, who is waiting for it.
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    def _open(self, block: BlockRead) -> None:
        """Take memory for what is read into for the first time."""
        for _, destination in block.copies:
            if destination.landing is not None and not destination.data.size:
                with self._opening:
                    if not destination.data.size:  # another reader may have been first
                        destination.data = self.runway.take(destination.landing, destination.nbytes)

    def _release(self, block: BlockRead) -> None:
        """Close a file after its last block: a load may read a thousand parts, and descriptors are few."""
        with self._lock:
            self._left[block.part, block.file] -= 1
            if self._left[block.part, block.file]:
                return
            over = [key for key in self._readers if key[1:] == (block.part, block.file)]
            readers = [self._readers.pop(key) for key in over]
        for reader in readers:
            reader.close()

    def _finished(self, block: BlockRead) -> list[Destination]:
        whole = []
        with self._lock:
            for _, destination in block.copies:
                destination.missing -= 1
                if destination.missing == 0:
                    whole.append(destination)
        return whole

    def _read(self, block: BlockRead) -> None:
        """Read, scatter and verify one block, from the first copy in which it is right."""
        worst: CorruptError | None = None
        for store in self._stores:
            try:
                self._read_from(store, block)
            except HoldfastError as error:
                bad = self._as_corrupt(error, block)
                self._on_bad(bad, store.root)
                worst = worst or bad
            else:
                self._count(store, repaired=worst is not None)
                return
        assert worst is not None
        raise worst

    def _count(self, store: Store, *, repaired: bool) -> None:
        with self._lock:
            self.stats.blocks[store.root] = self.stats.blocks.get(store.root, 0) + 1
            self.stats.repaired += repaired

    def _read_from(self, store: Store, block: BlockRead) -> None:
        """Bring the bytes of a block to where they go, and verify them. Nothing is handed on before that."""
        index = self._indexes[block.part]
        begin, end = block_range(block.block, index.files[block.file].size)
        if scatters(end - begin):
            self._scatter(store, block, index, begin, end)
        else:
            self._copy_out(store, block, index, begin, end)
        with self._lock:
            self.stats.bytes_read += end - begin

    def _scatter(self, store: Store, block: BlockRead, index: PartIndex, begin: int, end: int) -> None:
        """Copy and hash piece by piece, each as it is read where the store has a descriptor for that."""
        copies = Scatter((move, destination.data) for move, destination in block.copies)
        seed = block_seed(index.save, index.part, block.block, block.file) if self._verify else None
        early = self._taken_early(block.key)
        fd = None if early is not None else self._reader(store, block.part, block.file).descriptor()
        size = end - begin
        buffer, got = early or (self._filled(store, block.key) if fd is None else (self._free_buffer(), size))
        try:
            self._check_whole(index, block, begin + got)
            if fd is not None:
                found = copies.read(fd, begin, size, buffer[:PIECE], seed)
            else:
                found = copies.take(buffer[:size], begin, seed)
        except OSError as error:
            raise StorageError.from_os(
                error, doing="read", path=self._reader(store, *block.key[:2]).path
            ) from error
        finally:
            self._give_back(buffer)
        self._check_whole(index, block, begin + found.nbytes)
        if self._verify:
            self._check(index, block, found.digest, found.hash_s)

    def _copy_out(self, store: Store, block: BlockRead, index: PartIndex, begin: int, end: int) -> None:
        """The same where nothing in C can be had for it."""
        buffer, got = self._taken_early(block.key) or self._filled(store, block.key)
        try:
            data = buffer[: min(got, end - begin)]
            self._check_whole(index, block, begin + data.size)
            # Scattering first leaves the bytes in cache for the hash.
            for copy_out, destination in block.copies:
                for move in copy_out.clip(begin, end):
                    move.shifted(source=-begin).apply(data, destination.data)
            if self._verify:
                started = time.thread_time()
                seed = block_seed(index.save, index.part, block.block, block.file)
                self._check(index, block, block_digest(data.data, seed), time.thread_time() - started)
        finally:
            self._give_back(buffer)

    def _read_early(self, store: Store, todo: deque[tuple[BlockKey, Future[tuple[Bytes1D, int]]]]) -> None:
        """Read blocks until there are none left that nobody else reads."""
        with suppress(IndexError):
            while True:
                key, found = todo.popleft()
                if found.set_running_or_notify_cancel():
                    try:
                        found.set_result(self._filled(store, key))
                    except BaseException as error:
                        found.set_exception(error)

    def _taken_early(self, key: BlockKey) -> tuple[Bytes1D, int] | None:
        """What was read ahead of a block, once: a second reading is from another copy.

        Blocks: until it is read, if that has begun.
        """
        early = self._early.pop(key, None)
        if early is None or early.cancel() or early.exception() is not None:
            return None
        return early.result()

    def _filled(self, store: Store, key: BlockKey) -> tuple[Bytes1D, int]:
        """A buffer with a block in it, and how many bytes there were."""
        part, file, block = key
        begin, _ = block_range(block, self._indexes[part].files[file].size)
        reader = self._reader(store, part, file)
        buffer = self._free_buffer()
        try:
            return buffer, reader.read_into(buffer.data, begin)
        except BaseException:
            self._give_back(buffer)
            raise

    def _free_buffer(self) -> Bytes1D:
        with self._lock:
            if self._buffers:
                return self._buffers.pop()
        return region(BLOCK)

    def _give_back(self, buffer: Bytes1D) -> None:
        with self._lock:
            self._buffers.append(buffer)

    def _check(self, index: PartIndex, block: BlockRead, seen: bytes, hash_s: float) -> None:
        with self._lock:
            self.stats.hash_s += hash_s
        check_digest(index, block.file, block.block, seen)

    def _check_whole(self, index: PartIndex, block: BlockRead, seen: int) -> None:
        """A file whose block ends at `seen` may have become shorter while it was read."""
        entry = index.files[block.file]
        if seen < block_range(block.block, entry.size)[1]:
            check_size(entry.name, seen, entry.size)

    def _reader(self, store: Store, part: int, file: int) -> PartReader:
        key = (store.root, part, file)
        with self._lock:
            if key not in self._readers:
                index = self._indexes[part]
                name = data_name(part, index.save.attempt, file)
                reader = store.open_part(self._folder, name, ahead=False)  # only what is needed
                try:
                    check_size(name, reader.size, index.files[file].size)
                except CorruptError:
                    reader.close()
                    raise
                self._readers[key] = reader
            return self._readers[key]

    def _as_corrupt(self, error: HoldfastError, block: BlockRead) -> CorruptError:
        if isinstance(error, CorruptError) and error.block is not None:
            return error
        index = self._indexes[block.part]
        begin, end = block_range(block.block, index.files[block.file].size)
        found = CorruptError(
            error.message,
            hint=error.hint,
            file=index.files[block.file].name,
            block=block.block,
            arrays=arrays_in(index, block.file, begin, end),
        )
        found.__cause__ = error
        return found


def _blocks_in(indexes: dict[int, PartIndex]) -> Iterator[BlockKey]:
    """Every block of some parts, the first of each file first."""
    files = [
        (part, file, -(-one.size // BLOCK))
        for part, index in indexes.items()
        for file, one in enumerate(index.files)
    ]
    for block in range(max((blocks for _, _, blocks in files), default=0)):
        yield from ((part, file, block) for part, file, blocks in files if block < blocks)
