"""Connecting to a coordinator with a blocking socket, interruptible and within a deadline."""

from __future__ import annotations

import errno
import os
import select
import socket
from contextlib import suppress
from typing import Final

from holdfast.clock import Deadline
from holdfast.coord.address import Address
from holdfast.coord.link import Link
from holdfast.coord.messages import Answer
from holdfast.wire import ConnectionLost

CONNECT_S: Final = 2.0
HANDSHAKE_S: Final = 5.0
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
_OPTIONS: Final = [
    (int(socket.IPPROTO_TCP), int(socket.TCP_NODELAY), 1),
    (int(socket.SOL_SOCKET), int(socket.SO_KEEPALIVE), 1),
    *(
        (int(socket.IPPROTO_TCP), getattr(socket, name), n)
        for name, n in _KEEPALIVE.items()
        if hasattr(socket, name)
    ),
]


def tuned(sock: socket.socket) -> None:
    """Send at once; notice in seconds that the other machine is gone, but not that a process is stopped."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):
        for option in _OPTIONS:
            sock.setsockopt(*option)


def connected(address: Address, wake: int) -> socket.socket:
    """A connected, non-blocking socket.

    Blocks: CONNECT_S at most, or until `wake` can be read. Fails: OSError.
    """
    if address.path:
        return _connected(socket.AF_UNIX, address.path, wake)
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(errno.EADDRNOTAVAIL, f"{address.host} has no address")
    for family, _, _, _, where in found:
        try:
            return _connected(family, where, wake)
        except OSError as error:
            failure = error
    raise failure


def _connected(family: int, target: object, wake: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tuned(sock)
        code = sock.connect_ex(target)  # type: ignore[arg-type]
        if code in (errno.EINPROGRESS, errno.EAGAIN):
            _await(sock, wake, select.POLLOUT, Deadline(CONNECT_S))
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def shaken(sock: socket.socket, link: Link, wake: int) -> list[Answer]:
    """Go through the handshake; gives the messages that came right behind it.

    Blocks: HANDSHAKE_S at most, or until `wake` can be read. Fails: OSError, ConnectionLost, HandshakeError.
    """
    deadline = Deadline(HANDSHAKE_S)
    answers: list[Answer] = []
    _send_all(sock, link.reply, wake, deadline)
    while not link.open:
        _await(sock, wake, select.POLLIN, deadline)
        data = sock.recv(1 << 16)
        if not data:
            raise ConnectionLost("the coordinator closed the connection during the handshake")
        answers = link.feed(data)
        _send_all(sock, link.reply, wake, deadline)
    return answers


def _send_all(sock: socket.socket, data: bytes, wake: int, deadline: Deadline) -> None:
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            _await(sock, wake, select.POLLOUT, deadline)


def _await(sock: socket.socket, wake: int, events: int, deadline: Deadline) -> None:
    poller = select.poll()
    poller.register(sock, events)
    poller.register(wake, select.POLLIN)
    ready = dict(poller.poll(deadline.remaining() * 1000))
    if wake in ready:
        raise OSError(errno.ECANCELED, "this client is closing")
    if not ready:
        raise OSError(errno.ETIMEDOUT, f"no answer within {deadline.timeout_s:g} s")
