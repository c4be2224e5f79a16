"""From a slot to disk: write the blocks of a part as they are staged, hash them, then commit.

States of a job: queued -> writing -> synced -> voted -> decided -> committed | failed. It may be aborted
while it is not staged. Blocks are written in parallel as soon as the watermark has passed them, and hashed
once, when all are staged. A failure at any point removes the job's own files and leaves every committed
step as it was.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import final

from holdfast import faults, journal
from holdfast.clock import Deadline
from holdfast.coord import Agreement
from holdfast.errors import BusyPathError, DeadlineError, HoldfastError, SaveError, StorageError
from holdfast.format import (
    VERSION,
    ArrayTable,
    PartFile,
    PartIndex,
    SaveId,
    block_digest,
    block_range,
    block_seed,
    data_name,
    encode_index,
    index_name,
    num_blocks,
    step_folder,
)
from holdfast.storage import PartWriter, Store
from holdfast.vault.commit import Commit, existing_step, forget, is_committed
from holdfast.vault.crew import Crew
from holdfast.vault.intents import Intent, announce, unfence
from holdfast.vault.messages import Order, Outcome, Recipe
from holdfast.vault.recycling import take_recycled

log = logging.getLogger("holdfast.vault")


class _Aborted(HoldfastError):
    """The save was dropped before it was staged."""


@final
class Job:
    """One save on its way to disk. `image` is the part file, byte for byte, as it fills up."""

    def __init__(self, order: Order, recipe: Recipe, image: memoryview) -> None:
        self.order = order
        self.recipe = recipe
        self.image = image[: recipe.size]
        self.staged = False
        self.orphaned = False
        """Whether its trainer is gone."""
        self.digests = b""
        """Those of all blocks, once they are hashed."""
        self.intent: Intent | None = None
        self._upto = 0
        self._aborted: str | None = None
        self._changed = threading.Condition()

    def advance(self, upto: int) -> None:
        """All bytes below `upto` lie in the image."""
        with self._changed:
            self._upto = max(self._upto, upto)
            self._changed.notify_all()

    def stage(self) -> None:
        """All bytes lie in the image; the save can no longer be aborted."""
        with self._changed:
            self.staged = True
            self._upto = self.recipe.size
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Drop the save unless it is staged."""
        with self._changed:
            if not self.staged:
                self._aborted = reason
                self._changed.notify_all()

    def wait(self, upto: int, deadline: Deadline) -> None:
        """Return once all bytes below `upto` are staged."""
        with self._changed:
            while self._upto < upto or self._aborted is not None:
                if self._aborted is not None:
                    raise _Aborted(self._aborted)
                if not self._changed.wait(deadline.remaining()):
                    raise DeadlineError(
                        f"the trainer staged {self._upto:,} of {self.recipe.size:,} bytes of step "
                        f"{self.order.save.step} and then stopped"
                    )


@dataclass(frozen=True, slots=True)
class _Written:
    """What a commit needs of a part that was written."""

    index: bytes
    table: ArrayTable


@final
class Persister:
    """Writes and commits jobs in the order they are submitted, on its own threads."""

    def __init__(
        self,
        store: Store,
        agreement: Agreement,
        *,
        on_done: Callable[[int, Outcome], None],
        journal: journal.Journal | None = None,
        threads: int = 4,
        recycle: bool = True,
    ) -> None:
        self._store = store
        self._agreement = agreement
        self._on_done = on_done
        self._journal = journal
        self._threads = threads
        self._recycle = recycle
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._idle = threading.Condition()
        self._pending = 0
        self._over: SaveId | None = None
        self._table: ArrayTable | None = None
        """Of the last tree that was saved."""
        self._crew = Crew(threads, "holdfast-write")
        self._runner = threading.Thread(target=self._run, name="holdfast-persist", daemon=True)
        self._runner.start()

    def submit(self, job: Job) -> None:
        """Take a job; `on_done` is called once when it is committed or failed."""
        with self._idle:
            self._pending += 1
        # A job may wait behind another: until it has files of its own, this tells the others of it.
        if self._store.has_locks:
            with suppress(HoldfastError):
                job.intent = self._announced(job)
        self._jobs.put(job)

    def _announced(self, job: Job) -> Intent:
        return announce(self._store, job.order.save, self._agreement.rank)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is over; False if time runs out first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drain, then end the threads; False if a job was still running."""
        drained = self.drain(timeout_s)
        self._jobs.put(None)
        if drained:
            self._runner.join(timeout_s)
        self._crew.close(timeout_s if drained else 0.0)
        return drained

    def _run(self) -> None:
        # The timeout only bounds one look at the queue: an idle persister waits for its next job.
        while True:
            try:
                job = self._jobs.get(timeout=60.0)
            except queue.Empty:
                continue
            if job is None:
                return
            outcome = self._persist(job)
            job.image.release()
            if job.intent is not None:
                job.intent.close()
            if outcome.committed:
                self._forget(job)
            self._on_done(job.order.seq, outcome)
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _persist(self, job: Job) -> Outcome:
        order, touched = job.order, False
        commit = Commit(self._store, self._agreement, job.order, job.recipe, orphaned=lambda: job.orphaned)
        try:
            faults.site("vault.begin")
            if job.intent is None and not self._store.has_locks:
                # Nothing else tells a cleaning that this save's parts are a live writer's.
                job.intent = self._announced(job)
            if is_committed(self._store, order.save):  # a vault that died right after the commit
                self._store.sync_folder(step_folder(order.save.step))
                self._store.sync_folder()
                return Outcome(nbytes=job.recipe.size, seconds=max(0.0, time.time() - order.created))
            replaced = existing_step(self._store, order) if self._agreement.rank == 0 else None
            # The writer keeps its lock until the step is committed: a cleaning elsewhere must not
            # take the part for a leftover while this rank waits for the others.
            touched = True
            with closing(self._open(job)) as writer:
                written = self._write(job, writer)
                commit.run(written.index, written.table, replaced)
        # Whatever goes wrong in a save, including a bug of ours, must reach the handle and must not
        # end the vault: the next save may well succeed.
        except Exception as error:
            with suppress(Exception):
                commit.withdraw(str(error))
            # What another process has locked is that one's, even under this name: a vault that lost its
            # connection finishes the save which its trainer hands over again.
            if touched and not isinstance(error, BusyPathError) and commit.is_over():
                self._discard(job)
            return _failure(error)
        return Outcome(nbytes=job.recipe.size, seconds=max(0.0, time.time() - order.created))

    def _forget(self, job: Job) -> None:
        """Free the ballots of the save committed before this one.

        This commit took a ballot from every rank's writer, so each has finished the save before. An aborted
        save says nothing of the kind: a trainer withdraws while its writer is still at work.
        """
        over, self._over = self._over, job.order.save
        if over is not None and self._agreement.rank == 0:
            with suppress(HoldfastError):  # left for the next start to clean
                forget(self._agreement, over)
                unfence(self._store, over)

    def _open(self, job: Job) -> PartWriter:
        """The part file of this job, its space reserved."""
        save, recipe = job.order.save, job.recipe
        folder = step_folder(save.step)
        name = data_name(recipe.part, save.attempt)
        # A file of this name was written by a vault that died, perhaps after its vote: it may be part of a
        # committed step by now, so the same bytes go over it in place.
        fresh = self._recycle and not self._store.exists(folder, name)
        recycled = take_recycled(self._store, recipe.part, recipe.size) if fresh else None
        writer = self._store.write_part(folder, name, size=recipe.size, recycled=recycled)
        faults.site("vault.reserved")
        return writer

    def _write(self, job: Job, writer: PartWriter) -> _Written:
        """Write and sync this rank's part and index."""
        written = self._write_blocks(job, writer)
        writer.sync()
        faults.site("vault.part.synced")
        # A vault that replaces a dead one writes the same bytes again, hence not `create`. The folder
        # sync in it also makes the part's own name durable.
        save = job.order.save
        self._store.replace(
            step_folder(save.step), index_name(job.recipe.part, save.attempt), data=written.index
        )
        faults.site("vault.index.written")
        return written

    def _write_blocks(self, job: Job, writer: PartWriter) -> _Written:
        """Write each block when it is staged, and hash them once all are.

        A trainer that still copies needs the processors: writing takes hardly any of them, hashing does. It
        is done beside the writing that is left, by this thread and by those that have nothing more to write;
        and so is what the commit needs.
        """
        deadline = Deadline(job.order.deadline_s)
        count = num_blocks(job.recipe.size)
        digests = [b""] * count
        running: deque[Future[None]] = deque()
        hashing: list[Future[None]] = []
        try:
            for block in range(count):
                job.wait(block_range(block, job.recipe.size)[1], deadline)
                running.append(self._crew.submit(self._write_block, job, writer, block))
                while running[0].done() and len(running) > 1:
                    running.popleft().result(0)
            todo = itertools.count()  # `next` on it is atomic
            hashing += (self._crew.submit(self._hash, job, todo, digests) for _ in range(self._threads))
            self._hash(job, todo, digests)
            for future in hashing:
                if not future.cancel():  # who has not begun finds nothing to do
                    future.result(deadline.remaining())
            job.digests = b"".join(digests)
            written = _Written(self._index(job), self._table_of(job.recipe))
            for future in _drained(running):
                future.result(deadline.remaining())
        finally:
            # No thread may touch the file or the slot once this save is given up.
            for future in (*running, *hashing):
                future.cancel()
            for future in (*running, *hashing):
                if not future.cancelled():
                    future.exception(deadline.remaining() + 60.0)
        return written

    def _index(self, job: Job) -> bytes:
        save, recipe = job.order.save, job.recipe
        name = data_name(recipe.part, save.attempt)
        part_file = PartFile(name=name, size=recipe.size, blocks=job.digests.hex())
        return encode_index(
            PartIndex(version=VERSION, save=save, part=recipe.part, files=(part_file,), slices=recipe.slices)
        )

    def _table_of(self, recipe: Recipe) -> ArrayTable:
        if self._table is None or self._table.entries is not recipe.arrays:
            self._table = ArrayTable(recipe.arrays)
        return self._table

    def _write_block(self, job: Job, writer: PartWriter, block: int) -> None:
        begin, end = block_range(block, job.recipe.size)
        # Released in any case: the traceback of a failed write would keep the slot mapped. An upload holds
        # views of its own until it is over.
        with job.image[begin:end] as data:
            writer.write(data, begin)
        faults.site("vault.block.written")

    def _hash(self, job: Job, todo: Iterator[int], digests: list[bytes]) -> None:
        """Take blocks that nobody else has taken, until there are none."""
        for block in todo:
            if block >= len(digests):
                return
            begin, end = block_range(block, job.recipe.size)
            with job.image[begin:end] as data:
                digests[block] = block_digest(data, block_seed(job.order.save, job.recipe.part, block))

    def _discard(self, job: Job) -> None:
        """Remove what this job wrote; leftovers are cleaned at the next start."""
        folder, attempt = step_folder(job.order.save.step), job.order.save.attempt
        with suppress(HoldfastError):
            self._store.remove(folder, data_name(job.recipe.part, attempt))
            self._store.remove(folder, index_name(job.recipe.part, attempt))
            if not self._store.names(folder):
                self._store.remove_folder(folder)


def _drained(running: deque[Future[None]]) -> Iterator[Future[None]]:
    while running:
        yield running.popleft()


def _failure(error: Exception) -> Outcome:
    if isinstance(error, HoldfastError):
        kind = "SaveError" if isinstance(error, _Aborted) else type(error).__name__
        if isinstance(error, StorageError):
            return Outcome(
                kind=kind, message=error.message, hint=error.hint, path=error.path, errno=error.errno
            )
        return Outcome(kind=kind, message=error.message, hint=error.hint)
    log.error("a save failed in an unforeseen way", exc_info=error)
    return Outcome(
        kind=SaveError.__name__,
        message=f"{type(error).__name__}: {error}",
        hint="this is a defect in Holdfast; the log of the vault has the traceback",
    )
