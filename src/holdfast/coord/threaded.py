"""The engine of the sync face: one connection, one thread that reads it, and one that runs callbacks.

A caller sends from its own thread, under a lock, without ever blocking there, and then sleeps on a lock of
its own until the reader wakes it: no loop and no queue lie between the two. What the socket does not take at
once is sent by the reader. Callbacks run on a thread of their own, outside all locks, so they may call the
client.

Waking a thread costs as much as a message. So where calls follow each other closely the reader steps aside
for a moment after each, and the next caller reads its own answer: whoever holds `_reading` reads. It does so
for a few milliseconds at most; then the reader, which also sees to heartbeats and pushes, takes over again.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Final, TypeAlias, cast, final

from holdfast.coord import messages as m
from holdfast.coord.address import candidates
from holdfast.coord.calls import ClientCore, Happening, Noticed, OpenCall, Over, Pushed, Stalled, WatchState
from holdfast.coord.link import Link, encoded
from holdfast.coord.retries import failures_after, pause_s
from holdfast.coord.sockets import connected, shaken
from holdfast.errors import (
    CoordError,
    DeadlineError,
    HandshakeError,
    LimitError,
    UnreachableError,
    UsageError,
)
from holdfast.wire import NONCE_BYTES, ConnectionLost

log = logging.getLogger("holdfast.coord")

Tell: TypeAlias = Callable[[m.Changed], None]

_ASIDE_S: Final = 0.002
"""How long the reader steps aside for the next caller. Pushes may be late by as much."""
_HELP_S: Final = 0.005
"""How long a caller reads for itself."""
_BYE_S: Final = 1.0
_JOIN_S: Final = 5.0
_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()


@final
class Engine:
    """Runs a ClientCore over a blocking socket."""

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
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._resume = threading.Event()
        self._helped = False
        self._link: Link | None = None
        self._poller = select.poll()
        self._broken: ConnectionLost | None = None
        self._sock: socket.socket | None = None
        self._backlog = bytearray()
        self._closing = False
        self._closed = False
        self._welcomed = False
        self._pid = os.getpid()
        self._refused: HandshakeError | None = None
        """Why no coordinator took this client at all, if none did."""
        self._settled = threading.Event()
        """Set once the session stood for the first time, or never will."""
        self._stop_waiters: list[threading.Event] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._dispatcher: threading.Thread | None = None
        self._reader = threading.Thread(target=self._run, name="holdfast-coord-reader", daemon=True)
        _engines.add(self)
        self._reader.start()

    # ---- for callers

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the session stands. Fails: UnreachableError, HandshakeError."""
        self._settled.wait(timeout_s)
        with self._lock:
            if self.core.sid and self.core.over is None:
                return
            if self.core.over is not None:
                raise self.core.over
            if self._refused is not None:
                raise self._refused
            raise UnreachableError(
                f"no coordinator at {', '.join(self._addresses)} within {timeout_s:g} s: {self.core.trouble}",
                hint="is it running, and is this its address?",
            )

    def call(self, op: m.Op, timeout_s: float) -> Any:
        """The result of a call. Fails: with what the coordinator refused it for, or UnreachableError."""
        waker = threading.Lock()
        waker.acquire()
        with self._lock:
            self._check()
            call = self.core.call(op, time.monotonic(), timeout_s)
            if not call.settled:
                call.waker = waker
                self._flush()
        if not call.settled and self._reading.acquire(blocking=False):
            self._help(call)
        return self._outcome(call, waker)

    def _help(self, call: OpenCall) -> None:
        """Read until the call is settled, for a moment at most. `_reading` is held, and released."""
        try:
            ends = time.monotonic() + _HELP_S
            while not call.settled and (left := ends - time.monotonic()) > 0:
                sock, link = self._sock, self._link
                if sock is None or link is None or self._backlog or self._broken is not None:
                    break
                if not self._poller.poll(left * 1000):
                    break
                answers = self._read(sock, link)
                with self._lock:
                    now = time.monotonic()
                    self._handle([one for answer in answers for one in self.core.received(answer, now)])
        except ConnectionLost as error:
            self._broken = error  # for the reader, who deals with it
        except OSError:
            pass  # the reader finds the same
        finally:
            self._helped = call.settled
            self._reading.release()
            if not call.settled or self.core.has_open:
                self._resume.set()

    def watch(self, prefix: str, callback: Tell, timeout_s: float) -> WatchState:
        """Open a watch; `callback` is called on the dispatcher thread until `unwatch`."""
        waker = threading.Lock()
        waker.acquire()
        with self._lock:
            self._check()
            self._start_dispatcher()
            call, state = self.core.watch(prefix, callback, time.monotonic(), timeout_s)
            if not call.settled:
                call.waker = waker
                self._flush()
        self._outcome(call, waker)
        return state

    def unwatch(self, state: WatchState) -> None:
        with self._lock:
            self.core.unwatch(state)
            self._flush()

    def progress(self, step: int, phase: str) -> None:
        with self._lock:
            self.core.progress(step, phase, time.monotonic())
            self._flush()

    def reached(self, step: int, timeout_s: float) -> bool:
        """Whether the step is at or after the stop; waits while a stop is announced and not decided."""
        ends = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._check()
                if self.core.over is not None:
                    raise copy(self.core.over)
                known = self.core.reached(step)
                if known is not None:
                    return known
                woken = threading.Event()
                self._stop_waiters.append(woken)
            if not woken.wait(max(0.0, ends - time.monotonic())) and time.monotonic() >= ends:
                raise DeadlineError(
                    f"the step at which all stop was not decided within {timeout_s:g} s",
                    hint="a member that has not answered holds it up; `holdfast coord status` shows who",
                )

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this client was made in another process", hint="make one after the fork; it has threads"
            )
        if self._closing:
            raise UsageError("this client is closed", hint="make a new one")

    def _outcome(self, call: OpenCall, waker: threading.Lock) -> Any:
        while not call.settled:
            now = time.monotonic()
            if call.expired(now):
                with self._lock:
                    self.core.give_up(call)
                    self._flush()
                break
            # A connection that broke meanwhile takes the grace away.
            waker.acquire(timeout=min(max(0.0, call.due() - now), threading.TIMEOUT_MAX))
        return call.outcome()

    # ---- sending; all under the lock

    def _flush(self) -> None:
        """Send what the core has to say, as far as the socket takes it at once."""
        messages = self.core.take()
        sock = self._sock
        if not messages or sock is None:
            return
        if len(messages) == 1:
            data: bytes | bytearray = self._checked(messages[0])
        else:
            data = b"".join(map(self._checked, messages))
        if self._backlog:
            self._backlog += data
            return
        try:
            sent = sock.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reader finds the same
        if sent < len(data):
            self._backlog += memoryview(data)[sent:]
            self._kick()

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

    def _kick(self) -> None:
        """Make the reader look up."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    # ---- the reader

    def _run(self) -> None:
        failures = 0
        try:
            while not self._closing and self.core.over is None:
                since = time.monotonic()
                self._attempt()
                lasted_s = time.monotonic() - since
                failures = failures_after(failures, welcomed=self._welcomed, lasted_s=lasted_s)
                self._pause(pause_s(failures, random.random()))
        finally:
            with self._lock:
                self._handle(self.core.finish(CoordError("this client is closed")))
                self._settled.set()

    def _attempt(self) -> None:
        """Try every address in turn, and serve the first that takes us until it is lost."""
        self._welcomed = False
        places, trouble = candidates(self._addresses)
        refusals: list[HandshakeError] = []
        for place in places:
            link = Link(run=self.core.run, token=self._token, nonce=os.urandom(NONCE_BYTES))
            try:
                sock = connected(place, self._wake)
            except OSError as error:
                trouble = f"{place}: {error.strerror or error}"
                continue
            with sock:
                try:
                    self._serve(sock, link, shaken(sock, link, self._wake))
                except HandshakeError as error:
                    refusals.append(error)
                    trouble = f"{place}: {error.message}"
                except ConnectionLost as error:
                    trouble = f"{place}: {error.message}"
                except OSError as error:
                    trouble = f"{place}: {error.strerror or error}"
                finally:
                    self._lost(trouble)
            if self._welcomed or self._closing or self.core.over is not None:
                return
        if refusals and len(refusals) == len(places) and not self.core.sid:
            self._refused = refusals[0]
            self._settled.set()
        self._lost(trouble or "there is no address to try")

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        ends = time.monotonic() + seconds
        while not self._closing and (left := ends - time.monotonic()) > 0:
            if poller.poll(left * 1000):
                self._drain()

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _serve(self, sock: socket.socket, link: Link, early: list[m.Answer]) -> None:
        """Read until the connection is lost or of no more use."""
        core, lock, monotonic = self.core, self._lock, time.monotonic
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        number, wake = sock.fileno(), self._wake
        poller.register(number, select.POLLIN)
        with lock:
            self._sock, self._backlog, self._link, self._broken = sock, bytearray(), link, None
            self._poller = select.poll()
            self._poller.register(number, select.POLLIN)
            core.connected(monotonic())
            self._flush()
        answers, writing = early, False
        while not self._closing or core.ready:
            with self._reading:
                if self._broken is not None:
                    raise self._broken
                with lock:
                    now = monotonic()
                    happened: list[Happening] = []
                    for answer in answers:
                        happened += core.received(answer, now)
                    if now >= core.wake_at:
                        happened += core.tick(now)
                    self._flush()
                    if happened:
                        self._handle(happened)
                    if core.over is not None:
                        return
                    wait_ms = min(60.0, core.wake_at - now) * 1000
                    if bool(self._backlog) != writing:
                        writing = bool(self._backlog)
                        poller.modify(number, select.POLLIN | (select.POLLOUT if writing else 0))
                answered = any(type(one) is OpenCall for one in happened)
                answers = []
                if not (answered or self._helped) or core.has_open or writing:
                    for fd, events in poller.poll(max(0.0, wait_ms)):
                        if fd == wake:
                            self._drain()
                        elif events & ~select.POLLOUT:
                            answers = self._read(sock, link)
                        if fd == number and events & select.POLLOUT:
                            self._send_backlog(sock)
                    continue
                self._helped = False
                self._resume.clear()
            self._resume.wait(_ASIDE_S)

    @staticmethod
    def _read(sock: socket.socket, link: Link) -> list[m.Answer]:
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionLost("the coordinator closed the connection")
        return link.feed(data)

    def _send_backlog(self, sock: socket.socket) -> None:
        with self._lock, suppress(BlockingIOError):
            del self._backlog[: sock.send(self._backlog, socket.MSG_NOSIGNAL)]

    def _lost(self, reason: str) -> None:
        with self._lock:
            self._sock = self._link = None
            self._backlog = bytearray()
            self.core.disconnected(time.monotonic(), reason)

    def _handle(self, happened: list[Happening]) -> None:
        """Wake whoever waits; under the lock."""
        for one in happened:
            match one:
                case OpenCall():
                    if one.waker is not None:
                        one.waker.release()
                case Noticed(watch, changed):
                    self._tasks.put(partial(cast(Tell, watch.token), changed))
                case Pushed(push):
                    if isinstance(push, m.Welcome):
                        self._welcomed = True
                        self._settled.set()
                    if self._on_push is not None:
                        self._start_dispatcher()
                        self._tasks.put(partial(self._on_push, push))
                case Stalled(reason):
                    raise ConnectionLost(reason)
                case Over(_):
                    self._settled.set()
        for woken in self._stop_waiters:
            woken.set()
        self._stop_waiters.clear()

    # ---- callbacks

    def _start_dispatcher(self) -> None:
        """Under the lock."""
        if self._dispatcher is None:
            self._dispatcher = threading.Thread(
                target=self._dispatch, name="holdfast-coord-callbacks", daemon=True
            )
            self._dispatcher.start()

    def _dispatch(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a callback of the coordinator's client failed")

    # ---- the end

    def close(self) -> None:
        """Say goodbye, if anybody is there, and end the threads. Calls that are open fail."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ready = self.core.ready
        if ready:
            with suppress(CoordError):
                self.call(m.Bye(), _BYE_S)
        with self._lock:
            self._closing = True
            self._handle(self.core.finish(CoordError("this client is closed")))
        self._kick()
        self._tasks.put(None)
        self._reader.join(_JOIN_S)
        if self._dispatcher is not None and self._dispatcher is not threading.current_thread():
            self._dispatcher.join(_JOIN_S)
        if not self._reader.is_alive():
            os.close(self._wake)
        _engines.discard(self)

    def _forked(self) -> None:
        """In a child: let go of the parent's connection, so that the parent's end can be seen as its end."""
        for fd in (self._wake, self._sock.fileno() if self._sock is not None else -1):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        if self._sock is not None:
            self._sock.detach()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._forked()
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork)
