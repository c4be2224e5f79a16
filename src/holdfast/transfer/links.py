"""Connections between endpoints: finding, dialling, proving oneself, and control frames.

Usable on its own: a link says nothing about what is moved over it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import secrets
import socket
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar, final

import msgspec
import xxhash

from holdfast.clock import Deadline
from holdfast.errors import PeerLostError, StalledError, TransferError, UsageError
from holdfast.transfer.messages import MAX_CONTROL, MAX_GREETING, STALE, Greeted, Greeting, Refused
from holdfast.wire import (
    MAX_HANDSHAKE,
    NONCE_BYTES,
    ClientHandshake,
    ConnectionLost,
    FrameSocket,
    ServerHandshake,
    framed,
    refusal,
)

PURPOSE: Final = "transfer"
_ADDRESS: Final = re.compile(
    r"(?:tcp://)?(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/\s#]+)):(\d{1,5})(?:#([0-9a-f]+))?"
)
_HINT: Final = "an address is tcp://HOST:PORT"
_HEAD: Final = struct.Struct("<I")
_BACKLOG: Final = 1024
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

Message = TypeVar("Message")


class Address(NamedTuple):
    """Where a peer listens; `incarnation`, if given, which life of it is meant."""

    host: str
    port: int
    incarnation: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def address_of(text: str) -> Address:
    """The address written as tcp://HOST:PORT or HOST:PORT, with #INCARNATION or without."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        raise UsageError(f"{text!r} is no address", hint=_HINT)
    return Address(found[1] or found[2], int(found[3]), found[4] or "")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an endpoint is: what it proves in a handshake, and what it says afterwards."""

    run: str
    token: bytes | None
    incarnation: str
    name: str
    node: str


@cache
def node_id() -> str:
    """Equal for processes that can reach each other's abstract Unix sockets."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def local_name(incarnation: str) -> str:
    """The name of the abstract Unix socket of an endpoint, without its leading NUL."""
    return f"holdfast-transfer-{incarnation}"


# ---- listening


def listen(text: str, *, sealed: bool) -> tuple[socket.socket, str]:
    """A listening socket and its address. Fails: UsageError; also beyond loopback without a token."""
    host, port, _ = address_of(text)
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"cannot listen at {text}: {error.strerror}", hint=_HINT) from error
    where = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if not where.is_loopback and not sealed:
        raise UsageError(
            f"refusing to listen at {text} without a token: whoever reaches it could read the arrays",
            hint="give a token (--token-file), the same to all endpoints of the run, or listen at 127.0.0.1",
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise TransferError(
            f"cannot listen at {text}: {error.strerror}", hint="port 0 takes any that is free"
        ) from error
    name = socket.gethostname() if where.is_unspecified else str(place[0])
    return sock, str(Address(name, int(sock.getsockname()[1])))


def listen_locally(name: str) -> socket.socket:
    """A listening Unix socket that no file stands for."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(name)
    sock.listen(_BACKLOG)
    return sock


# ---- dialling


def dial(address: Address | str, timeout_s: float) -> socket.socket:
    """A connected socket; a str is the name of a Unix socket. Fails: PeerLostError, StalledError."""
    shown = str(address) if isinstance(address, Address) else "its local socket"
    try:
        if isinstance(address, Address):
            sock = socket.create_connection((address.host, address.port), timeout_s)
        else:
            with contextlib.ExitStack() as failed:
                sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.settimeout(timeout_s)
                sock.connect(address)
                failed.pop_all()
    except TimeoutError as error:
        raise StalledError(
            f"{shown}: no connection within {timeout_s:g} s",
            hint="is the address right, and does a firewall drop packets?",
        ) from error
    except OSError as error:
        raise PeerLostError(
            f"{shown}: cannot connect: {error.strerror or error}", hint="is the peer running?"
        ) from error
    tuned(sock)
    return sock


def tuned(sock: socket.socket) -> None:
    """Send at once, and notice within seconds that the other machine is gone."""
    if sock.family == socket.AF_UNIX:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def call(sock: socket.socket, me: Identity, peer: str, link: int, expects: str, timeout_s: float) -> Greeted:
    """Prove ourselves to a source and greet it.

    Fails: HandshakeError, PeerLostError (also: another incarnation lives there), StalledError.
    """
    deadline = Deadline(timeout_s)
    try:
        shake = ClientHandshake(
            purpose=PURPOSE, run=me.run, token=me.token, nonce=secrets.token_bytes(NONCE_BYTES)
        )
        _write(sock, shake.offer(), deadline)
        _write(sock, shake.receive(_read_frame(sock, MAX_HANDSHAKE, deadline)), deadline)
        mine = Greeting(me.incarnation, me.node, me.name, link, expects)
        _write(sock, framed(msgspec.msgpack.encode(mine)), deadline)
        answer: Greeted | Refused = _decode_greeted(_read_frame(sock, MAX_GREETING, deadline))
    except TimeoutError as error:
        raise StalledError(
            f"{peer}: no greeting within {timeout_s:g} s", hint="is the peer stopped, or is it no endpoint?"
        ) from error
    except (OSError, ConnectionLost, msgspec.MsgspecError) as error:
        raise PeerLostError(f"{peer}: turned away during the greeting: {error}") from error
    if isinstance(answer, Refused):
        if answer.code == STALE:
            raise PeerLostError(f"{peer}: {answer.message}", hint=answer.hint or None)
        raise TransferError(f"{peer}: {answer.message}", hint=answer.hint or None)
    return answer


_decode_greeted: Final = msgspec.msgpack.Decoder(Greeted | Refused).decode
_decode_greeting: Final = msgspec.msgpack.Decoder(Greeting).decode


def hear(sock: socket.socket, me: Identity, timeout_s: float) -> Greeting:
    """Let a target prove itself and greet us.

    Fails: HandshakeError, ConnectionLost, OSError, MsgspecError.
    """
    deadline = Deadline(timeout_s)
    shake = ServerHandshake(
        purpose=PURPOSE, run=me.run, token=me.token, nonce=secrets.token_bytes(NONCE_BYTES)
    )
    while not shake.done:
        reply = shake.receive(_read_frame(sock, MAX_HANDSHAKE, deadline))
        _write(sock, reply, deadline)
    return _decode_greeting(_read_frame(sock, MAX_GREETING, deadline))


def answer(sock: socket.socket, message: Greeted | Refused) -> None:
    """The answer to a greeting."""
    _write(sock, framed(msgspec.msgpack.encode(message)), Deadline(5.0))


def turn_away(sock: socket.socket, reason: str) -> None:
    """Say why, if the peer still listens; never fails."""
    with contextlib.suppress(OSError):
        sock.settimeout(1.0)
        sock.sendall(refusal(reason))


def _write(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    if data:
        sock.settimeout(max(0.001, deadline.remaining()))
        sock.sendall(data)


def _read_frame(sock: socket.socket, limit: int, deadline: Deadline) -> bytes:
    (length,) = _HEAD.unpack(_read(sock, _HEAD.size, deadline))
    if length > limit:
        raise ConnectionLost(f"the peer announced a greeting of {length:,} bytes")
    return _read(sock, length, deadline)


def _read(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    # Exactly so much: what follows the greeting belongs to somebody else.
    found = bytearray()
    while len(found) < size:
        remaining = deadline.remaining()
        if remaining <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "no greeting in time")
        sock.settimeout(remaining)
        data = sock.recv(size - len(found))
        if not data:
            raise ConnectionLost("the peer closed the connection")
        found += data
    return bytes(found)


# ---- control frames


@final
class Channel(Generic[Message]):
    """Control frames on a connection, each with a checksum. `send` from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._frames = FrameSocket(sock, msgspec.msgpack.Decoder(bytes), max_frame=MAX_CONTROL)
        self._decoder = decoder
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: object, fds: tuple[int, ...] = (), *, timeout_s: float = 10.0) -> None:
        """Send one message. Blocks: `timeout_s` at most. Fails: ConnectionLost, TransferError."""
        body = self._encode(message)
        if len(body) + 64 > MAX_CONTROL:
            raise TransferError(
                f"a message of {len(body):,} bytes; {MAX_CONTROL:,} are allowed",
                hint="transfer fewer or larger slices in one plan",
            )
        self._frames.send(xxhash.xxh3_64_digest(body) + body, fds, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> tuple[Message, list[int]]:
        """The next message and its descriptors. Fails: DeadlineError, ConnectionLost."""
        frame, fds = self._frames.receive(timeout_s=timeout_s)
        try:
            body = memoryview(frame)[8:]
            if frame[:8] != xxhash.xxh3_64_digest(body):
                raise ConnectionLost("a control frame arrived damaged")
            return self._decoder.decode(body), fds
        except (msgspec.MsgspecError, ConnectionLost) as error:
            for fd in fds:
                os.close(fd)
            self.shutdown()
            raise ConnectionLost(f"the peer sent a message that is none: {error}") from error

    def shutdown(self) -> None:
        """End the connection; a blocked `receive` returns at once."""
        self._frames.shutdown()

    def close(self) -> None:
        self._frames.close()
