"""What a coordinator's folder holds: the newest good snapshot, and the records after it. Reads only."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

import msgspec

from holdfast.coord.ledger import Ledger
from holdfast.coord.segment import (
    SEGMENT_HEAD,
    Batch,
    SegmentHead,
    Snapshot,
    batch_at,
    batches_after,
    records_of,
)
from holdfast.errors import CorruptError, FormatError, VersionError
from holdfast.storage import TEMPORARY, LocalStore

NAME: Final = re.compile(r"(log|snapshot)-(\d{20})")
_MAX_BYTES: Final = 16 << 30
_HINT: Final = "bring back a copy of the folder, or move it away to let the run agree on everything anew"


@dataclass(slots=True)
class Found:
    """What there was.

    `taken` is the number of the snapshot, `replayed` the segments that lead on from it with the offsets at
    which they end well, `before` the checksum of the last batch. `superfluous` files can go. `salt` is None
    in a folder without a log.
    """

    ledger: Ledger
    salt: int | None
    taken: int
    before: int
    replayed: list[tuple[str, int]] = field(default_factory=list)
    superfluous: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)


class _Segment(NamedTuple):
    name: str
    first: int
    data: bytes
    head: SegmentHead | None


def read_folder(store: LocalStore) -> Found:
    """Read everything. Fails: CorruptError for damage to what had been synced, StorageError."""
    names = store.names()
    numbers = {name: (match[1], int(match[2])) for name in names if (match := NAME.fullmatch(name))}
    snapshots = sorted((n, name) for name, (kind, n) in numbers.items() if kind == "snapshot")
    segments = sorted((n, name) for name, (kind, n) in numbers.items() if kind == "log")
    reader = _Reader(store, snapshots)
    found = reader.found
    if segments and not snapshots and segments[0][0] != 1:
        raise _damage(segments[0][1], 0, f"the records before {segments[0][0]} are missing")
    start = max((at for at, (first, _) in enumerate(segments) if first <= found.taken + 1), default=0)
    reader.replay([name for _, name in segments[start:]])
    found.superfluous += [
        *(name for name in names if name.startswith(TEMPORARY)),
        *(name for _, name in segments[:start]),
        *(name for number, name in snapshots if number != found.taken),
    ]
    return found


@final
class _Reader:
    def __init__(self, store: LocalStore, snapshots: list[tuple[int, str]]) -> None:
        self._store = store
        self._bad: tuple[int, str] | None = None
        self.found = Found(Ledger(), None, 0, 0)
        for number, name in reversed(snapshots):
            taken = Snapshot.decode(store.read(name, max_bytes=_MAX_BYTES))
            if taken is not None and taken.number == number:
                self.found = Found(Ledger.restore(taken.body), taken.salt, number, taken.before)
                break
            self._bad = self._bad or (number, name)

    def replay(self, names: list[str]) -> None:
        """Bring the ledger up to the last record that counts."""
        found = self.found
        torn: tuple[int, int] | None = None
        segments = []
        for at, name in enumerate(names):
            segment = self._read(name)
            segments.append(segment)
            if torn is not None:
                continue  # read only for what it can say about the tear
            end = self._one(segment) if self._follows(segment, first=at == 0) else 0
            if end < len(segment.data) or not end:
                torn = (at, end)
        if torn is not None:
            self._cut(segments[torn[0] :], torn[1])
        if self._bad is not None:
            if found.ledger.number < self._bad[0]:
                raise _damage(self._bad[1], 0, "the snapshot is damaged and no older one leads there")
            found.cuts.append(f"{self._bad[1]} is damaged; an older snapshot and the log made up for it")

    def _read(self, name: str) -> _Segment:
        data = self._store.read(name, max_bytes=_MAX_BYTES)
        return _Segment(name, int(name.rpartition("-")[2]), data, SegmentHead.decode(data))

    def _follows(self, segment: _Segment, *, first: bool) -> bool:
        head, salt = segment.head, self.found.salt
        if head is None or head.first != segment.first or head.salt != (head.salt if salt is None else salt):
            return False
        if first and head.first <= self.found.ledger.number:
            return True  # begun before the snapshot
        return head.first == self.found.ledger.number + 1 and head.before == self.found.before

    def _one(self, segment: _Segment) -> int:
        """Replay one segment; the offset at which it ends, or breaks off."""
        found, head = self.found, segment.head
        assert head is not None
        found.salt = head.salt
        at, before, number = SEGMENT_HEAD, head.before, head.first - 1
        while (batch := batch_at(segment.data, at, head.salt)) is not None:
            if batch.before != before or batch.first != number + 1:
                break
            self._apply(segment, batch)
            at, before, number = batch.end, batch.check, number + batch.num_records
        if number < found.ledger.number:
            # The snapshot is ahead: whatever became of the rest of this segment, it is not needed.
            found.superfluous.append(segment.name)
            return len(segment.data)
        found.before = before
        found.replayed.append((segment.name, at))
        return at

    def _apply(self, segment: _Segment, batch: Batch) -> None:
        ledger = self.found.ledger
        if batch.first + batch.num_records - 1 <= ledger.number:
            return
        number = batch.first - 1
        try:
            for record in records_of(segment.data, batch):
                number += 1
                if number > ledger.number:
                    ledger.apply(record)
        except (msgspec.MsgspecError, struct.error) as error:
            raise VersionError(
                f"{segment.name} at offset {batch.offset}: record {number + 1} is of no known kind: {error}",
                hint="was it written by a newer Holdfast?",
            ) from error
        except (KeyError, FormatError) as error:
            raise _damage(
                segment.name, batch.offset, f"record {number} does not fit what came before: {error!r}"
            ) from error

    def _cut(self, segments: list[_Segment], end: int) -> None:
        """Give up what follows a bad batch, unless something says that it had been synced."""
        found, torn = self.found, segments[0]
        missing = found.ledger.number + 1
        told = [0 if s.head is None else s.head.synced for s in segments]
        for at, segment in enumerate(segments):
            salt = found.salt if found.salt is not None or segment.head is None else segment.head.salt
            if salt is not None:
                begin = max(SEGMENT_HEAD, 0 if at else end)
                told += [batch.synced for batch in batches_after(segment.data, begin, salt)]
            elif len(segment.data) > SEGMENT_HEAD:
                # The head of the first segment is synced before anything else is written.
                raise _damage(segment.name, 0, "the head is damaged")
        if self._bad is not None and self._bad[0] >= missing:
            raise _damage(self._bad[1], 0, "the snapshot is damaged and no older one leads there")
        if max(told) >= missing:
            raise _damage(torn.name, end, f"record {missing} was on the disk and is damaged now")
        lost = len(torn.data) - end + sum(len(segment.data) for segment in segments[1:])
        if lost:
            found.cuts.append(
                f"{lost:,} bytes from offset {end:,} of {torn.name} on were cut off: writes that were not "
                f"synced when the machine went down"
            )
        found.superfluous += [segment.name for segment in segments[0 if not end else 1 :]]


def _damage(name: str, offset: int, what: str) -> CorruptError:
    return CorruptError(f"{name} at offset {offset}: {what}", file=name, block=offset, hint=_HINT)
