"""The pipeline that reads a load plan: block by block, verified, scattered to where the bytes belong.

A block (8 MiB of a part file) is the unit of reading and of trust. Each is read once, past the page cache,
into a small reused buffer, scattered to the arrays that need it, and hashed. An array is handed on only when
every block that touches it has verified. A block that does not verify is looked for in the other copies.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import final

from holdfast.arrays import Bytes1D, Move
from holdfast.checkpoint.memory import region
from holdfast.errors import CorruptError, HoldfastError
from holdfast.format import (
    BLOCK,
    PartIndex,
    arrays_in,
    block_digest,
    block_range,
    block_seed,
    check_block,
    check_size,
    data_name,
)
from holdfast.storage import LocalStore, PartReader

BadBlock = Callable[[CorruptError, str], None]


@dataclass(slots=True)
class Destination:
    """The memory of one box of one array, and the blocks still missing for it."""

    array: int
    box: int
    data: Bytes1D
    owned: bool
    missing: int = 0


@dataclass(slots=True)
class BlockRead:
    """One block of one file, and the copies out of it (source offsets are those of the file)."""

    part: int
    file: int
    block: int
    copies: list[tuple[Move, Destination]] = field(default_factory=list)


@dataclass(slots=True)
class ReadStats:
    """What a load cost."""

    bytes_read: int = 0
    hash_s: float = 0.0


@final
class BlockPipeline:
    """Reads blocks on several threads and yields destinations as they become whole."""

    def __init__(
        self,
        stores: Sequence[LocalStore],
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
        self._readers: dict[tuple[int, int, int], PartReader] = {}
        self._stop = threading.Event()
        self.stats = ReadStats()

    def run(self, blocks: Sequence[BlockRead]) -> Iterator[list[Destination]]:
        """The destinations of each block that completes any, as soon as all their bytes have verified.

        Fails: CorruptError naming file, block and arrays, if no copy of a block verifies; StorageError.
        """
        for block in blocks:
            for _, destination in block.copies:
                destination.missing += 1
        done: queue.SimpleQueue[list[Destination] | BaseException | None] = queue.SimpleQueue()
        todo: queue.SimpleQueue[BlockRead] = queue.SimpleQueue()
        for block in blocks:
            todo.put(block)
        workers = max(1, min(self._threads, len(blocks)))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="holdfast-read")
        try:
            for _ in range(workers):
                pool.submit(self._work, todo, done)
            running = workers
            while running:
                item = done.get()  # each worker always ends with None or an error
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            self._stop.set()
            pool.shutdown()
            for reader in self._readers.values():
                reader.close()

    def _work(
        self,
        todo: queue.SimpleQueue[BlockRead],
        done: queue.SimpleQueue[list[Destination] | BaseException | None],
    ) -> None:
        buffer = region(BLOCK)
        try:
            while not self._stop.is_set():
                try:
                    block = todo.get_nowait()
                except queue.Empty:
                    break
                self._read(block, buffer)
                if whole := self._finished(block):
                    done.put(whole)
        # Whatever ends a reader must reach the caller, who is waiting for it.
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    def _finished(self, block: BlockRead) -> list[Destination]:
        whole = []
        with self._lock:
            for _, destination in block.copies:
                destination.missing -= 1
                if destination.missing == 0:
                    whole.append(destination)
        return whole

    def _read(self, block: BlockRead, buffer: Bytes1D) -> None:
        """Read, scatter and verify one block, from the first copy in which it is right."""
        for at, store in enumerate(self._stores):
            try:
                self._read_from(at, block, buffer)
                return
            except (CorruptError, HoldfastError) as error:
                bad = self._as_corrupt(error, block)
                self._on_bad(bad, store.root)
                if at == len(self._stores) - 1:
                    raise bad from error

    def _read_from(self, copy: int, block: BlockRead, buffer: Bytes1D) -> None:
        index = self._indexes[block.part]
        size = index.files[block.file].size
        begin, end = block_range(block.block, size)
        reader = self._reader(copy, block.part, block.file)
        got = reader.read_into(buffer.data, begin)
        data = buffer[: min(got, end - begin)]
        if data.size < end - begin:
            check_block(index, block.file, block.block, data.data)  # raises: the file is shorter
        # Scattering first leaves the bytes in cache for the hash. Nothing is handed on before it.
        for copy_out, destination in block.copies:
            for move in copy_out.clip(begin, end):
                move.shifted(source=-begin).apply(data, destination.data)
        if self._verify:
            self._check(index, block, data)
        with self._lock:
            self.stats.bytes_read += data.size

    def _check(self, index: PartIndex, block: BlockRead, data: Bytes1D) -> None:
        started = time.thread_time()
        seed = block_seed(index.save, index.part, block.block, block.file)
        found = block_digest(data.data, seed)
        spent = time.thread_time() - started
        with self._lock:
            self.stats.hash_s += spent
        if found != index.files[block.file].block(block.block):
            check_block(index, block.file, block.block, data.data)

    def _reader(self, copy: int, part: int, file: int) -> PartReader:
        key = (copy, part, file)
        with self._lock:
            if key not in self._readers:
                index = self._indexes[part]
                name = data_name(part, index.save.attempt, file)
                reader = self._stores[copy].open_part(self._folder, name)
                self._readers[key] = reader
                check_size(name, reader.size, index.files[file].size)
            return self._readers[key]

    def _as_corrupt(self, error: HoldfastError, block: BlockRead) -> CorruptError:
        if isinstance(error, CorruptError) and error.block is not None:
            return error
        index = self._indexes[block.part]
        begin, end = block_range(block.block, index.files[block.file].size)
        return CorruptError(
            error.message,
            hint=error.hint,
            file=index.files[block.file].name,
            block=block.block,
            arrays=arrays_in(index, block.file, begin, end),
        )
