"""Reads a journal, whole or while it grows; torn and damaged lines are skipped and counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final, Self, final

from holdfast.clock import REAL, Clock, Deadline
from holdfast.errors import StorageError
from holdfast.journal.record import MAX_LINE, Record, decode

_CHUNK: Final = 1 << 20
_POLL_S: Final = 0.02
# More than a line's checksum, so that lines of other events do not look the same.
_OVERLAP: Final = 64


@final
class Reading(Iterator[Record]):
    """An iterator over records; `damaged` counts the lines skipped so far."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.damaged = 0
        self._records: Iterator[Record] = iter(())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        return next(self._records)


def read(path: str | os.PathLike[str]) -> Reading:
    """The records that are in the file now. Raises StorageError if it cannot be read."""
    reading = Reading(path)
    reading._records = _read(reading)
    return reading


def follow(
    path: str | os.PathLike[str],
    *,
    timeout_s: float,
    stop: Callable[[], bool] | None = None,
    clock: Clock = REAL,
) -> Reading:
    """The records in the file and those still to come; the file may not exist yet.

    Iterating waits for the next record. It ends once `stop()` is true and what was in the file by
    then has been given out; it raises DeadlineError `timeout_s` after this call, whatever came.
    """
    reading = Reading(path)
    reading._records = _follow(reading, stop, Deadline(timeout_s, clock), clock)
    return reading


def _read(reading: Reading) -> Iterator[Record]:
    lines = _Lines(reading)
    fd = _open(reading.path)
    try:
        while chunk := _read_chunk(fd, reading.path):
            yield from lines.feed(chunk)
        yield from lines.end()
    finally:
        os.close(fd)


def _follow(
    reading: Reading, stop: Callable[[], bool] | None, deadline: Deadline, clock: Clock
) -> Iterator[Record]:
    lines = _Lines(reading)
    file: _Growing | None = None
    try:
        while True:
            # Asked before reading, so that what was written before the stop is still given out.
            stopping = stop is not None and stop()
            if file is None and os.path.exists(reading.path):
                file = _Growing(reading.path)
            while file is not None and (chunk := file.read()):
                yield from lines.feed(chunk)
                deadline.check(f"the end of the journal {reading.path}")
            if file is not None and file.replaced():
                yield from lines.end()
                file.close()
                file = None
                continue
            if stopping:
                yield from lines.end()
                return
            deadline.check(f"the next event in {reading.path}")
            clock.sleep(min(_POLL_S, deadline.remaining()))
    finally:
        if file is not None:
            file.close()


class _Growing:
    """A file that is read as it grows, and that may be cut, written anew or replaced meanwhile."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = _open(path)
        self._at = 0
        self._seen = b""
        self._rewritten = False

    def read(self) -> bytes:
        """What came since the last call; empty if nothing did, or if the file is another now.

        The last bytes seen are read again with what follows them: a size alone does not tell a
        file that was cut and has grown back.
        """
        overlap = len(self._seen)
        try:
            chunk = os.pread(self._fd, overlap + _CHUNK, self._at - overlap)
        except OSError as error:
            raise StorageError.from_os(error, doing="read the journal", path=self._path) from error
        self._rewritten = not chunk.startswith(self._seen)
        if self._rewritten:
            return b""
        self._seen = chunk[-_OVERLAP:]
        self._at += len(chunk) - overlap
        return chunk[overlap:]

    def replaced(self) -> bool:
        """Whether what was read is no longer what stands at the path."""
        if self._rewritten:
            return True
        try:
            now = os.stat(self._path)
        except OSError:
            return False
        return not os.path.samestat(now, os.fstat(self._fd))

    def close(self) -> None:
        os.close(self._fd)


class _Lines:
    """Cuts chunks into lines and lines into records, never holding more than MAX_LINE bytes."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._tail = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> Iterator[Record]:
        *whole, tail = (self._tail + chunk).split(b"\n")
        self._tail = b""
        for line in whole:
            yield from self._record(line)
        if len(tail) > MAX_LINE:
            self._count_once()
            self._skipping = True
        else:
            self._tail = tail

    def end(self) -> Iterator[Record]:
        tail, self._tail = self._tail, b""
        yield from self._record(tail)

    def _record(self, line: bytes) -> Iterator[Record]:
        if self._skipping:
            # The rest of a line that was too long, counted when its start was seen.
            self._skipping = False
            return
        if not line:
            return
        record = decode(line)
        if record is None:
            self._reading.damaged += 1
        else:
            yield record

    def _count_once(self) -> None:
        if not self._skipping:
            self._reading.damaged += 1


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError.from_os(error, doing="open the journal", path=path) from error


def _read_chunk(fd: int, path: str) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except OSError as error:
        raise StorageError.from_os(error, doing="read the journal", path=path) from error
