r"""One line of the journal: a JSON object, a tab, the xxh3_64 of the object in hex, a newline.

The checksum tells a whole line from a torn, overwritten or glued one without trusting the JSON
parser to notice. It guards against damage, not malice.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from holdfast.journal.events import Event, Unknown

# Longer lines are never written, and not kept in memory by a reader of a damaged file.
MAX_LINE = 256 * 1024
_CLIP_CHARS = 4096
_CLIP_ITEMS = 100
_CLIP_ITEM_CHARS = 200


class Record(msgspec.Struct, frozen=True):
    """An event with its time (`t` wall, `m` monotonic, seconds), process and component."""

    t: float
    m: float
    pid: int
    component: str
    event: Event | Unknown


class _Typed(msgspec.Struct, frozen=True):
    t: float
    m: float
    pid: int
    component: str
    event: Event


class _Untyped(msgspec.Struct, frozen=True):
    t: float
    m: float
    pid: int
    component: str
    event: dict[str, Any]


_encoder = msgspec.json.Encoder()
_typed = msgspec.json.Decoder(_Typed)
_untyped = msgspec.json.Decoder(_Untyped)


def encode(t: float, m: float, pid: int, component: str, event: Event) -> bytes:
    """The line for an event, at most MAX_LINE long: an event too large is clipped."""
    body = _encoder.encode(_Typed(t, m, pid, component, event))
    if len(body) > MAX_LINE - 32:
        body = _encoder.encode(_Typed(t, m, pid, component, _clipped(event)))
    return b"%b\t%b\n" % (body, xxhash.xxh3_64_hexdigest(body).encode())


def decode(line: bytes) -> Record | None:
    """The record of a line without its newline; None if the line is torn or damaged."""
    body, tab, digest = line.rpartition(b"\t")
    if not tab or xxhash.xxh3_64_hexdigest(body).encode() != digest:
        return None
    try:
        known = _typed.decode(body)
        return Record(known.t, known.m, known.pid, known.component, known.event)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        other = _untyped.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    kind = str(other.event.pop("kind", ""))
    event = Unknown(kind, other.event)
    return Record(other.t, other.m, other.pid, other.component, event)


def _clipped(event: Event) -> Event:
    changes: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(event).items():
        if isinstance(value, str):
            changes[name] = _clip(value, _CLIP_CHARS)
        elif isinstance(value, tuple):
            kept = [_clip(item, _CLIP_ITEM_CHARS) for item in value[:_CLIP_ITEMS]]
            if len(value) > _CLIP_ITEMS:
                kept.append(f"… and {len(value) - _CLIP_ITEMS} more")
            changes[name] = tuple(kept)
    return msgspec.structs.replace(event, **changes)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"
