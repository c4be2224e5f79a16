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
    fd = -1
    try:
        while True:
            # Asked before reading, so that what was written before the stop is still given out.
            stopping = stop is not None and stop()
            if fd < 0 and os.path.exists(reading.path):
                fd = _open(reading.path)
            while fd >= 0 and (chunk := _read_chunk(fd, reading.path)):
                yield from lines.feed(chunk)
                deadline.check(f"the end of the journal {reading.path}")
            if stopping:
                yield from lines.end()
                return
            if fd >= 0 and _replaced(fd, reading.path):
                yield from lines.end()
                os.close(fd)
                fd = -1
                continue
            deadline.check(f"the next event in {reading.path}")
            clock.sleep(min(_POLL_S, deadline.remaining()))
    finally:
        if fd >= 0:
            os.close(fd)


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


def _replaced(fd: int, path: str) -> bool:
    """Whether another file stands at `path`, or this one was cut below where we read."""
    try:
        now = os.stat(path)
    except OSError:
        return False
    ours = os.fstat(fd)
    same = (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino)
    return not same or now.st_size < os.lseek(fd, 0, os.SEEK_CUR)
