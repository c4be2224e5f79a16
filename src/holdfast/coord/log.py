"""The coordinator's write-ahead log: what it must still know after its own death, in a folder of its own.

    <folder>/
      coordinator.lock              held by the one process that serves this folder
      snapshot-<number>             the state after that record
      log-<number>                  the records from that number on

`append` is one write; what it wrote survives the process. `sync` makes what was appended survive the machine;
it may run in another thread meanwhile. A snapshot begins a new segment; once it is durable, older files go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from holdfast.clock import Deadline
from holdfast.coord.ledger import Ledger
from holdfast.coord.records import Record
from holdfast.coord.recovery import NAME, read_folder
from holdfast.coord.segment import SEGMENT_HEAD, SegmentHead, Snapshot, encode_batch
from holdfast.errors import LeaseError, StorageError
from holdfast.storage import TEMPORARY, Files, LocalStore

LOCK: Final = "coordinator.lock"


class DataFiles(Files):
    """Files whose sync leaves out the times of a file: fdatasync."""

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


@dataclass(slots=True)
class _Segment:
    """A segment that is open for writing. `before` is in its head. `named`: its name is durable."""

    path: str
    fd: int
    first: int
    before: int
    size: int
    named: bool


@final
class Log:
    """The log in `folder`. Call `recover` first, and once. Fails: LeaseError if another process serves it.

    `snapshot_records` and `snapshot_bytes` say when a snapshot is `due`. `wait_s` is how long to wait for
    another process, which may be dying just now, to let go of the folder. `salt` is that of a new folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        files: Files | None = None,
        snapshot_records: int = 50_000,
        snapshot_bytes: int = 64 << 20,
        wait_s: float = 0.0,
        salt: int | None = None,
    ) -> None:
        self._store = LocalStore(folder, files=files or DataFiles())
        self._files = self._store.files
        self._snapshot_records = snapshot_records
        self._snapshot_bytes = snapshot_bytes
        self._salt = secrets.randbits(64) if salt is None else salt
        self._guard = threading.Lock()
        self._segment: _Segment | None = None
        self._full: list[_Segment] = []
        self._before = 0
        self._since = 0
        self._since_bytes = 0
        self._snapshotting = False
        self._marked = 0
        self.folder = self._store.root
        self.number = 0
        self.synced = 0
        self.cuts: list[str] = []
        """What `recover` had to leave out, for people: writes that a power cut interrupted."""
        self._store.make_root()
        self._lock_fd = self._lock(Deadline(wait_s))

    def _lock(self, deadline: Deadline) -> int:
        path = self._store.path(LOCK)
        try:
            fd = self._files.create(path)
        except OSError as error:
            raise StorageError.from_os(error, doing="lock", path=path) from error
        while not self._files.lock(fd):
            if deadline.expired():
                holder = "another process"
                with contextlib.suppress(OSError):
                    holder = os.pread(fd, 256, 0).decode(errors="replace") or holder
                self._files.close(fd)
                raise LeaseError(
                    f"{self._store.root} is served by {holder}",
                    hint="a run has one coordinator: stop the other one, or give this one its own folder",
                )
            time.sleep(0.005)
        with contextlib.suppress(OSError):  # only for the message above, in another process
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return fd

    # ---- writing

    def _segment_of(self) -> _Segment:
        assert self._segment is not None, "recover first"
        return self._segment

    def append(self, records: Sequence[Record]) -> int:
        """Write the records, with one system call; returns the number of the last one.

        Without records it notes how far the log is on the disk, if that is news. Fails: StorageError; the log
        is of no use then, and neither is the process.
        """
        segment = self._segment_of()
        if not records and self._marked == self.synced:
            return self.number
        synced = self.synced
        data, check = encode_batch(
            records, first=self.number + 1, synced=synced, before=self._before, salt=self._salt
        )
        try:
            self._files.write_at(segment.fd, data, segment.size)
        except OSError as error:
            raise StorageError.from_os(error, doing="write", path=segment.path) from error
        with self._guard:
            segment.size += len(data)
            self.number += len(records)
        self._before, self._marked = check, synced
        self._since += len(records)
        self._since_bytes += len(data)
        return self.number

    def sync(self) -> int:
        """Make what was appended so far durable; returns the number of the last such record.

        May run beside `append` in another thread, but not twice at a time. Fails: StorageError; what became
        of the bytes is not known then, so the process must end.
        """
        with self._guard:
            number, segment = self.number, self._segment_of()
            full, self._full = self._full, []
        for each in (*full, segment):
            try:
                self._files.sync(each.fd)
                if not each.named:
                    self._files.sync_folder(self._store.root)
                    each.named = True
            except OSError as error:
                raise StorageError.from_os(error, doing="sync", path=each.path) from error
        for each in full:
            self._files.close(each.fd)
        self.synced = max(self.synced, number)
        return number

    def due(self) -> bool:
        """Whether it is time for a snapshot."""
        if self._snapshotting:
            return False
        return self._since >= self._snapshot_records or self._since_bytes >= self._snapshot_bytes

    def snapshot(self, ledger: Ledger) -> None:
        """Keep the state instead of the records that led to it."""
        self.finish_snapshot(self.start_snapshot(ledger))

    def start_snapshot(self, ledger: Ledger) -> Snapshot:
        """Take down the state and begin the next segment, in the thread that appends. Then finish it."""
        assert ledger.number == self.number, "every record of the ledger must be in the log"
        self._snapshotting = True
        if self._segment_of().first <= self.number:
            self._begin()
        # Not self._before: marks, which have no records, may stand in the segment already.
        return Snapshot(self._salt, self.number, self._segment_of().before, ledger.snapshot())

    def finish_snapshot(self, taken: Snapshot) -> None:
        """Make the snapshot durable and remove what it replaces. In any thread. Fails: StorageError."""
        try:
            self._store.replace(f"snapshot-{taken.number:020d}", data=taken.encode())
            self._remove_before(taken.number)
        finally:
            self._snapshotting = False

    def _remove_before(self, number: int) -> None:
        """Remove what a snapshot at `number` makes superfluous."""
        for name in self._store.names():
            found = NAME.fullmatch(name)
            if found is None:
                if name.startswith(TEMPORARY):
                    self._store.remove(name)
                continue
            kind, at = found[1], int(found[2])
            if (kind == "snapshot" and at < number) or (kind == "log" and at <= number):
                self._store.remove(name)

    def _begin(self) -> None:
        """Begin a segment with the next record. Its bytes and its name become durable with the next sync."""
        name = f"log-{self.number + 1:020d}"
        head = SegmentHead(self._salt, self.number + 1, self._before, self.synced)
        path = self._store.path(name)
        try:
            fd = self._files.create(path, exclusive=True)
            self._files.write_at(fd, head.encode(), 0)
        except OSError as error:
            raise StorageError.from_os(error, doing="begin", path=path) from error
        with self._guard:
            if self._segment is not None:
                self._full.append(self._segment)
            self._segment = _Segment(path, fd, head.first, head.before, SEGMENT_HEAD, named=False)
        self._since = self._since_bytes = 0

    def close(self) -> None:
        """Sync, note that, and let go of the folder. May be called twice; never fails."""
        with contextlib.suppress(StorageError):
            if self._segment is not None:
                self.sync()
                self.append([])
        for segment in (*self._full, *([self._segment] if self._segment else [])):
            self._files.close(segment.fd)
        self._full, self._segment = [], None
        if self._lock_fd >= 0:
            self._files.close(self._lock_fd)
            self._lock_fd = -1

    # ---- reading

    def recover(self) -> Ledger:
        """The state that the folder holds, durable from now on. Call first, and once.

        A write that was not synced when the power went is cut off, with all that follows it; `cuts` says so.
        Fails: CorruptError for damage to what had been synced, StorageError.
        """
        try:
            return self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> Ledger:
        found = read_folder(self._store)
        self.cuts = found.cuts
        self.number = found.ledger.number
        self._before = found.before
        self._salt = self._salt if found.salt is None else found.salt
        self._since = self.number - found.taken
        try:
            for name in found.superfluous:
                self._files.unlink(self._store.path(name))
            for name, end in found.replayed:
                self._settle(name, end, last=name == found.replayed[-1][0])
            if self._segment is None:
                self._begin()
                self.sync()
            self._files.sync_folder(self._store.root)
        except OSError as error:
            raise StorageError.from_os(error, doing="recover", path=self._store.root) from error
        self._segment_of().named = True
        self._since = self.number - found.taken
        self.synced = self._marked = self.number
        return found.ledger

    def _settle(self, name: str, end: int, *, last: bool) -> None:
        """Cut a segment off at `end`, and make it durable: what it led to is about to be seen by others."""
        path = self._store.path(name)
        fd = self._files.create(path)
        if self._files.size(fd) > end:
            self._files.reserve(fd, end)
        self._files.sync(fd)
        if not last:
            self._files.close(fd)
            return
        data = bytearray(SEGMENT_HEAD)
        self._files.read_at(fd, data, 0)
        head = SegmentHead.decode(data)
        assert head is not None
        self._segment = _Segment(path, fd, head.first, head.before, end, named=True)
        self._since_bytes = end
