"""Things to do later, on one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import final

log = logging.getLogger("holdfast.transfer")


@final
class Timers:
    """Calls functions when their time has come; one that returns a number is called again after so many
    seconds. They must not block.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], float | None]]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def after(self, delay_s: float, function: Callable[[], float | None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), function))
            if self._due[0][2] is function:
                self._changed.notify()

    def _loop(self) -> None:
        while (function := self._next()) is not None:
            try:
                again = function()
            except Exception:
                log.exception("a timer of the transfer endpoint failed")
                continue
            if again is not None:
                self.after(again, function)

    def _next(self) -> Callable[[], float | None] | None:
        with self._changed:
            while not self._closed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
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
