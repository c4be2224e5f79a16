"""Barriers, votes, live sets and the completion of a run: one machine for all that wait for each other.

An *epoch* is one instance of waiting under a (kind, name). Its participants are fixed by its first caller; it
has exactly one outcome, and each participant gets it exactly once:

    open --- everybody that counts is there ------------------> Met
         --- a participant died, cancel, a deadline ran out --> Refused; of a vote, Met(ok=False)
         --- the next generation formed ----------------------> Refused(stale)

Whoever had not come when an epoch failed is *owed* the failure: its next call under that name gets it at
once, and the one after that goes to the next epoch, where the others are. So callers that retry stay in
phase.

    kind      counts as there                          death of a participant
    barrier   arrived, or out of sync (`rejoin`)       fails the epoch, naming it
    vote      arrived                                  decides against, unless its ballot is in
    live      arrived, or dead                         takes it out
    finish    arrived, or dead                         takes it out; a deadline is its waiter's own
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

from holdfast.coord.desk import Desk
from holdfast.coord.ledger import Meeting, Session
from holdfast.coord.membership import compact
from holdfast.coord.messages import (
    BARRIER,
    DEADLINE,
    FAILED,
    FINISH,
    KINDS,
    LIMIT,
    LIVE,
    MISUSE,
    STALE,
    VOTE,
    Call,
    Cancel,
    Done,
    Meet,
    Met,
    Patience,
    Refused,
    Waiting,
)
from holdfast.coord.records import Parted, Settled, Told

_NAMED: Final = 16
"""How many of the missing are named; the rest are counted."""


@dataclass(slots=True)
class Arrival:
    """A participant that waits. `seq` is 0 once its own deadline has been answered (completions only)."""

    sid: int
    seq: int
    acked: int
    deadline: float
    ok: bool
    note: bytes


@dataclass(slots=True)
class Epoch:
    meeting: Meeting
    number: int
    slots: tuple[int, ...]
    since: float
    earliest: float = math.inf
    arrived: dict[int, Arrival] = field(default_factory=dict)

    def pending(self) -> list[int]:
        return [slot for slot in self.slots if slot not in self.arrived]


@final
class Meetings:
    """All open epochs."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open: dict[Meeting, Epoch] = {}
        self._number = desk.ledger.epoch

    def idle(self) -> bool:
        return not self._open

    def waiting(self) -> tuple[Waiting, ...]:
        """The open epochs, for people."""
        return tuple(
            Waiting(
                *e.meeting, e.number, tuple(sorted(e.arrived)), tuple(e.pending()), self._desk.now - e.since
            )
            for e in self._open.values()
        )

    # ---- calls

    def meet(self, session: Session, call: Call, op: Meet) -> None:
        sid, seq = session.sid, call.seq
        slots = self._participants(session, call, op)
        if isinstance(slots, Refused):
            self._desk.answer(sid, seq, slots)
            return
        meeting = (op.kind, op.name)
        if self._told(session, call, meeting):
            return
        epoch = self._open.get(meeting)
        if epoch is None:
            if self._hopeless(session, call, op, slots):
                return
            self._number += 1
            epoch = self._open[meeting] = Epoch(meeting, self._number, slots, self._desk.now)
            self._desk.alarms.set("remind", meeting, self._desk.now + self._desk.settings.remind_s)
        elif epoch.slots is not slots and epoch.slots != slots:
            self._desk.refuse(
                sid,
                seq,
                MISUSE,
                f"{op.kind} {op.name!r} is open for slots {compact(epoch.slots)}, not {compact(slots)}",
                "all callers of an epoch must name the same slots; use another name for another group",
            )
            return
        self._arrive(epoch, session, call, op)

    def _participants(self, session: Session, call: Call, op: Meet) -> tuple[int, ...] | Refused:
        ledger = self._desk.ledger
        if session.slot < 0:
            if call.generation:
                return stale(call.generation, ledger.generation)
            return Refused(MISUSE, f"{op.kind} {op.name!r}: this client has not joined", "call join() first")
        if call.generation != ledger.generation:
            return stale(call.generation, ledger.generation)
        if op.kind not in KINDS or not op.name or len(op.name) > self._desk.settings.max_key_bytes:
            return Refused(MISUSE, f"{op.kind!r} {op.name[:80]!r} is no kind and name that can be waited for")
        if len(op.note) > self._desk.settings.max_value_bytes:
            return Refused(LIMIT, f"a ballot of {len(op.note):,} bytes is too large")
        if op.slots is None:
            return ledger.slots
        slots = tuple(sorted(set(op.slots)))
        strangers = [slot for slot in slots if slot not in ledger.seats]
        if strangers:
            return Refused(MISUSE, f"{op.kind} {op.name!r}: there is no slot {compact(strangers)}")
        if session.slot not in slots:
            return Refused(
                MISUSE, f"{op.kind} {op.name!r}: slot {session.slot} is not one of {compact(slots)}"
            )
        return slots

    def _told(self, session: Session, call: Call, meeting: Meeting) -> bool:
        """Whether the caller was owed the result of an epoch it missed, and now has it."""
        for owed in self._desk.ledger.owed.get(meeting, ()):
            if session.sid in owed.sids:
                result = owed.result
                record = Told(*meeting, owed.epoch, ((session.sid, call.seq, call.acked),))
                number = self._desk.write(record)
                self._desk.answer(session.sid, call.seq, result, number, self._sync(meeting[0]))
                return True
        return False

    def _hopeless(self, session: Session, call: Call, op: Meet, slots: tuple[int, ...]) -> bool:
        """Whether an epoch need not be opened, since somebody in it is dead and will not come back."""
        desk = self._desk
        if len(desk.ledger.owed) + len(self._open) >= desk.settings.max_names:
            desk.refuse(session.sid, call.seq, LIMIT, f"{len(self._open)} barriers are open, too many")
            return True
        gone = [slot for slot in slots if slot in desk.vacant]
        if not gone or desk.settings.rejoin or op.kind not in (BARRIER, VOTE):
            return False
        self._number += 1
        epoch = Epoch((op.kind, op.name), self._number, slots, desk.now)
        epoch.arrived[session.slot] = Arrival(session.sid, call.seq, call.acked, desk.now, op.ok, op.note)
        self._fail(epoch, FAILED, f"{self._names(gone)} is dead", gone, owe=False)
        return True

    def _arrive(self, epoch: Epoch, session: Session, call: Call, op: Meet) -> None:
        desk = self._desk
        earlier = epoch.arrived.get(session.slot)
        if earlier is not None and earlier.seq not in (0, call.seq):
            desk.refuse(
                earlier.sid, earlier.seq, MISUSE, f"replaced by a later call to {op.kind} {op.name!r}"
            )
        deadline = desk.deadline(op.timeout_s)
        desk.present[session.sid].open[call.seq] = op
        epoch.arrived[session.slot] = Arrival(session.sid, call.seq, call.acked, deadline, op.ok, op.note)
        if op.kind == FINISH and not session.parted:
            desk.write(Parted(session.sid))
        if not self._check(epoch) and deadline < epoch.earliest:
            epoch.earliest = deadline
            desk.alarms.set("meet", epoch.meeting, deadline)

    def cancel(self, session: Session, call: Call, op: Cancel) -> None:
        epoch = self._open.get((BARRIER, op.name))
        if session.slot < 0 or call.generation != self._desk.ledger.generation:
            self._desk.answer(session.sid, call.seq, stale(call.generation, self._desk.ledger.generation))
            return
        if epoch is not None:
            why = f": {op.reason}" if op.reason else ""
            self._fail(epoch, FAILED, f"cancelled by {self._names([session.slot])}{why}", [])
        self._desk.answer(session.sid, call.seq, Done())

    # ---- what happens to members

    def died(self, slot: int, reason: str) -> None:
        """A member is dead; its slot is vacant."""
        for epoch in list(self._open.values()):
            if slot not in epoch.slots:
                continue
            kind = epoch.meeting[0]
            if kind == BARRIER or (kind == VOTE and slot not in epoch.arrived):
                self._fail(epoch, FAILED, f"{self._names([slot])} died: {reason}", [slot])
                continue
            if kind == LIVE:
                epoch.arrived.pop(slot, None)
            self._check_or_drop(epoch)

    def replaced(self, slot: int) -> None:
        """A restarted member took its slot back: it is not where the others are. Ballots stay."""
        for epoch in list(self._open.values()):
            if slot in epoch.slots and epoch.meeting[0] != VOTE:
                epoch.arrived.pop(slot, None)
                self._check_or_drop(epoch)

    def _check_or_drop(self, epoch: Epoch) -> None:
        if not epoch.arrived:
            self._drop(epoch)
        else:
            self._check(epoch)

    def formed(self) -> None:
        """A new generation: nobody will come to the epochs of the old one."""
        for epoch in list(self._open.values()):
            self._settle(epoch, Refused(STALE, f"generation {self._desk.ledger.generation} has formed"), ())

    # ---- time

    def due(self, meeting: Meeting) -> None:
        """A waiter's deadline has come."""
        epoch = self._open.get(meeting)
        if epoch is None:
            return
        now = self._desk.now
        late = [a for a in epoch.arrived.values() if a.seq and a.deadline <= now]
        if not late:
            self._set_alarm(epoch)
            return
        missing = epoch.pending()
        text = self._shortfall(epoch, missing)
        if meeting[0] != FINISH:
            self._fail(epoch, DEADLINE, text, missing)
            return
        for arrival in late:
            refused = Refused(DEADLINE, f"{FINISH} {meeting[1]!r}: {text}", _HINT, self._listed(missing))
            self._desk.answer(arrival.sid, arrival.seq, refused)
            arrival.seq = 0
        self._set_alarm(epoch)

    def remind(self, meeting: Meeting) -> None:
        """Tell those who wait for whom."""
        epoch = self._open.get(meeting)
        if epoch is None:
            return
        desk = self._desk
        names = self._listed(epoch.pending())
        for arrival in epoch.arrived.values():
            if arrival.seq:
                desk.push([arrival.sid], Patience(arrival.seq, desk.now - epoch.since, names))
        desk.note("waiting", self._shortfall(epoch, epoch.pending()), name=meeting[1])
        desk.alarms.set("remind", meeting, desk.now + desk.settings.remind_s)

    def _set_alarm(self, epoch: Epoch) -> None:
        epoch.earliest = min((a.deadline for a in epoch.arrived.values() if a.seq), default=math.inf)
        if epoch.earliest < math.inf:
            self._desk.alarms.set("meet", epoch.meeting, epoch.earliest)

    # ---- outcomes

    def _check(self, epoch: Epoch) -> bool:
        """Settle an epoch in which everybody that counts is there."""
        missing = len(epoch.slots) - len(epoch.arrived)
        kind, ledger, vacant = epoch.meeting[0], self._desk.ledger, self._desk.vacant
        if missing:
            excused = ledger.out_of_sync - vacant if kind == BARRIER else vacant if kind != VOTE else set()
            if missing > len(excused) or not epoch.arrived or not excused.issuperset(epoch.pending()):
                return False
        absent = tuple(epoch.pending()) if missing else ()
        together = epoch.slots if kind == BARRIER and not missing and ledger.out_of_sync else ()
        self._settle(epoch, self._met(epoch, absent), (), together)
        return True

    def _met(self, epoch: Epoch, absent: tuple[int, ...]) -> Met:
        kind = epoch.meeting[0]
        if kind == VOTE:
            against = sorted(slot for slot, a in epoch.arrived.items() if not a.ok)
            reason = f"{self._names(against)} voted against" if against else ""
            notes = tuple((slot, a.note) for slot, a in sorted(epoch.arrived.items()) if a.note)
            return Met(epoch.number, absent, not against, reason, notes)
        if kind == LIVE:
            sessions = self._desk.ledger.sessions
            live = tuple((slot, sessions[a.sid].incarnation) for slot, a in sorted(epoch.arrived.items()))
            return Met(epoch.number, absent, live=live)
        return Met(epoch.number, absent)

    def _fail(self, epoch: Epoch, code: str, text: str, blame: Iterable[int], *, owe: bool = True) -> None:
        """One outcome for those who wait and those who are still to come."""
        kind, name = epoch.meeting
        if kind == VOTE:
            result: Met | Refused = Met(epoch.number, tuple(epoch.pending()), False, text)
        else:
            result = Refused(code, f"{kind} {name!r}: {text}", _HINT, self._listed(blame))
        seats = self._desk.ledger.seats
        owed = tuple(sid for slot in epoch.pending() if (sid := seats[slot].sid)) if owe else ()
        self._desk.note("failed", f"{kind} {name!r}: {text}", name=name, epoch=epoch.number)
        self._settle(epoch, result, owed)

    def _settle(
        self, epoch: Epoch, result: Met | Refused, owed: tuple[int, ...], together: tuple[int, ...] = ()
    ) -> None:
        self._drop(epoch)
        waiting = [a for a in epoch.arrived.values() if a.seq and a.sid in self._desk.present]
        calls = tuple((a.sid, a.seq, a.acked) for a in waiting)
        kind, name = epoch.meeting
        number = self._desk.write(Settled(kind, name, epoch.number, result, calls, owed, together))
        sync = self._sync(kind)
        for arrival in waiting:
            self._desk.answer(arrival.sid, arrival.seq, result, number, sync)

    def _drop(self, epoch: Epoch) -> None:
        self._open.pop(epoch.meeting, None)
        self._desk.alarms.clear("meet", epoch.meeting)
        self._desk.alarms.clear("remind", epoch.meeting)

    def _sync(self, kind: str) -> bool:
        return self._desk.sync_keys if kind == VOTE else self._desk.sync_barriers

    # ---- words

    def _shortfall(self, epoch: Epoch, missing: list[int]) -> str:
        there, all_, waited = len(epoch.arrived), len(epoch.slots), self._desk.now - epoch.since
        return f"{there} of {all_} came in {waited:.1f} s; missing: {self._names(missing)}"

    def _names(self, slots: Iterable[int]) -> str:
        """Slots for people: the first few by name, all of them by number."""
        listed = sorted(set(slots))
        if len(listed) > 4:
            return f"slots {compact(listed)}"
        return ", ".join(map(self._desk.ledger.seat_name, listed)) or "nobody"

    def _listed(self, slots: Iterable[int]) -> tuple[str, ...]:
        listed = sorted(set(slots))
        names = [self._desk.ledger.seat_name(slot) for slot in listed[:_NAMED]]
        return (*names, *([f"and {len(listed) - _NAMED} more"] if len(listed) > _NAMED else []))


_HINT: Final = "look at the logs of those named: did they crash, hang or go another way?"


def stale(theirs: int, current: int) -> Refused:
    """The refusal of a call that belongs to another generation."""
    if theirs == current:
        return Refused(STALE, f"this client is not in generation {current}", "call join() to take part again")
    return Refused(
        STALE, f"the call belongs to generation {theirs}; this is {current}", "call join() to take part again"
    )
