"""One connection to another member: the handshake, then messages in both directions. Never blocks.

    dialling ─▶ shaking ─▶ greeting ─▶ up ─▶ (broken)

A link belongs to two incarnations and outlives generations. What its peer has said is kept here, by
generation and step, until the caller looks it up. All of it is touched under the lock of the hub only.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

from holdfast.arrays import Bytes1D
from holdfast.errors import HandshakeError, ReduceError
from holdfast.reduce.banks import MAX_BANKS, Flat, Words, adopted
from holdfast.reduce.frames import Chunk, Inbox
from holdfast.reduce.layout import Block
from holdfast.reduce.messages import (
    HEADER_BANK,
    MAX_FRAME,
    Ask,
    Begun,
    Data,
    Done,
    Held,
    Hello,
    Lend,
    Message,
    Ready,
    Shape,
    Share,
    Void,
    Want,
    decoded,
    encoded,
)
from holdfast.reduce.shelf import Shelf
from holdfast.wire import (
    MAX_HANDSHAKE,
    NONCE_BYTES,
    ClientHandshake,
    ConnectionLost,
    ServerHandshake,
    refusal,
)

PURPOSE: Final = "reduce"
_REMEMBERED: Final = 4
"""Notices of each kind: this step's, the next one's, and those of a generation that has just begun."""
_MAX_ASKS: Final = 4096
_MAX_OUTBOX: Final = 8192
_CHUNKS_PER_TURN: Final = 8


class Identity(NamedTuple):
    """Who this member is, and what it proves in a handshake."""

    run: str
    token: bytes | None
    incarnation: str


class Reading:
    """Blocks of a peer's bank on their way into a flat memory of ours."""

    __slots__ = ("_into", "missing", "void")

    def __init__(self, into: Flat, blocks: range) -> None:
        self._into = into
        self.missing = set(blocks)
        self.void = False

    def arrived(self, block: int, payload: memoryview) -> None:
        """Fails: ConnectionLost, for a block that was not asked for."""
        if block not in self.missing or len(payload) != self._into.blocks[block].nbytes:
            raise ConnectionLost(f"block {block} with {len(payload)} bytes was not asked for")
        target = self._into.blocks[block]
        target.view("u1")[:] = payload
        self.missing.discard(block)


@final
class Link:
    """A connection. `up` once both know who the other is; `broken` says why it is over."""

    def __init__(
        self, sock: socket.socket, me: Identity, shelf: Shelf, *, expects: str | None, now: float
    ) -> None:
        self.sock = sock
        self.since = now
        self.lent = sock.family == socket.AF_UNIX
        self.incarnation = expects or ""
        self.calling = expects is not None
        self.connected = expects is None
        self.up = False
        self.broken: str | None = None
        self.watched: int | None = None
        self.begun: Begun | None = None
        self.has = -1
        """The newest step whose total the peer has or needs no more, as far as it has said."""
        self.shape: Shape | None = None
        self.ready: dict[tuple[int, int], Ready] = {}
        self.shares: dict[tuple[int, int], Share] = {}
        self.answers: dict[int, Held] = {}
        self._me, self._shelf = me, shelf
        make = ClientHandshake if self.calling else ServerHandshake
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._shake = make(purpose=PURPOSE, run=me.run, token=me.token, nonce=nonce)
        self._inbox = Inbox(max_frame=MAX_HANDSHAKE)
        self._chunk = Chunk()
        self._outbox: deque[tuple[memoryview, int | None]] = deque()
        self._asks: deque[tuple[Ask, int]] = deque()
        self._fds: list[int] = []
        self._memories: dict[int, Bytes1D] = {}
        self._flats: dict[int, Flat] = {}
        self._words: Words | None = None
        self._readings: dict[int, Reading] = {}
        self._requests = 0

    # ---- for the caller

    def flat(self, bank: int, blocks: Sequence[Block], nbytes: int) -> Flat:
        """A bank that the peer lent. Fails: ReduceError."""
        found = self._flats.get(bank)
        if found is None:
            memory = self._memories.get(bank)
            if memory is None or memory.nbytes < nbytes:
                raise ReduceError(f"the peer speaks of bank {bank}, which it has not lent")
            found = self._flats[bank] = Flat(memory, blocks)
        return found

    def valid(self, bank: int, epoch: int) -> bool:
        """Whether what was read of a lent bank is what the peer spoke of."""
        if self._words is None or bank not in self._memories:
            return False
        return 0 < epoch == self._words.epoch(bank)

    def ask(self, bank: int, epoch: int, blocks: range, into: Flat) -> Reading:
        """Have the peer send blocks of a bank."""
        reading = Reading(into, blocks)
        if blocks:
            self._requests += 1
            self._readings[self._requests] = reading
            self.post(Ask(self._requests, bank, epoch, blocks.start, blocks.stop))
        return reading

    def want(self, step: int) -> int:
        """Ask where the peer has the total of a step; `answers` has it under the number returned."""
        self._requests += 1
        self.post(Want(self._requests, step))
        return self._requests

    def forget_readings(self) -> None:
        """Nothing that is under way goes into our memory any more."""
        self._readings.clear()
        self.answers.clear()

    # ---- out

    @property
    def wants_write(self) -> bool:
        return not self.connected or bool(self._outbox) or (self.up and bool(self._asks))

    def start(self) -> None:
        """The connection is there; the one that called speaks first."""
        self.connected = True
        if isinstance(self._shake, ClientHandshake):
            self._send(memoryview(self._shake.offer()))

    def post(self, message: Message, fd: int | None = None) -> None:
        """Send a message as soon as the peer reads; a link that is over takes it and drops it."""
        if self.broken is None:
            self._send(memoryview(encoded(message)), fd)

    def _send(self, frame: memoryview, fd: int | None = None) -> None:
        if len(self._outbox) >= _MAX_OUTBOX:
            self.fail("the peer reads nothing")
            return
        self._outbox.append((frame, fd))
        self.flush()

    def flush(self) -> None:
        """Send what the peer takes now."""
        try:
            while self._outbox:
                view, fd = self._outbox[0]
                rights: list[Any] = []
                if fd is not None:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                sent = self.sock.sendmsg([view], rights)
                if sent < len(view):
                    self._outbox[0] = (view[sent:], None)
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            # What came before the end may still lie unread, and may be all that is needed: the reader says
            # so.
            self._outbox.clear()
            if self.calling and not self.up:
                self.fail(f"the connection broke: {error.strerror or error}")

    def serve(self) -> None:
        """Send a few blocks that the peer has asked for, as long as it takes them."""
        for _ in range(_CHUNKS_PER_TURN):
            if self._outbox or not self._asks or self.broken is not None:
                return
            ask, block = self._asks.popleft()
            payload = self._shelf.block(ask, block)
            # The frame of the block before this one is on its way: nothing is left to send.
            frame = None if payload is None else self._chunk.frame(ask.request, block, payload)
            if frame is None or not self._shelf.stands(ask):
                self.post(Void(ask.request))
                continue
            if block + 1 < ask.last:
                self._asks.appendleft((ask, block + 1))
            self._send(frame)

    # ---- in

    def receive(self) -> bool:
        """Take what has come; True once both know who the other is. Fails: ConnectionLost, HandshakeError."""
        try:
            if self.lent:
                rights = socket.CMSG_SPACE(4 * 16)
                taken, ancillary, _, _ = self.sock.recvmsg_into(
                    [self._inbox.space()], rights, socket.MSG_CMSG_CLOEXEC
                )
                self._claim(ancillary)
            else:
                taken = self.sock.recv_into(self._inbox.space())
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from error
        if not taken:
            raise ConnectionLost("the peer closed the connection")
        was_up = self.up
        for body in self._inbox.took(taken):
            self._take(body)
        return self.up and not was_up

    def _claim(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) // received.itemsize * received.itemsize])
                self._fds.extend(received)
        if len(self._fds) > 16:
            raise ConnectionLost("the peer sent descriptors that belong to no message")

    def _take(self, body: memoryview) -> None:
        if not self._shake.done:
            reply = self._shake.receive(bytes(body))
            if reply:
                self._send(memoryview(reply))
            self._shaken()
            return
        message = decoded(body)
        if not self.up:
            self._greeted(message)
        else:
            self._heard(message)

    def _shaken(self) -> None:
        """Once the handshake is over, the one that called says who it is."""
        if self._shake.done:
            self._inbox.max_frame = MAX_FRAME
            if self.calling:
                self.post(Hello(self._me.incarnation, self.incarnation))

    def _greeted(self, message: Message) -> None:
        if not isinstance(message, Hello):
            raise ConnectionLost("the peer did not say who it is")
        if message.expects != self._me.incarnation:
            raise ConnectionLost(f"the peer means another life of this member: {message.expects[:40]!r}")
        if self.calling and message.incarnation != self.incarnation:
            raise ConnectionLost("another life of the member answers there")
        self.incarnation = message.incarnation
        self.up = True
        if not self.calling:
            self.post(Hello(self._me.incarnation, self.incarnation))
        for parcel in self._shelf.news(self.lent):
            self.post(*parcel)

    def _heard(self, message: Message) -> None:
        match message:
            case Begun():
                self.begun = message
                self.has = message.step - 1  # perhaps it goes back
            case Ready():
                self._at(message)
                _remember(self.ready, (message.generation, message.step), message)
            case Share():
                self._at(message)
                _remember(self.shares, (message.generation, message.step), message)
            case Done():
                self.has = message.step
            case Shape():
                self.shape = message
            case Lend():
                self._lend(message)
            case Want():
                self.post(self._shelf.held(message))
            case Held():
                self.answers[message.request] = message
            case Ask():
                if len(self._asks) >= _MAX_ASKS:
                    raise ConnectionLost("the peer asks for too much at once")
                if 0 <= message.first < message.last:
                    self._asks.append((message, message.first))
                self.serve()
            case Data():
                self._data(message)
            case Void():
                reading = self._readings.pop(message.request, None)
                if reading is not None:
                    reading.void = True
            case Hello():
                raise ConnectionLost("the peer said twice who it is")

    def _at(self, message: Ready | Share) -> None:
        """The peer is at a step to which it adds: it tells nobody of its beginning, nor of the end before."""
        if self.begun is not None and self.begun.generation == message.generation:
            self.has = max(self.has, message.step - 1)

    def _data(self, message: Data) -> None:
        reading = self._readings.get(message.request)
        if reading is None:
            return  # of a generation that is over
        reading.arrived(message.block, message.payload)
        if not reading.missing:
            del self._readings[message.request]

    def _lend(self, message: Lend) -> None:
        if not self._fds:
            raise ConnectionLost("the peer lent a bank without its descriptor")
        try:
            memory = adopted(self._fds.pop(0), message.nbytes)
            if message.bank == HEADER_BANK:
                self._words = Words(memory)
            elif not 0 <= message.bank < MAX_BANKS:
                raise ReduceError(f"bank {message.bank} of at most {MAX_BANKS}")
            else:
                self._memories.setdefault(message.bank, memory)
        except (ReduceError, ValueError) as error:
            raise ConnectionLost(f"the peer lent what is no bank: {error}") from error

    # ---- end

    def turn_away(self, error: HandshakeError) -> None:
        """Say why, if the peer still listens."""
        if not self.calling:
            with contextlib.suppress(OSError):
                self.sock.send(refusal(error.message))

    def fail(self, reason: str) -> None:
        """It is over. What the peer said stays known."""
        if self.broken is None:
            self.broken = reason
            self._outbox.clear()
            self._asks.clear()
            for reading in self._readings.values():
                reading.void = True

    def close(self) -> None:
        """Release the socket and descriptors that nobody took."""
        self.fail("closed here")
        self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def forget(self) -> None:
        """Let go of what the peer lent: a mapping holds a descriptor, and cycles of objects live long."""
        self._memories.clear()
        self._flats.clear()
        self._words = None
        self._readings.clear()


def _remember(kept: dict[tuple[int, int], Any], key: tuple[int, int], notice: Message) -> None:
    kept.pop(key, None)
    kept[key] = notice
    while len(kept) > _REMEMBERED:
        del kept[next(iter(kept))]
