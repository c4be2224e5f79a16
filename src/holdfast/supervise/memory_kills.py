"""Which SIGKILL was the kernel's, for want of memory: by a counter that says how often, not whom. Pure."""

from __future__ import annotations

from typing import Final, final

_TOGETHER_S: Final = 5.0
"""Deaths of one shortage are seen within this time; what is left of the count then was of somebody else."""


@final
class MemoryKills:
    """Matches deaths by SIGKILL with the counter of the control group, `count` at the start."""

    def __init__(self, count: int | None) -> None:
        self._matched = count or 0
        self._seen = self._matched
        self._seen_at = 0.0

    def claims(self, count: int | None, *, now: float) -> bool:
        """Whether a death by SIGKILL that is seen now was for want of memory, by the counter as it is now.

        Several can be killed before the first is seen dead: each takes one of the count.
        """
        if count is None:
            return False
        if now - self._seen_at > _TOGETHER_S:
            self._matched = max(self._matched, self._seen)
        self._seen, self._seen_at = count, now
        if count <= self._matched:
            return False
        self._matched += 1
        return True
