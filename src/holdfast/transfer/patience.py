"""How long somebody waits: until a deadline, or until it is cancelled."""

from __future__ import annotations

from typing import Final, final

from holdfast.clock import Deadline
from holdfast.errors import TransferCancelled

LATE_S: Final = 1.0


def late_s(idle_s: float) -> float:
    """Whoever wakes up later than this was stopped itself: the silence meanwhile was its own."""
    return min(LATE_S, idle_s / 4)


@final
class Patience:
    """A deadline that can be given up early, by any thread."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = Deadline(timeout_s)
        self.timeout_s = timeout_s
        self.cancelled = False

    def remaining(self) -> float:
        return self._deadline.remaining()

    def expired(self) -> bool:
        return self._deadline.expired()

    def check(self, so_far: str = "before any byte was asked for") -> None:
        """Fails: TransferCancelled."""
        if self.cancelled:
            raise TransferCancelled(f"cancelled here, {so_far}")
