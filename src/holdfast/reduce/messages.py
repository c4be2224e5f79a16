"""What members say to each other: msgpack arrays in frames, each with a checksum before it.

Notices are said to everybody, and again to whoever connects later; asks and answers belong to one link. A
notice counts for its own generation and step only: one that is old is never looked up, one that is early
waits.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
import xxhash
from msgspec import Struct

from holdfast.reduce.layout import Entry
from holdfast.wire import ConnectionLost, framed

MAX_FRAME: Final = 16 << 20
HEADER_BANK: Final = -1
_CHECK: Final = 8


class Hello(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Who this is, and which life of the other it means; the first frame in both directions."""

    incarnation: str
    expects: str


class Lend(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The descriptor that comes with this is bank `bank`, or the header page."""

    bank: int
    nbytes: int


class Shape(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """What the trees are made of. `outline` rebuilds one of plain containers; empty if it cannot be told."""

    entries: tuple[Entry, ...]
    wire_dtype: str | None
    num_lanes: int
    outline: bytes


class Begun(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The step has begun: what came before it is of no further use to this member."""

    generation: int
    step: int


class Root(Struct, frozen=True, array_like=True, gc=False):
    """The sum of lanes lo..hi-1 is in `bank`, as long as that has this epoch."""

    lo: int
    hi: int
    bank: int
    epoch: int


class Ready(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """All lanes of this member are folded. `deal` is the digest of who has which lanes."""

    generation: int
    step: int
    layout: str
    deal: int
    roots: tuple[Root, ...]


class Share(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """This member's share of the total is in `bank`, as long as that has this epoch."""

    generation: int
    step: int
    bank: int
    epoch: int


class Done(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The whole total of `step` is here; nothing more is asked for."""

    step: int


class Want(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Who has the decided total of `step`? Answered by Held."""

    request: int
    step: int


class Held(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """It is in `bank`, as long as that has this epoch; without it, epoch 0."""

    request: int
    layout: str
    bank: int
    epoch: int


class Ask(Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Send blocks first..last-1 of `bank`. Answered by Data for each, or one Void."""

    request: int
    bank: int
    epoch: int
    first: int
    last: int


class Data(Struct, frozen=True, array_like=True, tag=11, gc=False):
    """One block."""

    request: int
    block: int
    payload: memoryview
    """In the memory of whoever received it, and soon overwritten there."""


class Void(Struct, frozen=True, array_like=True, tag=12, gc=False):
    """What was asked for is there no more."""

    request: int


Message: TypeAlias = Hello | Lend | Shape | Begun | Ready | Share | Done | Want | Held | Ask | Data | Void
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Message).decode


def check_of(body: bytes | memoryview) -> bytes:
    """The checksum that stands before a message."""
    return xxhash.xxh3_64_digest(body)


def encoded(message: Message) -> bytes:
    """The message as a frame."""
    body = _encode(message)
    return framed(check_of(body) + body)


def data_front(request: int, block: int, nbytes: int) -> bytes:
    """The bytes of a Data message before its payload, which has so many."""
    front = _encode(Data(request, block, memoryview(b"")))[:-2]
    if nbytes < 1 << 8:
        return front + b"\xc4%c" % nbytes
    if nbytes < 1 << 16:
        return front + b"\xc5" + nbytes.to_bytes(2, "big")
    return front + b"\xc6" + nbytes.to_bytes(4, "big")


def decoded(frame: memoryview) -> Message:
    """The message in the body of a frame. Fails: ConnectionLost, if it arrived damaged or is none."""
    body = frame[_CHECK:]
    if frame[:_CHECK] != check_of(body):
        raise ConnectionLost("a frame arrived damaged")
    try:
        return _decode(body)  # type: ignore[no-any-return, unused-ignore]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConnectionLost(f"the peer sent a message that is none: {error}") from error
