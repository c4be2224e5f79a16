"""Copies from devices into registered host memory, on streams of their own.

One stream per device, in the background of whatever XLA runs. A source must be computed before its copy is
given to `run`: nothing orders these streams against XLA's, and waiting on the host is the one order that
needs no knowledge of them. `run` returns when the driver says that every copy is done; only then may sources
be freed.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, final

from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, StagingError
from holdfast.jax.cuda import Driver
from holdfast.jax.pins import PinBudget

_BATCH: Final = 32 << 20
"""Bytes between two events: about half a millisecond of a link of 64 GB/s."""
_WINDOW: Final = 32
"""Events ahead of the last one seen: 1 GiB, tens of ms, so that a busy interpreter leaves no gap."""
_POLL_S: Final = 0.0005
_DRAIN_S: Final = 10.0


class Copy(NamedTuple):
    """`nbytes` from `source` on a device to `target` in registered memory."""

    device: int
    source: int
    target: int
    nbytes: int


class Batch(NamedTuple):
    """Copies of one device, one after the other, followed by an event."""

    device: int
    begin: int
    end: int


def batches(copies: Sequence[Copy], nbytes: int = _BATCH) -> Iterator[Batch]:
    """Stretches of `copies` of one device each, cut after about `nbytes`."""
    begin, size = 0, 0
    for at, copy in enumerate(copies):
        if at > begin and (copy.device != copies[begin].device or size >= nbytes):
            yield Batch(copies[begin].device, begin, at)
            begin, size = at, 0
        size += copy.nbytes
    if begin < len(copies):
        yield Batch(copies[begin].device, begin, len(copies))


@final
class CopyEngine:
    """Runs copies through a driver, one list at a time.

    After a failure whose copies cannot be shown to be over, `stuck` is true for good: nothing is
    unregistered, destroyed or started any more.
    """

    def __init__(self, driver: Driver, budget: PinBudget, *, drain_s: float = _DRAIN_S) -> None:
        self._driver = driver
        self._budget = budget
        self._drain_s = drain_s
        self._ranges: dict[int, int] = {}
        self._starts: list[int] = []
        self._streams: dict[int, int] = {}
        self._events: dict[int, list[int]] = {}
        """Of each device, those that are not in use."""
        self._waiting: deque[tuple[Batch, int]] = deque()
        """What was given to streams, and the event after it."""
        self._lock = threading.Lock()
        """Held while copies run."""
        self._busy: Counter[int] = Counter()
        """How many of the copies that run go to each range."""
        self._registry = threading.Lock()
        """Of the ranges. Memory may go while other copies run: who drops it may hold what they wait for."""
        self.stuck = False
        self._kept: list[object] = []

    # ---- registered memory

    @property
    def registered(self) -> int:
        """Bytes of host memory that are registered now."""
        return sum(self._ranges.values())

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether this memory is registered, in one piece."""
        with self._registry:
            return self._range_of(address, nbytes) is not None

    def _range_of(self, address: int, nbytes: int) -> int | None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address + nbytes > self._starts[at] + self._ranges[self._starts[at]]:
            return None
        return self._starts[at]

    def register(self, address: int, nbytes: int, device: int) -> bool:
        """Pin host memory; False where the budget has no room for it.

        Blocks: while the driver goes through its pages. Fails: StagingError.
        """
        self._usable()
        # Not with the lock held: it may collect garbage, and with it whatever finalizers do.
        if not self._budget.take(address, nbytes):
            return False
        with self._registry:
            try:
                with self._driver.bind(device):
                    self._driver.register(address, nbytes)
            except BaseException:
                self._budget.give_back(address)
                raise
            self._ranges[address] = nbytes
            self._starts = sorted(self._ranges)
        return True

    def unregister(self, address: int, device: int) -> bool:
        """Unpin; False where that cannot be done, and the memory must stay mapped."""
        with self._registry:
            if address not in self._ranges:
                return True
            if self.stuck or self._busy[address]:
                return False
            try:
                with self._driver.bind(device):
                    self._driver.unregister(address)
            except StagingError:
                return False
            del self._ranges[address]
            self._budget.give_back(address)
            self._starts = sorted(self._ranges)
            return True

    # ---- copies

    def run(
        self,
        copies: Sequence[Copy],
        *,
        filled: Callable[[int], None],
        stop: threading.Event,
        deadline: Deadline,
        keep: object = None,
    ) -> None:
        """Return when all copies are done; `filled(n)` is called as the first n are.

        `keep` is what the copies read from, held for good if they may be going on after a failure. Blocks:
        until then, `deadline` at most. Fails: StagingError, also when `stop` is set; DeadlineError.
        """
        with self._lock:
            self._usable()
            with self._using(copies), self._over(copies, keep):
                self._run(copies, filled, stop, deadline)

    def _run(
        self,
        copies: Sequence[Copy],
        filled: Callable[[int], None],
        stop: threading.Event,
        deadline: Deadline,
    ) -> None:
        for batch in batches(copies):
            if stop.is_set():
                raise StagingError("the copies were cancelled")
            with self._driver.bind(batch.device):
                stream = self._stream(batch.device)
                for copy in copies[batch.begin : batch.end]:
                    self._driver.copy_out(copy.target, copy.source, copy.nbytes, stream)
                self._waiting.append((batch, self._event(batch.device)))
                self._driver.record(self._waiting[-1][1], stream)
            if len(self._waiting) >= _WINDOW:
                filled(self._await(stop, deadline).end)
        while self._waiting:
            filled(self._await(stop, deadline).end)

    def _await(self, stop: threading.Event, deadline: Deadline) -> Batch:
        """The first batch that is waited for, once it is done."""
        batch, event = self._waiting[0]
        self._until(batch.device, event, stop, deadline)
        self._waiting.popleft()
        self._events[batch.device].append(event)
        return batch

    def _until(self, device: int, event: int, stop: threading.Event, deadline: Deadline) -> None:
        """Return once the event happened. The driver's own waits know no deadline, so it is asked."""
        with self._driver.bind(device):
            while not self._driver.happened(event):
                if deadline.expired():
                    raise DeadlineError(
                        "copies from a device did not end in time", hint="is the device stopped or lost?"
                    )
                if stop.wait(_POLL_S):
                    raise StagingError("the copies were cancelled")

    @contextmanager
    def _using(self, copies: Sequence[Copy]) -> Iterator[None]:
        """Keep the ranges that are copied to registered meanwhile. Fails: StagingError if one is not."""
        used: Counter[int] = Counter()
        with self._registry:
            for copy in copies:
                start = self._range_of(copy.target, copy.nbytes)
                if start is None:
                    raise StagingError(f"{copy.nbytes:,} bytes at {copy.target:#x} are not registered")
                used[start] += 1
            self._busy += used
        try:
            yield
        finally:
            with self._registry:
                self._busy -= used

    @contextmanager
    def _over(self, copies: Sequence[Copy], keep: object) -> Iterator[None]:
        """Leave no copy under way behind, whatever happened; else nothing of this is used again."""
        try:
            yield
        except BaseException as error:
            devices = {copy.device for copy in copies} & set(self._streams)
            if all(self._drained(device) for device in sorted(devices)):
                for batch, event in self._waiting:
                    self._events[batch.device].append(event)
                self._waiting.clear()
                raise
            self.stuck = True
            self._kept.append(keep)
            raise StagingError(
                f"copies from a device cannot be shown to be over: {error}",
                hint="restart the process; the device or its driver is in trouble",
                stuck=True,
            ) from error

    def _drained(self, device: int) -> bool:
        """Whether all that was given to a device's stream is known to be over."""
        deadline, never = Deadline(self._drain_s), threading.Event()
        with suppress(StagingError, DeadlineError):
            with self._driver.bind(device):
                event = self._event(device)
                self._driver.record(event, self._streams[device])
            self._until(device, event, never, deadline)
            self._events[device].append(event)
            return True
        return False

    def _stream(self, device: int) -> int:
        if device not in self._streams:
            self._streams[device] = self._driver.make_stream()
            self._events[device] = []
        return self._streams[device]

    def _event(self, device: int) -> int:
        free = self._events[device]
        return free.pop() if free else self._driver.make_event()

    def _usable(self) -> None:
        if self.stuck:
            raise StagingError("copies from this process's devices are stuck", hint="restart the process")

    def close(self) -> None:
        """Give streams and events back; what is registered stays so until its memory goes."""
        with self._lock:
            if self.stuck:
                return
            for device, stream in self._streams.items():
                with suppress(StagingError), self._driver.bind(device):
                    for event in self._events[device]:
                        self._driver.destroy_event(event)
                    self._driver.destroy_stream(stream)
            self._streams.clear()
            self._events.clear()
