"""A step written array by array by one process, read back, and only then committed.

The part files are made from front to back: tiles that fit into memory go into blocks of 8 MiB, which are
hashed and written while the next tile is read. States: planned -> written -> checked -> committed. Until the
last of them nothing of the step is visible; a failure removes what was written, a kill leaves it for the next
writer to clean.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from typing import Any, Final, final

import numpy as np
import xxhash

from holdfast import faults
from holdfast.arrays import Bytes1D, encode_scalar
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.pages import region
from holdfast.checkpoint import upkeep
from holdfast.checkpoint.foreign.boxes import extent, pieces
from holdfast.checkpoint.foreign.plan import Planned, part_files
from holdfast.checkpoint.foreign.source import Scalar
from holdfast.checkpoint.lease import Lease
from holdfast.checkpoint.step_reader import Box
from holdfast.errors import CorruptError, HoldfastError, StepExistsError
from holdfast.format import (
    BLOCK,
    MANIFEST,
    VERSION,
    ArrayEntry,
    Manifest,
    PartEntry,
    PartFile,
    PartIndex,
    SaveId,
    ScalarEntry,
    Slice,
    block_digest,
    block_range,
    block_seed,
    check_block,
    check_size,
    data_name,
    digest,
    encode_index,
    encode_manifest,
    index_name,
    num_blocks,
    parse_file_name,
    step_folder,
    versions,
)
from holdfast.format.part import PartLayout
from holdfast.storage import LocalStore, PartWriter, Store
from holdfast.vault import WORK, Intent, announce, claim, unfence

_LEASE_WAIT_S: Final = 60.0
_BLOCK_S: Final = 600.0
"""The longest that one block may take to be written."""

Progress = Callable[[int], None]


@final
class StepTarget:
    """One step of a folder, being written by this process alone; a context manager.

    Entering takes the folder's lease and cleans what earlier attempts left. Leaving without `commit` removes
    everything that was written. Fails: LeaseError, StepExistsError, StorageError.
    """

    def __init__(self, store: Store, step: int, *, overwrite: bool = False, threads: int = 4) -> None:
        self._store = store
        self._step = step
        self._folder = step_folder(step)
        self._overwrite = overwrite
        self._threads = threads
        self._save = SaveId("import", step, f"{uuid.uuid4().hex[:12]}-1")
        self._made: list[str] = []
        self._lease: Lease | None = None
        self._intent: Intent | None = None
        self._committed = False

    def __enter__(self) -> StepTarget:
        store = self._store
        if not self._overwrite and store.exists(self._folder, MANIFEST):
            raise self._exists()
        self._made = missing(store.root) if isinstance(store, LocalStore) else []
        try:
            self._lease = Lease(store, 0, wait_s=0.0 if store.has_locks else _LEASE_WAIT_S)
            upkeep.clean(store, lambda path, reason: None)
            self._intent = announce(store, self._save)
            store.make_folder(self._folder)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._lease is None:
            return  # what lies there, even a folder that was missing before, belongs to whoever has the lease
        if self._intent is not None:
            with suppress(HoldfastError):
                self._intent.close()
        if not self._committed:
            with suppress(HoldfastError):
                self._discard()
            if self._made:
                with suppress(HoldfastError, OSError):
                    _unmake(self._store, self._made)
        self._lease.close()

    def write(
        self,
        arrays: Sequence[Planned],
        scalars: Mapping[str, Scalar],
        meta: Mapping[str, Any],
        progress: Progress,
    ) -> dict[str, str]:
        """Write, read back, compare and commit; the digest of each array's bytes, by name.

        `progress` is told the bytes done; each counts twice, once written and once read back. Fails: whatever
        reading an array raises; CorruptError if what is stored is not what was read; StorageError.
        """
        files = part_files(arrays)
        by_name = {one.name: one for one in arrays}
        last = {piece.name: number for number, layout in enumerate(files) for piece in layout.slices}
        done = _Tally(progress)
        seen: list[dict[Slice, bytes]] = []
        entries: list[PartFile] = []
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="holdfast-move")
        try:
            for number, layout in enumerate(files):
                name = data_name(0, self._save.attempt, number)
                with closing(self._store.write_part(self._folder, name, size=layout.size)) as writer:
                    image = _Image(writer, self._save, number, layout.size, pool, self._threads + 1)
                    try:
                        ending = {name for name, file in last.items() if file == number}
                        seen.append(_fill(image, layout, by_name, ending, done))
                        entries.append(PartFile(name=name, size=layout.size, blocks=image.finished().hex()))
                        writer.sync()
                    finally:
                        image.settle()
        finally:
            pool.shutdown()
        index = PartIndex(
            version=VERSION,
            save=self._save,
            part=0,
            files=tuple(entries),
            slices=tuple(piece for layout in files for piece in layout.slices),
        )
        for number in range(len(files)):
            self._check(index, number, seen[number], done)
        self._commit(index, [one.entry for one in arrays], scalars, meta)
        return _array_digests(by_name, seen)

    def _check(self, index: PartIndex, file: int, seen: Mapping[Slice, bytes], done: _Tally) -> None:
        """CorruptError unless a file, as it lies in the store, holds the bytes that were read."""
        entry = index.files[file]
        pieces_left = deque(sorted((one for one in seen if one.nbytes), key=lambda one: one.offset))
        hasher = xxhash.xxh3_128()
        buffer = region(BLOCK)
        with closing(self._store.open_part(self._folder, entry.name)) as reader:
            check_size(entry.name, reader.size, entry.size)
            for block in range(num_blocks(entry.size)):
                begin, end = block_range(block, entry.size)
                got = reader.read_into(buffer.data, begin)
                data = buffer[: min(got, end - begin)]
                check_block(index, file, block, data.data)
                while pieces_left and pieces_left[0].offset < end:
                    piece = pieces_left[0]
                    last = piece.offset + piece.nbytes
                    hasher.update(data[max(0, piece.offset - begin) : last - begin].data)
                    if last > end:
                        break
                    if hasher.digest() != seen[piece]:
                        raise CorruptError(
                            f"{entry.name}: {piece.name} was read as {seen[piece].hex()} and lies there as "
                            f"{hasher.hexdigest()}",
                            hint="memory or storage of this machine is at fault; nothing was committed",
                            file=entry.name,
                            block=block,
                            arrays=[piece.name],
                        )
                    hasher.reset()
                    pieces_left.popleft()
                done.add(data.size)

    def _commit(
        self,
        index: PartIndex,
        arrays: Sequence[ArrayEntry],
        scalars: Mapping[str, Scalar],
        meta: Mapping[str, Any],
    ) -> None:
        store, folder = self._store, self._folder
        data = encode_index(index)
        name = index_name(0, self._save.attempt)
        part = PartEntry(part=0, index=name, size=len(data), digest=digest(data), nbytes=index.nbytes)
        manifest = encode_manifest(
            Manifest(
                save=self._save,
                created=time.time(),
                nbytes=index.nbytes,
                writer=versions(),
                meta=dict(meta),
                parts=(part,),
                scalars=tuple(
                    ScalarEntry(name, *encode_scalar(value)) for name, value in sorted(scalars.items())
                ),
                arrays=tuple(sorted(arrays, key=lambda one: one.name)),
            )
        )
        store.replace(folder, name, data=data)
        faults.site("import.written")
        claim(store, self._save)
        if self._overwrite and store.exists(folder, MANIFEST):
            done = store.replace(folder, MANIFEST, data=manifest, expected=store.version(folder, MANIFEST))
        else:
            done = store.create(folder, MANIFEST, data=manifest)
        if not done:
            raise self._exists()
        self._committed = True
        store.sync_folder()
        with suppress(HoldfastError):  # left for the next writer to clean
            self._remove(lambda attempt: attempt != self._save.attempt)
            unfence(store, self._save)

    def _discard(self) -> None:
        """Remove what this attempt wrote."""
        self._remove(lambda attempt: attempt == self._save.attempt)
        if not self._store.names(self._folder):
            self._store.remove_folder(self._folder)

    def _remove(self, which: Callable[[str], bool]) -> None:
        for name in self._store.names(self._folder):
            parsed = parse_file_name(name)
            if parsed is not None and parsed.kind != "manifest" and which(parsed.attempt):
                self._store.remove(self._folder, name)

    def _exists(self) -> StepExistsError:
        return StepExistsError(
            f"step {self._step} is already saved in {self._store.root}",
            hint="overwrite=True (--overwrite) replaces it; a step number of its own keeps both",
        )


@final
class _Tally:
    """Bytes done, told on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done)


@final
class _Image:
    """A part file that is filled from front to back; whole blocks are hashed and written on other threads.

    Every block has memory of its own: a store may read from it after `write` has returned. At most `ahead` of
    them are under way.
    """

    def __init__(
        self, writer: PartWriter, save: SaveId, file: int, size: int, pool: ThreadPoolExecutor, ahead: int
    ) -> None:
        self._writer = writer
        self._save = save
        self._file = file
        self._size = size
        self._pool = pool
        self._ahead = ahead
        self._at = 0
        self._block: Bytes1D = region(BLOCK)
        self._digests: list[bytes] = []
        self._running: deque[Future[bytes]] = deque()

    def add(self, data: Bytes1D) -> None:
        """Append bytes; blocks while too many blocks are under way."""
        taken = 0
        while taken < data.size:
            inside = self._at % BLOCK
            count = min(BLOCK - inside, data.size - taken)
            self._block[inside : inside + count] = data[taken : taken + count]
            taken += count
            self._at += count
            if self._at % BLOCK == 0:
                self._send(BLOCK)

    def _send(self, size: int) -> None:
        number, block = len(self._digests) + len(self._running), self._block
        self._running.append(self._pool.submit(self._write, block[:size], number))
        while len(self._running) > self._ahead:
            self._digests.append(self._running.popleft().result(_BLOCK_S))
        self._block = region(BLOCK)

    def _write(self, data: Bytes1D, number: int) -> bytes:
        self._writer.write(data.data, number * BLOCK)
        found = block_digest(data.data, block_seed(self._save, 0, number, self._file))
        faults.site("import.block.written")
        return found

    def finished(self) -> bytes:
        """The digests of all blocks, once the last is written."""
        assert self._at == self._size, f"{self._at} bytes of {self._size} were given"
        if self._at % BLOCK:
            self._send(self._at % BLOCK)
        while self._running:
            self._digests.append(self._running.popleft().result(_BLOCK_S))
        return b"".join(self._digests)

    def settle(self) -> None:
        """Return once no thread touches the file any more."""
        for future in self._running:
            future.cancel()
        wait(self._running, _BLOCK_S)


def _fill(
    image: _Image, layout: PartLayout, arrays: Mapping[str, Planned], ending: Set[str], done: _Tally
) -> dict[Slice, bytes]:
    """Read every slice of a file and append it; the digest of the bytes of each, as read.

    `ending` are the arrays of which later files have nothing.
    """
    image.add(np.frombuffer(layout.header, np.uint8))
    seen: dict[Slice, bytes] = {}
    last = {layout.slices[at].name: at for at in layout.order}
    for at in layout.order:
        piece = layout.slices[at]
        one = arrays[piece.name]
        kind = dtype_of(one.entry.dtype).numpy
        box: Box = tuple(zip(piece.start, piece.stop, strict=True))
        hasher = xxhash.xxh3_128()
        for tile in pieces(box, one.tile) if piece.nbytes else ():
            values = np.empty(extent(tile), kind)
            one.array.read_into(values, tile)
            data: Bytes1D = values.reshape(-1).view(np.uint8)
            hasher.update(data.data)
            image.add(data)
            done.add(data.size)
            del values, data  # before the next tile is made
        seen[piece] = hasher.digest()
        if last[piece.name] == at and piece.name in ending:
            one.array.release()
    return seen


def _array_digests(arrays: Mapping[str, Planned], seen: Sequence[Mapping[Slice, bytes]]) -> dict[str, str]:
    by_name: dict[str, list[tuple[tuple[int, ...], bytes]]] = {name: [] for name in arrays}
    for file in seen:
        for piece, found in file.items():
            by_name[piece.name].append((piece.start, found))
    return {
        name: parts[0][1].hex() if len(parts) == 1 else digest(b"".join(one for _, one in sorted(parts)))
        for name, parts in by_name.items()
    }


def missing(path: str) -> list[str]:
    """The folders that will have to be made for a folder to be there, deepest first."""
    found: list[str] = []
    while not os.path.isdir(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _unmake(store: Store, made: Sequence[str]) -> None:
    """Remove a folder that was made for a move that failed; never one that holds anything else."""
    for name in store.names(WORK):
        store.remove(WORK, name)
    store.remove_folder(WORK)
    for path in made:
        os.rmdir(path)
