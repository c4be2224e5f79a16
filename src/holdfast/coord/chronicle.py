"""What the coordinator's notes are in the journal of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from holdfast.coord.kernel import Note
from holdfast.journal import (
    BarrierFailed,
    BarrierLate,
    Event,
    GenerationFormed,
    MemberLost,
    MemberRejoined,
    MemberSuspected,
    StopAgreed,
    StopAsked,
    TroubleReported,
)

_EVENTS: Final[dict[str, Callable[[str, dict[str, Any]], Event]]] = {
    "formed": lambda text, said: GenerationFormed(said["generation"], said["size"]),
    "suspect": lambda text, said: MemberSuspected(said["slot"], text),
    "lost": lambda text, said: MemberLost(said["slot"], said["incarnation"], said["reason"]),
    "rejoined": lambda text, said: MemberRejoined(said["slot"], text),
    "waiting": lambda text, said: BarrierLate(said["name"], text),
    "failed": lambda text, said: BarrierFailed(said["name"], said["epoch"], text),
    "trouble": lambda text, said: TroubleReported(text),
    "preempting": lambda text, said: StopAsked(text),
    "stop": lambda text, said: StopAgreed(said["step"], text),
}


def event_of(note: Note) -> Event | None:
    """The event that a note is; None for one that is only for the log that people read."""
    make = _EVENTS.get(note.kind)
    return None if make is None else make(note.text, dict(note.fields))
