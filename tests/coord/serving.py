"""A real server in a thread of the test, and a client that is nothing but a socket and frames."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, final

from holdfast.coord.address import parse
from holdfast.coord.connections import Limits
from holdfast.coord.link import Link, encoded
from holdfast.coord.log import Log
from holdfast.coord.messages import Answer, Call, Hello, Join, Joined, Op, Welcome
from holdfast.coord.server import _loop_factory
from holdfast.coord.service import Server
from holdfast.coord.settings import Settings
from holdfast.journal import Journal
from holdfast.storage import Files

TIMEOUT_S = 20.0
_names = itertools.count(1)


@final
class Serving:
    """A server that runs as long as the block."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Settings | None = None,
        bind: Sequence[str] = ("tcp://127.0.0.1:0",),
        token: bytes | None = None,
        limits: Limits | None = None,
        journal: Journal | None = None,
        files: Files | None = None,
        snapshot_records: int = 50_000,
        plain_loop: bool = False,
    ) -> None:
        self.log = Log(folder, files=files, snapshot_records=snapshot_records)
        self.server = Server(
            settings or Settings(last_call_s=0.0), self.log, token=token, limits=limits, journal=journal
        )
        self.token = token
        self.error: BaseException | None = None
        self._bind = bind
        self._factory = asyncio.new_event_loop if plain_loop else _loop_factory()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-coordinator")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._factory) as runner:
                runner.run(self._main())
            self.server.check()
        except BaseException as error:
            self.error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        await self.server.start(self._bind)
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self.server.over.wait()
        await self.server.stop()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        if self.error is not None and not self.server.addresses:
            self._thread.join(TIMEOUT_S)
            self.log.close()
            raise self.error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.over.set)
        self.wait()

    def wait(self) -> None:
        """Until it is over."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def address(self) -> str:
        return self.server.addresses[0]

    def client(self, incarnation: str = "") -> Raw:
        return Raw(self.address, token=self.token, incarnation=incarnation)

    def socket(self) -> socket.socket:
        """A connection on which nothing was said."""
        return connect(self.address)


def connect(address: str) -> socket.socket:
    place = parse(address)
    sock = socket.socket(socket.AF_UNIX if place.path else socket.AF_INET, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    try:
        sock.connect(place.path or (place.host, place.port))
    except BaseException:
        sock.close()
        raise
    if not place.path:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


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
class Raw:
    """Says Hello and then what it is told. One thread; no heartbeats, no reconnect."""

    def __init__(
        self,
        address: str,
        *,
        token: bytes | None = None,
        run: str = "run",
        incarnation: str = "",
        sid: int = 0,
    ) -> None:
        self.sock = connect(address)
        self.said = bytearray()
        """Everything that was sent, byte by byte."""
        self.pushes: list[Answer] = []
        self.order: list[int] = []
        """The seqs of all answers, as they came."""
        self.generation = 0
        self.incarnation = incarnation or f"raw-{os.getpid()}-{next(_names)}"
        self._answers: dict[int, Answer] = {}
        self._seq = 0
        self.open: set[int] = set()
        self._link = Link(run=run, token=token, nonce=secrets.token_bytes(32))
        try:
            self.send(self._link.reply)
            ends = time.monotonic() + TIMEOUT_S
            while not self._link.open:
                self._read(ends)
            self.send(self._link.reply + encoded(Hello(run, self.incarnation, sid, self.incarnation)))
            while not self.pushes:
                self._read(ends)
        except BaseException:
            self.close()
            raise
        self.welcome = self.pushes[0].body

    @property
    def sid(self) -> int:
        assert isinstance(self.welcome, Welcome), self.welcome
        return self.welcome.sid

    def send(self, data: bytes) -> None:
        self.said += data
        self.sock.sendall(data)

    def ask(self, op: Op, *, seq: int = 0) -> int:
        """Send a call without waiting; its seq."""
        if not seq:
            self._seq += 1
            seq = self._seq
        self.open.add(seq)
        self.send(bytes(encoded(Call(seq, min(self.open) - 1, self.generation, op))))
        return seq

    def answer(self, seq: int, timeout_s: float = TIMEOUT_S) -> Answer:
        ends = time.monotonic() + timeout_s
        while seq not in self._answers:
            self._read(ends)
        return self._answers.pop(seq)

    def answered(self, timeout_s: float = 0.0) -> list[int]:
        """The seqs that were answered by now, in order."""
        while select.select([self.sock], [], [], timeout_s)[0]:
            self._read(time.monotonic() + 1.0)
        return list(self._answers)

    def call(self, op: Op, timeout_s: float = TIMEOUT_S) -> object:
        return self.answer(self.ask(op), timeout_s).body

    def join(self) -> None:
        """Take part; alone, if the settings allow."""
        body = self.call(Join(-1, TIMEOUT_S))
        assert isinstance(body, Joined), body
        self.generation = body.generation

    def gone_from(self, serving: Serving) -> bool:
        """Whether the server has ended this connection."""
        port = self.sock.getsockname()
        return all(
            connection._transport is None or connection._transport.get_extra_info("peername") != port
            for connection in list(serving.server._connections.values())
        )

    def await_gone(self, serving: Serving, timeout_s: float) -> None:
        """Until the server has ended this connection, and without reading from it."""
        poll = select.poll()
        poll.register(self.sock, 0)  # errors and hang-ups only
        assert poll.poll(timeout_s * 1e3), "the connection stands"
        assert self.gone_from(serving)

    def _read(self, ends: float) -> None:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self.sock.settimeout(left)
        data = self.sock.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the coordinator closed the connection")
        for answer in self._link.feed(data):
            if answer.seq:
                self._answers[answer.seq] = answer
                self.order.append(answer.seq)
                self.open.discard(answer.seq)
            else:
                self.pushes.append(answer)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
