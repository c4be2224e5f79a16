"""Real and manual clocks, and deadlines measured on them."""

from __future__ import annotations

import math
import threading
import time
from datetime import UTC, datetime
from typing import Protocol, final

from holdfast.errors import DeadlineError, UsageError


class Clock(Protocol):
    """Where the time comes from. Safe to share between threads."""

    def monotonic(self) -> float:
        """Seconds that never go back; on one machine, comparable between processes."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump when the machine's clock is set."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""
        ...


@final
class RealClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


REAL: Clock = RealClock()


@final
class ManualClock:
    """A clock that moves only when told to.

    `sleep` moves it too instead of blocking: a test or simulation that runs code with waits in it
    goes through them at once, and no thread can be left waiting for an `advance` that never comes.
    """

    def __init__(self, *, monotonic: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Move both readings forward by `seconds`."""
        if seconds < 0:
            raise UsageError(f"a clock cannot go back: advance({seconds})")
        with self._lock:
            self._monotonic += seconds
            self._wall += seconds


@final
class Deadline:
    """A moment `timeout_s` from now, on `clock`; every wait in Holdfast is given one.

    `timeout_s=0` is a poll. An infinite timeout is refused: no call may block for ever.
    """

    __slots__ = ("_clock", "_ends", "_since", "_started", "timeout_s")

    def __init__(self, timeout_s: float, clock: Clock = REAL) -> None:
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise UsageError(
                f"timeout_s={timeout_s} is not a number of seconds",
                hint="every wait has a deadline; give a finite timeout_s >= 0",
            )
        self.timeout_s = timeout_s
        self._clock = clock
        self._started = clock.monotonic()
        self._ends = self._started + timeout_s
        self._since = clock.wall()

    def remaining(self) -> float:
        """Seconds left, 0.0 once expired: fit to be passed on as a timeout."""
        return max(0.0, self._ends - self._clock.monotonic())

    def expired(self) -> bool:
        """Whether the moment has come."""
        return self._clock.monotonic() >= self._ends

    def check(self, waiting_for: str, *, hint: str | None = None) -> None:
        """Raise DeadlineError if expired; the message names `waiting_for` and since when."""
        now = self._clock.monotonic()
        if now < self._ends:
            return
        since = datetime.fromtimestamp(self._since, UTC).strftime("%H:%M:%S UTC")
        raise DeadlineError(
            f"waited {now - self._started:.1f} s for {waiting_for}, since {since}"
            f" (timeout_s={self.timeout_s:g})",
            hint=hint,
        )
