"""What an endpoint offers: named trees in versions, held by reference for as long as somebody reads them.

Arrays are not copied. numpy arrays must not be changed while they are published. JAX arrays on CPU are looked
at through a host view, which makes the runtime copy instead of reuse their memory if they are donated later;
so a donating step after `publish` is safe, and costs one copy.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self, final

from holdfast.arrays import Bytes1D
from holdfast.errors import HoldfastError, UsageError
from holdfast.transfer.buffers import is_sealed, lendable
from holdfast.transfer.chunks import Memories
from holdfast.transfer.manifest import PublishedTree
from holdfast.transfer.messages import NEWEST, UNKNOWN
from holdfast.transfer.timers import Timers
from holdfast.transfer.workers import Workers

log = logging.getLogger("holdfast.transfer")

_MAX_DIGESTS: Final = 64
"""Plans whose digests are kept; targets of one kind share theirs."""


_LONGEST_S: Final = 1e9
_READ_S: Final = 1.0
"""How long a reader may take over what it is reading when its version is revoked."""


class Reader(Protocol):
    """A run that reads a version."""

    def cut_off(self, reason: str) -> None:
        """Let go of the memory: read nothing more after what is being read now.

        Blocks: until the target is told, which takes one that reads nothing some seconds.
        """
        ...

    def await_out(self, timeout_s: float) -> None:
        """Return once nothing is being read; whoever holds that up for so long is cut off harder."""
        ...


@final
class Lent:
    """Memory that targets on this node may read themselves, and where in it the boxes lie.

    Its descriptor is for reading, and ends with the version: memory lives as long as one refers to it.
    """

    def __init__(self, fd: int, memory: Bytes1D, boxes: Sequence[Bytes1D]) -> None:
        self.nbytes = memory.size
        start = memory.ctypes.data
        self.offsets = tuple(box.ctypes.data - start if box.size else 0 for box in boxes)
        for offset, box in zip(self.offsets, boxes, strict=True):
            if not 0 <= offset <= self.nbytes - box.size:
                raise UsageError("a box lies outside of the memory that is shared")
        self.fd = lendable(fd)
        self.close = weakref.finalize(self, os.close, self.fd)


def lent(fd: int, memory: Bytes1D, boxes: Sequence[Bytes1D]) -> Lent | None:
    """What can be lent of a memfd; None if it cannot be, and has to be sent: not sealed, or no descriptor."""
    try:
        if is_sealed(fd):
            return Lent(fd, memory, boxes)
    except OSError as error:
        log.warning("memory is not lent to readers on this node, but sent: %s", error)
    return None


@final
class Edition:
    """One version of a published tree. Its memory goes when it is retired and nobody reads it."""

    def __init__(self, name: str, version: int, found: PublishedTree) -> None:
        self.name = name
        self.version = version
        self.manifest, memories = found.taken()
        self.digest = self.manifest.digest()
        self.places: dict[tuple[int, int], int] = {}
        self.memories = Memories()
        self.outcomes: dict[str, str] = {}
        self._digests: dict[str, list[bytes]] = {}
        self.retired = ""
        self._lock = threading.Lock()
        self._readers: set[Reader] = set()
        self._gone = threading.Event()
        self._at_end: Callable[[], None] | None = None
        for array, boxes in enumerate(memories):
            for box, memory in enumerate(boxes):
                self.places[array, box] = len(self.memories)
                self.memories.append(memory)
        self.nbytes = sum(memory.size for memory in self.memories)
        self.lent = None if found.shared is None else lent(*found.shared, self.memories)

    def sizes(self) -> dict[tuple[int, int], int]:
        """The bytes of each (array, box)."""
        return {place: self.memories[at].size for place, at in self.places.items()}

    def digests_of(self, plan: str, num_chunks: int) -> list[bytes]:
        """The digests of the chunks of a plan, as far as they are known; to be filled in.

        What several targets ask for alike is hashed once. It also shows if somebody changes an array while it
        is published: the digests that the first reader got do not fit the bytes that the next one gets.
        """
        with self._lock:
            found = self._digests.get(plan)
            if found is None:
                found = [b""] * num_chunks
                if len(self._digests) < _MAX_DIGESTS:
                    self._digests[plan] = found
            return found

    def read(self, reader: Reader, target: str) -> Memories | None:
        """The memory, until `left`; None if it is gone."""
        with self._lock:
            if self.retired:
                return None
            self._readers.add(reader)
            self.outcomes[target] = UNKNOWN
            return self.memories

    def ended(self, target: str, outcome: str) -> None:
        """A run is over. What a vanished target did with the bytes is unknown."""
        with self._lock:
            self.outcomes[target] = outcome

    def left(self, reader: Reader) -> None:
        """A reader is out: it reads nothing any more."""
        with self._lock:
            self._readers.discard(reader)
            self._sweep()

    def retire(self, reason: str) -> None:
        """Let nobody read it from now on; those who do may finish."""
        with self._lock:
            self.retired = self.retired or reason
            self._sweep()

    def expire(self, reason: str) -> list[Reader]:
        """Let nobody read it any more, and cut off those who do: these may be within a last read."""
        with self._lock:
            self.retired = self.retired or reason
            readers = list(self._readers)
            self._sweep()
        for reader in readers:
            reader.cut_off(f"version {self.version} of {self.name!r}: {reason}")
        return readers

    def _sweep(self) -> None:
        if self.retired and not self._readers:
            self.memories = Memories()
            self._digests = {}
            if self.lent is not None:
                self.lent.close()
            self._gone.set()
            if self._at_end is not None:
                self._at_end()
                self._at_end = None

    def when_gone(self, act: Callable[[], None]) -> None:
        """Call it once the memory is let go, at once if it is. It must not block."""
        with self._lock:
            if not self._gone.is_set():
                self._at_end = act
                return
        act()

    def wait_gone(self, timeout_s: float) -> bool:
        return self._gone.wait(timeout_s)

    @property
    def readers(self) -> int:
        return len(self._readers)


@final
class Publication:
    """A version that was published; leaving its context releases it."""

    def __init__(self, shelf: Shelf, edition: Edition) -> None:
        self._shelf = shelf
        self._edition = edition
        self.name = edition.name
        self.version = edition.version
        self.nbytes = edition.nbytes

    def release(self) -> None:
        """Offer it no more. Its memory goes when the runs that read it are over."""
        self._shelf.drop(self._edition, "it was released")

    def revoke(self, reason: str) -> None:
        """Offer it no more, and cut off the runs that read it: its memory is no longer read on return."""
        for reader in self._shelf.revoke(self._edition, reason):
            reader.await_out(_READ_S)

    def wait_released(self, timeout_s: float) -> bool:
        """Whether its memory is let go. Blocks: until it is, `timeout_s` at most."""
        return self._edition.wait_gone(timeout_s)

    @property
    def readers(self) -> int:
        """How many runs read it now."""
        return self._edition.readers

    def targets(self) -> dict[str, str]:
        """What became of it at each target that asked: committed, aborted, or unknown.

        It is unknown while a run is under way, and for ever if the target vanished before it said.
        """
        return dict(self._edition.outcomes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Absent(HoldfastError):
    """There is no such version; `ever` says whether one may still come."""

    def __init__(self, message: str, *, ever: bool, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ever = ever


Waiter = Callable[[], None]


@final
class Shelf:
    """All that an endpoint has published."""

    def __init__(self, timers: Timers, workers: Workers) -> None:
        self._timers = timers
        self._workers = workers
        self._lock = threading.Lock()
        self._names: dict[str, dict[int, Edition]] = {}
        self._newest: dict[str, int] = {}
        self._waiters: dict[str, list[Waiter]] = {}

    def publish(
        self, name: str, tree: Callable[[], PublishedTree], version: int, *, lease_s: float, keep: int
    ) -> Publication:
        if version < 0 or keep < 1 or not 0 < lease_s < _LONGEST_S:
            raise UsageError(
                f"version={version}, keep={keep}, lease_s={lease_s}: versions start at 0, at least one is "
                "kept, and a lease has an end"
            )
        self._check_newer(name, version)
        edition = Edition(name, version, tree())
        with self._lock:
            self._check_newer(name, version)
            editions = self._names.setdefault(name, {})
            editions[version] = edition
            self._newest[name] = version
            old = [editions.pop(number) for number in sorted(editions)[:-keep]]
            waiters = self._waiters.pop(name, [])
        for one in old:
            one.retire(f"version {version} took its place")
        alarm = self._timers.after(lease_s, lambda: self._lapse(edition))
        edition.when_gone(lambda: self._timers.cancel(alarm))
        for waiter in waiters:
            waiter()
        return Publication(self, edition)

    def _check_newer(self, name: str, version: int) -> None:
        newest = self._newest.get(name, -1)
        if version <= newest:
            raise UsageError(
                f"version {version} of {name!r} is not newer than {newest}",
                hint="versions only grow; count on after a restart",
            )

    def find(self, name: str, version: int = NEWEST) -> Edition:
        """The edition asked for. Fails: Absent."""
        with self._lock:
            editions = self._names.get(name, {})
            newest = self._newest.get(name)
            if version == NEWEST:
                if editions:
                    return editions[max(editions)]
                seen = (
                    "was never published" if newest is None else f"has no version now; the last was {newest}"
                )
                known = ", ".join(sorted(self._names)) or "nothing"
                raise Absent(f"{name!r} {seen}", ever=True, hint=f"published here: {known}")
            if version in editions:
                return editions[version]
            have = ", ".join(map(str, sorted(editions))) or "none"
            raise Absent(
                f"version {version} of {name!r} is not there; there are: {have}",
                ever=newest is None or version > newest,
                hint="ask for no version to have the newest, or keep more of them where it is published",
            )

    def versions(self, name: str) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._names.get(name, {})))

    def when_published(self, name: str, waiter: Waiter) -> None:
        """Call it once, at the next publication under this name. It must not block."""
        with self._lock:
            self._waiters.setdefault(name, []).append(waiter)

    def forget_waiter(self, name: str, waiter: Waiter) -> None:
        with self._lock:
            waiting = self._waiters.get(name, [])
            if waiter in waiting:
                waiting.remove(waiter)

    def drop(self, edition: Edition, reason: str) -> None:
        self._take_off(edition)
        edition.retire(reason)

    def revoke(self, edition: Edition, reason: str) -> list[Reader]:
        """Take it off and cut off its readers, who may still be within a last read."""
        self._take_off(edition)
        return edition.expire(reason)

    def _lapse(self, edition: Edition) -> None:
        # Not by the timers' own thread: a target that reads nothing would hold all of them up.
        self._workers.submit(lambda: self.revoke(edition, "its lease ran out"))

    def _take_off(self, edition: Edition) -> None:
        with self._lock:
            editions = self._names.get(edition.name, {})
            if editions.get(edition.version) is edition:
                del editions[edition.version]

    def close(self) -> None:
        with self._lock:
            editions = [one for found in self._names.values() for one in found.values()]
            self._names.clear()
            self._waiters.clear()
        for one in editions:
            one.expire("its endpoint closed")
