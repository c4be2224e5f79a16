"""A simulated disk with the coordinator's log on it.

Records are encoded as they are on a real disk. They lie in memory, then in the page cache (written), then
on the platter (synced); the death of the process loses the first kind, the loss of power the second too,
and either may leave a torn record at the end. A slow disk takes its time about everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

from holdfast.coord.kernel import Write
from holdfast.coord.ledger import Ledger
from holdfast.coord.records import Record
from holdfast.coord.segment import batch_at, encode_batch, records_of
from holdfast.testing.coordination.world import World

_SALT: Final = 7


@final
class Disk:
    """What survives the coordinator: a snapshot and the records after it."""

    def __init__(self, world: World, progress: Callable[[], None]) -> None:
        self._world = world
        self._progress = progress
        self.slow = 1.0
        self.written = 0
        """The number of the last record that survives the death of the process."""
        self.synced = 0
        """The number of the last record that survives the loss of power."""
        self._snapshot = Ledger().snapshot()
        self._before_snapshot = 0
        self._file = bytearray()
        self._before = 0
        """The checksum of the last batch."""
        self._synced_bytes = 0
        self._queue: list[Record] = []
        self._busy = False
        self._life = 0

    # ---- as the log's writer sees it

    def append(self, write: Write) -> None:
        self._queue.append(write.record)
        if not self._busy:
            self._busy = True
            self._world.later(self._latency(0.00005, 0.0005), self._flush, self._life)

    def _latency(self, low: float, high: float) -> float:
        roll = self._world.rng.random()
        return min(2.0, (low + (high - low) * roll if roll < 0.97 else 0.2 * roll) * self.slow)

    def _flush(self, life: int) -> None:
        """One turn of the writer: all that waits goes out with one write, then one fdatasync."""
        if life != self._life:
            return
        self._file += self._batch()
        self.written += len(self._queue)
        self._queue.clear()
        self._world.later(
            self._latency(0.0002, 0.003), self._synchronised, life, self.written, len(self._file)
        )
        self._progress()

    def _batch(self) -> bytes:
        data, self._before = encode_batch(
            self._queue, first=self.written + 1, synced=self.synced, before=self._before, salt=_SALT
        )
        return data

    def _synchronised(self, life: int, number: int, num_bytes: int) -> None:
        if life != self._life:
            return
        self.synced, self._synced_bytes = number, num_bytes
        if self._queue:
            self._world.later(self._latency(0.00005, 0.0005), self._flush, life)
        else:
            self._busy = False
        self._progress()

    def snapshot(self, ledger: Ledger) -> None:
        """Put the state on the disk, and drop the records that led to it. Only with nothing under way."""
        if self._busy or ledger.number != self.written:
            return
        self._snapshot, self._before_snapshot = ledger.snapshot(), self._before
        self._file.clear()
        self._synced_bytes = 0
        self.synced = self.written

    # ---- as the next process finds it

    def crash(self, *, power: bool) -> None:
        """The process is gone, or the machine."""
        self._life += 1
        rng = self._world.rng
        waiting = self._batch() if self._queue else b""
        self._queue.clear()
        self._busy = False
        if power:
            # What was not synced may be there in part, and its last page may hold anything.
            keep = rng.randint(self._synced_bytes, len(self._file))
            del self._file[keep:]
            if keep > self._synced_bytes and rng.random() < 0.5:
                at = rng.randrange(self._synced_bytes, keep)
                self._file[at] ^= 1 << rng.randrange(8)
        elif waiting and rng.random() < 0.5:
            self._file += waiting[: rng.randrange(len(waiting) + 1)]

    def recover(self) -> Ledger:
        """The state that the disk holds; a torn tail is cut off."""
        ledger = Ledger.restore(self._snapshot)
        good, self._before = 0, self._before_snapshot
        while (batch := batch_at(self._file, good, _SALT)) is not None:
            if batch.first != ledger.number + 1 or batch.before != self._before:
                break
            for record in records_of(self._file, batch):
                ledger.apply(record)
            good, self._before = batch.end, batch.check
        del self._file[good:]
        self._synced_bytes = good
        self.written = self.synced = ledger.number
        return ledger
