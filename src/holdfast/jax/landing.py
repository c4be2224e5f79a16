"""Host memory on its way to devices: little of it, pinned through JAX itself, and used again and again.

A load could also be written by the driver into arrays that exist already, as saves are read from them. It is
not: XLA would take an array for whole that is half filled, and nothing in JAX says that one may be written
to. Instead the memory that is read into is registered with the runtime (`Client.dma_map`), and `device_put`
then copies out of it directly. Memory that the runtime does not know is copied to pinned memory of its own
first, which a fresh process has none of: that is why the first load of a process is otherwise the slowest.

To fault memory in and to pin it takes longer than to copy out of it. So there is only some, and an array that
has arrived on its device leaves its part of it to the next. Memory is pinned only after a known pattern went
up and came back right.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final

import jax
import numpy as np

from holdfast.arrays import Bytes1D, Placement
from holdfast.arrays.copying import address_of
from holdfast.arrays.pages import populate, region
from holdfast.errors import StagingError, UsageError
from holdfast.jax.pins import PinBudget, budget
from holdfast.jax.placing import Made, foreign, put
from holdfast.jax.settings import setting
from holdfast.jax.shards import own

log = logging.getLogger("holdfast.jax")

BUDGET: Final = 512 << 20
"""Bytes of host memory that a landing has, unless arrays are so large that two of them need more."""
_LEAST: Final = 1 << 20
"""Smaller boxes are not worth a mapping of their own."""
_PATTERN: Final = 1 << 20


class Runtime(Protocol):
    """What registers memory: a client of JAX's."""

    def dma_map(self, address: int, size: int) -> None: ...

    def dma_unmap(self, address: int) -> None: ...


@final
class RuntimePins:
    """Pins memory through the runtime, where that is possible; says once if it is not."""

    def __init__(
        self,
        runtime: Callable[[Any], Runtime] = lambda device: device.client,
        *,
        pins: PinBudget | None = None,
        enabled: bool = True,
    ) -> None:
        self._runtime = runtime
        self._budget = pins or PinBudget()
        self._enabled = enabled
        self._limited = False
        self._checked = False
        self._pinned: dict[int, tuple[Runtime, Bytes1D]] = {}
        """By address; with the memory, which must outlive its being pinned."""
        self._lock = threading.Lock()

    @property
    def pinned(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            return sum(memory.nbytes for _, memory in self._pinned.values())

    def pin(self, memory: Bytes1D, device: Any) -> None:
        """Pin a mapping, from which arrays go to `device`, if it can be. Blocks: while its pages are made."""
        with self._lock:
            if not self._enabled:
                return
            refused = self._map(memory, device)
            self._enabled = not refused
            limited = not refused and address_of(memory) not in self._pinned and not self._limited
            self._limited |= limited
        if refused:
            log.warning("arrays are loaded from pageable memory: %s", refused)
        elif limited:
            log.info("some arrays are loaded from pageable memory: HOLDFAST_PIN_LIMIT")

    def unpin(self, memory: Bytes1D) -> None:
        """Undo `pin`, if it was done. No array may be on its way out of this memory."""
        start = address_of(memory)
        with self._lock:
            found = self._pinned.get(start)
            if found is None:
                return
            with suppress(RuntimeError):  # then the runtime keeps it pinned, and it stays mapped and counted
                found[0].dma_unmap(start)
                self._budget.give_back(start)
                del self._pinned[start]

    def _map(self, memory: Bytes1D, device: Any) -> str:
        """Pin one mapping, if the budget has room for it; why that is impossible altogether, else nothing."""
        start = address_of(memory)
        try:
            runtime = self._runtime(device)
            if not self._checked:
                _check_way(runtime, device)
                self._checked = True
            if not self._budget.take(start, memory.nbytes):
                return ""
            try:
                runtime.dma_map(start, memory.nbytes)
            except BaseException:
                self._budget.give_back(start)
                raise
        # JAX's own errors are RuntimeErrors; a version without the call has no such attribute.
        except (RuntimeError, AttributeError, TypeError, StagingError) as error:
            return str(error).partition("\n")[0][:200] or type(error).__name__
        self._pinned[start] = (runtime, memory)
        return ""


@dataclass(slots=True, eq=False)
class _Buffer:
    """A mapping of a landing; `taken` is what was given out of it, and tells when nobody has it any more."""

    memory: Bytes1D
    taken: weakref.ref[Any] | None = None


class _Flight(NamedTuple):
    """A buffer that arrays are made from: it is theirs until all of them have arrived."""

    buffer: _Buffer
    shards: list[Any]


@final
class JaxLanding:
    """Memory for arrays on their way to devices, used again when they have arrived.

    What `take` gave is free again once all arrays that `place` made of it are ready, or once nobody has a
    view of it any more, if it was never placed. Arrays never share this memory, not even those on CPUs.
    """

    def __init__(self, device: Any, *, pins: RuntimePins | None = None, nbytes: int = BUDGET) -> None:
        self._device = device
        self._pins = pins or runtime_pins()
        self._budget = nbytes
        self._nbytes = 0
        self._free: list[_Buffer] = []
        self._taken: dict[int, _Buffer] = {}
        self._flights: deque[_Flight] = deque()
        """The oldest first."""
        self._num_awaited = 0
        """Flights that some thread has taken out of the queue and waits for."""
        self._dropped: deque[tuple[_Buffer, weakref.ref[Any]]] = deque()
        """What nobody has any more. Filled by a collection, anywhere in any thread: it waits for no lock."""
        self._spent: list[_Buffer] = []
        """Those whose arrays failed; they are not used again."""
        self._doubted: set[Any] = set()
        """Devices that may be reading buffers without our knowing of it."""
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it has now."""
        return self._nbytes

    def take(self, nbytes: int) -> Bytes1D:
        """Memory for one box, with whatever is in it.

        Blocks: while arrays that were placed are on their way, if there is no memory left but theirs. Where
        none are, it goes beyond its budget: who fills boxes is never waited for, it may be the caller. Fails:
        what such an array failed with; UsageError if it is closed.
        """
        if nbytes < _LEAST:
            return np.empty(nbytes, np.uint8)
        size = _rounded(nbytes)
        while True:
            with self._changed:
                found = self._found(size)
            if not isinstance(found, _Flight):
                return self._given(found or self._made(size), nbytes)
            self._await(found)

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        made: list[Made] = []
        try:
            return put(batch, made, kept=True)
        except BaseException:
            # One call sends many arrays: some may be on their way, and nobody has them to wait for.
            self._doubted |= {device for one in batch for device in one.sink.devices}
            raise
        finally:
            self._depart(made)

    def close(self) -> None:
        self._closed = True
        while True:
            with self._changed:
                if not self._flights:
                    break
                flight = self._next()
            self._await(flight)
        with self._changed:
            while self._num_awaited:  # by threads in `take`: each ends with its arrays
                self._changed.wait()
            buffers = [*self._free, *self._taken.values(), *self._spent]
            self._free, self._taken, self._spent = [], {}, []
            error, self._error = self._error, None
        for device in self._doubted:
            # What is sent to a device arrives in turn: when this has, so has all before it.
            with suppress(Exception):  # of a device that is lost: it reads nothing
                jax.device_put(np.zeros(1, np.uint8), device).block_until_ready()
        with self._changed:
            while buffers:
                self._let_go(buffers.pop())
        # JAX lets go of host memory that it was given only in a collection, of any generation.
        gc.collect(0)
        if error is not None:
            raise error

    # ---- with the lock held

    def _found(self, size: int) -> _Buffer | _Flight | None:
        """A buffer; or what is to be waited for first; or None: room for a new buffer, which counts already.

        Blocks: while all arrays that are on their way are waited for by other threads.
        """
        self._budget = max(self._budget, 2 * size)
        while True:
            if self._closed:
                raise UsageError("the landing is closed", hint="ask the adapter for another one")
            self._gather()
            if self._error is not None:
                raise self._error
            buffer = self._fitting(size, 2 * size)
            if buffer is None and not self._has_room(size):
                buffer = self._fitting(size, self._nbytes)
            if buffer is not None:
                self._free.remove(buffer)
                return buffer
            idle = not self._flights and not self._num_awaited
            if self._has_room(size, sum(one.memory.nbytes for one in self._free)) or idle:
                self._shrink(size)
                self._nbytes += size
                return None
            if self._flights:
                return self._next()
            self._changed.wait()  # who waits for a flight tells of its end, whatever that is

    def _next(self) -> _Flight:
        """The oldest flight, for the caller to wait for."""
        self._num_awaited += 1
        return self._flights.popleft()

    def _has_room(self, size: int, free: int = 0) -> bool:
        return self._nbytes - free + size <= self._budget

    def _gather(self) -> None:
        """Free what was dropped, and what has arrived unnoticed."""
        while self._dropped:
            buffer, reference = self._dropped.popleft()
            # It may be on its way to devices, or have come from there and be somebody else's by now.
            if buffer.taken is reference and self._taken.pop(address_of(buffer.memory), None) is not None:
                self._release(buffer)
        while self._flights and all(map(_is_over, self._flights[0].shards)):
            self._await(self._next())  # returns at once

    def _fitting(self, least: int, most: int) -> _Buffer | None:
        fitting = [buffer for buffer in self._free if least <= buffer.memory.nbytes <= most]
        return min(fitting, key=lambda buffer: buffer.memory.nbytes, default=None)

    def _shrink(self, size: int) -> None:
        """Give free buffers back until a new one has room, the largest first."""
        self._free.sort(key=lambda buffer: buffer.memory.nbytes)
        while self._free and not self._has_room(size):
            self._let_go(self._free.pop())

    def _release(self, buffer: _Buffer) -> None:
        buffer.taken = None
        if self._nbytes > self._budget:
            self._let_go(buffer)
        else:
            self._free.append(buffer)

    def _abandon(self, buffer: _Buffer) -> None:
        """Wait no more for arrays that their owner deleted: JAX has a view of the memory until it is done."""
        if buffer.taken is not None and buffer.taken() is not None:
            self._taken[address_of(buffer.memory)] = buffer
        else:
            self._release(buffer)

    def _let_go(self, buffer: _Buffer) -> None:
        buffer.taken = None
        self._pins.unpin(buffer.memory)
        self._nbytes -= buffer.memory.nbytes

    # ---- without it

    def _await(self, flight: _Flight) -> None:
        """Wait for the arrays of a flight that was taken out of the queue and counted; keep their error."""
        error: Exception | None = None
        num_over = 0
        try:
            for shard in flight.shards:
                try:
                    shard.block_until_ready()
                except Exception as caught:
                    error = error or caught
                num_over += 1
        finally:
            with self._changed:
                self._num_awaited -= 1
                if num_over < len(flight.shards):  # interrupted: it is on its way still
                    self._flights.appendleft(flight)
                elif error is None:
                    self._release(flight.buffer)
                elif any(shard.is_deleted() for shard in flight.shards):
                    self._abandon(flight.buffer)
                else:
                    self._spent.append(flight.buffer)
                    self._error = self._error or error
                self._changed.notify_all()

    def _made(self, size: int) -> _Buffer:
        try:
            memory = region(size)
            # Pages are made here, by whichever threads need them; the runtime would make them one by one.
            populate(address_of(memory), memory.nbytes)
            self._pins.pin(memory, self._device)
        except BaseException:
            with self._changed:
                self._nbytes -= size
            raise
        return _Buffer(memory)

    def _given(self, buffer: _Buffer, nbytes: int) -> Bytes1D:
        # An array of its own over the buffer: views of it have it as their base, so it lives while they do.
        data: Bytes1D = np.frombuffer(buffer.memory.data, np.uint8, nbytes)
        dropped = self._dropped
        with self._changed:
            if self._closed:
                self._let_go(buffer)
                raise UsageError("the landing is closed", hint="ask the adapter for another one")
            buffer.taken = weakref.ref(data, lambda reference: dropped.append((buffer, reference)))
            self._taken[address_of(buffer.memory)] = buffer
        return data

    def _depart(self, made: Sequence[Made]) -> None:
        """From now on the buffers that arrays are made from are those arrays'."""
        shards: dict[int, list[Any]] = {}
        for host, shard in made:
            shards.setdefault(address_of(_root(host)), []).append(shard)
        with self._changed:
            for start, some in shards.items():
                buffer = self._taken.pop(start, None)
                if buffer is not None:  # small ones, and what was cast, lie elsewhere
                    self._flights.append(_Flight(buffer, [own(shard) for shard in some]))


def _is_over(shard: Any) -> bool:
    try:
        return bool(shard.is_ready())
    except RuntimeError:  # it was deleted: who waits for it does not wait
        return True


def _rounded(nbytes: int) -> int:
    """The size of a buffer for so many bytes: few sizes, so that arrays of about one size share buffers."""
    unit = max(1 << ((nbytes - 1).bit_length() - 4), mmap.PAGESIZE)
    return -(-nbytes // unit) * unit


def _root(host: Any) -> Any:
    """The array that a view is of."""
    while isinstance(host.base, np.ndarray):
        host = host.base
    return host


def _check_way(runtime: Runtime, device: Any) -> None:
    """Put a known pattern on a device and read it back by the slow path. Fails: StagingError."""
    pattern = np.random.default_rng(7).integers(0, 256, _PATTERN, np.uint8)
    host = region(_PATTERN)
    host[:] = pattern
    start = address_of(host)
    runtime.dma_map(start, _PATTERN)
    try:
        up = jax.device_put(foreign(host, device), device, may_alias=True)
        jax.block_until_ready(up)  # type: ignore[no-untyped-call]
        host[:] = 0  # what comes back is no view of what went up
        back = np.asarray(up)
    finally:
        runtime.dma_unmap(start)
    if not np.array_equal(back, pattern):
        raise StagingError("a known pattern came through wrong")


_PINS: RuntimePins | None = None


def runtime_pins() -> RuntimePins:
    """The pins of this process. Nothing is touched before memory is pinned."""
    global _PINS
    if _PINS is None:
        _PINS = RuntimePins(pins=budget(), enabled=setting(os.environ) == 0)
    return _PINS
