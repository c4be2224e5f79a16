"""A coordinator without a disk on a thread of the test, whose connections a test can break."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from holdfast.coord.coordinator import Coordinator
from holdfast.coord.kernel import Close, Closed, Effect, Event, Opened, Received, Send, Tick
from holdfast.coord.ledger import Ledger
from holdfast.coord.messages import Answer, Call, Hello
from holdfast.coord.settings import Settings
from holdfast.errors import HandshakeError
from holdfast.wire import NONCE_BYTES, ConnectionLost, FrameSplitter, ServerHandshake, framed, refusal

_hello = msgspec.msgpack.Decoder(Hello).decode
_call = msgspec.msgpack.Decoder(Call).decode
_encode = msgspec.msgpack.Encoder().encode


class _Peer(asyncio.Protocol):
    def __init__(self, owner: MemoryCoordinator, number: int) -> None:
        self.owner = owner
        self.number = number
        self.splitter = FrameSplitter(max_frame=16 << 20)
        nonce = os.urandom(NONCE_BYTES)
        self.handshake = ServerHandshake(
            purpose="coord", run=owner.settings.run, token=owner.token, nonce=nonce
        )
        self.greeted = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.owner.peers[self.number] = self

    def data_received(self, data: bytes) -> None:
        try:
            for body in self.splitter.feed(data):
                if not self.handshake.done:
                    self.transport.write(self.handshake.receive(body))
                elif not self.greeted:
                    self.greeted = True
                    self.owner.step(Opened(self.number, _hello(body)))
                else:
                    call = _call(body)
                    self.owner.seen.append(call)
                    self.owner.step(Received(self.number, call))
        except HandshakeError as error:
            self.transport.write(refusal(error.message))
            self.transport.close()
        except ConnectionLost:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.owner.peers.pop(self.number, None)
        if self.greeted and not self.owner.down:
            self.owner.step(Closed(self.number))


class MemoryCoordinator:
    """Serves at a Unix socket until it is left. `mute` says which answers are lost on the way."""

    def __init__(self, folder: Path, settings: Settings | None = None, *, token: bytes | None = None) -> None:
        self.settings = settings or Settings(last_call_s=0.05, reconnect_s=2.0)
        self.token = token
        self.address = f"unix:{folder}/coord.sock"
        self.peers: dict[int, _Peer] = {}
        self.seen: list[Call] = []
        self.down = False
        self.mute: Callable[[Answer], bool] = lambda answer: False
        self._path = f"{folder}/coord.sock"
        self._ledger = Ledger()
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._core: Coordinator
        self._server: asyncio.AbstractServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memory-coordinator")
        self._thread.start()
        self._do(self._start())

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)  # type: ignore[arg-type]

    async def _start(self) -> None:
        self.down = False
        self._core = Coordinator(self.settings, self._ledger, service=uuid.uuid4().hex, now=time.monotonic())
        self._carry_out(self._core.begin(now=time.monotonic()))
        self._server = await self._loop.create_unix_server(self._peer, self._path)
        self._set_timer()

    def _peer(self) -> _Peer:
        self._number += 1
        return _Peer(self, self._number)

    async def _stop(self) -> None:
        self.down = True
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers.values()):
            peer.transport.abort()
        while self.peers:
            await asyncio.sleep(0)

    def step(self, event: Event) -> None:
        self._carry_out(self._core.step(event, now=time.monotonic()))
        self._set_timer()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(conn, answer):
                    if conn in self.peers and not self.mute(answer):
                        self.peers[conn].transport.write(framed(_encode(answer)))
                case Close(conn, _):
                    if conn in self.peers:
                        self.peers[conn].transport.close()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._core.wake_at < float("inf"):
            delay = max(0.0, self._core.wake_at - time.monotonic())
            self._timer = self._loop.call_later(delay, self.step, Tick())

    # ---- for tests

    def break_all(self) -> None:
        """Drop every connection; the sessions stay."""

        async def work() -> None:
            for peer in list(self.peers.values()):
                peer.transport.abort()

        self._do(work())

    def stop(self) -> None:
        """End without a word, as SIGKILL does; `start` is the next process."""
        self._do(self._stop())

    def start(self) -> None:
        os.unlink(self._path) if os.path.exists(self._path) else None
        self._ledger = Ledger.restore(self._ledger.snapshot())
        self._do(self._start())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
