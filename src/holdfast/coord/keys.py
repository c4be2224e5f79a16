"""The key-value store: reads that never block, waits with deadlines, watches that miss nothing.

The revision of a change is the number of its record, so it grows with every change and survives restarts. A
read is answered when the change it shows is on the disk: nobody sees a value that a power cut can take back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, final

from holdfast.coord.desk import Desk
from holdfast.coord.ledger import Session
from holdfast.coord.messages import (
    DEADLINE,
    EXISTS,
    LIMIT,
    MISUSE,
    Add,
    Call,
    Changed,
    Count,
    Delete,
    Done,
    Get,
    Item,
    Items,
    Put,
    Refused,
    Scan,
    Swap,
    Swapped,
    Unwatch,
    Value,
    Watch,
)
from holdfast.coord.records import KeySet, KeysGone

_INT64: Final = 1 << 63


@final
class Keys:
    """Calls about keys, those who wait for one, and those who watch many."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._sorted: list[str] | None = None
        self._waiting: dict[str, dict[tuple[int, int], float]] = {}
        self._watches: dict[str, dict[tuple[int, int], None]] = {}
        self._history: deque[Item] = deque(maxlen=desk.settings.history)
        self._known_since = desk.ledger.number
        self.num_watches = 0

    def idle(self) -> bool:
        return not self._waiting

    # ---- writing

    def put(self, session: Session, call: Call, op: Put) -> None:
        if not self._allowed(session, call, op.key, len(op.value)):
            return
        found = self._desk.ledger.keys.get(op.key)
        if op.create and found is not None:
            refused = Refused(EXISTS, f"key {op.key!r} exists")
            self._desk.answer(session.sid, call.seq, refused, found.revision, self._sync)
            return
        self._set(session, call, op.key, op.value, op.owned, "put", Done)

    def swap(self, session: Session, call: Call, op: Swap) -> None:
        if not self._allowed(session, call, op.key, len(op.value)):
            return
        found = self._desk.ledger.keys.get(op.key)
        value, revision = (None, 0) if found is None else (found.value, found.revision)
        if value != op.expected:
            after = revision or self._desk.ledger.number
            self._desk.answer(session.sid, call.seq, Swapped(False, value, revision), after, self._sync)
            return
        self._set(session, call, op.key, op.value, op.owned, "swap", lambda n: Swapped(True, op.value, n))

    def add(self, session: Session, call: Call, op: Add) -> None:
        found = self._desk.ledger.keys.get(op.key)
        try:
            total = (int(found.value) if found is not None else 0) + op.by
        except ValueError:
            refused = Refused(MISUSE, f"key {op.key!r} holds no number")
            self._desk.answer(session.sid, call.seq, refused, self._desk.ledger.number, self._sync)
            return
        if not -_INT64 <= total < _INT64:
            self._desk.refuse(
                session.sid, call.seq, MISUSE, f"key {op.key!r} would be {total}, beyond 64 bits"
            )
            return
        value = b"%d" % total
        if not self._allowed(session, call, op.key, len(value)):
            return
        owned = found is not None and found.owner == session.sid
        self._set(session, call, op.key, value, owned, "add", lambda n: Count(total, n))

    def _set(
        self,
        session: Session,
        call: Call,
        key: str,
        value: bytes,
        owned: bool,
        how: str,
        result: Callable[[int], Done | Swapped | Count],
    ) -> None:
        ids = ((session.sid, call.seq, call.acked),)
        if key not in self._desk.ledger.keys:
            self._sorted = None
        number = self._desk.write(KeySet(key, value, session.sid if owned else 0, how, ids))
        self._desk.answer(session.sid, call.seq, result(number), number, self._sync)
        waiters = self._waiting.pop(key, None)
        if waiters:
            found = Value(value, number)
            for sid, seq in waiters:
                self._desk.alarms.clear("get", (sid, seq, key))
                self._desk.answer(sid, seq, found, number, self._sync)
        self._tell([Item(key, value, number)])

    def delete(self, session: Session, call: Call, op: Delete) -> None:
        keys = self._desk.ledger.keys
        gone = tuple(self._under(op.key)) if op.prefix else (op.key,) if op.key in keys else ()
        if not gone:
            self._desk.answer(session.sid, call.seq, Count(0, 0), self._desk.ledger.number, self._sync)
            return
        self._sorted = None
        number = self._desk.write(KeysGone(gone, ((session.sid, call.seq, call.acked),)))
        self._desk.answer(session.sid, call.seq, Count(len(gone), number), number, self._sync)
        self._tell([Item(key, None, number) for key in gone])

    def vanished(self, keys: Iterable[str], number: int) -> None:
        """The keys of a session went with it, by record `number`."""
        items = [Item(key, None, number) for key in sorted(keys)]
        if items:
            self._sorted = None
            self._tell(items)

    def _allowed(self, session: Session, call: Call, key: str, size: int) -> bool:
        settings, ledger = self._desk.settings, self._desk.ledger
        problem = None
        if not key or len(key) > settings.max_key_bytes:
            problem = f"a key of {len(key)} characters; 1 to {settings.max_key_bytes} are allowed"
        elif size > settings.max_value_bytes:
            problem = f"a value of {size:,} bytes for {key!r}; {settings.max_value_bytes:,} are allowed"
        elif key not in ledger.keys and len(ledger.keys) >= settings.max_keys:
            problem = f"{len(ledger.keys):,} keys are stored already"
        elif ledger.key_bytes + len(key) + size > settings.max_store_bytes:
            problem = f"{ledger.key_bytes:,} bytes are stored already"
        if problem is not None:
            hint = "keep large data in a checkpoint or a transfer; delete keys that are no longer needed"
            self._desk.refuse(session.sid, call.seq, LIMIT, problem, hint)
        return problem is None

    # ---- reading

    def get(self, session: Session, call: Call, op: Get) -> None:
        found = self._desk.ledger.keys.get(op.key)
        if found is not None:
            value = Value(found.value, found.revision)
            self._desk.answer(session.sid, call.seq, value, found.revision, self._sync)
        elif not op.timeout_s > 0:
            # That it is gone may be news as well.
            self._desk.answer(session.sid, call.seq, Value(None, 0), self._desk.ledger.number, self._sync)
        else:
            deadline = self._desk.deadline(op.timeout_s)
            self._desk.present[session.sid].open[call.seq] = op
            self._waiting.setdefault(op.key, {})[session.sid, call.seq] = deadline
            self._desk.alarms.set("get", (session.sid, call.seq, op.key), deadline)

    def due(self, sid: int, seq: int, key: str) -> None:
        """A wait for a key ran out."""
        self.forget(sid, seq, key)
        message = f"key {key!r} was not set in time"
        self._desk.refuse(sid, seq, DEADLINE, message, "did whoever was to set it get that far?")

    def forget(self, sid: int, seq: int, key: str) -> None:
        """A wait for a key is over."""
        self._desk.alarms.clear("get", (sid, seq, key))
        waiters = self._waiting.get(key, {})
        waiters.pop((sid, seq), None)
        if not waiters:
            self._waiting.pop(key, None)

    def scan(self, session: Session, call: Call, op: Scan) -> None:
        ledger = self._desk.ledger
        limit = max(1, min(op.limit, self._desk.settings.max_items))
        found: list[Item] = []
        size = 0
        more = False
        for key in self._under(op.prefix, op.after):
            entry = ledger.keys[key]
            size += len(key) + len(entry.value)
            # At least one, so that whoever asks again gets on.
            if len(found) >= limit or (found and size > 4 * self._desk.settings.max_value_bytes):
                more = True
                break
            found.append(Item(key, entry.value, entry.revision))
        self._desk.answer(session.sid, call.seq, Items(tuple(found), more), ledger.number, self._sync)

    def _under(self, prefix: str, after: str = "") -> list[str]:
        """The keys that begin with `prefix`, in order."""
        if self._sorted is None:
            self._sorted = sorted(self._desk.ledger.keys)
        start = bisect_left(self._sorted, prefix)
        if after:
            start = max(start, bisect_right(self._sorted, after))
        end = start
        while end < len(self._sorted) and self._sorted[end].startswith(prefix):
            end += 1
        return self._sorted[start:end]

    # ---- watching

    def watch(self, session: Session, call: Call, op: Watch) -> None:
        present = self._desk.present[session.sid]
        if call.seq not in present.watches:
            if self.num_watches >= self._desk.settings.max_watches:
                self._desk.refuse(
                    session.sid, call.seq, LIMIT, f"there are {self.num_watches} watches already"
                )
                return
            self.num_watches += 1
            present.watches[call.seq] = op.prefix
            self._watches.setdefault(op.prefix, {})[session.sid, call.seq] = None
        number = self._desk.ledger.number
        self._desk.answer(session.sid, call.seq, Done(number), number, self._sync)
        changed = self._since(call.seq, op)
        if changed is not None:
            self._desk.push([session.sid], changed, number, self._sync)

    def _since(self, watch: int, op: Watch) -> Changed | None:
        """What a watch has missed; None if nothing."""
        if op.since and op.since >= self._known_since and self._covers(op.since):
            items = [i for i in self._history if i.revision > op.since and i.key.startswith(op.prefix)]
            return Changed(watch, tuple(items)) if items else None
        keys = self._desk.ledger.keys
        there = [Item(key, keys[key].value, keys[key].revision) for key in self._under(op.prefix)]
        return Changed(watch, tuple(sorted(there, key=lambda i: i.revision)), True)

    def _covers(self, since: int) -> bool:
        full = len(self._history) == self._history.maxlen
        return not full or self._history[0].revision <= since

    def unwatch(self, session: Session, call: Call, op: Unwatch) -> None:
        self.drop_watch(session.sid, op.watch)
        self._desk.answer(session.sid, call.seq, Done())

    def drop_watch(self, sid: int, watch: int) -> None:
        prefix = self._desk.present[sid].watches.pop(watch, None)
        if prefix is None:
            return
        self.num_watches -= 1
        del self._watches[prefix][sid, watch]
        if not self._watches[prefix]:
            del self._watches[prefix]

    def _tell(self, items: list[Item]) -> None:
        self._history.extend(items)
        if not self._watches:
            return
        told: dict[tuple[int, int], list[Item]] = {}
        for item in items:
            for prefix in self._prefixes(item.key):
                for watch in self._watches[prefix]:
                    told.setdefault(watch, []).append(item)
        for (sid, seq), mine in told.items():
            self._desk.push([sid], Changed(seq, tuple(mine)), mine[-1].revision, self._sync)

    def _prefixes(self, key: str) -> list[str]:
        """The watched prefixes of a key."""
        if len(self._watches) <= len(key):
            return [prefix for prefix in self._watches if key.startswith(prefix)]
        return [prefix for end in range(len(key) + 1) if (prefix := key[:end]) in self._watches]

    @property
    def _sync(self) -> bool:
        return self._desk.sync_keys
