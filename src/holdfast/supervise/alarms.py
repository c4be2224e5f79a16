"""Moments at which something is due, each under a name; setting a name again moves it."""

from __future__ import annotations

import heapq
import math
from typing import TypeAlias, final

Alarm: TypeAlias = tuple[str, int]


@final
class Alarms:
    """A queue of moments. Nothing rings by itself: ask for what is due."""

    def __init__(self) -> None:
        self._at: dict[Alarm, float] = {}
        self._heap: list[tuple[float, int, Alarm]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, kind: str, of: int, at: float) -> None:
        alarm = (kind, of)
        if self._at.get(alarm) == at:
            return
        self._at[alarm] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, alarm))
        # Moved and cleared alarms stay in the heap until they come up; not for ever.
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [one for one in self._heap if self._at.get(one[2]) == one[0]]
            heapq.heapify(self._heap)

    def is_set(self, kind: str, of: int) -> bool:
        return (kind, of) in self._at

    def clear(self, kind: str, of: int) -> None:
        self._at.pop((kind, of), None)

    def postpone(self, seconds: float) -> None:
        """Move all of them."""
        live = [one for one in self._heap if self._at.get(one[2]) == one[0]]
        self._heap = [(at + seconds, count, alarm) for at, count, alarm in live]
        self._at = {alarm: at for at, _, alarm in self._heap}

    def next_at(self) -> float:
        """When the next one is due; inf if there is none."""
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop_due(self, now: float) -> Alarm | None:
        """The next one that is due, which is then forgotten."""
        if self.next_at() > now:
            return None
        alarm = heapq.heappop(self._heap)[2]
        del self._at[alarm]
        return alarm
