"""One connection of the coordinator's server: handshake, frames in, answers out, and limits on all of it."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol, cast, final

import msgspec

from holdfast.coord.kernel import Received
from holdfast.coord.link import PURPOSE
from holdfast.coord.messages import Answer, Call, Hello
from holdfast.errors import HandshakeError
from holdfast.wire import (
    MAX_HANDSHAKE,
    NONCE_BYTES,
    ConnectionLost,
    FrameSplitter,
    ServerHandshake,
    refusal,
)

_decode_hello: Final = msgspec.msgpack.Decoder(Hello).decode
_decode_call: Final = msgspec.msgpack.Decoder(Call).decode
_CALLS_PER_TURN: Final = 128
"""Calls of one connection that are served before others have their turn."""

STRANGER, KNOWN, OPEN, ENDING = range(4)
"""Stages: no proof yet; proof given, Hello awaited; open; ending, with something left to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one peer may cost. Whoever goes beyond loses the connection, and nobody else notices."""

    handshake_s: float = 10.0
    """From the connection to its Hello."""
    frame_s: float = 10.0
    """From the first byte of a frame to its last."""
    unread_s: float = 30.0
    """How long a peer may read nothing while something waits for it."""
    unread_bytes: int = 32 << 20
    """Bytes that may wait for a peer when one more message is to be sent."""
    frame_bytes: int = 8 << 20
    connections: int = 20_000
    strangers: int = 8_192
    """Connections without a proof; of more, the oldest go."""


class Host(Protocol):
    """What a connection needs of the server."""

    limits: Limits
    token: bytes | None
    run: str

    def admit(self, connection: Connection) -> bool: ...
    def introduced(self, connection: Connection, hello: Hello) -> None: ...
    def step(self, event: Received, now: float) -> None: ...
    def lost(self, connection: Connection) -> None: ...
    def watch(self, connection: Connection) -> None: ...
    def later(self, connection: Connection) -> None: ...


@final
class Connection(asyncio.Protocol):
    """`out` is written at the end of the loop's turn; `held` waits for the disk, and so does what follows."""

    __slots__ = (
        "_backlog",
        "_handshake",
        "_host",
        "_splitter",
        "_transport",
        "begun",
        "dirty",
        "held",
        "number",
        "out",
        "reason",
        "stage",
        "unread_since",
    )

    def __init__(self, host: Host, number: int) -> None:
        self._host = host
        self._splitter = FrameSplitter(max_frame=MAX_HANDSHAKE)
        self._handshake: ServerHandshake | None = None
        self._transport: asyncio.Transport | None = None
        self._backlog: deque[bytes] = deque()
        self.number = number
        self.stage = STRANGER
        self.begun = 0.0
        """Since when a frame is not whole; for a stranger, since when it is connected. 0: neither."""
        self.unread_since = 0.0
        self.out = bytearray()
        self.held: deque[tuple[int, Answer]] = deque()
        self.dirty = False
        self.reason = ""

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.begun = monotonic()
        if not self._host.admit(self):
            self.drop("too many connections")
            return
        _keep_alive(transport.get_extra_info("socket"))
        self._handshake = ServerHandshake(
            purpose=PURPOSE,
            run=self._host.run,
            token=self._host.token,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._backlog.clear()
        self._host.lost(self)

    def pause_writing(self) -> None:
        self.unread_since = monotonic()
        self._host.watch(self)

    def resume_writing(self) -> None:
        self.unread_since = 0.0

    def data_received(self, data: bytes) -> None:
        splitter = self._splitter
        try:
            bodies = splitter.feed(data)
        except ConnectionLost as error:
            self.drop(error.message)
            return
        if self.stage == OPEN:
            if splitter.num_pending:
                if bodies or not self.begun:
                    self.begun = monotonic()
                    self._host.watch(self)
            else:
                self.begun = 0.0
        if self._backlog:
            self._backlog.extend(bodies)
        elif bodies:
            self._serve(bodies)

    def eof_received(self) -> bool:
        return False  # closes: half-open connections are of no use here

    # ---- in

    def _serve(self, bodies: list[bytes]) -> None:
        if self.stage < OPEN:
            bodies = self._introduce(bodies)
        number, step, now = self.number, self._host.step, monotonic()
        for body in bodies[:_CALLS_PER_TURN]:
            if self.stage != OPEN:
                return
            try:
                call = _decode_call(body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self.drop(f"a message that is none: {error}")
                return
            step(Received(number, call), now)
        if len(bodies) > _CALLS_PER_TURN and self._transport is not None:
            self._backlog.extend(bodies[_CALLS_PER_TURN:])
            self._host.later(self)
            if not self._transport.is_closing():
                self._transport.pause_reading()

    def go_on(self) -> None:
        """Serve what the last turn left."""
        bodies = list(self._backlog)
        self._backlog.clear()
        if self._transport is None:
            return
        self._serve(bodies)
        if not self._backlog and not self._transport.is_closing():
            self._transport.resume_reading()

    def _introduce(self, bodies: list[bytes]) -> list[bytes]:
        """Take the handshake and the Hello off the front; the rest are calls."""
        try:
            for at, body in enumerate(bodies):
                if self.stage == STRANGER and self._handshake is not None:
                    reply = self._handshake.receive(body)
                    if reply and self._transport is not None:
                        self._transport.write(reply)
                    if self._handshake.done:
                        self.stage = KNOWN
                elif self.stage == KNOWN:
                    hello = _decode_hello(body)
                    self._handshake = None
                    self._splitter.max_frame = self._host.limits.frame_bytes
                    self.stage = OPEN
                    self.begun = 0.0
                    self._host.introduced(self, hello)
                else:
                    return bodies[at:]
        except HandshakeError as error:
            self.turn_away(error.message)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.drop(f"a Hello that is none: {error}")
        return []

    # ---- out

    def flush(self) -> None:
        """Hand what is in `out` to the socket."""
        self.dirty = False
        out, self.out = self.out, bytearray()
        transport = self._transport
        if transport is None:
            return
        if out:
            if self.unread_since and transport.get_write_buffer_size() > self._host.limits.unread_bytes:
                self.drop("it does not read what it is sent")
                return
            transport.write(out)
        if self.stage == ENDING and not self.held:
            transport.close()

    def end(self, reason: str) -> None:
        """Close once everything is sent. `flush` must follow."""
        if self.stage != ENDING:
            self.stage, self.reason, self.begun = ENDING, reason, monotonic()
            self._backlog.clear()
            self._host.watch(self)

    def turn_away(self, reason: str) -> None:
        """Say why, and close."""
        if self._transport is not None:
            self._transport.write(refusal(reason))
            self.end(reason)
            self.flush()

    def drop(self, reason: str) -> None:
        """End it at once."""
        self.stage, self.reason = ENDING, self.reason or reason
        self._backlog.clear()
        if self._transport is not None:
            _forget_unsent(self._transport.get_extra_info("socket"))
            self._transport.abort()

    def overdue(self, now: float) -> str | None:
        """Why this connection must go now; empty if not; None if there is nothing to watch any more."""
        limits = self._host.limits
        if self._transport is None:
            return None
        if self.unread_since and now - self.unread_since > limits.unread_s:
            return f"it has read nothing for {limits.unread_s:g} s"
        if self.begun and self.stage == ENDING and now - self.begun > limits.unread_s:
            return self.reason
        if self.begun and self.stage == OPEN and now - self.begun > limits.frame_s:
            return f"it sent half a message {limits.frame_s:g} s ago"
        if self.begun and self.stage < OPEN and now - self.begun > limits.handshake_s:
            return f"it did not introduce itself in {limits.handshake_s:g} s"
        return "" if self.begun or self.unread_since else None


def _forget_unsent(sock: socket.socket | None) -> None:
    """Else the system would go on trying to send to a peer that does not read."""
    with suppress(OSError):
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _keep_alive(sock: socket.socket | None) -> None:
    """Notice a peer whose machine is gone: nothing else would, while there is nothing to send."""
    if sock is None or sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
