"""State on devices into host memory that somebody else owns: the vault's arena.

Three routes, the best first; a worse one is taken when a better one fails, and that is said once:

    pinned arena   the arena's pages are registered with the CUDA driver, and devices copy into them; memory
                   that may not be pinned any more, by HOLDFAST_PIN_LIMIT, takes the next route for itself
    pinned_host    JAX copies to page-locked memory of its own, and from there it is copied
    pageable       `np.asarray`

Whatever the route, copies begin when the arrays are computed (waited for on the host: nothing else orders our
streams against XLA's) and read arrays that are kept alive until the driver says that they are done. An array
that was donated meanwhile fails the save: its bytes may be those of another step.

The first route is used only after a known pattern came through it right, and the first saves are compared
with what JAX itself reads, in one place each. `HOLDFAST_STAGING` chooses: auto, pinned_host, pageable, off.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import jax
import numpy as np

from holdfast.arrays import Bytes1D, DeviceCopy, HostMemory
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, StagingError
from holdfast.jax import snapshots
from holdfast.jax.cuda import CudaDriver, Driver
from holdfast.jax.engine import Copy, CopyEngine
from holdfast.jax.pins import PinBudget, budget
from holdfast.jax.routes import NUM_ROUTES, Routes
from holdfast.jax.settings import setting
from holdfast.jax.shards import (
    Arrays,
    Shards,
    arrays_of,
    bytes_at,
    check_way,
    flat,
    gone,
    is_packed,
    nobody,
    ordinal,
    shards_of,
)
from holdfast.jax.snapshots import Headroom, Stats, memory_stats

log = logging.getLogger("holdfast.jax")

_COMPARED: Final = 3
"""Saves of a process that are compared, in one place each, with what JAX reads."""
_POLL_S: Final = 0.001


@final
class DeviceStager:
    """Copies arrays from devices of some platforms. Safe to use from several threads."""

    def __init__(
        self,
        driver: Callable[[], Driver] = CudaDriver,
        *,
        platforms: frozenset[str] = frozenset({"gpu", "cuda"}),
        first: int = 0,
        pins: PinBudget | None = None,
        stats: Callable[[Any], Stats | None] = memory_stats,
        drain_s: float = 10.0,
    ) -> None:
        self._make_driver = driver
        self._platforms = platforms
        self.routes = Routes(first)
        self._budget = pins or PinBudget()
        self._stats = stats
        self._drain_s = drain_s
        self._engine: CopyEngine | None = None
        self._checked: set[tuple[int, Any]] = set()
        self._known: tuple[Sequence[DeviceCopy], frozenset[Any]] | None = None
        self._headrooms: dict[Any, Headroom] = {}
        self._compared = 0
        self._lock = threading.RLock()

    # ---- what others ask

    @property
    def route(self) -> str:
        """The route that the next copies take into pinned memory."""
        return self.routes.name()

    @property
    def pinned(self) -> int:
        """Bytes of host memory that are pinned now."""
        return self._engine.registered if self._engine is not None else 0

    def announcements(self) -> list[tuple[str, str]]:
        return self.routes.announcements()

    def takes(self, leaf: Any) -> bool:
        if self.routes.first >= NUM_ROUTES:
            return False
        device: Any = next(iter(leaf.sharding.device_set))
        if device.platform not in self._platforms:
            return False
        # Several elements to a byte on the device, one in a file: JAX has to unpack them.
        return not isinstance(leaf.dtype, np.dtype) or not is_packed(leaf.dtype)

    def prepare(self, leaves: Sequence[Any], copies: Sequence[DeviceCopy], memory: HostMemory) -> None:
        arrays = arrays_of(leaves, copies)
        pinned = self._pinned_for(memory, self._devices(arrays, copies), fresh_only=True)
        snapshots.prepare(list(shards_of(arrays, copies).values()))
        if pinned:
            for number in range(self._compared, _COMPARED):
                self._sample(arrays, copies, number)

    def begin(
        self,
        leaves: Sequence[Any],
        copies: Sequence[DeviceCopy],
        memory: HostMemory,
        *,
        fenced: bool,
    ) -> StagedCopies:
        arrays = arrays_of(leaves, copies)
        pinned = self._pinned_for(memory, self._devices(arrays, copies))
        sample = None
        with self._lock:
            if pinned and self._compared < _COMPARED:
                # Given to the device before the next step is: later it would wait for that to end.
                sample = self._sample(arrays, copies, self._compared)
                self._compared += 1
        snapshot = None if fenced else self._snapshot(shards_of(arrays, copies))
        arrays = {} if snapshot else arrays
        return StagedCopies(self, copies, memory, sample, arrays, snapshot or {}, pinned=pinned)

    # ---- pinned memory

    def _devices(self, arrays: Arrays, copies: Sequence[DeviceCopy]) -> frozenset[Any]:
        """The devices that are copied from; asked at every save, and the same for the copies of one plan."""
        if self._known is None or self._known[0] is not copies:
            shards = shards_of(arrays, copies).values()
            self._known = (copies, frozenset(device for shard in shards for device in shard.devices()))
        return self._known[1]

    def _pinned_for(self, memory: HostMemory, devices: frozenset[Any], *, fresh_only: bool = False) -> bool:
        """Have memory registered, and each device's way into it checked; False if another route is taken."""
        with self._lock:
            if self.routes.first:
                self.routes.tell(self.routes.first, "HOLDFAST_STAGING says so")
            elif self.routes.best() == 0:
                try:
                    return self._pin(memory, devices, fresh_only)
                except StagingError as error:
                    self.routes.leave(0, error.message)
                    if error.stuck:
                        raise
            return False

    def _pin(self, memory: HostMemory, devices: frozenset[Any], fresh_only: bool) -> bool:
        if self._engine is None:
            self._engine = CopyEngine(self._make_driver(), self._budget, drain_s=self._drain_s)
        engine = self._engine
        if not engine.covers(memory.address, memory.size):
            device = min(map(ordinal, devices))
            started = time.monotonic()
            if not engine.register(memory.address, memory.size, device):
                # Tried again at each save into it: room may come back.
                self.routes.over_limit(
                    f"{memory.size:,} bytes more to pin, beside {self._budget.pinned:,}, are over the limit "
                    f"of {self._budget.limit:,}; raise HOLDFAST_PIN_LIMIT, or use fewer save slots"
                )
                return False
            address = memory.address
            memory.before_unmap(lambda: self._unpinned(address, device))
            log.info(
                "pinned %s bytes of host memory in %.2f s (%s in all, at most %s)",
                f"{memory.size:,}",
                time.monotonic() - started,
                f"{self._budget.pinned:,}",
                f"{self._budget.limit:,}",
            )
        elif fresh_only:
            return True  # what lies there may be in use
        for one in devices:
            if (memory.address, one) not in self._checked:
                check_way(engine, memory, one)
                self._checked.add((memory.address, one))
        self.routes.tell(0)
        return True

    def _unpinned(self, address: int, device: int) -> bool:
        # Without our lock: who holds it may wait for copies that wait for whoever drops this memory.
        assert self._engine is not None
        for pair in [pair for pair in tuple(self._checked) if pair[0] == address]:
            self._checked.discard(pair)
        return self._engine.unregister(address, device)

    # ---- snapshots and samples

    def _snapshot(self, shards: Shards) -> Shards | None:
        """A copy of the shards on their devices; None if there is no room for it."""
        sizes: dict[Any, int] = {}
        for shard in shards.values():
            (device,) = shard.devices()
            sizes[device] = sizes.get(device, 0) + shard.nbytes
        with self._lock:
            for device, nbytes in sizes.items():
                headroom = self._headrooms.setdefault(device, Headroom())
                if not headroom.fits(self._stats(device), nbytes):
                    return None
            try:
                made = snapshots.snapshot(list(shards.values()))
            except StagingError as error:
                log.info("%s", error.message)
                return None
        return dict(zip(shards, made, strict=True))

    def _sample(self, arrays: Arrays, copies: Sequence[DeviceCopy], number: int) -> tuple[Any, int] | None:
        """A piece of what is to be copied, as the device cuts it out, and where it will lie."""
        # Largest first: that is where most of the bytes are. Another array at each save.
        order = sorted(copies, key=lambda copy: -copy.nbytes)
        copy = order[number % len(order)]
        (shard,) = shards_of(arrays, [copy]).values()
        found = snapshots.sample(shard, copy.source, copy.nbytes)
        return None if found is None else (found[0], copy.target + found[1] - copy.source)

    # ---- copies, for StagedCopies

    def by_arena(
        self,
        job: StagedCopies,
        filled: Callable[[int], None],
        stop: threading.Event,
        deadline: Deadline,
    ) -> None:
        """Copy by the first route. Fails: StagingError, DeadlineError."""
        assert self._engine is not None
        bases = {}
        for key, one in job.shards.items():
            (device,) = one.devices()
            bases[key] = (ordinal(device), one.unsafe_buffer_pointer())
        copies = []
        for copy in job.copies:
            number, base = bases[copy.leaf, copy.ordinal]
            copies.append(Copy(number, base + copy.source, job.memory.address + copy.target, copy.nbytes))
        self._engine.run(copies, filled=filled, stop=stop, deadline=deadline, keep=(job.shards, job.arrays))

    def close(self) -> None:
        """Give the driver's streams back."""
        if self._engine is not None:
            self._engine.close()


@final
class StagedCopies:
    """The copies of one save."""

    def __init__(
        self,
        stager: DeviceStager,
        copies: Sequence[DeviceCopy],
        memory: HostMemory,
        sample: tuple[Any, int] | None,
        arrays: Arrays,
        shards: Shards,
        *,
        pinned: bool,
    ) -> None:
        self._stager = stager
        self._routes = stager.routes
        self.shards = shards
        self.copies = copies
        self.memory = memory
        self._sample = sample
        self._pinned = pinned
        self.arrays = arrays
        """Those of the program, as objects of our own, if they are what is read; empty with a snapshot."""
        self.captured = not arrays

    def run(self, filled: Callable[[int], None], stop: threading.Event, deadline: Deadline) -> None:
        """Copy by the best route there is; see `holdfast.arrays.Copying`."""
        try:
            self._run(filled, stop, deadline)
        except RuntimeError as error:  # JAX's: of a failed computation, or an array that is gone
            self._check_kept()
            raise StagingError(f"the state cannot be read: {str(error)[:200]}") from error
        finally:
            # Whatever happened: no later than now may the program's memory be its own again.
            self.shards, self.arrays, self._sample = {}, {}, None

    def _run(self, filled: Callable[[int], None], stop: threading.Event, deadline: Deadline) -> None:
        self.shards = self.shards or shards_of(self.arrays, self.copies)
        self._ready(stop, deadline)
        if self._routes.best(pinned=self._pinned) == 0:
            try:
                self._stager.by_arena(self, self._telling(filled), stop, deadline)
                self._compare()
                self._finish(filled)
                return
            except StagingError as error:
                if stop.is_set() and not error.stuck:
                    raise
                self._routes.leave(0, error.message)
                if error.stuck:
                    raise
        self._by_jax(filled, stop, deadline)

    def _telling(self, filled: Callable[[int], None]) -> Callable[[int], None]:
        """What tells of copies while others run: of none if they will be compared, else of all but the last.

        What is told is written to disk at once, and with the last of it the save is committed.
        """
        last = len(self.copies)
        return nobody if self._sample is not None else lambda done: filled(done) if done < last else None

    def _finish(self, filled: Callable[[int], None]) -> None:
        """Tell of the last copy, once it is sure that all of them read what was to be saved."""
        self._check_kept()
        filled(len(self.copies))

    def _by_jax(self, filled: Callable[[int], None], stop: threading.Event, deadline: Deadline) -> None:
        """Copy through memory that JAX allocates, one shard at a time."""
        held: tuple[tuple[int, int], Bytes1D] | None = None
        tell = self._telling(filled)
        for at, copy in enumerate(self.copies):
            key = (copy.leaf, copy.ordinal)
            if held is None or held[0] != key:
                held = None  # before the next one is fetched
                held = (key, self._fetched(self.shards[key]))
            # After fetching, which may take long: nobody wants these bytes in memory that is being given up.
            _check_wanted(stop, deadline)
            source = held[1].ctypes.data + copy.source
            ctypes.memmove(self.memory.address + copy.target, source, copy.nbytes)
            tell(at + 1)
        self._finish(filled)

    def _fetched(self, shard: Any) -> Bytes1D:
        if self._routes.best(pinned=False) == 1:
            try:
                return flat(jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host")))
            except (ValueError, NotImplementedError, RuntimeError) as error:
                self._check_kept()
                self._routes.leave(1, f"pinned_host: {str(error).splitlines()[0][:200]}")
        return flat(shard)

    def _ready(self, stop: threading.Event, deadline: Deadline) -> None:
        """Return once all is computed. Fails: TreeError if an array was donated meanwhile."""
        # JAX's own wait knows no deadline, and a step may hang in a collective whose other side is gone.
        for shard in self.shards.values():
            while not shard.is_ready():
                _check_wanted(stop, deadline)
                stop.wait(_POLL_S)
        jax.block_until_ready(list(self.shards.values()))  # type: ignore[no-untyped-call] # raises what failed
        self._check_kept()

    def _check_kept(self) -> None:
        """Fail if the program gave an array away. Donating marks it before the device does anything.

        Each shard is marked for its own device; an array is said to be gone when the first of them is.
        """
        if any(one.is_deleted() for one in (*self.arrays.values(), *self.shards.values())):
            raise gone()

    def _compare(self) -> None:
        """Fail if the piece that JAX reads is not what the driver copied."""
        if self._sample is None:
            return
        expected = flat(self._sample[0])
        found = bytes_at(self.memory.address + self._sample[1], expected.nbytes)
        if not np.array_equal(expected, found):
            self._check_kept()  # bytes of another step are no fault of the route
            wrong = int(np.count_nonzero(expected != found))
            raise StagingError(f"{wrong:,} of {expected.nbytes:,} bytes compared came through wrong")


def _check_wanted(stop: threading.Event, deadline: Deadline) -> None:
    """Fail if the copies are not wanted any more, or are late."""
    if stop.is_set():
        raise StagingError("the copies were cancelled")
    if deadline.expired():
        raise DeadlineError(
            "copies from a device did not end in time", hint="is the step before them stuck, or the device?"
        )


_STAGER: DeviceStager | None = None


def stager() -> DeviceStager:
    """The stager of this process. Nothing of the driver is touched before a leaf is on a GPU."""
    global _STAGER
    if _STAGER is None:
        _STAGER = DeviceStager(first=setting(os.environ), pins=budget())
    return _STAGER


def install(one: DeviceStager | None) -> DeviceStager | None:
    """Have this process use another stager, as a test of it does; the one before it."""
    global _STAGER
    before, _STAGER = _STAGER, one
    return before
