"""Signs of life where there are no locks: a small object that its holder writes again and again.

A holder is alive while its object is younger than `hold_s`, by the clock of the store itself, so that the
clocks of the machines do not matter. Whether one on this very machine has ended is seen directly: the record
names its process, so a restart after a crash need not wait. A process that was stopped for long looks dead,
and its hold may be taken: what it does afterwards must be fenced by other means.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Final, final

import msgspec

from holdfast.errors import HoldfastError, MissingPathError
from holdfast.storage.bucket import Bucket, Object
from holdfast.storage.store import Hold, Version

log = logging.getLogger("holdfast.storage")

_PER_HOLD: Final = 3
"""Signs of life that a holder gives in the time after which it counts as dead."""
_MAX_RECORD: Final = 4096
_CLOCK: Final = "clock"


_living: set[str] = set()
"""The holds of this process, by `life`."""


class Record(msgspec.Struct, frozen=True):
    """A sign of life. `life` names the hold; `beat` makes each sign other bytes, so that versions differ."""

    holder: str
    machine: str
    pid: int
    started: int
    life: str
    beat: int = 0


@final
class Beats:
    """The holds of one process on one store, kept alive by one thread while there are any."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # A sign of life that cannot be given soon is given up: the next one is due, and nobody is to wait
        # for it who gives a hold back.
        soon_s = bucket.options.hold_s / _PER_HOLD
        options = replace(bucket.options, retry_s=min(soon_s, bucket.options.retry_s))
        self.quick = Bucket(bucket.url, replace(options, timeout_s=max(1.0, min(soon_s, options.timeout_s))))
        self._lock = threading.Lock()
        self._holds: set[_BeatHold] = set()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._skew: tuple[float, float] | None = None

    def take(self, key: str, *, exclusive: bool, holder: str) -> Hold | None:
        """Mark a key; None if a live process holds it and `exclusive` is asked. Fails: StorageError."""
        record = Record(holder[:1024], _machine(), os.getpid(), _started(os.getpid()), uuid.uuid4().hex)
        data = msgspec.json.encode(record)
        if not exclusive:
            self._bucket.put(key, data)
        elif not self._bucket.create(key, data) and not self._take_over(key, data):
            return None
        found = self._bucket.head(key) if exclusive else None
        hold = _BeatHold(self, key, record, found[2] if found is not None else None)
        with self._lock:
            self._holds.add(hold)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="holdfast-beats", daemon=True
                )
                self._thread.start()
        return hold

    def _take_over(self, key: str, data: bytes) -> bool:
        try:
            found = self._bucket.get(key, max_bytes=_MAX_RECORD)
        except MissingPathError:  # given back just now
            return self._bucket.create(key, data)
        return not self._lives(key, found) and self._bucket.update(key, data, found.version)

    def is_alive(self, key: str) -> bool:
        """Whether a live process holds this key."""
        try:
            return self._lives(key, self._bucket.get(key, max_bytes=_MAX_RECORD))
        except MissingPathError:
            return False

    def holder(self, key: str) -> str:
        """What the holder of a key said of itself."""
        with suppress(HoldfastError, msgspec.MsgspecError):
            data = self._bucket.get(key, max_bytes=_MAX_RECORD).data
            return msgspec.json.decode(data, type=Record).holder
        return ""

    def _lives(self, key: str, found: Object) -> bool:
        try:
            record = msgspec.json.decode(found.data, type=Record)
        except msgspec.MsgspecError:
            return False  # not a hold of ours
        if record.machine == _machine():
            if record.pid == os.getpid():
                return record.life in _living
            if _started(record.pid) != record.started:
                return False
        # Also of a live process on this machine: it may have given the hold back and been unable to say so.
        return self.now(key) - found.modified < self._bucket.options.hold_s

    def now(self, key: str) -> float:
        """The time by the store's own clock; by this machine's where nothing may be written there."""
        with self._lock:
            skew = self._skew
        if skew is None or time.monotonic() - skew[1] > 600.0:
            skew = (self._measured(key), time.monotonic())
            with self._lock:
                self._skew = skew
        return skew[0] + time.monotonic()

    def _measured(self, key: str) -> float:
        """The store's clock minus this machine's monotonic one."""
        clock = "/".join((*key.split("/")[:-1], _CLOCK))
        with suppress(HoldfastError):
            before = time.monotonic()
            self._bucket.put(clock, uuid.uuid4().hex.encode())
            if (found := self._bucket.head(clock)) is not None:
                # Its last writer may have been another process, later than this one: later by no more
                # than the look took, which makes holders seem older by that much.
                return found[1] - before
        return time.time() - time.monotonic()

    def drop(self, hold: _BeatHold) -> None:
        """The holder gives it back."""
        with self._lock:
            self._holds.discard(hold)
            thread = self._thread if not self._holds else None
            if thread is not None:
                self._thread = None
                self._stop.set()
        if thread is not None:
            thread.join(2 * self.quick.options.timeout_s + self.quick.options.retry_s)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._bucket.options.hold_s / _PER_HOLD):
            with self._lock:
                holds = list(self._holds)
            for hold in holds:
                try:
                    hold.beat()
                # Whatever goes wrong: without this thread every hold of the process would seem dead.
                except Exception as error:
                    log.warning("no sign of life could be given: %s", error)


@final
class _BeatHold(Hold):
    """One held key. `version` is that of its last sign of life, where it is held exclusively."""

    def __init__(self, beats: Beats, key: str, record: Record, version: Version | None) -> None:
        self._beats = beats
        self._bucket = beats.quick
        self._key = key
        self._record = record
        self._version = version
        self._over = False
        self._lost = False
        self._lock = threading.Lock()
        _living.add(record.life)

    @property
    def lost(self) -> bool:
        return self._lost

    def beat(self) -> None:
        """Give a sign of life, unless another has taken the hold meanwhile."""
        with self._lock:
            if self._over:
                return
            self._record = msgspec.structs.replace(self._record, beat=self._record.beat + 1)
            data = msgspec.json.encode(self._record)
            if self._version is None:
                self._bucket.put(self._key, data)
                return
            if self._bucket.update(self._key, data, self._version):
                found = self._bucket.head(self._key)
                self._version = found[2] if found is not None else self._version
                return
            if (mine := self._mine()) is not None:
                self._version = mine  # a sign that was given although its answer was lost
                return
            self._over = self._lost = True
        log.error("%s was taken by another process", self._bucket.label(self._key))

    def _mine(self) -> Version | None:
        """The version that lies there, if this hold put it there. Fails: StorageError."""
        try:
            found = self._bucket.get(self._key, max_bytes=_MAX_RECORD)
            record = msgspec.json.decode(found.data, type=Record)
        except (MissingPathError, msgspec.MsgspecError):
            return None
        return found.version if record.life == self._record.life else None

    def close(self, *, remove: bool = False) -> None:
        """End it. The object goes in any case; where it cannot, its silence tells."""
        _living.discard(self._record.life)
        self._beats.drop(self)
        with self._lock, suppress(HoldfastError):
            # Another may have taken it while this process slept: then it is not ours to remove.
            if not self._over and (self._version is None or self._mine() is not None):
                self._bucket.delete([self._key])
            self._over = True


def _machine() -> str:
    """Names this boot of this machine and its view of processes: containers see their own."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return uuid.uuid4().hex  # never equal to another: then only time tells


def _started(pid: int) -> int:
    """When a process here was started, in ticks since boot; 0 if there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
