"""Outcomes and pushes as lines that people read."""

from __future__ import annotations

from typing import Any

from holdfast.coord import messages as m
from holdfast.errors import HoldfastError


def outcome_line(result: Any) -> str:
    """What a call came to."""
    match result:
        case HoldfastError():
            return f"{type(result).__name__}: {str(result).splitlines()[0]}"
        case m.Joined():
            if result.slot < 0:
                return f"standby, generation {result.generation} has {result.size}"
            return f"generation {result.generation}, slot {result.slot} of {result.size}"
        case m.Met():
            parts = [f"met, epoch {result.epoch}"]
            parts += [f"without {list(result.absent)}"] if result.absent else []
            parts += [] if result.ok else [f"not ok: {result.reason}"]
            parts += [f"notes {dict(result.notes)}"] if result.notes else []
            parts += [f"live {dict(result.live)}"] if result.live else []
            return ", ".join(parts)
        case m.Value():
            return result.value.decode() if result.value is not None else "nothing"
        case m.Swapped():
            shown = result.value.decode() if result.value is not None else "nothing"
            return "swapped" if result.done else f"not swapped, it is {shown}"
        case m.Items():
            return ", ".join(f"{i.key}={(i.value or b'').decode()}" for i in result.items) or "nothing"
        case m.Count():
            return str(result.count)
        case m.Stop():
            return f"stop {result.stop}" + (f" at step {result.step}" if result.step >= 0 else "")
    return "done"


def push_line(push: m.Push) -> str:
    """What a client is told; empty if it is not worth telling."""
    match push:
        case m.Rally():
            return f"join again, {'now' if push.urgent else 'please'} ({push.reason})"
        case m.Lost():
            return f"slot {push.slot} is lost ({push.incarnation}: {push.reason})"
        case m.Trouble():
            return f"trouble {push.number} of slot {push.slot}: {push.message}"
        case m.Stop():
            return f"stop {push.stop}" + (f" at step {push.step}" if push.step >= 0 else "")
        case m.Patience():
            return f"still waiting for {', '.join(push.names)}"
    return ""
