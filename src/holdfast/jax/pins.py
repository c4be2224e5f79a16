"""How much host memory this process may pin, be it slots of saves or memory that is loaded into."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import final

from holdfast.jax.settings import pin_limit


@final
class PinBudget:
    """The ranges that are pinned, and a limit to their sum: asked for each time, for a machine may grow."""

    def __init__(self, limit: Callable[[], int] = lambda: 1 << 62) -> None:
        self._limit = limit
        self._ranges: dict[int, int] = {}
        self._lock = threading.Lock()
        """Of those who take; `give_back` runs in finalizers, where no lock may be waited for."""

    @property
    def limit(self) -> int:
        return self._limit()

    @property
    def pinned(self) -> int:
        """Bytes that are pinned now."""
        return sum(list(self._ranges.values()))

    def take(self, start: int, nbytes: int) -> bool:
        """Whether this range may be pinned; it counts from now on."""
        with self._lock:
            fits = self._fits(nbytes)
            if fits:
                self._ranges[start] = nbytes
            return fits

    def give_back(self, start: int) -> None:
        """A range is not pinned any more. Atomic: it may interrupt anything, also this object."""
        self._ranges.pop(start, None)

    def _fits(self, nbytes: int) -> bool:
        return self.pinned + nbytes <= self._limit()


_BUDGET = PinBudget(lambda: pin_limit(os.environ))


def budget() -> PinBudget:
    """The one of this process."""
    return _BUDGET
