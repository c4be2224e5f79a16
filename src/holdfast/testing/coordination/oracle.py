"""What must hold after every event of a simulated coordinator, checked against its own account of what
happened.

The oracle sees each event before and each effect after the core; it knows which calls clients really made. It
keeps its own books of who lives, who sits where and which calls were answered, and raises `Violation` at the
first thing that does not fit.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, Final, final

from holdfast.coord import messages as m
from holdfast.coord import records as r
from holdfast.coord.kernel import Close, Closed, Effect, Event, Opened, Received, Send, Write
from holdfast.coord.ledger import Ledger, replay
from holdfast.testing.coordination.books import Books
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Record
from holdfast.testing.linearizability import Operation, Vanish


class Violation(AssertionError):
    """Something that must never happen has happened."""


_PRECISION_S: Final = 0.05
_CHANGES: Final = (m.Put, m.Swap, m.Add, m.Delete)
_SYNCED: Final = (r.KeySet, r.KeysGone, r.Formed, r.Replaced)


@final
class Oracle:
    """Watches one service through all its lives."""

    def __init__(self, service: Service, record: Record, *, every: int = 50) -> None:
        self._service = service
        self._record = record
        self._every = every
        self._steps = 0
        self.log: list[r.Record] = []
        """Every record of the history that stands, in order."""
        self.books = Books(service.settings)
        self.power_lost = False
        self._written = 0
        self._synced = 0
        self._conns: dict[int, str] = {}
        self._latest: dict[str, int] = {}
        """The connection of each incarnation that counts."""
        self._open: dict[tuple[int, int], float] = {}
        """Waits that the coordinator knows of, by connection and number: until when, on its clock."""
        self._deadlines: list[tuple[float, int, int]] = []
        self._closing: set[int] = set()
        """Connections that the core has given up and the edge may still have."""
        self._vanished: dict[int, tuple[str, float]] = {}
        self._forgiven_until = -math.inf

    # ---- the service's lives

    def stopped(self) -> None:
        self._conns.clear()
        self._open.clear()
        self._deadlines.clear()

    def began(self, ledger: Ledger) -> None:
        """A new process found `ledger` on the disk."""
        least = self._synced if self.power_lost else self._written
        if ledger.number < least:
            raise Violation(f"{ledger.number} records came back, but answers were given that rest on {least}")
        if ledger.number > len(self.log):
            raise Violation(f"{ledger.number} records came back, but only {len(self.log)} were written")
        del self.log[ledger.number :]
        if replay(self.log).snapshot() != ledger.snapshot():
            raise Violation("the state that came back is not what its records lead to")
        self._written = self._synced = ledger.number
        self.books = Books(self._service.settings)
        for number, record in enumerate(self.log, 1):
            self.books.take(number, record)
        for number in [number for number in self._vanished if number > ledger.number]:
            del self._vanished[number]
        # It was dead: what ran out meanwhile is answered when its client comes back.
        self._forgiven_until = -math.inf

    def forgive(self) -> None:
        """The process stood still; what ran out meanwhile is late by that."""
        self._forgiven_until = self._service.now + _PRECISION_S

    # ---- every event

    def stepped(self, event: Event | None, effects: list[Effect], now: float) -> None:
        if isinstance(event, Opened):
            self._conns[event.conn] = event.hello.incarnation
        elif isinstance(event, Received):
            self._received(event, now)
        elif isinstance(event, Closed):
            self._conns.pop(event.conn, None)
            self._forget(event.conn)
        self._check_deadlines(now)
        if isinstance(event, Received) and self._latest.get(self._conns[event.conn]) != event.conn:
            self._check_ignored(event, effects)
        for effect in effects:
            if isinstance(effect, Write):
                self._write(effect)
            elif isinstance(effect, Send):
                self._send(effect, now)
            elif isinstance(effect, Close):
                self._closing.add(effect.conn)
                self._forget(effect.conn)
        self._steps += 1
        if self._steps % self._every == 0:
            self.compare()
        if self._service.settings.rejoin and self._steps % 5 == 0:
            self._check_restarted()

    def _check_ignored(self, event: Received, effects: list[Effect]) -> None:
        """What comes on a connection that was replaced may be older than what was said since."""
        who = self._conns[event.conn]
        for effect in effects:
            answers = isinstance(effect, Send) and effect.answer.seq == event.call.seq
            if answers and self._conns.get(effect.conn) == who:  # type: ignore[union-attr]
                raise Violation(f"{event} came on an old connection and was done: {effect}")

    def _forget(self, conn: int) -> None:
        """Nobody waits on this connection any more."""
        for wait in [wait for wait in self._open if wait[0] == conn]:
            del self._open[wait]

    def _received(self, event: Received, now: float) -> None:
        incarnation, call = self._conns.get(event.conn), event.call
        if incarnation is None:
            raise Violation(f"{event} on a connection that nobody opened")
        timeout_s = getattr(call.op, "timeout_s", 0.0)
        if timeout_s > 0 and event.conn not in self._closing:
            until = now + timeout_s
            self._open[event.conn, call.seq] = until
            heapq.heappush(self._deadlines, (until, event.conn, call.seq))

    def _write(self, effect: Write) -> None:
        self.log.append(effect.record)
        if effect.number != len(self.log):
            raise Violation(f"{effect} has number {effect.number}, the one before it {len(self.log) - 1}")
        for problem in self.books.problems(effect.record, self._record.calls):
            raise Violation(f"record {effect.number} {effect.record}: {problem}")
        self.books.take(effect.number, effect.record)
        if isinstance(effect.record, r.Went):
            incarnation = self.books.incarnations[effect.record.sid]
            self._vanished[effect.number] = (incarnation, self._record.stamp())

    def _send(self, send: Send, now: float) -> None:
        seq, body = send.answer.seq, send.answer.body
        if isinstance(body, m.Welcome):
            self._latest[self._conns[send.conn]] = send.conn
        if seq == 0:
            return
        self._open.pop((send.conn, seq), None)
        incarnation = self._conns.get(send.conn, "")
        op = self._record.calls.get((incarnation, seq))
        if op is None:
            raise Violation(f"{send} answers a call that {incarnation!r} never made")
        shown = max((item.revision for item in body.items), default=0) if isinstance(body, m.Items) else 0
        if send.after < (body.revision if isinstance(body, m.Value) else shown):
            raise Violation(f"{send} shows what a crash may take back")
        sid = self.books.sids.get(incarnation, 0)
        answered = self.books.answers.get((sid, seq))
        if answered is not None:
            number, result = answered
            if result is not None and not isinstance(body, m.Refused) and body != result:
                raise Violation(f"{send} is another answer than record {number} gives: {result}")
            if send.after < number:
                raise Violation(f"{send} does not wait for record {number}, which it rests on")
            if (
                self._service.settings.sync_keys == "always"
                and not send.sync
                and isinstance(self.log[number - 1], _SYNCED)
            ):
                raise Violation(f"{send} does not wait for the disk, where record {number} must be")
        elif isinstance(body, m.Met) or (isinstance(op, _CHANGES) and _changed(body)):
            raise Violation(f"{send} says that {op} was done, and no record says so")

    def released(self, send: Send) -> None:
        """An answer left the building: what it rests on must be there after any crash."""
        self._written = max(self._written, send.after)
        if send.sync:
            self._synced = max(self._synced, send.after)

    def _check_deadlines(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] + _PRECISION_S < now:
            until, conn, seq = deadlines[0]
            if self._open.get((conn, seq)) == until and conn in self._conns:
                if now <= self._forgiven_until:
                    return
                who = self._conns[conn]
                raise Violation(
                    f"call {seq} of {who} ({self._record.calls.get((who, seq))}) waits "
                    f"{now - until:.3f} s longer than it may"
                )
            heapq.heappop(deadlines)

    # ---- now and then

    def _check_restarted(self) -> None:
        """A barrier never waits for members that were started again and are not in step yet."""
        core, books = self._service.core, self.books
        assert core is not None
        for wait in core.overview().waiting:
            excused = {slot for slot in books.restarted if books.seats[slot] not in books.over}
            if wait.kind == m.BARRIER and wait.present and set(wait.missing) <= excused:
                raise Violation(f"{wait} waits only for members that are out of sync")

    def compare(self) -> None:
        """The log and a snapshot both lead to the state that the core has."""
        core = self._service.core
        if core is None:
            return
        state = core.ledger.snapshot()
        if replay(self.log).snapshot() != state:
            raise Violation("replaying the records gives another state")
        if Ledger.restore(state).snapshot() != state:
            raise Violation("a snapshot does not give the state back")

    def history(self) -> list[Operation]:
        """The vanishing of dead incarnations, for the history of the keys."""
        return [
            Operation("coord", Vanish(incarnation), m.Done(), stamp, stamp)
            for incarnation, stamp in self._vanished.values()
        ]


def _changed(body: Any) -> bool:
    return (
        isinstance(body, m.Done)
        or (isinstance(body, m.Swapped) and body.done)
        or (isinstance(body, m.Count) and body.revision > 0)
    )
