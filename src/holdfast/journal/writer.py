"""Appends events to a run's journal file without ever failing, or blocking, the caller.

`append` puts the event on an in-memory queue; one daemon thread per process does the rest. Each
batch is a single write(2) with O_APPEND, so lines of several processes do not mix. What was
written survives the death of the process; a machine crash can cost the last seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import threading
from types import TracebackType
from typing import Final, Self, final

from holdfast.clock import REAL, Clock, Deadline
from holdfast.journal.events import Dropped, Event
from holdfast.journal.record import encode

_log = logging.getLogger("holdfast.journal")

_BATCH_EVENTS: Final = 512
_RETRY_FIRST_S: Final = 0.02
_RETRY_MAX_S: Final = 0.5
_EXIT_FLUSH_S: Final = 2.0

_Stamped = tuple[float, float, Event]
_Item = _Stamped | threading.Event | None


@final
class Journal:
    """A process's way into the journal file at `path`; close it, or leave it to process exit.

    Any number of processes and threads may append to one path. The file and its parent folders
    are created with the first event. At most `capacity` events wait in memory; beyond that events
    are dropped, counted, and reported as one `Dropped` event as soon as writing works again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        component: str = "trainer",
        *,
        capacity: int = 16_384,
        clock: Clock = REAL,
    ) -> None:
        self.path = os.fspath(path)
        self.component = component
        self._capacity = capacity
        self._clock = clock
        self._closed = False
        self._file = _File(self.path)
        self._reset()
        _live.add(self)

    def _reset(self) -> None:
        # SimpleQueue.put is reentrant: append works from signal handlers and __del__ as well.
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._drops = _Tally()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._complete = True

    def append(self, event: Event) -> None:
        """Take the event down; a few microseconds. Never raises, never blocks, does no I/O."""
        if self._closed or self._queue.qsize() >= self._capacity:
            self._drops.add()
            return
        self._queue.put((self._clock.wall(), self._clock.monotonic(), event))
        if self._thread is None:
            self._start()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all earlier events of this process are in the file; False if they are not."""
        if self._closed:
            return self._complete
        if self._thread is None:
            if self._queue.empty():
                return True
            self._start()
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what is left and stop; False if events were lost. Later events are dropped.

        Where the disk refuses, one last try is made. May be called twice.
        """
        self._closed = True
        _live.discard(self)
        self._closing.set()
        thread = self._thread
        if thread is None:
            return self._complete and self._queue.empty()
        self._queue.put(None)
        thread.join(timeout_s)
        return self._complete and not thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        # Not blocking: where two threads append first, one of them starts the writer for both.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError as error:
            # No thread to be had, or the interpreter is going down. The next append tries again.
            self._file.warn_once(error)
        finally:
            self._starting.release()

    def _run(self) -> None:
        pid = os.getpid()
        going = True
        while going:
            lines, waiters, going = self._batch(pid)
            if not self._write(lines):
                self._complete = False
                self._file.close()
                return
            for waiter in waiters:
                waiter.set()
        self._file.close(sync=True)

    def _batch(self, pid: int) -> tuple[list[bytes], list[threading.Event], bool]:
        """The lines of what is queued, those waiting for them, and whether to go on after."""
        lines: list[bytes] = []
        waiters: list[threading.Event] = []
        item = self._queue.get()
        while item is not None:
            if isinstance(item, threading.Event):
                waiters.append(item)
            else:
                self._encode(lines, pid, item)
            if len(lines) >= _BATCH_EVENTS:
                break
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
        count = self._drops.take()
        if count:
            stamped = (self._clock.wall(), self._clock.monotonic(), Dropped(count))
            self._encode(lines, pid, stamped)
        return lines, waiters, item is not None

    def _encode(self, lines: list[bytes], pid: int, item: _Stamped) -> None:
        try:
            lines.append(encode(item[0], item[1], pid, self.component, item[2]))
        except Exception as error:
            # A value that JSON cannot hold, such as a lone surrogate or an integer beyond 64 bits.
            self._drops.add()
            self._file.warn_once(error)

    def _write(self, lines: list[bytes]) -> bool:
        """Write all lines, for as long as it takes; False if closed while the disk refuses."""
        delay = _RETRY_FIRST_S
        while lines:
            last_try = self._closing.is_set()
            try:
                lines = self._file.write(lines)
            except OSError as error:
                self._file.warn_once(error)
                self._file.close()
                if last_try:
                    return False
                self._closing.wait(delay)
                delay = min(2 * delay, _RETRY_MAX_S)
        return True

    def _after_fork(self) -> None:
        # The child has no writer thread, and the parent's queue may have been caught in any state.
        # What was queued is the parent's to write.
        self._file.close()
        self._reset()


class _Tally:
    """A counter that many threads and signal handlers may bump without a lock."""

    def __init__(self) -> None:
        # next() on itertools.count is one atomic operation; reading it bumps it as well.
        self._bumps = itertools.count()
        self._seen = 0

    def add(self) -> None:
        next(self._bumps)

    def take(self) -> int:
        """How often add() was called since the last take(); for one thread only."""
        bumps = next(self._bumps)
        count = bumps - self._seen
        self._seen = bumps + 1
        return count


class _File:
    """The open journal file, used by the writer thread only."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self._made_parents = False
        self._warned = False

    def write(self, lines: list[bytes]) -> list[bytes]:
        """Append with one write(2); return the lines that did not fit, so that none is torn."""
        fd = self._open()
        # A torn line, ours from a full disk or another's from a crash, must not take the next
        # one with it: begin on a fresh line.
        start = b"" if _ends_with_newline(fd) else b"\n"
        written = os.write(fd, start + b"".join(lines)) - len(start)
        for number, line in enumerate(lines):
            written -= len(line)
            if written < 0:
                # Of a line that lacks only its newline nothing is left: the next write begins with one.
                return [line if written < -1 else b"", *lines[number + 1 :]]
        return []

    def _open(self) -> int:
        # Removed under us: what we write would go nowhere.
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            self.close()
        if self._fd < 0:
            if not self._made_parents:
                # Once only: a run folder that someone removed later is not brought back.
                os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
                self._made_parents = True
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
        return self._fd

    def close(self, *, sync: bool = False) -> None:
        """Close if open, synced if asked; never raises."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                if sync:
                    os.fdatasync(fd)
            with contextlib.suppress(OSError):
                os.close(fd)

    def warn_once(self, error: Exception) -> None:
        """Log the first problem; later ones show in the journal as Dropped."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "the journal %s cannot be written: %s; training goes on, events may be lost",
                self._path,
                error,
            )


def _ends_with_newline(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


# Journals with something to flush at exit or to forget after a fork.
_live: set[Journal] = set()


def _at_exit() -> None:
    deadline = Deadline(_EXIT_FLUSH_S)
    for journal in list(_live):
        journal.flush(deadline.remaining())


def _in_child() -> None:
    for journal in list(_live):
        journal._after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
