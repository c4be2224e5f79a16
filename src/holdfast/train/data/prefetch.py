"""Batches of the next steps, read in the background while this step computes. The bits are those of the
stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final, final

from holdfast.errors import DeadlineError, UsageError
from holdfast.train.data.packing import Batch

TIMEOUT_S: Final = 120.0

Range = tuple[int, int]


@final
class _Slot:
    """A range that somebody wants: the batch or what went wrong, once `done`."""

    def __init__(self, span: Range) -> None:
        self.span = span
        self.done = threading.Event()
        self.batch: Batch | None = None
        self.error: BaseException | None = None


@final
class Prefetcher:
    """Reads ahead on a thread of its own.

    `read` makes a batch, as `Stream.batch` does; `ranges` says which ranges of samples a step takes. At most
    those of `ahead` steps beyond the current one are held. A range that nobody foresaw, such as a lane of a
    lost replica, is read by the caller: slower, and the same bits.
    """

    def __init__(
        self,
        read: Callable[[int, int], Batch],
        ranges: Callable[[int], Iterable[Range]],
        *,
        ahead: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if ahead < 1:
            raise UsageError(f"ahead is {ahead}", hint="1 reads the next step while this one computes")
        self._read = read
        self._ranges = ranges
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._slots: dict[Range, _Slot] = {}
        self._closed = False
        # A daemon: a read that hangs in the kernel must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="holdfast-prefetch", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Step `step` begins: want its ranges and those of the next steps, and forget all others. Does not
        wait."""
        wanted = [span for number in range(step, step + self._ahead + 1) for span in self._ranges(number)]
        with self._changed:
            if self._closed:
                raise UsageError("the prefetcher is closed", hint="make another one")
            self._slots = {span: self._slots.get(span) or _Slot(span) for span in wanted}
            self._changed.notify()

    def batch(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` - 1.

        Waits for the reader where the range was foreseen. Fails: whatever the reader met; DeadlineError after
        `timeout_s`.
        """
        with self._changed:
            slot = self._slots.get((start, stop))
            closed = self._closed
        if closed:
            raise UsageError("the prefetcher is closed", hint="make another one")
        if slot is None:
            return self._read(start, stop)
        if not slot.done.wait(self._timeout_s):
            raise DeadlineError(
                f"samples {start:,} to {stop:,} were not read within {self._timeout_s:g} s",
                hint="the storage of the token files is slow or hangs; look at it, or raise the timeout",
            )
        if slot.error is not None:
            # It may pass, as a server that was away does: who asks again has it read again.
            with self._changed:
                self._slots.pop(slot.span, None)
            raise slot.error
        if slot.batch is None:
            raise UsageError("the prefetcher is closed", hint="make another one")
        return slot.batch

    def close(self) -> None:
        """Read nothing more, and free what was read. Waits for a read under way, for at most `timeout_s`."""
        with self._changed:
            self._closed = True
            slots, self._slots = self._slots, {}
            self._changed.notify()
        for slot in slots.values():
            slot.done.set()
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (slot := self._next()) is not None:
            try:
                slot.batch = self._read(*slot.span)
            except BaseException as error:
                slot.error = error
            slot.done.set()

    def _next(self) -> _Slot | None:
        """The first range that is wanted and not read, as soon as there is one; None at the end."""
        with self._changed:
            while not self._closed:
                for slot in self._slots.values():
                    if not slot.done.is_set():
                        return slot
                self._changed.wait()  # idle: `begin` and `close` end it, and nobody waits for it meanwhile
            return None
