"""One connection of a client, as bytes: the handshake first, then messages. No socket in here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, final

import msgspec

from holdfast.coord.messages import Answer, Call, Hello
from holdfast.errors import HandshakeError
from holdfast.wire import ConnectionLost
from holdfast.wire.handshake import MAX_HANDSHAKE, ClientHandshake
from holdfast.wire.splitter import FrameSplitter

PURPOSE: Final = "coord"
"""What a proof of the token is good for."""
MAX_ANSWER: Final = 64 << 20
"""No message of a coordinator is longer."""

_encoder: Final = msgspec.msgpack.Encoder()
_decode: Final = msgspec.msgpack.Decoder(Answer).decode


def encoded(message: Hello | Call) -> bytearray:
    """A message as a frame."""
    frame = bytearray(4)
    _encoder.encode_into(message, frame, 4)
    frame[:4] = (len(frame) - 4).to_bytes(4, "little")
    return frame


def joined(messages: Iterable[Hello | Call]) -> bytes:
    """Messages as frames, one after the other."""
    return b"".join(map(encoded, messages))


@final
class Link:
    """What was said on one connection so far. `nonce` is fresh randomness for its handshake."""

    __slots__ = ("_handshake", "_splitter", "open", "reply")

    def __init__(self, *, run: str, token: bytes | None, nonce: bytes) -> None:
        self._handshake = ClientHandshake(purpose=PURPOSE, run=run, token=token, nonce=nonce)
        self._splitter = FrameSplitter(max_frame=MAX_HANDSHAKE)
        self.reply = self._handshake.offer()
        """Bytes of the handshake that are to be sent now."""
        self.open = False
        """Whether the handshake is over."""

    def feed(self, data: bytes) -> list[Answer]:
        """The messages that are whole now. Fails: ConnectionLost, HandshakeError."""
        self.reply = b""
        bodies = self._splitter.feed(data)
        if not self.open:
            if not bodies:
                return []
            if len(bodies) > 1:
                raise HandshakeError("the coordinator spoke before the handshake was over")
            self.reply = self._handshake.receive(bodies[0])
            self._splitter.max_frame = MAX_ANSWER
            self.open = True
            return []
        try:
            return [_decode(body) for body in bodies]
        except msgspec.MsgspecError as error:
            raise ConnectionLost(f"the coordinator sent a message that is none: {error}") from error
