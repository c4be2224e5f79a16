"""Things to do later, on one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, final

log = logging.getLogger("holdfast.transfer")


_FEW: Final = 64


@final
class Alarm:
    """Something to be called at a moment, until it was or is cancelled."""

    __slots__ = ("_number", "at", "function")

    def __init__(self, at: float, number: int, function: Callable[[], float | None]) -> None:
        self.at = at
        self._number = number
        self.function: Callable[[], float | None] | None = function

    def __lt__(self, other: Alarm) -> bool:
        return (self.at, self._number) < (other.at, other._number)


@final
class Timers:
    """Calls functions when their time has come; one that returns a number is called again after so many
    seconds. They must not block.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._due: list[Alarm] = []
        self._cancelled = 0
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def after(self, delay_s: float, function: Callable[[], float | None]) -> Alarm:
        """Call it in `delay_s` seconds, unless the alarm is cancelled before."""
        with self._changed:
            alarm = Alarm(time.monotonic() + delay_s, next(self._numbers), function)
            heapq.heappush(self._due, alarm)
            if self._due[0] is alarm:
                self._changed.notify()
            return alarm

    def cancel(self, alarm: Alarm) -> None:
        """Do not call it, and let go of what it holds. Any number of times."""
        with self._changed:
            if alarm.function is None:
                return
            alarm.function = None
            self._cancelled += 1
            # What is due in a week would otherwise stay here for a week.
            if self._cancelled > _FEW and 2 * self._cancelled > len(self._due):
                self._due = [one for one in self._due if one.function is not None]
                heapq.heapify(self._due)
                self._cancelled = 0

    def _loop(self) -> None:
        while (alarm := self._next()) is not None:
            function = alarm.function
            if function is None:
                continue
            try:
                again = function()
            except Exception:
                log.exception("a timer of the transfer endpoint failed")
                again = None
            del function
            with self._changed:
                if again is None:
                    alarm.function = None
                elif alarm.function is not None:
                    alarm.at = time.monotonic() + again
                    heapq.heappush(self._due, alarm)

    def _next(self) -> Alarm | None:
        """The alarm whose time has come, or None at the end. Blocks: until there is one."""
        with self._changed:
            while not self._closed:
                wait = self._due[0].at - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)
                self._changed.wait(wait)
            return None

    def close(self) -> None:
        """Call nothing any more."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
