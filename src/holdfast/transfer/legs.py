"""One peer's part of a run, as its target sees it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, final

from holdfast import faults
from holdfast.errors import (
    HoldfastError,
    IntegrityError,
    MismatchError,
    PeerLostError,
    TransferError,
    VersionGoneError,
)
from holdfast.transfer.buffers import BufferSet
from holdfast.transfer.chunks import Copies, Cuts, Memories
from holdfast.transfer.messages import MISMATCH, NOT_LENT, STALE, UNKNOWN_VERSION, Refused, Started
from holdfast.transfer.route import Route, Stream
from holdfast.wire import ConnectionLost

_SHOWN: Final = 5


@final
class PeerRoute:
    """What a plan takes from one peer, and where it goes in a buffer."""

    def __init__(self, peer: str, route: Route, offsets: dict[int, int], names: dict[int, str]) -> None:
        self.peer = peer
        self.route = route
        self.stream: Stream = route.stream.within(offsets)
        self.cuts = Cuts(self.stream)
        self.copies: Copies | None = None
        self._names = names

    @property
    def nbytes(self) -> int:
        return self.stream.nbytes

    def arrays(self, chunk: int) -> list[str]:
        """The names of the arrays that have bytes in a chunk."""
        return list(dict.fromkeys(self._names[piece.place] for piece in self.route.stream.pieces(chunk)))


@final
class Leg:
    """Counts what has arrived, and tells the run when it is all there or something went wrong."""

    def __init__(
        self, number: int, route: PeerRoute, buffers: BufferSet, wake: threading.Event, *, checked: bool
    ) -> None:
        self.number = number
        self.route = route
        self.peer = route.peer
        self.memories = Memories([buffers.memory])
        self.checked = checked
        self.started: Started | None = None
        self.started_at = 0.0
        self.moved_at = 0.0
        self.heard = time.monotonic()
        self.seq = 0
        self.lent = (-1, -1)
        self.sent = False
        self.cut_off = False
        self.done_bytes = 0
        self.error: HoldfastError | None = None
        self._wake = wake
        self._lock = threading.Lock()
        self._seen = bytearray(route.stream.num_chunks)
        self._left = route.stream.num_chunks
        self._inside = 0
        self._owed = 0
        self._over = False

    # ---- what its peer says

    def answered(self, message: Started | Refused) -> None:
        """The peer has begun, or will not."""
        if isinstance(message, Refused):
            self.sent = True  # one that does not begin writes nothing
            self.fail(error_of(self.peer, message))
            return
        self.started = message
        self.started_at = self.heard = time.monotonic()
        self._wake.set()

    def failed(self, code: str, message: str) -> None:
        """The peer gave up."""
        self.cut_off = True
        self.fail(error_of(self.peer, Refused(0, code, message)))

    def fail(self, error: HoldfastError) -> None:
        """The first error stands."""
        with self._lock:
            if self.error is None:
                self.error = error
        self._wake.set()

    # ---- chunks

    def enter(self, chunks: Sequence[int]) -> bool:
        """Whether these chunks are to be written now; then `leave` must follow. Fails: ConnectionLost."""
        with self._lock:
            if self._over or self.error is not None:
                return False
            for chunk in chunks:
                if not 0 <= chunk < len(self._seen) or self._seen[chunk]:
                    raise ConnectionLost(f"chunk {chunk} was not asked for, or came before")
                self._seen[chunk] = 1
            self._inside += 1
            return True

    def leave(self, chunks: Sequence[int]) -> None:
        """So many chunks are in place; whether they are right was said before."""
        nbytes = sum(self.route.stream.size(chunk) for chunk in chunks)
        with self._lock:
            self._inside -= 1
            self._left -= len(chunks)
            self.done_bytes += nbytes
            wake = self._left == 0
            self._let_go()
        if nbytes:
            self.moved_at = self.heard = time.monotonic()
        if wake:
            self._wake.set()

    def owed(self, nbytes: int, enough: int) -> int:
        """`nbytes` more are consumed: how many to give credit for now, 0 until it is `enough`."""
        with self._lock:
            self._owed += nbytes
            if self._owed < enough:
                return 0
            found, self._owed = self._owed, 0
            return found

    @contextlib.contextmanager
    def writing(self, chunks: Sequence[int]) -> Iterator[bool]:
        """A stretch in which these chunks are written; False if they are not to be. What goes wrong in it
        fails the run.
        """
        done: Sequence[int] = ()
        try:
            entered = self.enter(chunks)
        except ConnectionLost as error:
            self.fail(TransferError(f"{self.peer}: {error.message}"))
            entered = False
        try:
            yield entered
            faults.site("transfer.chunk.received")
            done = chunks if self.error is None else ()
        except Exception as error:
            self.fail(TransferError(f"{self.peer}: {error}"))
        finally:
            if entered:
                self.leave(done)

    def damaged(self, chunk: int) -> None:
        """The bytes of a chunk are not those that were sent."""
        arrays = self.route.arrays(chunk)
        shown = ", ".join(arrays[:_SHOWN]) + (", ..." if len(arrays) > _SHOWN else "")
        self.fail(
            IntegrityError(
                f"{self.peer}: chunk {chunk} of run {self.number} arrived damaged; it holds {shown}",
                hint="the version before stays in service; run again. If it happens again: was an array "
                "changed while it was published? Else check the network and the memory",
            )
        )

    @property
    def complete(self) -> bool:
        return self.started is not None and self._left == 0

    def close(self) -> bool:
        """Take no more chunks; whether nobody writes the buffer now."""
        with self._lock:
            self._over = True
            self._let_go()
            return self._inside == 0

    def _let_go(self) -> None:
        # Whoever keeps an error keeps the frames it came through, and with them this leg.
        if self._over and not self._inside:
            self.memories = Memories()


class NotLentError(TransferError):
    """The peer does not lend its memory; it has to send."""


def error_of(peer: str, refused: Refused) -> HoldfastError:
    """The error for what a peer refused."""
    message, hint = f"{peer}: {refused.message}", refused.hint or None
    if refused.code == UNKNOWN_VERSION:
        return VersionGoneError(message, hint=hint)
    if refused.code == MISMATCH:
        return MismatchError([message], source="publication", hint=hint or "prepare a new plan")
    if refused.code == NOT_LENT:
        return NotLentError(message, hint=hint)
    if refused.code == STALE:
        return PeerLostError(message, hint=hint)
    return TransferError(message, hint=hint)
