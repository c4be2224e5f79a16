"""What the parts of the coordinator share: ledger, who is there, alarms, and the effects of this step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, final

from holdfast.coord.kernel import Close, Effect, Note, Send, Write
from holdfast.coord.ledger import Ledger, Session
from holdfast.coord.messages import Answer, Op, Push, Refused, Result
from holdfast.coord.records import Record
from holdfast.coord.settings import ALWAYS, Settings

Alarm = tuple[str, Hashable]
_LONGEST_S: Final = 30 * 86400.0


@final
class Alarms:
    """Moments at which something is due, each under a name; setting a name again moves it."""

    def __init__(self) -> None:
        self._at: dict[Alarm, float] = {}
        self._heap: list[tuple[float, int, Alarm]] = []
        self._count = 0
        self.first = math.inf
        """Nothing is due before this; cheap to look at, and `next_at` makes it exact."""

    def set(self, kind: str, of: Hashable, at: float) -> None:
        alarm = (kind, of)
        if self._at.get(alarm) == at:
            return
        self._at[alarm] = at
        self._count += 1
        if at < self.first:
            self.first = at
        heapq.heappush(self._heap, (at, self._count, alarm))
        # Moved and cleared alarms stay in the heap until they come up; not for ever.
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [one for one in self._heap if self._at.get(one[2]) == one[0]]
            heapq.heapify(self._heap)

    def is_set(self, kind: str, of: Hashable) -> bool:
        return (kind, of) in self._at

    def clear(self, kind: str, of: Hashable) -> None:
        self._at.pop((kind, of), None)

    def next_at(self) -> float:
        """When the next one is due; inf if there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.first = self._heap[0][0] if self._heap else math.inf
        return self.first

    def pop_due(self, now: float) -> Alarm | None:
        """The next one that is due, which is then forgotten."""
        if self.next_at() > now:
            return None
        alarm = heapq.heappop(self._heap)[2]
        del self._at[alarm]
        return alarm


@dataclass(slots=True)
class Presence:
    """What is known of a session only as long as this process lives. `conn` is 0 while it is away."""

    session: Session
    heard: float
    conn: int = 0
    joined: bool = False
    suspect: bool = False
    patience_s: float = 0.0
    """How much longer it may be away once its alarm rings."""
    step: int = -1
    phase: str = ""
    open: dict[int, Op] = field(default_factory=dict)
    watches: dict[int, str] = field(default_factory=dict)


@final
class Desk:
    """Shared by the parts; owned by the Coordinator."""

    def __init__(self, settings: Settings, ledger: Ledger, now: float) -> None:
        self.settings = settings
        self.sync_keys = settings.sync_keys == ALWAYS
        self.sync_barriers = settings.sync_barriers == ALWAYS
        self.ledger = ledger
        self.now = now
        self.alarms = Alarms()
        self.present: dict[int, Presence] = {}
        self.vacant: set[int] = {slot for slot, seat in ledger.seats.items() if not seat.sid}
        self.effects: list[Effect] = []

    def deadline(self, timeout_s: float) -> float:
        """When a wait of `timeout_s` ends. Every wait ends, whatever number a client sends."""
        return self.now + min(timeout_s, _LONGEST_S) if timeout_s > 0 else self.now

    def write(self, record: Record) -> int:
        """Change the ledger and the log; the record's number."""
        number = self.ledger.apply(record)
        self.effects.append(Write(number, record))
        return number

    def answer(self, sid: int, seq: int, body: Result, after: int = 0, sync: bool = False) -> None:
        """Answer a call, if its client is there; else it will ask again."""
        found = self.present.get(sid)
        if found is None:
            return
        found.open.pop(seq, None)
        if found.conn:
            self.effects.append(Send(found.conn, Answer(seq, body), after, sync))

    def push(self, sids: Iterable[int], body: Push, after: int = 0, sync: bool = False) -> None:
        answer = Answer(0, body)
        for sid in sids:
            found = self.present.get(sid)
            if found is not None and found.conn:
                self.effects.append(Send(found.conn, answer, after, sync))

    def refuse(self, sid: int, seq: int, code: str, message: str, hint: str = "") -> None:
        self.answer(sid, seq, Refused(code, message, hint))

    def hang_up(self, conn: int, code: str, reason: str, hint: str = "") -> None:
        """Say why and end a connection."""
        self.effects.append(Send(conn, Answer(0, Refused(code, reason, hint)), self.ledger.number))
        self.effects.append(Close(conn, reason))

    def note(self, kind: str, text: str, **fields: object) -> None:
        self.effects.append(Note(kind, text, tuple(fields.items())))

    def member_sids(self) -> list[int]:
        """The members of the generation that are alive."""
        return [seat.sid for seat in self.ledger.seats.values() if seat.sid]

    def name_of(self, sid: int) -> str:
        session = self.ledger.sessions[sid]
        label = session.name or session.incarnation
        return f"slot {session.slot} ({label})" if session.slot >= 0 else label
