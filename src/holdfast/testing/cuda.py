"""A CUDA driver that is none: it copies host memory, later, on a thread of its own, and minds the rules.

With it the arrays of the CPU backend stand for those of a GPU, and all of staging runs but the driver's own
calls. Every rule that the real driver leaves to its caller is checked, and what breaks one is written down in
`broken` as well as raised: a context on each thread, copies only into registered memory, nothing
unregistered or destroyed while a copy is under way, no handle used that was given back, none left behind.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, final

from holdfast.errors import StagingError


class _Copy(NamedTuple):
    target: int
    source: int
    nbytes: int


class _Record(NamedTuple):
    event: int
    ticket: int


class Misuse(AssertionError):
    """A rule of the driver was broken."""


@final
class FakeDriver:
    """Stands for `holdfast.jax.cuda.CudaDriver`.

    `fail` makes the nth call of a name fail, as in {"copy_out": 3}; `fail_from` that one and all later.
    `delay_s` is how long each copy takes. While `gate` is clear copies wait. `damage` says from which copy on
    one byte comes out wrong.
    """

    def __init__(
        self,
        *,
        fail: Mapping[str, int] | None = None,
        fail_from: Mapping[str, int] | None = None,
        delay_s: float = 0.0,
        damage: int | None = None,
    ) -> None:
        self._fail = dict(fail or {})
        self._fail_from = dict(fail_from or {})
        self._delay_s = delay_s
        self._damage = damage
        self.calls: Counter[str] = Counter()
        self.broken: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.first_copy = threading.Event()
        """Set once a copy was given to the driver."""
        self.bytes_copied = 0
        self._bound = threading.local()
        self._ranges: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        """The device of each stream."""
        self._events: dict[int, tuple[int, int, int]] = {}
        """The device of each event, the last ticket given to it and the last that has come."""
        self._next = 1
        self._under_way: list[_Copy] = []
        self._pending: Counter[int] = Counter()
        """What each stream has still to do."""
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[int, _Copy | _Record] | None] = queue.SimpleQueue()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    # ---- the driver's calls

    @contextmanager
    def bind(self, device: int) -> Iterator[None]:
        self._called("bind")
        before = getattr(self._bound, "device", None)
        self._bound.device = device
        try:
            yield
        finally:
            self._bound.device = before

    def register(self, address: int, nbytes: int) -> None:
        self._called("register")
        self._device()
        with self._lock:
            if any(
                start < address + nbytes and address < start + size for start, size in self._ranges.items()
            ):
                raise StagingError(
                    "cuMemHostRegister failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)"
                )
            self._ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        self._called("unregister")
        self._device()
        with self._lock:
            size = self._ranges.get(address)
            self._rule(size is not None, f"{address:#x} is not registered")
            assert size is not None
            busy = any(address <= one.target < address + size for one in self._under_way)
            self._rule(not busy, "unregistered while a copy into it is under way")
            del self._ranges[address]

    def make_stream(self) -> int:
        self._called("make_stream")
        with self._lock:
            self._streams[self._next] = self._device()
            self._next += 1
            return self._next - 1

    def destroy_stream(self, stream: int) -> None:
        self._called("destroy_stream")
        with self._lock:
            self._rule(self._streams.get(stream) == self._device(), "a stream of another device, or none")
            self._rule(not self._pending[stream], "a stream was destroyed with work in it")
            del self._streams[stream]

    def make_event(self) -> int:
        self._called("make_event")
        with self._lock:
            self._events[self._next] = (self._device(), 0, 0)
            self._next += 1
            return self._next - 1

    def destroy_event(self, event: int) -> None:
        self._called("destroy_event")
        with self._lock:
            self._rule(event in self._events, "an event that is not there was destroyed")
            _, given, come = self._events[event]
            self._rule(given == come, "an event was destroyed before it happened")
            del self._events[event]

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._called("copy_out")
        with self._lock:
            self._rule(self._streams.get(stream) == self._device(), "a stream of another device, or none")
            inside = any(
                start <= target and target + nbytes <= start + size for start, size in self._ranges.items()
            )
            self._rule(inside, f"a copy of {nbytes} bytes to memory that is not registered")
            copy = _Copy(target, source, nbytes)
            self._under_way.append(copy)
            self._give(stream, copy)
        self.first_copy.set()

    def record(self, event: int, stream: int) -> None:
        self._called("record")
        with self._lock:
            self._rule(event in self._events, "an event that is not there was recorded")
            device, given, come = self._events[event]
            self._rule(self._streams.get(stream) == device == self._device(), "event and stream differ")
            self._events[event] = (device, given + 1, come)
            self._give(stream, _Record(event, given + 1))

    def happened(self, event: int) -> bool:
        self._called("happened")
        with self._lock:
            self._rule(event in self._events, "an event that is not there was asked for")
            _, given, come = self._events[event]
            self._rule(given > 0, "an event that was never recorded was asked for")
            return given == come

    # ---- what tests ask

    @property
    def registered(self) -> int:
        """Bytes that are registered."""
        with self._lock:
            return sum(self._ranges.values())

    @property
    def under_way(self) -> int:
        """Copies that are not done."""
        with self._lock:
            return len(self._under_way)

    def check(self, *, leaks: bool = True) -> None:
        """Raise Misuse if a rule was broken, or if something was left behind. Ends the thread."""
        self.gate.set()
        self._work.put(None)
        self._thread.join(10.0)
        if self.broken:
            raise Misuse("; ".join(self.broken))
        if leaks and (self._ranges or self._streams or self._events or self._under_way):
            raise Misuse(
                f"left: {self._ranges}, streams {self._streams}, events {sorted(self._events)}, "
                f"copies {self._under_way}"
            )

    # ---- inside

    def _called(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
            number = self.calls[name]
        if number == self._fail.get(name) or number >= self._fail_from.get(name, number + 1):
            raise StagingError(f"{name} failed: CUDA_ERROR_UNKNOWN (999)")

    def _device(self) -> int:
        device: int | None = getattr(self._bound, "device", None)
        self._rule(device is not None, "no context is current on this thread")
        assert device is not None
        return device

    def _rule(self, kept: bool, text: str) -> None:
        if not kept:
            self.broken.append(text)
            raise Misuse(text)

    def _give(self, stream: int, work: _Copy | _Record) -> None:
        self._pending[stream] += 1
        self._work.put((stream, work))

    def _run(self) -> None:
        while (found := self._work.get()) is not None:  # ends with the None of check()
            stream, work = found
            if isinstance(work, _Copy):
                self.gate.wait(60.0)
                if self._delay_s:
                    self._pause.wait(self._delay_s)
                self._move(work)
            with self._lock:
                if isinstance(work, _Copy):
                    self._under_way.remove(work)
                elif work.event in self._events:
                    device, given, _ = self._events[work.event]
                    self._events[work.event] = (device, given, work.ticket)
                self._pending[stream] -= 1

    def _move(self, copy: _Copy) -> None:
        ctypes.memmove(copy.target, copy.source, copy.nbytes)
        self.bytes_copied += copy.nbytes
        if self._damage is not None:
            self._damage -= 1
            if self._damage < 0:
                ctypes.c_uint8.from_address(copy.target + copy.nbytes // 2).value ^= 0x10
