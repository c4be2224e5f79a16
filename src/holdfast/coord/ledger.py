"""What the coordinator must still know after its own death.

`apply` is the only way in which it changes, and it depends on nothing but the record; so the state after a
restart is the state before it, and a test compares the two after every event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, final

import msgspec
from msgspec import Struct

from holdfast.coord import records as r
from holdfast.coord.messages import (
    FINISH,
    STOP_ANNOUNCED,
    STOP_OVER,
    Count,
    Done,
    Joined,
    MemberInfo,
    Met,
    Refused,
    Result,
    Stop,
    Swapped,
    Trouble,
)
from holdfast.errors import FormatError

_TOMBS: Final = 4096
"""Sessions that are over and still remembered, so that their calls get a reason."""
_TROUBLES: Final = 64
"""Error reports that a client which was away still gets."""

Meeting = tuple[str, str]
"""Kind and name of a barrier, vote, live set or completion."""


@dataclass(slots=True)
class Session:
    """One life of one client. `over` says why it is, if it is."""

    sid: int
    incarnation: str
    name: str
    slot: int = -1
    parted: bool = False
    over: str = ""
    acked: int = 0
    results: dict[int, Result] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Entry:
    """A key's value, the record that set it, and the session it belongs to (0: none)."""

    value: bytes
    revision: int
    owner: int


@dataclass(slots=True)
class Owed:
    """A result that some members have not had yet."""

    epoch: int
    result: Met | Refused
    sids: set[int]


@dataclass(slots=True)
class Seat:
    """A slot of the generation. `sid` is 0 while it is vacant; `asked` is the slot its holder asked for."""

    sid: int
    lanes: tuple[int, ...]
    last: int
    asked: int


class _SessionState(Struct, frozen=True, array_like=True):
    sid: int
    incarnation: str
    name: str
    slot: int
    parted: bool
    over: str
    acked: int
    results: dict[int, Result]


class _LedgerState(Struct, frozen=True, array_like=True):
    version: int
    number: int
    term: int
    service: str
    next_sid: int
    epoch: int
    generation: int
    ending: str
    finished: bool
    seats: dict[int, tuple[int, tuple[int, ...], int, int]]
    out_of_sync: list[int]
    sessions: list[_SessionState]
    tombs: list[int]
    keys: list[tuple[str, bytes, int, int]]
    owed: list[tuple[str, str, int, Met | Refused, list[int]]]
    stop: Stop | None
    stop_by: int
    troubles: list[Trouble]


_VERSION: Final = 1
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_LedgerState)


@final
class Ledger:
    """The durable part of a coordinator's state."""

    def __init__(self) -> None:
        self.number = 0
        self.term = 0
        self.service = ""
        self.next_sid = 1
        self.epoch = 0
        self.generation = 0
        self.ending = ""
        self.finished = False
        self.seats: dict[int, Seat] = {}
        self.slots: tuple[int, ...] = ()
        self.out_of_sync: set[int] = set()
        self.sessions: dict[int, Session] = {}
        self.by_incarnation: dict[str, Session] = {}
        self.tombs: deque[int] = deque()
        self.keys: dict[str, Entry] = {}
        self.key_bytes = 0
        self.owed: dict[Meeting, list[Owed]] = {}
        self.stop: Stop | None = None
        self.stop_by = 0
        self.troubles: deque[Trouble] = deque(maxlen=_TROUBLES)
        self._members: tuple[MemberInfo, ...] | None = None

    # ---- reading

    def members(self) -> tuple[MemberInfo, ...]:
        """The members of the generation, by slot; those whose slot is vacant now included no more."""
        if self._members is None:
            self._members = tuple(
                MemberInfo(slot, found.incarnation, found.name, seat.lanes)
                for slot, seat in sorted(self.seats.items())
                if (found := self.sessions.get(seat.sid)) is not None
            )
        return self._members

    def joined(self, session: Session) -> Joined:
        """What a member, or a standby, is told of the generation."""
        seat = self.seats.get(session.slot)
        return Joined(self.generation, session.slot, len(self.seats), seat.lanes if seat else ())

    def seat_name(self, slot: int) -> str:
        """A slot for people: its number, and the name of who holds or held it."""
        seat = self.seats.get(slot)
        session = self.sessions.get(seat.sid or seat.last) if seat else None
        return f"slot {slot}" if session is None or not session.name else f"slot {slot} ({session.name})"

    # ---- changing

    def apply(self, record: r.Record) -> int:
        """Change the state by one record; returns the record's number."""
        self.number += 1
        _APPLY[type(record)](self, record)
        return self.number

    def _answer(self, calls: Iterable[r.CallId], result: Result) -> None:
        for sid, seq, acked in calls:
            session = self.sessions.get(sid)
            if session is None:
                continue
            self._trim(session, acked)
            if seq > session.acked:
                session.results[seq] = result

    @staticmethod
    def _trim(session: Session, acked: int) -> None:
        """Forget the results that the client has had."""
        if acked > session.acked:
            session.acked = acked
            if session.results:
                for seq in [seq for seq in session.results if seq <= acked]:
                    del session.results[seq]

    def _started(self, record: r.Started) -> None:
        self.term, self.service = record.term, record.service

    def _came(self, record: r.Came) -> None:
        session = Session(record.sid, record.incarnation, record.name)
        self.sessions[record.sid] = session
        self.by_incarnation[record.incarnation] = session
        self.next_sid = record.sid + 1

    def _went(self, record: r.Went) -> None:
        session = self.sessions[record.sid]
        session.over = record.reason
        session.results.clear()
        self._answer(record.calls, Done(self.number))
        for key in session.keys:
            self.key_bytes -= len(key) + len(self.keys.pop(key).value)
        session.keys.clear()
        if session.slot >= 0:
            seat = self.seats[session.slot]
            if seat.sid == session.sid:
                seat.sid = 0
            self._members = None
        if record.ends:
            self.ending = record.reason
        for meeting in list(self.owed):
            for owed in self.owed[meeting]:
                owed.sids.discard(session.sid)
            self._free(meeting)
        self.tombs.append(record.sid)
        while len(self.tombs) > _TOMBS:
            old = self.sessions.pop(self.tombs.popleft())
            if self.by_incarnation.get(old.incarnation) is old:
                del self.by_incarnation[old.incarnation]

    def _formed(self, record: r.Formed) -> None:
        if record.generation != self.generation:
            self.out_of_sync.clear()
            self.owed.clear()
        self.generation = record.generation
        self.ending = ""
        self.finished = False
        before = {seat.sid for seat in self.seats.values() if seat.sid}
        for sid in before:
            self.sessions[sid].slot = -1
        self.seats = {slot: Seat(sid, tuple(lanes), sid, asked) for slot, sid, lanes, asked in record.members}
        for slot, seat in self.seats.items():
            self.sessions[seat.sid].slot = slot
            self.sessions[seat.sid].parted = False
        self.slots = tuple(sorted(self.seats))
        self._members = None
        if self.stop is not None and self._stop_is_over(before, {one[1] for one in record.members}):
            self.stop = Stop(self.stop.stop, STOP_OVER, self.stop.reason)
        for call in record.calls:
            session = self.sessions.get(call[0])
            if session is not None:
                self._answer([call], self.joined(session))

    def _stop_is_over(self, before: set[int], members: set[int]) -> bool:
        """Whether the member that was to go is gone, or all are: this is another start of the run."""
        by = self.sessions.get(self.stop_by)
        return before.isdisjoint(members) or (self.stop_by > 0 and (by is None or bool(by.over)))

    def _replaced(self, record: r.Replaced) -> None:
        seat = self.seats[record.slot]
        seat.sid = seat.last = record.sid
        seat.asked = record.asked
        session = self.sessions[record.sid]
        session.slot = record.slot
        self.out_of_sync.add(record.slot)
        self._members = None
        self._answer(record.calls, self.joined(session))

    def _settled(self, record: r.Settled) -> None:
        self.epoch = max(self.epoch, record.epoch)
        self._answer(record.calls, record.result)
        if record.owed:
            owed = Owed(record.epoch, record.result, set(record.owed))
            self.owed.setdefault((record.kind, record.name), []).append(owed)
        if isinstance(record.result, Met):
            if record.together:
                self.out_of_sync.difference_update(record.together)
            if record.kind == FINISH:
                self.finished = True

    def _told(self, record: r.Told) -> None:
        meeting = (record.kind, record.name)
        for owed in self.owed.get(meeting, ()):
            if owed.epoch == record.epoch:
                self._answer(record.calls, owed.result)
                owed.sids.difference_update(sid for sid, _, _ in record.calls)
        self._free(meeting)

    def _free(self, meeting: Meeting) -> None:
        left = [owed for owed in self.owed.get(meeting, ()) if owed.sids]
        if left:
            self.owed[meeting] = left
        else:
            self.owed.pop(meeting, None)

    def _parted(self, record: r.Parted) -> None:
        self.sessions[record.sid].parted = True

    def _key_set(self, record: r.KeySet) -> None:
        key, value = record.key, record.value
        self._drop(key)
        self.keys[key] = Entry(value, self.number, record.owner)
        self.key_bytes += len(key) + len(value)
        if record.owner:
            self.sessions[record.owner].keys.add(key)
        result: Result
        if record.how == "add":
            result = Count(int(value), self.number)
        elif record.how == "swap":
            result = Swapped(True, value, self.number)
        else:
            result = Done(self.number)
        self._answer(record.calls, result)

    def _keys_gone(self, record: r.KeysGone) -> None:
        for key in record.keys:
            self._drop(key)
        self._answer(record.calls, Count(len(record.keys), self.number))

    def _drop(self, key: str) -> None:
        entry = self.keys.pop(key, None)
        if entry is None:
            return
        self.key_bytes -= len(key) + len(entry.value)
        if entry.owner:
            self.sessions[entry.owner].keys.discard(key)

    def _stopping(self, record: r.Stopping) -> None:
        self.stop = Stop(record.stop, STOP_ANNOUNCED, record.reason)
        self.stop_by = record.by
        self._answer(record.calls, self.stop)

    def _stop_set(self, record: r.StopSet) -> None:
        reason = self.stop.reason if self.stop is not None else ""
        self.stop = Stop(record.stop, record.step, reason)

    def _said(self, record: r.Said) -> None:
        self.troubles.append(Trouble(record.number, record.slot, record.name, record.message))
        self._answer(record.calls, Done(self.number))

    def _ended(self, record: r.Ended) -> None:
        self.ending = record.reason

    # ---- snapshots

    def snapshot(self) -> bytes:
        """All of it, as bytes; equal states give equal bytes."""
        return _encoder.encode(
            _LedgerState(
                _VERSION,
                self.number,
                self.term,
                self.service,
                self.next_sid,
                self.epoch,
                self.generation,
                self.ending,
                self.finished,
                {
                    slot: (seat.sid, seat.lanes, seat.last, seat.asked)
                    for slot, seat in sorted(self.seats.items())
                },
                sorted(self.out_of_sync),
                [
                    _SessionState(
                        s.sid,
                        s.incarnation,
                        s.name,
                        s.slot,
                        s.parted,
                        s.over,
                        s.acked,
                        dict(sorted(s.results.items())),
                    )
                    for s in sorted(self.sessions.values(), key=lambda s: s.sid)
                ],
                list(self.tombs),
                [(key, e.value, e.revision, e.owner) for key, e in sorted(self.keys.items())],
                [
                    (kind, name, owed.epoch, owed.result, sorted(owed.sids))
                    for (kind, name), all_owed in sorted(self.owed.items())
                    for owed in all_owed
                ],
                self.stop,
                self.stop_by,
                list(self.troubles),
            )
        )

    @staticmethod
    def restore(data: bytes) -> Ledger:
        """The state that `snapshot` gave. Fails: FormatError."""
        try:
            state = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise FormatError(f"not a snapshot of a coordinator: {error}") from error
        if state.version != _VERSION:
            raise FormatError(f"a snapshot of version {state.version}; this Holdfast reads {_VERSION}")
        ledger = Ledger()
        ledger.number, ledger.term, ledger.service = state.number, state.term, state.service
        ledger.next_sid, ledger.epoch = state.next_sid, state.epoch
        ledger.generation, ledger.ending, ledger.finished = state.generation, state.ending, state.finished
        ledger.seats = {
            slot: Seat(sid, tuple(lanes), last, asked)
            for slot, (sid, lanes, last, asked) in state.seats.items()
        }
        ledger.slots = tuple(sorted(ledger.seats))
        ledger.out_of_sync = set(state.out_of_sync)
        for s in state.sessions:
            session = Session(
                s.sid, s.incarnation, s.name, s.slot, s.parted, s.over, s.acked, dict(s.results)
            )
            ledger.sessions[s.sid] = session
            known = ledger.by_incarnation.get(s.incarnation)
            if known is None or known.sid < s.sid:
                ledger.by_incarnation[s.incarnation] = session
        ledger.tombs = deque(state.tombs)
        for key, value, revision, owner in state.keys:
            ledger.keys[key] = Entry(value, revision, owner)
            ledger.key_bytes += len(key) + len(value)
            if owner:
                ledger.sessions[owner].keys.add(key)
        for kind, name, epoch, result, sids in state.owed:
            ledger.owed.setdefault((kind, name), []).append(Owed(epoch, result, set(sids)))
        ledger.stop, ledger.stop_by = state.stop, state.stop_by
        ledger.troubles.extend(state.troubles)
        return ledger


def replay(records: Iterable[r.Record]) -> Ledger:
    """The state that a log leads to."""
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger


_APPLY: Final[dict[type, Callable[[Ledger, Any], None]]] = {
    r.Started: Ledger._started,
    r.Came: Ledger._came,
    r.Went: Ledger._went,
    r.Formed: Ledger._formed,
    r.Replaced: Ledger._replaced,
    r.Settled: Ledger._settled,
    r.Told: Ledger._told,
    r.Parted: Ledger._parted,
    r.KeySet: Ledger._key_set,
    r.KeysGone: Ledger._keys_gone,
    r.Stopping: Ledger._stopping,
    r.StopSet: Ledger._stop_set,
    r.Said: Ledger._said,
    r.Ended: Ledger._ended,
}
