"""The oracle's own account of a run, kept from records alone, and what a new record must not contradict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, final

from holdfast.coord import messages as m
from holdfast.coord import records as r
from holdfast.coord.settings import Settings

_EXCUSED_DEAD: Final = (m.LIVE, m.FINISH)


@final
class Books:
    """Who lives, who sits where, which calls were answered and with what."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.incarnations: dict[int, str] = {}
        self.sids: dict[str, int] = {}
        self.over: set[int] = set()
        self.parted: set[int] = set()
        self.seats: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        """The slot that each session has, or had when it died."""
        self.generation = 0
        self.restarted: set[int] = set()
        self.newcomers: set[int] = set()
        """Sessions that took over a slot of a running generation."""
        self.answers: dict[tuple[int, int], tuple[int, m.Result | None]] = {}
        self.owed: dict[tuple[str, str, int], set[int]] = {}
        self.epochs: dict[tuple[str, str], int] = {}
        self.results: dict[tuple[str, str, int], m.Met | m.Refused] = {}
        self.stop = 0
        self.term = 0

    # ---- what must hold before a record is taken in

    def problems(self, record: r.Record, calls: Mapping[tuple[str, int], m.Op]) -> Iterator[str]:
        """What is wrong with `record`, given what was before and the calls that clients really made."""
        for sid, seq, _ in getattr(record, "calls", ()):
            if sid not in self.incarnations:
                yield f"session {sid} never came"
            elif sid in self.over and not isinstance(record, r.Settled):
                # Who died waiting is named among those that waited; it gets nothing.
                yield f"{self.incarnations[sid]} was out when it was answered"
            elif (sid, seq) in self.answers:
                yield f"call {seq} of {self.incarnations[sid]} was answered by {self.answers[sid, seq]}"
            elif (self.incarnations[sid], seq) not in calls:
                yield f"{self.incarnations[sid]} never made call {seq}"
        match record:
            case r.Started():
                if record.term <= self.term:
                    yield f"term {record.term} after term {self.term}"
            case r.Came():
                if record.sid in self.incarnations:
                    yield f"session {record.sid} is {self.incarnations[record.sid]}"
            case r.Went():
                if record.sid in self.over:
                    yield "it was out already"
            case r.Formed():
                yield from self._formed(record)
            case r.Replaced():
                yield from self._replaced(record)
            case r.Settled():
                yield from self._settled(record, calls)
            case r.Told():
                yield from self._told(record, calls)
            case r.Stopping():
                if record.stop != self.stop + 1:
                    yield f"stop {record.stop} after stop {self.stop}"

    def _formed(self, record: r.Formed) -> Iterator[str]:
        settings = self._settings
        slots = [slot for slot, *_ in record.members]
        sids = [sid for _, sid, *_ in record.members]
        if len(set(slots)) != len(slots) or len(set(sids)) != len(sids):
            yield "a slot or a session is in it twice"
        if any(sid in self.over or sid not in self.incarnations for sid in sids):
            yield "somebody in it is out"
        if record.generation not in (self.generation, self.generation + 1):
            yield f"it comes after generation {self.generation}"
        if record.generation == self.generation and dict(zip(slots, sids, strict=True)) != self.seats:
            yield "another membership under the same number"
        if not settings.min_size <= len(slots) <= settings.max_size or len(slots) % settings.divisible_by:
            yield f"{len(slots)} members are not allowed"
        lanes = sorted(lane for _, _, mine, *_ in record.members for lane in mine)
        if lanes != list(range(settings.num_lanes)):
            yield f"lanes {lanes} are not each held once"
        where = {sid: slot for slot, sid, *_ in record.members}
        for slot, sid in self.seats.items():
            # Only who would be beyond the end may move.
            if slot < len(slots) and sid not in self.parted and where.get(sid, slot) != slot:
                yield f"{self.incarnations[sid]} was moved from slot {slot} to {where[sid]}"

    def _replaced(self, record: r.Replaced) -> Iterator[str]:
        if not self._settings.rejoin:
            yield "a slot changed hands within a generation"
        if record.slot not in self.seats:
            yield "there is no such slot"
        elif self.seats[record.slot] not in self.over:
            yield f"{self.incarnations[self.seats[record.slot]]} still holds the slot"
        if record.sid in self.over or record.sid in self.seats.values():
            yield "its new holder is out, or holds another slot"

    def _settled(self, record: r.Settled, calls: Mapping[tuple[str, int], m.Op]) -> Iterator[str]:
        if record.epoch <= self.epochs.get((record.kind, record.name), 0):
            yield f"epoch {self.epochs[record.kind, record.name]} of it is over"
        ops = [op for sid, seq, _ in record.calls if (op := calls.get((self.incarnations.get(sid, ""), seq)))]
        for op in ops:
            if not isinstance(op, m.Meet) or (op.kind, op.name) != (record.kind, record.name):
                yield f"it answers {op}"
        if not ops or not isinstance(ops[0], m.Meet):
            return
        slots = set(self.seats) if ops[0].slots is None else set(ops[0].slots)
        if isinstance(record.result, m.Refused) or not record.result.ok:
            yield from self._shared(record, slots)
        if isinstance(record.result, m.Refused):
            return
        came = {self.slots.get(sid, -1) for sid, _, _ in record.calls if sid not in self.over}
        if record.kind == m.VOTE:
            # A ballot counts even if whoever gave it is dead by now.
            came |= {slot for slot, _ in record.result.notes}
        missing = slots - came
        if record.kind == m.VOTE and not record.result.ok:
            return
        absent = set(record.result.absent)
        if record.kind != m.FINISH and missing != absent:
            yield f"slots {sorted(missing)} had not come, it says {sorted(absent)}"
        vacant = {slot for slot, sid in self.seats.items() if sid in self.over}
        excused = (
            vacant if record.kind in _EXCUSED_DEAD else self.restarted if record.kind == m.BARRIER else set()
        )
        if record.kind != m.FINISH and not absent <= excused:
            yield f"slots {sorted(absent - excused)} had not come and count"
        if record.kind == m.VOTE and not all(op.ok for op in ops if isinstance(op, m.Meet)):
            yield "somebody voted against it"

    def _shared(self, record: r.Settled, slots: set[int]) -> Iterator[str]:
        """A failure is for all: who has not come yet is owed it, unless the generation ends with it."""
        holders = {self.seats[slot] for slot in slots if slot in self.seats}
        if isinstance(record.result, m.Refused) and record.result.code == m.STALE:
            return
        if holders & self.over and not self._settings.rejoin:
            return
        told = {sid for sid, _, _ in record.calls} | set(record.owed)
        if record.kind == m.VOTE:
            # Its slot may have voted before it was started again.
            told |= self.newcomers
        if holders - self.over - told:
            names = [self.incarnations[sid] for sid in holders - self.over - told]
            yield f"{names} will never hear of it"

    def _told(self, record: r.Told, calls: Mapping[tuple[str, int], m.Op]) -> Iterator[str]:
        owed = self.owed.get((record.kind, record.name, record.epoch), set())
        for sid, seq, _ in record.calls:
            if sid not in owed:
                yield f"{self.incarnations.get(sid)} is not owed it, or had it"
            op = calls.get((self.incarnations.get(sid, ""), seq))
            if not isinstance(op, m.Meet) or (op.kind, op.name) != (record.kind, record.name):
                yield f"it answers {op}"

    # ---- taking it in

    def take(self, number: int, record: r.Record) -> None:
        """Write the record into the books."""
        result: m.Result | None = None
        match record:
            case r.Started():
                self.term = record.term
            case r.Came():
                self.incarnations[record.sid] = record.incarnation
                self.sids[record.incarnation] = record.sid
            case r.Went():
                self.over.add(record.sid)
                for owed in self.owed.values():
                    owed.discard(record.sid)
            case r.Formed():
                if record.generation != self.generation:
                    self.restarted.clear()
                    self.owed.clear()
                self.generation = record.generation
                self.parted.difference_update(sid for _, sid, *_ in record.members)
                self.seats = {slot: sid for slot, sid, *_ in record.members}
                self.slots = {sid: slot for slot, sid, *_ in record.members}
            case r.Replaced():
                self.seats[record.slot] = record.sid
                self.slots[record.sid] = record.slot
                self.restarted.add(record.slot)
                self.newcomers.add(record.sid)
            case r.Settled():
                meeting = (record.kind, record.name, record.epoch)
                self.results[meeting] = result = record.result
                self.epochs[record.kind, record.name] = record.epoch
                self.owed[meeting] = set(record.owed)
                if record.kind == m.BARRIER and isinstance(result, m.Met) and not result.absent:
                    self.restarted.difference_update(record.together)
            case r.Told():
                meeting = (record.kind, record.name, record.epoch)
                result = self.results[meeting]
                self.owed[meeting].difference_update(sid for sid, _, _ in record.calls)
            case r.Parted():
                self.parted.add(record.sid)
            case r.Stopping():
                self.stop = record.stop
        for sid, seq, _ in getattr(record, "calls", ()):
            self.answers[sid, seq] = (number, result)
