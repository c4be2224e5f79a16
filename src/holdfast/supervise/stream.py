"""Messages of `holdfast.supervise.messages` over a connected socket, for loops that must never block.

`send` keeps what the socket does not take: a stopped peer holds nobody up. `take` gives what has come. At the
end of the stream `ended` says why. Whoever wants to block has `receive`.

    stream = orders_of(sock)          # a worker's end of its control socket
    stream.send(Waiting())
    order = stream.receive(timeout_s=60.0)
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections import deque
from typing import Final, Generic, TypeVar, final

import msgspec

from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, HoldfastError
from holdfast.supervise.messages import Command, Order, Report, Word
from holdfast.wire import ConnectionLost, FrameSplitter, framed

MAX_FRAME: Final = 1 << 20
MAX_BACKLOG: Final = 8 << 20
"""Bytes that may wait for a peer that reads nothing; beyond it the peer counts as gone."""
_READ: Final = 1 << 16
_GONE: Final = (errno.EPIPE, errno.ECONNRESET)

Message = TypeVar("Message")


@final
class Stream(Generic[Message]):
    """One end of a stream. `send` from any thread, `take` and `receive` from one."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Message],
        *,
        max_frame: int = MAX_FRAME,
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._splitter = FrameSplitter(max_frame=max_frame)
        self._max_frame = max_frame
        self._max_backlog = max_backlog
        self._sending = threading.Lock()
        self._backlog = bytearray()
        self._came: deque[Message] = deque()
        self.ended: str | None = None
        """Why nothing comes or goes any more; None while the peer is there."""

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_backlog(self) -> bool:
        """Whether something waits to be sent: call `flush` when the socket takes more."""
        return bool(self._backlog)

    def send(self, message: object) -> bool:
        """Send one message, now or as soon as the peer reads. Never blocks; False if the peer is gone."""
        body = self._encoder.encode(message)
        if len(body) > self._max_frame:
            raise HoldfastError(
                f"a message of {len(body):,} bytes; {self._max_frame:,} are allowed",
                hint="shorten the text in it",
            )
        with self._sending:
            if self.ended is not None:
                return False
            self._backlog += framed(body)
            self._push()
            if len(self._backlog) > self._max_backlog:
                self._end(f"the peer left {len(self._backlog):,} bytes unread")
            return self.ended is None

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. Never blocks."""
        with self._sending:
            if self.ended is None:
                self._push()

    def drain(self, timeout_s: float) -> bool:
        """Send all that waits. Blocks: until the peer has room for it; False if it has not by then."""
        deadline = Deadline(timeout_s)
        while self.has_backlog and self.ended is None:
            if not _ready(self, select.POLLOUT, deadline):
                return False
            self.flush()
        return not self._backlog

    def _push(self) -> None:
        while self._backlog:
            try:
                sent = self._sock.send(self._backlog, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                # What the peer sent before it went may still be read: the end of reading is the end.
                self._backlog.clear()
                if self.ended is None and error.errno not in _GONE:
                    self._end(f"the connection broke: {error.strerror or error}")
                return
            del self._backlog[:sent]

    def take(self) -> list[Message]:
        """What has come, in order. Never blocks, never fails; look at `ended` afterwards."""
        while self.ended is None and self._fill():
            pass
        came = list(self._came)
        self._came.clear()
        return came

    def receive(self, timeout_s: float) -> Message:
        """The next message. Blocks: until one comes. Fails: DeadlineError; ConnectionLost at the end."""
        deadline = Deadline(timeout_s)
        while not self._came:
            if self.ended is None and self._fill():
                continue
            if self._came:
                break
            if self.ended is not None:
                raise ConnectionLost(self.ended)
            if not _ready(self, select.POLLIN, deadline):
                raise DeadlineError(f"no message came within {timeout_s:g} s")
        return self._came.popleft()

    def _fill(self) -> bool:
        """Read once; whether there may be more."""
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(f"the connection broke: {error.strerror or error}")
            return False
        if not data:
            self._end("the peer closed the connection")
            return False
        try:
            for body in self._splitter.feed(data):
                self._came.append(self._decoder.decode(body))
        except (ConnectionLost, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._end(f"the peer sent what is no message: {error}")
            return False
        return True

    def _end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason

    def close(self) -> None:
        """Release the socket; the peer sees the end of the stream."""
        self._end("closed here")
        self._sock.close()


def _ready(stream: Stream[Message], events: int, deadline: Deadline) -> bool:
    left = deadline.remaining()
    poller = select.poll()
    poller.register(stream.fileno(), events)
    return bool(poller.poll(left * 1000)) if left > 0 else False


# ---- the four directions; each end is named for what comes in there


def reports_of(sock: socket.socket) -> Stream[Report]:
    """The conductor's end of an agent's stream: reports come in."""
    return Stream(sock, msgspec.msgpack.Decoder(Report))


def commands_of(sock: socket.socket) -> Stream[Command]:
    """The agent's end: commands come in."""
    return Stream(sock, msgspec.msgpack.Decoder(Command))


def words_of(sock: socket.socket) -> Stream[Word]:
    """The agent's end of a worker's control socket: the worker's words come in."""
    return Stream(sock, msgspec.msgpack.Decoder(Word))


def orders_of(sock: socket.socket) -> Stream[Order]:
    """The worker's end of its control socket: orders come in."""
    return Stream(sock, msgspec.msgpack.Decoder(Order))


def inherited(fd: int) -> socket.socket:
    """The socket behind a descriptor that this process was given at its start."""
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    return sock
