"""The baselines: plain sockets as fast as Python drives them, and one copy by one thread."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from bench.transfer import trees
from bench.transfer.sides import DEADLINE_S
from bench.transfer.trees import TreeSpec

_MIB = 1 << 20

WAYS: tuple[dict[str, int], ...] = tuple(
    {"streams": streams, "chunk": chunk, "buffer": buffer}
    for streams in (1, 2, 4)
    for chunk, buffer in ((0, 0), (_MIB, 0), (_MIB, 4 * _MIB), (4 * _MIB, 4 * _MIB))
)
"""Connections, bytes per call (0: all at once) and the kernel's buffers (0: its own choice). Which is fastest
changes with the machine and with what else runs on it: all are tried before the first measurement."""


def _shares(flat: NDArray[np.uint8], way: dict[str, int]) -> list[list[memoryview]]:
    """For each connection the pieces that it carries, in order."""
    view = flat.data
    share = -(-len(view) // way["streams"])
    step = way["chunk"] or share
    return [
        [view[at : min(at + step, start + share)] for at in range(start, min(start + share, len(view)), step)]
        for start in range(0, share * way["streams"], share)
    ]


def _enlarge(one: socket.socket, way: dict[str, int]) -> None:
    if way["buffer"]:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            one.setsockopt(socket.SOL_SOCKET, option, way["buffer"])


@final
class RawSource:
    """Sends its bytes over every connection as soon as a byte comes in on it."""

    def __init__(self, spec: TreeSpec, options: dict[str, Any]) -> None:
        self._way = options
        flat = trees.filled(spec)
        self.digest = trees.digest(trees.cut(flat, spec))
        self._shares = _shares(flat, self._way)
        self._listener = socket.create_server(("127.0.0.1", 0))
        _enlarge(self._listener, self._way)
        self.address = self._listener.getsockname()[1]
        self._threads = ThreadPoolExecutor(len(self._shares) + 1)
        self._threads.submit(self._accept)

    def _accept(self) -> None:
        for share in self._shares:  # in the order in which the target connects
            self._threads.submit(self._serve, self._listener.accept()[0], share)

    @staticmethod
    def _serve(connection: socket.socket, pieces: list[memoryview]) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                for piece in pieces:
                    connection.sendall(piece)

    def offer(self, number: int) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.shutdown()


@final
class RawTarget:
    """Receives straight into memory that was there before."""

    def __init__(self, spec: TreeSpec, port: int, options: dict[str, Any]) -> None:
        self._spec = spec
        self._flat = trees.lines(sum(spec.sizes()))
        self._shares = _shares(self._flat, options)
        self._connections = []
        for _ in self._shares:
            connection = socket.socket()
            _enlarge(connection, options)
            connection.connect(("127.0.0.1", port))
            self._connections.append(connection)
        self._threads = ThreadPoolExecutor(len(self._shares))

    def take(self, number: int, checked: bool) -> float:
        started = time.perf_counter()
        list(self._threads.map(self._receive, self._connections, self._shares, timeout=DEADLINE_S))
        return time.perf_counter() - started

    @staticmethod
    def _receive(connection: socket.socket, pieces: list[memoryview]) -> None:
        connection.sendall(b"!")
        for piece in pieces:
            got = 0
            while got < len(piece):
                more = connection.recv_into(piece[got:], 0, socket.MSG_WAITALL)
                if not more:
                    raise ConnectionError("the source is gone")
                got += more

    def digest(self) -> str:
        return trees.digest(trees.cut(self._flat, self._spec))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._threads.shutdown()


@final
class CopyTarget:
    """One copy of the tree within this process, array by array, by one thread."""

    def __init__(self, spec: TreeSpec, _address: None, _options: dict[str, Any]) -> None:
        self._spec = spec
        self._from = trees.filled(spec)
        self._into = trees.lines(self._from.nbytes)
        self._pairs = list(
            zip(trees.cut(self._into, spec).values(), trees.cut(self._from, spec).values(), strict=True)
        )

    def take(self, number: int, checked: bool) -> float:
        started = time.perf_counter()
        for into, out_of in self._pairs:
            np.copyto(into, out_of)
        return time.perf_counter() - started

    def digest(self) -> str:
        return trees.digest(trees.cut(self._into, self._spec))

    def close(self) -> None:
        pass
