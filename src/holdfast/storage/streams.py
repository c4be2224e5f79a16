"""Parts on an object store: sent piece by piece out of the writer's own memory, read by ranges.

States of a writer: open -> streaming -> whole | given up. Blocks may be handed in by several threads in any
order; a thread of the writer sends them from the front, several at a time, without copying them. The part
becomes visible with the last request of the upload, all at once; a writer that is closed before gives it up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, final

from holdfast.clock import Deadline
from holdfast.errors import MissingPathError, StorageError
from holdfast.storage.bucket import CHUNK, Bucket
from holdfast.storage.store import PartReader, PartWriter

_WINDOW: Final = 16 * CHUNK
"""How far ahead of the upload blocks are taken: what was handed in and not sent yet stays in memory."""
_AHEAD: Final = 4
"""Ranges that are asked for before they are read."""
_STALL_S: Final = 3600.0
"""The longest that an upload waits for its next block; the save's own deadline is below it."""


class _GivenUp(Exception):
    """The writer was closed before the part was whole."""


@final
class ObjectPartWriter(PartWriter):
    """Sends one part as it is written."""

    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        self.path = bucket.label(key)
        self.size = size
        self._bucket = bucket
        self._key = key
        self._blocks: dict[int, memoryview] = {}
        self._sent = 0
        self._closed = False
        self._failure: StorageError | None = None
        self._changed = threading.Condition()
        self._uploader = threading.Thread(target=self._upload, name="holdfast-upload", daemon=True)
        self._uploader.start()

    def write(self, data: memoryview, offset: int) -> None:
        deadline = Deadline(_STALL_S)
        with self._changed:
            # The block that the upload waits for is always let in: threads work on them from the front.
            while offset >= self._sent + _WINDOW and self._failure is None:
                if self._closed or not self._changed.wait(deadline.remaining()):
                    break
            self._check()
            self._blocks[offset] = data[:]  # the caller may release its own view
            self._changed.notify_all()

    def sync(self) -> None:
        options = self._bucket.options
        self._uploader.join(_STALL_S + options.retry_s)
        with self._changed:
            self._check()
            if self._uploader.is_alive() or self._sent != self.size:
                raise StorageError(
                    f"{self.path}: {self._sent:,} of {self.size:,} bytes were sent",
                    path=self.path,
                    hint="the store is too slow, or a block was never written",
                )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # What is under way ends by its own timeouts; the upload is then given up.
        options = self._bucket.options
        self._uploader.join(options.retry_s + 2 * options.timeout_s)
        with self._changed:
            for block in self._blocks.values():
                block.release()
            self._blocks.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise StorageError(f"{self.path} is closed", path=self.path)

    def _upload(self) -> None:
        try:
            if self.size <= CHUNK:  # one request, nothing to leave behind
                self._bucket.put(self._key, list(self._pieces()) or b"")
            else:
                self._bucket.stream(self._key, self._pieces(), self.size)
        except Exception as error:
            if not isinstance(error, StorageError):
                error = StorageError(f"cannot write {self.path}: {error}", path=self.path)
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _pieces(self) -> Iterator[memoryview]:
        while self._sent < self.size:
            deadline = Deadline(_STALL_S)
            with self._changed:
                while self._sent not in self._blocks:
                    if self._closed or not self._changed.wait(deadline.remaining()):
                        raise _GivenUp("the save was given up")
                block = self._blocks.pop(self._sent)
                self._sent += block.nbytes
                self._changed.notify_all()
            yield block


@final
class ObjectPartReader(PartReader):
    """Reads ranges of one part; each is a request of its own.

    A thread that reads one range right behind the other, as verification does, has the next few asked for
    beforehand: it would wait for a round trip at each of them otherwise.
    """

    def __init__(self, bucket: Bucket, key: str, *, ahead: bool) -> None:
        self.path = bucket.label(key)
        self._bucket = bucket
        self._key = key
        self._reads_ahead = ahead
        found = bucket.head(key)
        if found is None:
            raise MissingPathError(
                f"cannot open {self.path}: there is no such object",
                path=self.path,
                hint="was the step removed, or only partly copied?",
            )
        self.size = found[0]
        self._lock = threading.Lock()
        self._last: tuple[int, int] | None = None
        self._ahead: dict[int, Future[memoryview]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def read_into(self, buffer: memoryview, offset: int) -> int:
        length = max(0, min(buffer.nbytes, self.size - offset))
        if not length:
            return 0
        coming = self._coming(offset, length)
        if coming is None:
            data = self._bucket.fetch(self._key, offset, offset + length)
        else:
            options = self._bucket.options
            data = coming.result(options.retry_s + 2 * options.timeout_s)[:length]
        buffer.cast("B")[:length] = data
        return length

    def _coming(self, offset: int, length: int) -> Future[memoryview] | None:
        """The range, if it was asked for before; asks for those behind it where one follows another."""
        if not self._reads_ahead:
            return None
        here = (threading.get_ident(), offset)
        with self._lock:
            follows, self._last = here == self._last, (here[0], offset + length)
            found = self._ahead.pop(offset, None)
            if not follows:
                self._drop()
                return found
            self._pool = self._pool or ThreadPoolExecutor(_AHEAD, thread_name_prefix="holdfast-ahead")
            for begin in range(offset + length, min(self.size, offset + (_AHEAD + 1) * length), length):
                if begin not in self._ahead:
                    end = min(begin + length, self.size)
                    self._ahead[begin] = self._pool.submit(self._bucket.fetch, self._key, begin, end)
            return found

    def _drop(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def read(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        return bytes(self._bucket.fetch(self._key, offset, offset + length)) if length else b""

    def close(self) -> None:
        with self._lock:
            self._drop()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()  # what is under way ends by its own deadlines
