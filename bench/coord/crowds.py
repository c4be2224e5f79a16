"""Clients of one system, some or many in this process, behind one protocol.

Every system is used through its best face for the number of clients: one client is called from the main
thread; many are threads where the client is native code that lets the interpreter go (jaxlib, torch), and
tasks of one event loop where it is Python (Holdfast, gRPC for etcd).
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

VALUE = bytes(range(64))
DEADLINE_S = 120.0


class Crowd(Protocol):
    """The clients of this process. Every method is for all of them at once, unless it says otherwise."""

    def connect(self) -> float:
        """Connect and register; returns when every client of this process is in: the moment of that."""

    def barrier(self, times: int) -> list[float]:
        """Meet `times` times, one after the other; the periods as the first client sees them."""

    def exchange(self, times: int) -> float:
        """Set and get an own key `times` times; the moment when the last client was done."""

    def sets(self, times: int) -> float:
        """Set an own key `times` times; the moment when the last client was done."""

    def latency(self, times: int) -> tuple[list[float], list[float]]:
        """The times of single sets and gets of the first client, the others at rest."""

    def close(self) -> None:
        """Say goodbye."""


def moment() -> float:
    """Now, on the clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def laps(act: Callable[[], object], times: int) -> list[float]:
    """How long each of `times` calls took."""
    found = []
    last = time.perf_counter()
    for _ in range(times):
        act()
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return found


class ThreadCrowd(ABC):
    """Clients whose calls block, each on a thread of its own; a single one on the main thread."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        self._address, self._slots, self._total = address, slots, total
        self._threads: ThreadPoolExecutor | None = None
        if len(slots) > 1:
            threading.stack_size(512 << 10)
            self._threads = ThreadPoolExecutor(len(slots))
            gate = threading.Barrier(len(slots))
            # Threads are started here, so that none is started inside a measurement.
            list(self._threads.map(lambda _: gate.wait(DEADLINE_S), slots))

    def _all(self, act: Callable[[int], Any]) -> list[Any]:
        """`act` of every place in `slots`, all at once."""
        places = range(len(self._slots))
        if self._threads is None:
            return [act(place) for place in places]
        return list(self._threads.map(act, places, timeout=DEADLINE_S))

    def connect(self) -> float:
        self._all(self._enter)
        return moment()

    def barrier(self, times: int) -> list[float]:
        found: list[list[float]] = self._all(lambda place: laps(lambda: self._meet(place), times))
        return found[0]

    def exchange(self, times: int) -> float:
        def act(place: int) -> None:
            for _ in range(times):
                self._set(place)
                self._get(place)

        self._all(act)
        return moment()

    def sets(self, times: int) -> float:
        self._all(lambda place: laps(lambda: self._set(place), times))
        return moment()

    def latency(self, times: int) -> tuple[list[float], list[float]]:
        return laps(lambda: self._set(0), times), laps(lambda: self._get(0), times)

    def close(self) -> None:
        self._all(self._leave)
        if self._threads is not None:
            self._threads.shutdown()

    @abstractmethod
    def _enter(self, place: int) -> None: ...

    @abstractmethod
    def _meet(self, place: int) -> None: ...

    @abstractmethod
    def _set(self, place: int) -> None: ...

    @abstractmethod
    def _get(self, place: int) -> None: ...

    @abstractmethod
    def _leave(self, place: int) -> None: ...


class LoopCrowd(ABC):
    """Clients that are tasks of one event loop (uvloop where it is installed)."""

    def __init__(self, address: str, slots: Sequence[int], total: int) -> None:
        self._address, self._slots, self._total = address, slots, total
        self._runner = asyncio.Runner(loop_factory=_loop_factory())

    def _all(self, act: Callable[[int], Coroutine[Any, Any, Any]]) -> list[Any]:
        async def everybody() -> list[Any]:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.gather(*(act(place) for place in range(len(self._slots))))

        return self._runner.run(everybody())

    def connect(self) -> float:
        self._all(self._enter)
        return moment()

    def barrier(self, times: int) -> list[float]:
        found: list[list[float]] = self._all(lambda place: _laps(lambda: self._meet(place), times))
        return found[0]

    def exchange(self, times: int) -> float:
        async def act(place: int) -> None:
            for _ in range(times):
                await self._set(place)
                await self._get(place)

        self._all(act)
        return moment()

    def sets(self, times: int) -> float:
        self._all(lambda place: _laps(lambda: self._set(place), times))
        return moment()

    def latency(self, times: int) -> tuple[list[float], list[float]]:
        run = self._runner.run
        return run(_laps(lambda: self._set(0), times)), run(_laps(lambda: self._get(0), times))

    def close(self) -> None:
        self._all(self._leave)
        self._runner.close()

    @abstractmethod
    async def _enter(self, place: int) -> None: ...

    @abstractmethod
    async def _meet(self, place: int) -> None: ...

    @abstractmethod
    async def _set(self, place: int) -> None: ...

    @abstractmethod
    async def _get(self, place: int) -> None: ...

    @abstractmethod
    async def _leave(self, place: int) -> None: ...


async def _laps(act: Callable[[], Awaitable[object]], times: int) -> list[float]:
    found = []
    last = time.perf_counter()
    for _ in range(times):
        await act()
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return found


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None
