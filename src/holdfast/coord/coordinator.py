"""The coordinator's core: a deterministic state machine.

    coordinator = Coordinator(settings, ledger, service="...", now=...)
    effects = coordinator.begin(now=...)           # once
    effects = coordinator.step(event, now=...)     # for every event, in order
    coordinator.wake_at                            # when to send a Tick, at the latest

What must survive the process is in the ledger and changes only by records; who is connected, who waits for
what and until when is kept here and comes back by itself, because clients send their open calls again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

from holdfast.coord import messages as m
from holdfast.coord.desk import Desk, Presence
from holdfast.coord.kernel import Close, Closed, Effect, Event, Opened, Received, Send
from holdfast.coord.keys import Keys
from holdfast.coord.ledger import Ledger, Session
from holdfast.coord.meetings import Meetings
from holdfast.coord.messages import (
    FENCED,
    LIMIT,
    OVER,
    Answer,
    Call,
    Done,
    Hello,
    Lost,
    Members,
    MemberState,
    Overview,
    Rally,
    Trouble,
    Welcome,
)
from holdfast.coord.records import Came, Said, Started, Went
from holdfast.coord.rounds import Rounds
from holdfast.coord.settings import Settings
from holdfast.coord.stops import Stops

_MAX_FRAME: Final = 8 << 20
_MAX_RESULTS: Final = 65_536
_MAX_TEXT: Final = 64 << 10


@final
class Coordinator:
    """Everything that is agreed on in one run."""

    def __init__(self, settings: Settings, ledger: Ledger | None = None, *, service: str, now: float) -> None:
        self.settings = settings
        self.ledger = ledger if ledger is not None else Ledger()
        self._service = service
        self._desk = Desk(settings, self.ledger, now)
        self._meetings = Meetings(self._desk)
        self._keys = Keys(self._desk)
        self._rounds = Rounds(self._desk, self)
        self._stops = Stops(self._desk)
        self._by_conn: dict[int, int] = {}
        self._due: dict[str, Callable[[Any], None]] = {
            "meet": self._meetings.due,
            "remind": self._meetings.remind,
            "get": lambda of: self._keys.due(*of),
            "join": self._rounds.due,
            "round": lambda of: self._rounds.evaluate(),
            "gone": self._gone,
            "pulse": lambda of: self._pulse(),
        }

    @property
    def wake_at(self) -> float:
        """When the next Tick is due; inf if there is nothing to wait for."""
        return self._desk.alarms.next_at()

    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        waits = any(p.open for p in self._desk.present.values())
        return not waits and self._meetings.idle() and self._keys.idle() and self._rounds.idle()

    def begin(self, *, now: float) -> list[Effect]:
        """Take over: a new term, and time for everybody to come back."""
        self._desk.now = now
        self._desk.write(Started(self.ledger.term + 1, self._service))
        for session in self.ledger.sessions.values():
            if session.over:
                continue
            member = session.slot >= 0
            present = self._desk.present[session.sid] = Presence(session, now, joined=member)
            self._await(present, self.settings.dead_s if member else self.settings.session_s)
        self._keep_pulse()
        return self._take()

    def step(self, event: Event, *, now: float) -> list[Effect]:
        """The effects of one event. Nothing outside is looked at or changed."""
        desk = self._desk
        if now >= desk.alarms.first:
            self._credit(now)
        desk.now = now
        if type(event) is Received:
            self._received(event.conn, event.call)
        elif type(event) is Opened:
            self._opened(event.conn, event.hello)
        elif type(event) is Closed:
            self._closed(event.conn)
        if now >= desk.alarms.first:
            while (alarm := desk.alarms.pop_due(now)) is not None:
                self._due[alarm[0]](alarm[1])
        return self._take()

    def _credit(self, now: float) -> None:
        """If this process itself was away, nobody's silence in that time is held against them."""
        late = now - self._desk.alarms.next_at()
        if late > self.settings.heartbeat_s:
            for present in self._desk.present.values():
                present.heard += late

    def _take(self) -> list[Effect]:
        effects, self._desk.effects = self._desk.effects, []
        return effects

    # ---- connections

    def _opened(self, conn: int, hello: Hello) -> None:
        desk, ledger = self._desk, self.ledger
        if hello.run != self.settings.run:
            message = f"this is the coordinator of run {self.settings.run!r}, not {hello.run!r}"
            desk.hang_up(conn, OVER, message, "is the address that of another run?")
            return
        session = ledger.sessions.get(hello.sid) or ledger.by_incarnation.get(hello.incarnation)
        if (session is None and hello.sid) or (session and session.incarnation != hello.incarnation):
            desk.hang_up(conn, FENCED, "this client is not known, or was forgotten", "start a new client")
            return
        if session is not None and session.over:
            desk.hang_up(conn, FENCED, f"this client is out: {session.over}", "start a new client")
            return
        fresh = session is None
        if session is None:
            if len(desk.present) >= self.settings.max_sessions:
                desk.hang_up(conn, LIMIT, f"there are {len(desk.present):,} clients already")
                return
            desk.write(Came(ledger.next_sid, hello.incarnation, hello.name[:256]))
            session = ledger.sessions[ledger.next_sid - 1]
            desk.present[session.sid] = Presence(session, desk.now)
        self._attach(conn, session)
        welcome = Welcome(
            session.sid, ledger.term, self._service, ledger.generation, fresh,
            self.settings.heartbeat_s, _MAX_FRAME,
        )  # fmt: skip
        desk.push([session.sid], welcome, ledger.number)
        for trouble in ledger.troubles:
            if trouble.number > hello.seen_error and not fresh:
                desk.push([session.sid], trouble, ledger.number)
        if not fresh:
            self._stops.greet(session.sid)
        if ledger.ending and session.slot >= 0:
            desk.push([session.sid], Rally(ledger.generation, True, ledger.ending), ledger.number)
        if not fresh:
            self._rounds.evaluate()  # it may be one of those who wait

    def _attach(self, conn: int, session: Session) -> None:
        """The newest connection of a session is the one that counts."""
        present = self._desk.present[session.sid]
        if present.conn:
            del self._by_conn[present.conn]
            self._desk.effects.append(Close(present.conn, "replaced by a newer connection"))
        self._drop_watches(present)  # the client asks for them again
        present.conn, present.heard, present.suspect = conn, self._desk.now, False
        self._by_conn[conn] = session.sid
        self._desk.alarms.clear("gone", session.sid)

    def _closed(self, conn: int) -> None:
        sid = self._by_conn.pop(conn, None)
        if sid is None:
            return
        present = self._desk.present[sid]
        present.conn = 0
        self._drop_watches(present)
        self._await(present, self.settings.reconnect_s if present.joined else self.settings.session_s)

    def _await(self, present: Presence, grace_s: float) -> None:
        """Give it time to come back, in two halves: one is left however long this process itself is away."""
        present.patience_s = grace_s / 2
        self._desk.alarms.set("gone", present.session.sid, self._desk.now + grace_s / 2)

    def _gone(self, sid: int) -> None:
        present = self._desk.present[sid]
        if present.patience_s:
            self._desk.alarms.set("gone", sid, self._desk.now + present.patience_s)
            present.patience_s = 0.0
            return
        reason = "its connection closed" if present.joined else "not heard of for too long"
        self.end(present.session, reason)

    def _drop_watches(self, present: Presence) -> None:
        for watch in list(present.watches):
            self._keys.drop_watch(present.session.sid, watch)

    # ---- heartbeats

    def _keep_pulse(self) -> None:
        if not self._desk.alarms.is_set("pulse", 0) and any(p.joined for p in self._desk.present.values()):
            self._desk.alarms.set("pulse", 0, self._desk.now + self.settings.heartbeat_s)

    def _pulse(self) -> None:
        """Look for members that have gone silent."""
        now, settings = self._desk.now, self.settings
        for present in list(self._desk.present.values()):
            silent = now - present.heard
            # One whose connection is closed has its own alarm.
            if silent < settings.suspect_s or not (present.joined and present.conn):
                continue
            if silent >= settings.dead_s:
                self.end(present.session, f"silent for {silent:.1f} s")
            elif not present.suspect:
                present.suspect = True
                name = self._desk.name_of(present.session.sid)
                self._desk.note("suspect", f"{name} is silent for {silent:.1f} s", slot=present.session.slot)
        self._keep_pulse()

    # ---- calls

    def _received(self, conn: int, call: Call) -> None:
        desk = self._desk
        sid = self._by_conn.get(conn)
        if sid is None:
            return  # of a connection that has been replaced
        present = desk.present[sid]
        present.heard = desk.now
        present.suspect = False
        session = present.session
        known = session.results.get(call.seq)
        if known is not None:
            # It was carried out, and its answer may have been lost.
            desk.effects.append(Send(conn, Answer(call.seq, known), self.ledger.number, True))
            return
        if call.seq <= session.acked and not isinstance(call.op, m.Watch):
            return  # an echo: the client has no such call open
        if len(session.results) >= _MAX_RESULTS:
            message = (
                f"{len(session.results):,} answers are kept for this client, which has an older call open"
            )
            desk.refuse(sid, call.seq, LIMIT, message, "give long waits a client of their own")
            return
        if len(present.open) >= self.settings.max_open_calls:
            desk.refuse(sid, call.seq, LIMIT, f"{len(present.open):,} calls of this client wait already")
            return
        _CALLS[type(call.op)](self, session, call, call.op)

    def _join(self, session: Session, call: Call, op: m.Join) -> None:
        self._rounds.join(session, call, op)
        self._keep_pulse()

    def _beat(self, session: Session, call: Call, op: m.Beat) -> None:
        present = self._desk.present[session.sid]
        present.step, present.phase = op.step, op.phase[:64]
        if op.joined and not present.joined:  # a standby is known again after a restart
            present.joined = True
            self._keep_pulse()
        self._desk.answer(session.sid, call.seq, Done(self.ledger.generation))

    def _leave(self, session: Session, call: Call, op: m.Leave) -> None:
        reason = f"left: {op.reason[:1000]}" if op.reason else "left"
        self.end(session, reason, call=call)

    def _bury(self, session: Session, call: Call, op: m.Bury) -> None:
        found = self.ledger.by_incarnation.get(op.incarnation)
        if found is session:
            self._leave(session, call, m.Leave(op.reason))
            return
        if found is not None and not found.over:
            self.end(found, op.reason[:1000])
        self._desk.answer(session.sid, call.seq, Done(), self.ledger.number, self._desk.sync_keys)

    def _bye(self, session: Session, call: Call, op: m.Bye) -> None:
        self.end(session, "closed its client", call=call)

    def _report(self, session: Session, call: Call, op: m.Report) -> None:
        desk = self._desk
        last = self.ledger.troubles[-1].number if self.ledger.troubles else 0
        name = session.name or session.incarnation
        calls = ((session.sid, call.seq, call.acked),)
        trouble = Trouble(last + 1, session.slot, name, op.message[:_MAX_TEXT])
        number = desk.write(Said(trouble.number, trouble.slot, name, trouble.message, calls))
        desk.answer(session.sid, call.seq, Done(number), number)
        others = [sid for sid in (*desk.member_sids(), *self._rounds.standbys()) if sid != session.sid]
        desk.push(others, trouble, number)
        desk.note("trouble", f"{desk.name_of(session.sid)} reports: {trouble.message[:1000]}")

    def _roster(self, session: Session, call: Call, op: m.Roster) -> None:
        members = Members(self.ledger.generation, self.ledger.members())
        self._desk.answer(session.sid, call.seq, members, self.ledger.number, self._desk.sync_keys)

    def _status(self, session: Session, call: Call, op: m.Status) -> None:
        self._desk.answer(session.sid, call.seq, self.overview())

    def overview(self) -> Overview:
        """How things stand, for people."""
        desk, ledger = self._desk, self.ledger
        return Overview(
            run=self.settings.run,
            term=ledger.term,
            service=self._service,
            generation=ledger.generation,
            forming=not self._rounds.idle() or bool(ledger.ending),
            finished=ledger.finished,
            members=tuple(self._member_state(slot) for slot in sorted(ledger.seats)),
            standbys=tuple(desk.name_of(sid) for sid in self._rounds.standbys()),
            waiting=self._meetings.waiting(),
            keys=len(ledger.keys),
            key_bytes=ledger.key_bytes,
            sessions=len(desk.present),
            watches=self._keys.num_watches,
            records=ledger.number,
            stop=ledger.stop,
        )

    def _member_state(self, slot: int) -> MemberState:
        seat = self.ledger.seats[slot]
        present = self._desk.present.get(seat.sid)
        session = self.ledger.sessions.get(seat.sid or seat.last)
        incarnation, name = (session.incarnation, session.name) if session else ("", "")
        unsynced = slot in self.ledger.out_of_sync
        if present is None:
            return MemberState(slot, incarnation, name, "vacant", -1, "", 0.0, unsynced)
        silent = self._desk.now - present.heard
        state = (
            "done"
            if present.session.parted
            else "suspect"
            if present.suspect or not present.conn
            else "alive"
        )
        return MemberState(slot, incarnation, name, state, present.step, present.phase, silent, unsynced)

    # ---- ends and beginnings

    def end(
        self, session: Session, reason: str, *, by: Session | None = None, call: Call | None = None
    ) -> None:
        """End a session: its keys vanish, its slot is vacant, whoever waits for it is told."""
        desk, ledger = self._desk, self.ledger
        sid, slot = session.sid, session.slot
        member = slot >= 0 and ledger.seats[slot].sid == sid
        taken = by is not None and self.settings.rejoin and not ledger.ending
        lost = member and not session.parted
        ends = lost and not self.settings.rejoin and not ledger.ending
        name = desk.name_of(sid)
        keys = list(session.keys)
        calls = ((sid, call.seq, call.acked),) if call is not None else ()
        number = desk.write(Went(sid, reason, ends, calls))
        if call is not None:
            desk.answer(sid, call.seq, Done(number), number, self._desk.sync_keys)
        self._detach(session, reason, quietly=call is not None)
        self._keys.vanished(keys, number)
        if member:
            desk.vacant.add(slot)
            if taken:
                self._meetings.replaced(slot)
            else:
                self._meetings.died(slot, reason)
        if lost:
            desk.note("lost", f"{name}: {reason}", slot=slot, reason=reason, incarnation=session.incarnation)
            if ends or self.settings.rejoin:
                # Once a generation is over its members know; telling each of every further one is quadratic.
                desk.push(desk.member_sids(), Lost(slot, session.incarnation, session.name, reason), number)
            self._stops.check()
        if ends:
            self._rounds.end_generation(f"{name}: {reason}")
        self._rounds.evaluate()

    def _detach(self, session: Session, reason: str, *, quietly: bool) -> None:
        """Forget who is gone, and tell it if it is still there."""
        present = self._desk.present[session.sid]
        self._drop_watches(present)
        for seq, op in present.open.items():
            if isinstance(op, m.Get):
                self._keys.forget(session.sid, seq, op.key)
        self._rounds.withdraw(session.sid)
        self._desk.alarms.clear("gone", session.sid)
        del self._desk.present[session.sid]
        if present.conn:
            del self._by_conn[present.conn]
            if quietly:
                self._desk.effects.append(Close(present.conn, reason))
            else:
                self._desk.hang_up(
                    present.conn, FENCED, f"this client is out: {reason}", "start a new client"
                )

    def formed(self, changed: bool) -> None:
        """A generation stands: the epochs of the one before it are over."""
        if changed:
            self._meetings.formed()
        for sid in self._desk.member_sids():
            self._stops.greet(sid)
        self._stops.check()

    def replaced(self, slot: int) -> None:
        """A slot has a new holder: it is told of what stands, and barriers may pass without it."""
        self._meetings.replaced(slot)
        self._stops.greet(self.ledger.seats[slot].sid)


_CALLS: Final[dict[type, Callable[[Coordinator, Session, Call, Any], None]]] = {
    m.Join: Coordinator._join,
    m.Leave: Coordinator._leave,
    m.Beat: Coordinator._beat,
    m.Bury: Coordinator._bury,
    m.Meet: lambda self, session, call, op: self._meetings.meet(session, call, op),
    m.Cancel: lambda self, session, call, op: self._meetings.cancel(session, call, op),
    m.Put: lambda self, session, call, op: self._keys.put(session, call, op),
    m.Swap: lambda self, session, call, op: self._keys.swap(session, call, op),
    m.Get: lambda self, session, call, op: self._keys.get(session, call, op),
    m.Scan: lambda self, session, call, op: self._keys.scan(session, call, op),
    m.Delete: lambda self, session, call, op: self._keys.delete(session, call, op),
    m.Add: lambda self, session, call, op: self._keys.add(session, call, op),
    m.Watch: lambda self, session, call, op: self._keys.watch(session, call, op),
    m.Unwatch: lambda self, session, call, op: self._keys.unwatch(session, call, op),
    m.Report: Coordinator._report,
    m.Preempt: lambda self, session, call, op: self._stops.preempt(session, call, op),
    m.At: lambda self, session, call, op: self._stops.at(session, call, op),
    m.Status: Coordinator._status,
    m.Bye: Coordinator._bye,
    m.Roster: Coordinator._roster,
}
