"""Simulated time: one queue of things to come, one source of chance, and clocks that go wrong."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock that shows another time than the true one, and runs at another rate."""

    offset: float = 0.0
    rate: float = 1.0

    def reads(self, true: float) -> float:
        return self.offset + self.rate * true

    def when(self, reading: float) -> float:
        """The true time at which it will show `reading`."""
        return (reading - self.offset) / self.rate


class Still(random.Random):
    """No chance at all: every draw is the middle one. For scenarios that are written by hand."""

    def random(self) -> float:
        return 0.5


@final
class World:
    """Everything that happens in a simulation happens here, in order, and follows from the seed."""

    def __init__(self, seed: int, *, tracing: bool = False, still: bool = False) -> None:
        self.rng = Still() if still else random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.tracing = tracing
        self.trace: list[str] = []
        self.watchers: list[Callable[[], None]] = []
        """Called after every event: the invariants."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (max(when, self.now), self._count, action, args))

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, action, *args)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def tell(self, who: str, text: str) -> None:
        """A line of the trace; ask `tracing` first, the text costs more than the event."""
        self.trace.append(f"{self.now:10.4f}  {who:<8} {text}")

    def run(self, until: float, *, max_events: int = 1_000_000) -> None:
        """Let everything happen that is due up to `until`."""
        queue = self._queue
        limit = self.events + max_events
        while queue and queue[0][0] <= until:
            when, _, action, args = heapq.heappop(queue)
            self.now = when
            self.events += 1
            action(*args)
            for watcher in self.watchers:
                watcher()
            if self.events > limit:
                raise AssertionError(f"more than {max_events} events: something goes round in circles")
        self.now = max(self.now, until)


@final
class Alarm:
    """One wake-up call that can be moved."""

    def __init__(self, world: World, action: Callable[[], None]) -> None:
        self._world = world
        self._action = action
        self._token = 0
        self._at = float("inf")

    def set(self, when: float) -> None:
        if when == self._at:
            return
        self._token += 1
        self._at = when
        if when < float("inf"):
            self._world.at(when, self._ring, self._token)

    def _ring(self, token: int) -> None:
        if token == self._token:
            self._at = float("inf")
            self._action()
