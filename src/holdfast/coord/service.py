"""The coordinator's edge: sockets, log and timers around the pure core. It decides nothing.

One turn of the loop reads what came, steps the core for each call, and ends with a flush: all records of the
turn in one write, then all answers that may go out, one write for each socket. Answers that wait for the disk
are held; a thread syncs while further records gather, and each sync lets go of all that it covers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import struct
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final, final

import msgspec

from holdfast.coord.chronicle import event_of
from holdfast.coord.commit import Committer
from holdfast.coord.connections import ENDING, Connection, Limits
from holdfast.coord.coordinator import Coordinator
from holdfast.coord.kernel import Close, Closed, Effect, Event, Note, Opened, Send, Tick, Write
from holdfast.coord.listeners import Listener, listen
from holdfast.coord.log import Log
from holdfast.coord.messages import Answer, Count, Done, Hello, Joined, Swapped, Value
from holdfast.coord.records import Record
from holdfast.coord.settings import Settings
from holdfast.errors import HoldfastError
from holdfast.journal import Cleaned, CoordinatorStarted, CoordinatorStopped, Journal

_log = logging.getLogger("holdfast.coord")

_SWEEP_S: Final = 0.25
_LENGTH: Final = struct.Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()
_encode: Final = _encoder.encode
_ALONE: Final = frozenset({Done, Value, Count, Swapped, Joined})
"""Bodies that go to one client each."""


@final
class Server:
    """A coordinator that serves the log in a folder. `start`, then wait for `over`, then `stop`."""

    def __init__(
        self,
        settings: Settings,
        log: Log,
        *,
        token: bytes | None = None,
        limits: Limits | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.token = token
        self.run = settings.run
        self.addresses: tuple[str, ...] = ()
        self._settings = settings
        self._disk = log
        self._journal = journal
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}
        self._watched: dict[int, Connection] = {}
        self._next = 1
        self._batch: list[Record] = []
        self._dirty: list[Connection] = []
        self._held: list[Connection] = []
        self._synced = 0
        self._wanted = 0
        self._syncing = False
        self._flushing = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._sweeping: asyncio.TimerHandle | None = None
        self._shared: tuple[object, bytes] = (None, b"")
        self._listeners: list[Listener] = []
        self._servers: list[asyncio.Server] = []
        self._error: BaseException | None = None
        self._stopped = False

    # ---- from start to stop

    async def start(self, bind: Sequence[str]) -> None:
        """Bring the state back and listen. Fails: UsageError, CorruptError, StorageError."""
        began = monotonic()
        self._loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        ledger = self._disk.recover()
        records = ledger.number
        for cut in self._disk.cuts:
            self._tell(Cleaned(self._disk.folder, cut), cut)
        self._synced = self._disk.synced
        self._core = Coordinator(self._settings, ledger, service=secrets.token_hex(8), now=began)
        self._committer = Committer(self._disk, self._loop, done=self._on_synced, failed=self._fail)
        try:
            self._listeners = listen(bind, sealed=self.token is not None)
            self._carry_out(self._core.begin(now=monotonic()))
            self._flush()
            for listener in self._listeners:
                self._servers.append(await self._serve_at(listener))
        except BaseException:
            await self.stop("it could not start")
            raise
        self.addresses = tuple(listener.address for listener in self._listeners)
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)
        spent = monotonic() - began
        text = f"term {ledger.term} at {', '.join(self.addresses)}; {records} records in {spent:.3f} s"
        self._tell(CoordinatorStarted(os.getpid(), ledger.term, self.addresses, records, spent), text)

    async def _serve_at(self, listener: Listener) -> asyncio.Server:
        if listener.path:
            return await self._loop.create_unix_server(self._connection, sock=listener.sock)
        return await self._loop.create_server(self._connection, sock=listener.sock, backlog=4096)

    async def stop(self, reason: str = "asked to") -> None:
        """Stop listening, send what may be sent, and let go of everything. What was answered is durable."""
        for timer in (self._alarm, self._sweeping):
            if timer is not None:
                timer.cancel()
        for server in self._servers:
            server.close()
        for listener in self._listeners:
            listener.close()
        self._stopped = True
        self._committer.stop()
        self._settle()
        self._disk.close()
        for connection in list(self._connections.values()):
            # After an error, what waits to be sent may promise what is not in the log.
            if self._error is None:
                connection.end(reason)
                connection.flush()
        await asyncio.sleep(0)
        for connection in list(self._connections.values()):
            connection.drop(reason)
        await asyncio.sleep(0)
        self._tell(CoordinatorStopped(os.getpid(), reason), f"stopped: {reason}")

    def _settle(self) -> None:
        """Make everything durable and answer what that allows to answer."""
        try:
            if self._error is None:
                self._disk.append(self._batch)
                self._let_go(self._disk.sync())
                self._write_out()
        except HoldfastError as error:
            self._fail(error)

    def check(self) -> None:
        """Raise what made the server give up, if anything did."""
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """Give up: what is in memory is ahead of the log, so only a restart from the log is sound."""
        if self._error is None:
            self._error = error
            _log.error("cannot go on: %s", error)
        self.over.set()

    # ---- connections

    def _connection(self) -> Connection:
        self._next += 1
        return Connection(self, self._next)

    def admit(self, connection: Connection) -> bool:
        """Take a new connection on, unless there are too many. Of too many strangers, the oldest go."""
        if len(self._connections) >= self.limits.connections or self.over.is_set():
            return False
        self._connections[connection.number] = connection
        self._strangers[connection.number] = connection
        self._watched[connection.number] = connection
        if len(self._strangers) > self.limits.strangers:
            oldest = self._strangers.pop(next(iter(self._strangers)))
            # Its end is told in a later turn; until then it must not keep others out.
            del self._connections[oldest.number]
            oldest.drop("too many connections that did not introduce themselves")
        return True

    def introduced(self, connection: Connection, hello: Hello) -> None:
        self._strangers.pop(connection.number, None)
        self.step(Opened(connection.number, hello), monotonic())

    def lost(self, connection: Connection) -> None:
        known = self._connections.pop(connection.number, None)
        self._watched.pop(connection.number, None)
        if self._strangers.pop(connection.number, None) is None and known is not None:
            self.step(Closed(connection.number), monotonic())
        if connection.reason:
            _log.info("connection %d ended: %s", connection.number, connection.reason)

    def watch(self, connection: Connection) -> None:
        """Look at its deadlines from time to time."""
        self._watched[connection.number] = connection

    def later(self, connection: Connection) -> None:
        """Serve the rest of what it sent in the next turn."""
        self._loop.call_soon(connection.go_on)

    def _sweep(self) -> None:
        now = monotonic()
        for number, connection in list(self._watched.items()):
            problem = connection.overdue(now)
            if problem is None:
                del self._watched[number]
            elif problem:
                connection.drop(problem)
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    # ---- the core

    def step(self, event: Event, now: float) -> None:
        """Let the core deal with an event."""
        if self._error is not None or self._stopped:
            return
        try:
            effects = self._core.step(event, now=now)
        except Exception as error:
            # A mistake of ours. What is in memory can no longer be trusted; what is in the log can.
            _log.exception("the coordinator met a mistake of its own at %r", event)
            self._fail(error)
            return
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self._send(effect)  # type: ignore[arg-type]
            elif kind is Write:
                self._batch.append(effect.record)  # type: ignore[union-attr]
            elif isinstance(effect, Close):
                connection = self._connections.get(effect.conn)
                if connection is not None:
                    connection.end(effect.reason)
                    self._soil(connection)
            elif isinstance(effect, Note):
                self._tell(event_of(effect), effect.text)
        # Most arrivals at a barrier come to nothing yet, and need no end of a turn of their own.
        if not self._flushing and (effects or self._core.wake_at < self._alarm_at):
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _send(self, send: Send) -> None:
        number, answer, after, sync = send
        connection = self._connections.get(number)
        if connection is None:
            return
        waits = sync and after > self._synced
        if waits:
            self._wanted = max(self._wanted, after)
        if waits or connection.held:
            if not connection.held:
                self._held.append(connection)
            connection.held.append((after if sync else 0, answer))
            return
        self._put(connection, answer)

    def _put(self, connection: Connection, answer: Answer) -> None:
        """Encode into `out`. The body of a barrier or a push goes to many, one after the other."""
        body = answer.body
        if type(body) in _ALONE:
            out = connection.out
            at = len(out)
            out += b"\0\0\0\0"
            _encoder.encode_into(answer, out, at + 4)
            _LENGTH.pack_into(out, at, len(out) - at - 4)
            if not connection.dirty:
                self._soil(connection)
            return
        if body is self._shared[0]:
            encoded = self._shared[1]
        else:
            encoded = _encode(body)
            self._shared = (body, encoded)
        seq = _encode(answer.seq)
        size = 1 + len(seq) + len(encoded)
        # An Answer is an array of two.
        connection.out += b"%b\x92%b%b" % (size.to_bytes(4, "little"), seq, encoded)
        if not connection.dirty:
            self._soil(connection)

    def _soil(self, connection: Connection) -> None:
        if not connection.dirty:
            connection.dirty = True
            self._dirty.append(connection)

    # ---- the end of a turn

    def _flush(self) -> None:
        """Records first, then what may go out after them."""
        self._flushing = False
        if self._error is not None or self._stopped:
            return
        try:
            if self._batch:
                batch, self._batch = self._batch, []
                self._disk.append(batch)
                if self._disk.due():
                    self._committer.keep(self._disk.start_snapshot(self._core.ledger))
        except HoldfastError as error:
            self._fail(error)
            return
        self._write_out()
        if self._wanted > self._synced and not self._syncing:
            self._syncing = True
            self._committer.request()
        if self._core.wake_at < self._alarm_at:
            self._arm()

    def _write_out(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()

    def _on_synced(self, number: int) -> None:
        self._syncing = False
        self._let_go(number)
        self._flush()
        if self._syncing or self._error is not None or self._stopped:
            return
        try:
            self._disk.append([])  # nobody waits: note how far the disk is
        except HoldfastError as error:
            self._fail(error)

    def _let_go(self, number: int) -> None:
        """Release the answers that waited for the disk to have record `number`."""
        self._synced = number
        held, self._held = self._held, []
        for connection in held:
            queue = connection.held
            while queue and queue[0][0] <= number:
                self._put(connection, queue.popleft()[1])
            if queue:
                self._held.append(connection)
            elif connection.stage == ENDING:
                self._soil(connection)

    # ---- time

    def _arm(self) -> None:
        """Wake at the moment the core named. A timer that is too early only looks again."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = self._core.wake_at
        if self._alarm_at < math.inf:
            self._alarm = self._loop.call_later(max(0.0, self._alarm_at - monotonic()), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        now = monotonic()
        if self._core.wake_at <= now:
            self.step(Tick(), now)
        else:
            self._arm()

    def _tell(self, event: Any, text: str) -> None:
        _log.info("%s", text)
        if self._journal is not None and event is not None:
            self._journal.append(event)
