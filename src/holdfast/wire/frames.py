"""Framed, typed messages over a connected Unix socket, with file descriptors alongside.

A frame is a little-endian u32 length, a u8 count of the descriptors that belong to it, and that many bytes of
MessagePack. The length is checked before memory is taken. A peer that breaks the rules costs itself the
connection: every violation ends it.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import weakref
from typing import Any, Final, Generic, TypeVar, final

import msgspec

from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, HoldfastError

MAX_FRAME: Final = 256 << 20
_MAX_FDS: Final = 16
_MAX_UNCLAIMED: Final = 4 * _MAX_FDS
"""Descriptors that may wait for the frames they belong to: a few frames are received at once."""
_HEAD: Final = struct.Struct("<IB")

Message = TypeVar("Message")


class ConnectionLost(HoldfastError):
    """The peer is gone or broke the framing; the connection is closed."""


@final
class FrameSocket(Generic[Message]):
    """One end of a connection. `send` from any thread, `receive` from one."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Message],
        *,
        max_frame: int = MAX_FRAME,
    ) -> None:
        # Timeouts belong to a Python socket object, so the two directions need one each.
        self._sock = sock
        self._inward = sock.dup()
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._max_frame = max_frame
        self._sending = threading.Lock()
        self._pending = bytearray()
        self._fds: list[int] = []
        _open.add(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: object, fds: tuple[int, ...] = (), *, timeout_s: float = 30.0) -> None:
        """Send one message; the descriptors arrive duplicated with it.

        Blocks: until the peer has read enough, `timeout_s` at most. Fails: ConnectionLost.
        """
        body = self._encoder.encode(message)
        frame = memoryview(_HEAD.pack(len(body), len(fds)) + body)
        deadline = Deadline(timeout_s)
        with self._sending:
            try:
                self._sock.settimeout(timeout_s)
                if fds:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    frame = frame[self._sock.sendmsg([frame], rights) :]
                while frame:
                    self._sock.settimeout(max(0.001, deadline.remaining()))
                    frame = frame[self._sock.send(frame) :]
            except TimeoutError as error:
                # A half-sent frame cannot be taken back, so the connection is over.
                self.shutdown()
                raise ConnectionLost(f"the peer read nothing for {timeout_s:g} s") from error
            except OSError as error:
                raise ConnectionLost(f"the peer is gone: {error.strerror or error}") from error

    def receive(self, *, timeout_s: float) -> tuple[Message, list[int]]:
        """The next message and the descriptors sent with it.

        Blocks: `timeout_s` at most (DeadlineError). Fails: ConnectionLost at the end of the stream.
        """
        deadline = Deadline(timeout_s)
        while True:
            found = self._frame()
            if found is not None:
                frame, count = found
                fds, self._fds = self._fds[:count], self._fds[count:]
                try:
                    return self._decoder.decode(frame), fds
                except msgspec.MsgspecError as error:
                    self.shutdown()
                    for fd in fds:
                        os.close(fd)
                    raise ConnectionLost(f"the peer sent a message that is none: {error}") from error
            self._fill(deadline)

    def _frame(self) -> tuple[bytes, int] | None:
        """The next whole frame and the number of descriptors that came with it."""
        if len(self._pending) < _HEAD.size:
            return None
        length, fds = _HEAD.unpack_from(self._pending)
        if length > self._max_frame:
            self.shutdown()
            raise ConnectionLost(f"the peer announced a frame of {length:,} bytes")
        end = _HEAD.size + length
        if len(self._pending) < end:
            return None
        if fds > len(self._fds):
            self.shutdown()
            raise ConnectionLost(f"the peer announced {fds} descriptors and sent {len(self._fds)}")
        frame = bytes(self._pending[_HEAD.size : end])
        del self._pending[:end]
        return frame, fds

    def _fill(self, deadline: Deadline) -> None:
        remaining = deadline.remaining()
        if remaining <= 0:
            raise DeadlineError("no message arrived in time")
        try:
            self._inward.settimeout(remaining)
            data, ancillary, _, _ = self._inward.recvmsg(
                1 << 18, socket.CMSG_SPACE(4 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError as error:
            raise DeadlineError("no message arrived in time") from error
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from error
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) // received.itemsize * received.itemsize])
                self._fds.extend(received)
        if len(self._fds) > _MAX_UNCLAIMED:
            self.shutdown()
            self._drop_fds()
            raise ConnectionLost("the peer sent descriptors that belong to no frame")
        if not data:
            raise ConnectionLost("the peer closed the connection")
        self._pending += data

    def shutdown(self) -> None:
        """End the connection; a blocked `receive` returns at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket and any descriptor that nobody took."""
        self.shutdown()
        self.let_go()

    def let_go(self) -> None:
        """Release it in this process alone: another may have the same connection."""
        self._sock.close()
        self._inward.close()
        self._drop_fds()

    def _drop_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


_open: Final[weakref.WeakSet[FrameSocket[Any]]] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child has the sockets of its parent, whose peers would not see that it died."""
    for one in list(_open):
        one.let_go()


os.register_at_fork(after_in_child=_in_child)
