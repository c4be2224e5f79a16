"""How often something may fail before it is given up, and how long to wait before trying again. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

from holdfast.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """`limit` failures within `window_s` are allowed, one more is not; 0 allows any number.

    The first one is tried again at once, the next after `first_s`, and then twice as long each time, up to
    `longest_s`.
    """

    limit: int
    window_s: float = 3600.0
    first_s: float = 1.0
    longest_s: float = 60.0

    def __post_init__(self) -> None:
        if self.limit < 0 or self.window_s <= 0 or not 0 <= self.first_s <= self.longest_s:
            raise UsageError(
                f"an allowance of {self.limit} in {self.window_s:g} s with waits of {self.first_s:g} to "
                f"{self.longest_s:g} s makes no sense",
                hint="limit >= 0, window_s > 0 and 0 <= first_s <= longest_s",
            )


@final
class Budget:
    """What is used of one allowance. Progress gives all of it back."""

    __slots__ = ("_times", "allowance", "run")

    def __init__(self, allowance: Allowance) -> None:
        self.allowance = allowance
        self.run = 0
        """Failures in a row, without progress between them."""
        self._times: deque[float] = deque(maxlen=allowance.limit + 1)

    def spend(self, now: float) -> float | None:
        """Count a failure; the seconds to wait before the next try, None if there is none left."""
        allowance = self.allowance
        self._times.append(now)
        self.run += 1
        if allowance.limit and self.used(now) > allowance.limit:
            return None
        if self.run == 1:
            return 0.0
        # 2**60 would do as well, and a float has no room for 2**1100.
        return min(allowance.longest_s, allowance.first_s * 2.0 ** min(self.run - 2, 60))

    def used(self, now: float) -> int:
        """Failures that count: those within the window."""
        while self._times and self._times[0] <= now - self.allowance.window_s:
            self._times.popleft()
        return len(self._times)

    def reset(self) -> None:
        """There was progress."""
        self._times.clear()
        self.run = 0
