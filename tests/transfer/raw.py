"""Peers that are nothing but sockets and messages: they say what a well-behaved one never would."""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, final

import msgspec
import xxhash

from holdfast.errors import HoldfastError
from holdfast.transfer.links import Channel, Identity, address_of, answer, call, dial, hear, node_id
from holdfast.transfer.manifest import Manifest
from holdfast.transfer.messages import (
    Describe,
    Described,
    FromSource,
    FromTarget,
    Greeted,
    Prepare,
    Prepared,
    Run,
    Started,
)
from holdfast.transfer.streams import Head, pack_head
from holdfast.wire import ConnectionLost

TIMEOUT_S = 10.0


def identity(token: bytes | None = None, node: str = "elsewhere") -> Identity:
    return Identity(run="run", token=token, incarnation=secrets.token_hex(8), name="raw", node=node)


def frame(body: bytes, *, length: int | None = None, fds: int = 0) -> bytes:
    """A control frame as it is on the wire, with the right checksum and any claims."""
    sealed = msgspec.msgpack.encode(xxhash.xxh3_64_digest(body) + body)
    return (len(sealed) if length is None else length).to_bytes(4, "little") + bytes([fds]) + sealed


def closed_within(sock: socket.socket, seconds: float) -> bool:
    """Whether the other end closes; what it says before does not matter."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        if select.select([sock], [], [], left)[0]:
            try:
                if not sock.recv(1 << 16):
                    return True
            except OSError:
                return True
    return False


@final
class RawTarget:
    """A target that has greeted a source, and then says what it is told."""

    def __init__(self, address: str, token: bytes | None = None, *, local: bool = False) -> None:
        self.me = identity(token, node=node_id() if local else "elsewhere")
        self._address = address_of(address)
        self.sock = dial(self._address, TIMEOUT_S)
        try:
            self.greeted = call(self.sock, self.me, address, 0, "", TIMEOUT_S)
            if local:  # where descriptors can be sent
                self.sock.close()
                self.sock = dial(f"\0{self.greeted.local}", TIMEOUT_S)
                self.greeted = call(self.sock, self.me, address, 0, "", TIMEOUT_S)
            self._channel = Channel(self.sock, msgspec.msgpack.Decoder[Any](FromSource))
        except BaseException:
            self.sock.close()
            raise

    def data(self) -> socket.socket:
        """A data connection of this link."""
        sock = dial(self._address, TIMEOUT_S)
        try:
            call(sock, self.me, str(self._address), self.greeted.link, self.greeted.incarnation, TIMEOUT_S)
        except BaseException:
            sock.close()
            raise
        return sock

    def send(self, *bodies: bytes) -> None:
        """Frames with these bodies."""
        self.sock.settimeout(TIMEOUT_S)
        self.sock.sendall(b"".join(map(frame, bodies)))

    def say(self, message: object, *fds: int) -> None:
        self._channel.send(message, fds)

    def hear(self, timeout_s: float = TIMEOUT_S) -> Any:
        return self._channel.receive(timeout_s=timeout_s)[0]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Play = Callable[["FakeSource", Run], None]


@final
class FakeSource:
    """A source with one publication, whose chunks come as the test wants: `play` is called for every run."""

    def __init__(self, manifest: Manifest, data: bytes) -> None:
        self.manifest = manifest
        self.bytes = data
        self.play: Play = FakeSource.well
        self.chunk_bytes = 0
        self.data: list[socket.socket] = []
        self.control: Channel[Any] | None = None
        self._me = identity()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="fake-source", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(sock)
            self._start(self._greet, sock)

    def _greet(self, sock: socket.socket) -> None:
        with suppress(OSError, HoldfastError, msgspec.MsgspecError):
            greeting = hear(sock, self._me, TIMEOUT_S)
            if greeting.link:
                self.data.append(sock)
            else:
                self.data.clear()
            answer(sock, Greeted(self._me.incarnation, "elsewhere", greeting.link or 1))
            sock.settimeout(TIMEOUT_S)
            if not greeting.link:
                channel = Channel(sock, msgspec.msgpack.Decoder[Any](FromTarget))
                try:
                    self._converse(channel)
                finally:
                    channel.close()

    def _converse(self, channel: Channel[Any]) -> None:
        self.control = channel
        with suppress(ConnectionLost, TimeoutError, OSError):
            while True:
                message, _ = channel.receive(timeout_s=60.0)
                match message:
                    case Describe(seq=seq):
                        digest = self.manifest.digest()
                        channel.send(Described(seq, 1, (1,), digest, self.manifest))
                    case Prepare(seq=seq, chunk_bytes=size):
                        self.chunk_bytes = size
                        channel.send(Prepared(seq))
                    case Run():
                        channel.send(Started(message.seq, message.run, 1, ()))
                        self.play(self, message)

    def say(self, message: object) -> None:
        assert self.control is not None
        self.control.send(message)

    def chunk(self, number: int) -> bytes:
        """The bytes of a chunk."""
        return self.bytes[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    @property
    def num_chunks(self) -> int:
        return -(-len(self.bytes) // self.chunk_bytes)

    def send_chunk(
        self, run: int, number: int, data: bytes | None = None, digest: bytes | None = None, **head: Any
    ) -> None:
        """A chunk, with other bytes, another digest or another head than it should have."""
        data = self.chunk(number) if data is None else data
        fields = {"chunk": number, "run": run, "nbytes": len(data), "checked": True}
        self.raw(pack_head(Head(**{**fields, **head})) + data + (digest or xxhash.xxh3_128_digest(data)))

    def raw(self, data: bytes) -> None:
        """Any bytes on a data connection. Fails: OSError, also if the target just connects anew."""
        for sock in self.data[:1]:
            sock.sendall(data)
            return
        raise ConnectionResetError("the target has given these connections up")

    def well(self, run: Run) -> None:
        """Send all chunks as a good source does."""
        for number in range(self.num_chunks):
            self.send_chunk(run.run, number)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for sock in self._open:
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
