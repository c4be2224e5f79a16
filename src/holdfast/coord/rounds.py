"""Registration: rounds in which clients ask to be in the next generation.

    no round --- a client joins ---> open --- membership.verdict says so ---> Formed, and no round

Each caller has its own deadline and withdraws alone. Whoever is not chosen becomes a standby: alive, not in
the generation, told when there is a chance to come in. With `rejoin`, a restarted member of a running
generation needs no round: it takes its slot back, out of sync until a barrier has all members together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, final

from holdfast.coord.desk import Desk
from holdfast.coord.ledger import Session
from holdfast.coord.membership import Candidate, compact, lanes_of, slots_of, usable, verdict
from holdfast.coord.messages import DEADLINE, FENCED, MISUSE, Call, Join, Rally, Refused
from holdfast.coord.records import Ended, Formed, Replaced

SUPERSEDED = "superseded by a newer incarnation"


@dataclass(slots=True)
class Pending:
    """A client that waits for the next generation."""

    session: Session
    seq: int
    acked: int
    slot: int
    since: float
    deadline: float
    spare: bool
    failed: bool


class Owner(Protocol):
    """What a round needs done by the whole coordinator."""

    def end(self, session: Session, reason: str, *, by: Session | None = None) -> None:
        """End a session; `by` is the one that takes its slot."""
        ...

    def formed(self, changed: bool) -> None:
        """A generation stands."""
        ...

    def replaced(self, slot: int) -> None:
        """A slot has a new holder in the same generation."""
        ...


@final
class Rounds:
    """Those who wait for the next generation."""

    def __init__(self, desk: Desk, owner: Owner) -> None:
        self._desk = desk
        self._owner = owner
        self._pending: dict[int, Pending] = {}
        self._asking: dict[int, Pending] = {}
        self._absent: set[int] = set()
        self._armed = False
        self._since = math.inf
        self._enough_since = math.inf
        self._rallied = False

    def idle(self) -> bool:
        return not self._pending

    def standbys(self) -> list[int]:
        """Clients that joined and are in no slot."""
        return [sid for sid, p in self._desk.present.items() if p.joined and p.session.slot < 0]

    # ---- calls

    def join(self, session: Session, call: Call, op: Join) -> None:
        desk = self._desk
        if op.slot >= desk.settings.max_size or op.slot < -1:
            message = f"there is no slot {op.slot}; they are 0 to {desk.settings.max_size - 1}"
            desk.refuse(session.sid, call.seq, MISUSE, message, "is max_size what it should be?")
            return
        newer = self._newer_claim(session, op.slot)
        if newer is not None:
            desk.refuse(session.sid, call.seq, FENCED, f"slot {op.slot}: {SUPERSEDED}")
            self._owner.end(session, SUPERSEDED)
            return
        desk.present[session.sid].joined = True
        self._unseat(session, op.slot)
        if call.seq in session.results:
            return  # those who were unseated were all that an earlier send of this call waited for
        pending = Pending(
            session,
            call.seq,
            call.acked,
            op.slot,
            desk.now,
            desk.deadline(op.timeout_s),
            op.standby,
            op.failed,
        )
        earlier = self._pending.get(session.sid)
        if earlier is not None:
            pending.since = earlier.since
            if self._asking.get(earlier.slot) is earlier:
                del self._asking[earlier.slot]
            if earlier.seq != call.seq:
                desk.refuse(session.sid, earlier.seq, MISUSE, "replaced by a later call to join")
        if not self._pending:
            self._since = desk.now
            self._absent = set(self._previous())
        self._pending[session.sid] = pending
        if op.slot >= 0:
            self._asking[op.slot] = pending
        self._absent.discard(session.sid)
        desk.present[session.sid].open[call.seq] = op
        desk.alarms.set("join", session.sid, pending.deadline)
        if self._stand_by(pending):
            return
        if self._may_form():
            self.evaluate()

    def _may_form(self) -> bool:
        """Whether one more caller can have changed the verdict: asking after each is quadratic."""
        count, settings = len(self._pending), self._desk.settings
        if count == 1 or self._desk.vacant:
            return True
        if not self._armed:
            return usable(count, settings) > 0
        return not self._absent or count >= usable(settings.max_size, settings)

    def _newer_claim(self, session: Session, slot: int) -> Session | None:
        """A younger session that holds or asks for the slot."""
        if slot < 0:
            return None
        claims = [self._asking[slot].session] if slot in self._asking else []
        seat = self._desk.ledger.seats.get(slot)
        if seat is not None and seat.sid and seat.asked == slot:
            claims.append(self._desk.ledger.sessions[seat.sid])
        return next((s for s in claims if s.sid > session.sid), None)

    def _unseat(self, session: Session, slot: int) -> None:
        """End the older sessions that asked for the slot: the newest incarnation wins.

        A member that asked for another slot, or any, is not a former life of this one, and stays.
        """
        if slot < 0 or session.slot == slot:
            return
        pending = self._asking.get(slot)
        if pending is not None and pending.session is not session:
            self._desk.refuse(pending.session.sid, pending.seq, FENCED, f"slot {slot}: {SUPERSEDED}")
            self._owner.end(pending.session, SUPERSEDED)
        seat = self._desk.ledger.seats.get(slot)
        if seat is not None and seat.sid not in (0, session.sid) and seat.asked == slot:
            self._owner.end(self._desk.ledger.sessions[seat.sid], SUPERSEDED, by=session)

    def _running(self) -> bool:
        return self._desk.ledger.generation > 0 and not self._desk.ledger.ending

    def _refill(self) -> None:
        """Give restarted members their slots in the running generation, where that is the rule."""
        desk = self._desk
        if not (desk.settings.rejoin and self._running()):
            return
        for pending in list(self._pending.values()):
            slot = pending.slot
            if slot < 0 and desk.vacant and not pending.spare:
                slot = min(desk.vacant)
            if slot in desk.vacant and pending.session.slot < 0 and desk.present[pending.session.sid].conn:
                self._take_back(pending, slot)

    def _take_back(self, pending: Pending, slot: int) -> None:
        desk, session = self._desk, pending.session
        number = desk.write(
            Replaced(slot, session.sid, pending.slot, ((session.sid, pending.seq, pending.acked),))
        )
        desk.vacant.discard(slot)
        answer = desk.ledger.joined(session)
        desk.answer(session.sid, pending.seq, answer, number, desk.sync_keys)
        self.withdraw(session.sid)
        desk.note("rejoined", f"{desk.name_of(session.sid)} took its slot back, out of sync", slot=slot)
        self._owner.replaced(slot)

    def _stand_by(self, pending: Pending) -> bool:
        """Send off a newcomer for whom a running generation has no place: it is told when there is one."""
        desk, ledger, settings = self._desk, self._desk.ledger, self._desk.settings
        session = pending.session
        if session.slot >= 0 or not self._running() or len(desk.vacant) == len(ledger.seats):
            return False
        full = len(ledger.seats) - len(desk.vacant) >= usable(settings.max_size, settings)
        returns = settings.rejoin and bool(desk.vacant)
        if not (pending.spare or full or (settings.shrink_only and not returns)):
            return False
        answer = ledger.joined(session)
        desk.answer(session.sid, pending.seq, answer, ledger.number, desk.sync_keys)
        self.withdraw(session.sid)
        return True

    # ---- what happens

    def withdraw(self, sid: int) -> None:
        """A client is gone, or its wait is over."""
        self._absent.discard(sid)
        pending = self._pending.pop(sid, None)
        if pending is None:
            return
        if self._asking.get(pending.slot) is pending:
            del self._asking[pending.slot]
        self._desk.alarms.clear("join", sid)
        if not self._pending:
            self._since = self._enough_since = math.inf
            self._rallied = self._armed = False
            self._desk.alarms.clear("round", 0)

    def due(self, sid: int) -> None:
        """A caller's deadline has come."""
        pending = self._pending[sid]
        message, names = self._missing(pending)
        hint = "look at the logs of those missing; is min_size what it should be?"
        self._desk.answer(sid, pending.seq, Refused(DEADLINE, message, hint, names))
        self.withdraw(sid)
        if self._pending and sid in self._previous():
            self._absent.add(sid)

    def _missing(self, caller: Pending) -> tuple[str, tuple[str, ...]]:
        ledger, settings = self._desk.ledger, self._desk.settings
        waited = self._desk.now - caller.since
        late = [slot for slot, seat in ledger.seats.items() if seat.sid and seat.sid not in self._pending]
        if late:
            who = f"slots {compact(late)} of generation {ledger.generation}"
            names = tuple(map(ledger.seat_name, sorted(late)))
        else:
            asked = {p.slot for p in self._pending.values()}
            absent = [slot for slot in range(settings.min_size) if slot not in asked]
            by_slot = any(slot >= 0 for slot in asked)
            who = f"slots {compact(absent)}" if by_slot and absent else f"{len(absent)} more"
            names = tuple(f"slot {slot}" for slot in absent) if by_slot else ()
        joined = f"{len(self._pending)} joined in {waited:.1f} s"
        return f"generation {ledger.generation + 1} did not form: {joined}; missing: {who}", names[:64]

    def end_generation(self, reason: str) -> None:
        """Say that the generation is over, and ask all to join again."""
        desk = self._desk
        if not desk.ledger.ending:
            desk.write(Ended(reason))
        self._rallied = True
        desk.push(
            [*desk.member_sids(), *self.standbys()],
            Rally(desk.ledger.generation, True, reason),
            desk.ledger.number,
        )

    def evaluate(self) -> None:
        """Form the next generation if it is time."""
        desk = self._desk
        self._refill()
        if not self._pending:
            return
        if not usable(len(self._pending), desk.settings) and (self._rallied or not desk.ledger.seats):
            # Too few, whoever they are: a crowd that comes one by one is not gone through for each of them.
            self._enough_since, self._armed = math.inf, False
            return
        previous = self._previous()
        here = [p for p in self._pending.values() if desk.present[p.session.sid].conn]
        candidates = [Candidate(p.session.sid, p.slot, p.since, p.spare) for p in here]
        able = [c for c in candidates if not (desk.settings.shrink_only and previous) or c.sid in previous]
        enough = usable(len(able), desk.settings) > 0
        self._enough_since = min(self._enough_since, desk.now) if enough else math.inf
        outsiders = sum(sid not in self._pending and desk.present[sid].conn != 0 for sid in self.standbys())
        found = verdict(
            desk.settings, candidates, previous, outsiders,
            since=self._since, enough_since=self._enough_since, now=desk.now,
            again=desk.ledger.generation > 0,
        )  # fmt: skip
        if found.chosen is not None:
            self._form(found.chosen, previous)
            return
        self._armed = found.wait_until < math.inf
        if self._armed:
            desk.alarms.set("round", 0, found.wait_until)
        if previous and not self._rallied and not desk.ledger.ending:
            self._rallied = True
            names = ", ".join(desk.name_of(sid) for sid in list(self._pending)[:4])
            desk.push(
                [sid for sid in previous if sid not in self._pending],
                Rally(desk.ledger.generation, False, f"{names} waits for the next generation"),
            )

    def _previous(self) -> dict[int, int]:
        """The members of the generation that are alive and have not finished, sid to slot."""
        ledger = self._desk.ledger
        return {
            seat.sid: slot
            for slot, seat in ledger.seats.items()
            if seat.sid and not ledger.sessions[seat.sid].parted
        }

    def _form(self, chosen: tuple[int, ...], previous: dict[int, int]) -> None:
        desk, ledger = self._desk, self._desk.ledger
        slots = slots_of(chosen, previous, {sid: p.slot for sid, p in self._pending.items()})
        before = {slot: seat.sid for slot, seat in ledger.seats.items()}
        had = {seat.sid: seat.lanes for seat in ledger.seats.values() if seat.sid}
        lanes = lanes_of(desk.settings.num_lanes, slots, had)
        failed = any(self._pending[sid].failed for sid in chosen)
        changed = slots != before or failed or bool(ledger.ending)
        generation = ledger.generation + changed
        waiting = list(self._pending.values())
        calls = tuple((p.session.sid, p.seq, p.acked) for p in waiting)
        asked = {seat.sid: seat.asked for seat in ledger.seats.values()}
        asked |= {sid: p.slot for sid, p in self._pending.items() if p.slot >= 0}
        members = tuple((slot, sid, lanes[slot], asked.get(sid, -1)) for slot, sid in slots.items())
        number = desk.write(Formed(generation, members, calls))
        desk.vacant.clear()
        for pending in waiting:
            answer = ledger.joined(pending.session)
            desk.answer(pending.session.sid, pending.seq, answer, number, desk.sync_keys)
            self.withdraw(pending.session.sid)
        if changed:
            desk.note(
                "formed",
                f"generation {generation}: {len(slots)} members",
                generation=generation,
                size=len(slots),
                standbys=len(waiting) - len(slots),
            )
            left_out = [sid for sid in previous if sid not in slots.values()]
            message = f"generation {generation} formed without this member"
            desk.push(left_out, Rally(generation, True, message), number)
        self._owner.formed(changed)
