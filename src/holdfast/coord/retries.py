"""How long to wait before the next attempt to reach a coordinator."""

from __future__ import annotations

from typing import Final

_FIRST_S: Final = 0.02
_LONGEST_S: Final = 0.5


def pause_s(failures: int, chance: float) -> float:
    """The pause after so many attempts in a row have failed; `chance` is in [0, 1).

    The first attempt after a loss is made at once. Then the pause doubles, spread over half to one and a half
    of itself, so that a thousand clients do not come back in the same moment.
    """
    if failures == 0:
        return 0.0
    return min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures - 1, 16)) * (0.5 + chance)


def failures_after(failures: int, *, welcomed: bool, lasted_s: float) -> int:
    """How many attempts in a row have failed, now that a connection is over or could not be made."""
    if not welcomed:
        return failures + 1
    # One that broke at once is hardly better than none.
    return 0 if lasted_s > 1.0 else min(failures + 1, 3)
