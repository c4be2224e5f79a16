"""The engine of the async face: a protocol on the running loop, without a task or a timer for each call.

All clients of a process share its loop. Calls made in the same turn of the loop go out in one write; a call
costs one future; a task exists only while there is no connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Final, TypeAlias, cast, final

from holdfast.coord import messages as m
from holdfast.coord.address import Address, candidates
from holdfast.coord.calls import ClientCore, Happening, Noticed, OpenCall, Over, Pushed, Stalled, WatchState
from holdfast.coord.link import Link, encoded
from holdfast.coord.retries import failures_after, pause_s
from holdfast.coord.sockets import CONNECT_S, HANDSHAKE_S, tuned
from holdfast.coord.turns import turn_of
from holdfast.errors import (
    CoordError,
    DeadlineError,
    HandshakeError,
    HoldfastError,
    LimitError,
    UnreachableError,
    UsageError,
)
from holdfast.wire import NONCE_BYTES, ConnectionLost

log = logging.getLogger("holdfast.coord")

Tell: TypeAlias = Callable[[m.Changed], None]

_BYE_S: Final = 1.0


def _settle(waker: asyncio.Future[Any], call: OpenCall) -> None:
    if waker.done():
        return  # cancelled
    if call.error is not None:
        waker.set_exception(call.error)
    else:
        waker.set_result(call.result)


@final
class _Connection(asyncio.Protocol):
    """One connection, from its handshake to its loss."""

    def __init__(self, engine: LoopEngine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self.transport: asyncio.Transport | None = None
        self.stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the session stands, or with the reason why it does not."""
        self.why: HoldfastError | None = None
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            tuned(sock)
        self.transport.write(self._link.reply)

    def data_received(self, data: bytes) -> None:
        opened = self._link.open
        try:
            answers = self._link.feed(data)
            if not opened and self._link.open:
                assert self.transport is not None
                self.transport.write(self._link.reply)
                self._engine._connected(self)
            if answers:
                self._engine._received(self, answers)
        except HoldfastError as error:
            self.end(error)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._engine._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self.why is None:
            reason = getattr(error, "strerror", None) or str(error or "the coordinator closed the connection")
            self.why = ConnectionLost(reason)
        self._engine._lost(self)
        if not self.stands.done():
            self.stands.set_exception(self.why)
            self.stands.exception()  # nobody may be waiting for it

    def end(self, why: HoldfastError) -> None:
        """Give the connection up."""
        if self.why is None:
            self.why = why
        if self.transport is not None:
            self.transport.abort()


@final
class LoopEngine:
    """Runs a ClientCore on an event loop. To be used on that loop only."""

    def __init__(
        self,
        core: ClientCore,
        addresses: Sequence[str],
        token: bytes | None,
        on_push: Callable[[m.Push], None] | None,
    ) -> None:
        self.core = core
        self._addresses = addresses
        self._token = token
        self._on_push = on_push
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._seeking: asyncio.Task[None] | None = None
        self._turn = turn_of(self._loop)
        self._dirty = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._failures = 0
        self._since = 0.0
        self._closing = False
        self._stop_waiters: list[asyncio.Future[None]] = []

    # ---- for callers

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the session stands. Fails: UnreachableError, HandshakeError."""
        self._seek()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.core.ready and self._seeking is not None:
                    await asyncio.wait([self._seeking])
        if self.core.over is not None:
            raise self.core.over
        if not self.core.sid:
            raise UnreachableError(
                f"no coordinator at {', '.join(self._addresses)} within {timeout_s:g} s: {self.core.trouble}",
                hint="is it running, and is this its address?",
            )

    def call(self, op: m.Op, timeout_s: float) -> asyncio.Future[Any]:
        """The result of a call. Fails: with what the coordinator refused it for, or UnreachableError."""
        self._check()
        return self._waker(self.core.call(op, time.monotonic(), timeout_s))

    async def meet(self, op: m.Meet) -> m.Met:
        """As `call`; if the waiting is cancelled, the next call for the same meeting takes it up."""
        self._check()
        call = self.core.call(op, time.monotonic(), op.timeout_s)
        try:
            return cast(m.Met, await self._waker(call))
        except asyncio.CancelledError:
            self.core.give_up(call)
            raise

    async def watch(self, prefix: str, callback: Tell, timeout_s: float) -> WatchState:
        self._check()
        call, state = self.core.watch(prefix, callback, time.monotonic(), timeout_s)
        try:
            await self._waker(call)
        except asyncio.CancelledError:
            self.unwatch(state)
            raise
        return state

    def _waker(self, call: OpenCall) -> asyncio.Future[Any]:
        call.waker = waker = self._loop.create_future()
        if call.settled:
            _settle(waker, call)
        elif not self._dirty:
            self._dirty = True
            self._turn.add(self._flush)
        return waker

    def unwatch(self, state: WatchState) -> None:
        self.core.unwatch(state)
        self._flush()

    def progress(self, step: int, phase: str) -> None:
        self.core.progress(step, phase, time.monotonic())
        self._flush()

    async def reached(self, step: int, timeout_s: float) -> bool:
        """Whether the step is at or after the stop; waits while a stop is announced and not decided."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._check()
                    if self.core.over is not None:
                        raise copy(self.core.over)
                    known = self.core.reached(step)
                    if known is not None:
                        return known
                    woken = self._loop.create_future()
                    self._stop_waiters.append(woken)
                    await woken
        except TimeoutError:
            raise DeadlineError(
                f"the step at which all stop was not decided within {timeout_s:g} s",
                hint="a member that has not answered holds it up; `holdfast coord status` shows who",
            ) from None

    def _check(self) -> None:
        if self._closing:
            raise UsageError("this client is closed", hint="make a new one")

    # ---- sending and time

    def _flush(self) -> None:
        """Send what the core has to say, and see to the next moment that matters."""
        self._dirty = False
        core, connection = self.core, self._connection
        if connection is None:
            self._seek()
        elif not connection.paused:
            messages = core.take()
            if messages:
                assert connection.transport is not None
                connection.transport.write(b"".join(map(self._checked, messages)))
        if core.wake_at < self._timer_at or self._timer is None:
            self._set_timer()

    def _checked(self, message: m.Hello | m.Call) -> bytes | bytearray:
        frame = encoded(message)
        if isinstance(message, m.Call) and 0 < self.core.max_frame < len(frame) - 4:
            error = LimitError(
                f"a call of {len(frame):,} bytes; the coordinator takes {self.core.max_frame:,}",
                hint="split the value, or keep large data in a checkpoint or a transfer",
            )
            self._handle(self.core.refuse(message.seq, error))
            return b""
        return frame

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self.core.wake_at
        if wake_at == float("inf") or self._closing:
            return
        self._timer_at = wake_at
        self._timer = self._loop.call_later(max(0.0, wake_at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        if now >= self.core.wake_at:
            self._handle(self.core.tick(now))
        self._flush()

    # ---- the connection

    def _seek(self) -> None:
        if self._seeking is None and not self._closing and self.core.over is None:
            self._seeking = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        try:
            while not self._closing and self.core.over is None:
                if self._failures:
                    await asyncio.sleep(pause_s(self._failures, random.random()))
                if not await self._attempt():
                    self._failures += 1
                elif self._connection is not None:
                    return
        finally:
            self._seeking = None

    async def _attempt(self) -> bool:
        """Try every address in turn; whether the session stands."""
        places, trouble = candidates(self._addresses)
        refusals: list[HandshakeError] = []
        for place in places:
            connection: _Connection | None = None
            try:
                async with asyncio.timeout(CONNECT_S) as limit:
                    connection = await self._connect(place)
                    limit.reschedule(self._loop.time() + HANDSHAKE_S)
                    await connection.stands
                return True
            except HandshakeError as error:
                refusals.append(error)
                trouble = f"{place}: {error.message}"
            except ConnectionLost as error:
                trouble = f"{place}: {error.message}"
            except TimeoutError:
                trouble = f"{place}: no answer within {CONNECT_S if connection is None else HANDSHAKE_S:g} s"
            except OSError as error:
                trouble = f"{place}: {error.strerror or error}"
            finally:
                if connection is not None and not self.core.ready:
                    connection.end(ConnectionLost(trouble))
            if self.core.over is not None:
                return False
        if refusals and len(refusals) == len(places) and not self.core.sid:
            self._handle(self.core.finish(refusals[0]))
        if self._connection is None:
            self.core.disconnected(time.monotonic(), trouble or "there is no address to try")
        return False

    async def _connect(self, place: Address) -> _Connection:
        link = Link(run=self.core.run, token=self._token, nonce=os.urandom(NONCE_BYTES))
        connection = _Connection(self, link)
        if place.path:
            await self._loop.create_unix_connection(lambda: connection, place.path)
        else:
            await self._loop.create_connection(lambda: connection, place.host, place.port)
        return connection

    def _connected(self, connection: _Connection) -> None:
        self._connection = connection
        self._since = time.monotonic()
        self.core.connected(self._since)
        self._flush()

    def _received(self, connection: _Connection, answers: list[m.Answer]) -> None:
        if connection is not self._connection:
            return
        core, now = self.core, time.monotonic()
        for answer in answers:
            self._handle(core.received(answer, now))
        self._flush()

    def _lost(self, connection: _Connection) -> None:
        if connection is not self._connection:
            return
        self._connection = None
        now = time.monotonic()
        if self.core.ready:
            lasted_s = now - self._since
            self._failures = failures_after(self._failures, welcomed=True, lasted_s=lasted_s)
        why = connection.why
        self.core.disconnected(now, why.message if why is not None else "")
        self._set_timer()
        self._seek()

    def _handle(self, happened: list[Happening]) -> None:
        for one in happened:
            match one:
                case OpenCall():
                    if one.waker is not None:
                        _settle(one.waker, one)
                case Noticed(watch, changed):
                    self._loop.call_soon(_run, partial(cast(Tell, watch.token), changed))
                case Pushed(push):
                    self._pushed(push)
                case Stalled(reason):
                    if self._connection is not None:
                        self._connection.end(ConnectionLost(reason))
                case Over(error):
                    self._wake_stops()
                    if self._connection is not None and not self._closing:
                        self._connection.end(error)

    def _pushed(self, push: m.Push) -> None:
        if isinstance(push, m.Welcome) and self._connection is not None:
            if not self._connection.stands.done():
                self._connection.stands.set_result(None)
        elif isinstance(push, m.Stop):
            self._wake_stops()
        if self._on_push is not None:
            # In the next turn: a callback may call the client.
            self._loop.call_soon(_run, partial(self._on_push, push))

    def _wake_stops(self) -> None:
        waiters, self._stop_waiters = self._stop_waiters, []
        for woken in waiters:
            if not woken.done():
                woken.set_result(None)

    # ---- the end

    async def close(self) -> None:
        """Say goodbye, if anybody is there. Calls that are open fail."""
        if self._closing:
            return
        if self.core.ready:
            with suppress(CoordError):
                await self.call(m.Bye(), _BYE_S)
        self._closing = True
        self._handle(self.core.finish(CoordError("this client is closed")))
        if self._timer is not None:
            self._timer.cancel()
        if self._seeking is not None:
            self._seeking.cancel()
            await asyncio.wait([self._seeking])
        if self._connection is not None:
            connection = self._connection
            assert connection.transport is not None
            connection.transport.abort()
        # The loop lets go of the socket in its next turn.
        await asyncio.sleep(0)


def _run(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        log.exception("a callback of the coordinator's client failed")
