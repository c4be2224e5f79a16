"""The error that a refusal of the coordinator is raised as."""

from __future__ import annotations

from typing import Final

from holdfast.coord import messages as m
from holdfast.errors import (
    BarrierError,
    BarrierTimeoutError,
    CoordError,
    DeadlineError,
    FencedError,
    HoldfastError,
    KeyExistsError,
    LimitError,
    StaleGenerationError,
)

_ERRORS: Final[dict[str, type[CoordError]]] = {
    m.STALE: StaleGenerationError,
    m.FENCED: FencedError,
    m.FAILED: BarrierError,
    m.EXISTS: KeyExistsError,
    m.LIMIT: LimitError,
}


def error_of(refused: m.Refused, op: m.Op | None = None) -> HoldfastError:
    """The error for a refusal of `op` (None: of the session as a whole)."""
    hint = refused.hint or None
    if refused.code == m.DEADLINE and not isinstance(op, m.Meet):
        return DeadlineError(refused.message, hint=hint)
    kind = BarrierTimeoutError if refused.code == m.DEADLINE else _ERRORS.get(refused.code, CoordError)
    return kind(refused.message, hint=hint, names=refused.names)
