"""Plans and runs as their source sees them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Final, Protocol, final

import numpy as np
import xxhash

from holdfast import faults
from holdfast.arrays import Bytes1D
from holdfast.arrays.passing import passes
from holdfast.errors import TransferError
from holdfast.transfer.buffers import adopted
from holdfast.transfer.chunks import BLOCK, DIGEST_BYTES, Copies, Cuts, Memories, copy, span_chunks
from holdfast.transfer.messages import (
    ABORTED,
    BORROWED,
    IN_PROCESS,
    LIMIT,
    MISMATCH,
    MISUSE,
    NOT_LENT,
    OVER_TCP,
    UNKNOWN_VERSION,
    Failed,
    Loan,
    Ping,
    Prepare,
    Run,
    Sent,
    Started,
    Wrote,
)
from holdfast.transfer.publication import Absent, Edition, Shelf
from holdfast.transfer.route import (
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MIN_CHUNK_BYTES,
    Stream,
    check_placed,
    check_segments,
    gather,
    route_digest,
    scattered,
)
from holdfast.transfer.streams import Feed, Head, send_chunk, send_hashed
from holdfast.transfer.timers import Alarm, Timers
from holdfast.transfer.workers import Workers

NO_SCRATCH: Final = np.empty(0, np.uint8)
_NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Of a chunk that was not written as it was to be."""
_HASHED_SPAN: Final = 64 << 20
"""Bytes of which a target is told at once, as far as chunks allow."""
_REPEATS: Final = 8
_STUCK_S: Final = 30.0
_GRACE_S: Final = 1.0


class Host(Protocol):
    """What the links of a source need of its endpoint."""

    shelf: Shelf
    timers: Timers
    workers: Workers
    streams: int


class Line(Protocol):
    """What a run needs of the link to its target."""

    host: Host
    target: str
    feed: Feed[ServedRun]

    def say(self, message: object, fds: tuple[int, ...] = ()) -> None: ...

    def check_open(self) -> None: ...

    def ping_s(self, asked: float) -> float: ...

    def close(self, reason: str) -> None: ...


class Ending(Protocol):
    """Something that is over when a run is."""

    def end(self) -> bool: ...


class Refusal(TransferError):
    """Why a target does not get what it asked for."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


@final
class ServedPlan:
    """A route that was checked against what is published, and the buffers lent for it."""

    def __init__(self, asked: Prepare, edition: Edition, streams: int) -> None:
        self.name = asked.name
        self.digest = asked.digest
        self.manifest = asked.manifest
        self.num_segments = len(asked.segments)
        self.stream = gather(asked.segments, edition.places, asked.chunk_bytes)
        self.cuts = Cuts(self.stream)
        self._segments, self._placed = asked.segments, asked.placed
        self.placed: Stream | None = None
        if asked.placed:
            self.placed = scattered(asked.segments, asked.placed, asked.chunk_bytes)
            self.written = Cuts(self.placed, small=0)
        self.read = Cuts(self.stream, small=0)
        self.buffers: dict[int, Bytes1D] = {}
        self.span_chunks = span_chunks(self.stream, streams)
        self.block_bytes = asked.chunk_bytes if asked.chunk_bytes % BLOCK else BLOCK

    @cached_property
    def chunks(self) -> Copies:
        """What is copied into a lent buffer, chunk by chunk."""
        assert self.placed is not None
        return Copies(self.stream, self.placed, self.stream.chunk_bytes)

    @cached_property
    def blocks(self) -> Copies:
        """The same where Python hashes: the blocks of `read` and of `written`."""
        assert self.placed is not None
        return Copies(self.stream, self.placed, self.block_bytes)

    @cached_property
    def spans(self) -> Copies:
        """What is copied at once if nothing is hashed."""
        assert self.placed is not None
        return Copies(self.stream, self.placed, self.span_chunks * self.stream.chunk_bytes)

    def lend(self, number: int, fd: int, nbytes: int) -> None:
        memory = adopted(fd, nbytes)
        check_placed(self._segments, self._placed, memory.size)
        self.buffers[number] = memory


def served_plan(asked: Prepare, shelf: Shelf, streams: int = 1) -> ServedPlan:
    """The plan, if it asks for nothing but what is published under this manifest. Fails: TransferError."""
    edition = None
    for version in reversed(shelf.versions(asked.name)):
        try:
            found = shelf.find(asked.name, version)
        except Absent:
            continue
        if found.digest == asked.manifest:
            edition = found
            break
    if edition is None:
        raise Refusal(MISMATCH, f"{asked.name!r} is not published (any more) as the plan knows it")
    if not MIN_CHUNK_BYTES <= asked.chunk_bytes <= MAX_CHUNK_BYTES:
        allowed = f"{MIN_CHUNK_BYTES:,} to {MAX_CHUNK_BYTES:,}"
        raise Refusal(LIMIT, f"chunks of {asked.chunk_bytes:,} bytes; {allowed} are allowed")
    check_segments(asked.segments, edition.manifest, edition.sizes())
    nbytes = sum(one.nbytes for one in asked.segments)
    # A target may want an array under several names, but not any number of times.
    if nbytes > _REPEATS * edition.nbytes or nbytes > MAX_CHUNKS * asked.chunk_bytes:
        raise Refusal(LIMIT, f"{nbytes:,} bytes asked for in chunks of {asked.chunk_bytes:,}")
    if route_digest(asked.segments, asked.chunk_bytes, asked.manifest) != asked.digest:
        raise Refusal(MISUSE, "the plan is not the one its digest names")
    return ServedPlan(asked, edition, streams)


@final
class ServedRun:
    """A run as its source sees it. It reads one version, from `begin` to `finish`."""

    def __init__(self, link: Line, asked: Run, plan: ServedPlan) -> None:
        self.number = asked.run
        self.window = max(1, asked.window)
        self.plan = plan
        self.num_chunks = plan.stream.num_chunks
        self._link = link
        self._asked = asked
        self._lock = threading.Lock()
        self._out = threading.Condition(self._lock)
        self._edition: Edition | None = None
        self._memories: Memories | None = None
        self._digests: list[bytes] = []
        self._inside = 0
        self._next = 0
        self._left = self.num_chunks
        self.over = False
        self.wait: Ending | None = None
        self._pinging: Alarm | None = None

    def size(self, chunk: int) -> int:
        return self.plan.stream.size(chunk)

    def begin(self, edition: Edition) -> None:
        """The version is there: say so and let the chunks go. Fails: TransferError."""
        asked = self._asked
        if edition.digest != self.plan.manifest:
            raise Refusal(
                MISMATCH,
                f"version {edition.version} of {edition.name!r} has other arrays than the plan was made for",
                "prepare a new plan",
            )
        if asked.buffer == BORROWED and edition.lent is None:
            raise Refusal(NOT_LENT, f"the memory of {edition.name!r} is not shared")
        memories = edition.read(self, self._link.target)
        if memories is None:
            raise Refusal(UNKNOWN_VERSION, f"version {edition.version} of {edition.name!r} is gone")
        with self._lock:
            if not self.over:
                self._edition, self._memories = edition, memories
                if asked.checked:
                    self._digests = edition.digests_of(self.plan.digest, self.num_chunks)
            over = self.over
        if over:
            edition.ended(self._link.target, ABORTED)
            edition.left(self)
            if asked.buffer == BORROWED:  # its target asked, and has no run yet that could hear of its end
                raise self._revoked(edition)
            return
        faults.site("transfer.run")
        if asked.buffer == BORROWED:
            self._lend(edition)
            return
        self._link.say(Started(asked.seq, self.number, edition.version, edition.manifest.scalars))
        self._pinging = self._link.host.timers.after(self._link.ping_s(asked.ping_s), self._tick)
        if self.over:
            self._link.host.timers.cancel(self._pinging)
        if not self.num_chunks:
            self._link.say(Sent(self.number))
        elif asked.buffer == OVER_TCP:
            self._link.feed.add(self.number, self)
            if self.over:
                self._link.feed.remove(self.number)
        elif asked.buffer != IN_PROCESS:
            if self.plan.stream.nbytes <= BLOCK:
                self._write()  # sooner done than handed to another thread
                return
            for _ in range(min(self._link.host.streams, self.num_chunks)):
                self._link.host.workers.submit(self._write)

    def _lend(self, edition: Edition) -> None:
        """Have the target read the memory itself; it asks at the end whether it was there all the time."""
        # Within the run: the descriptor goes with the version, and its number may then be anything.
        with self.reading(0) as memories:
            if memories is None or edition.lent is None:
                raise self._revoked(edition)
            version, scalars = edition.version, edition.manifest.scalars
            nbytes, offsets = edition.lent.nbytes, edition.lent.offsets
            loan = Loan(self._asked.seq, self.number, version, scalars, nbytes, offsets)
            self._link.say(loan, (edition.lent.fd,))
            del memories

    def _revoked(self, edition: Edition) -> Refusal:
        return Refusal(UNKNOWN_VERSION, f"version {edition.version} of {edition.name!r} was revoked")

    def _tick(self) -> float | None:
        if self.over:
            return None
        # Not by the timers' own thread: a target that reads nothing would hold all of them up.
        self._link.host.workers.submit(partial(self._link.say, Ping(self._asked.seq)))
        return self._link.ping_s(self._asked.ping_s)

    # ---- reading

    def enter(self) -> Memories | None:
        """The memory, until `leave`; None once the run is over."""
        with self._lock:
            if self.over or self._memories is None:
                return None
            self._inside += 1
            return self._memories

    def leave(self, chunks: int) -> None:
        """`chunks` more are sent."""
        edition = None
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._out.notify_all()
                if self.over:
                    edition, self._edition = self._edition, None
            self._left -= chunks
            last = not self._left if not self.over else not self._inside
        if edition is not None:
            edition.left(self)
        if last:
            self._link.say(Sent(self.number))

    def send_chunk(self, chunk: int, sock: socket.socket, scratch: Bytes1D) -> Bytes1D:
        """Send a chunk unless the run is over; returns the scratch, grown if need be."""
        memories = self.enter()
        if memories is None:
            return scratch
        sent = 0
        try:
            cut = self.plan.cuts[chunk]
            if cut.scratch_bytes > scratch.size:
                scratch = np.empty(cut.scratch_bytes, np.uint8)
            cut.gather(memories, scratch)
            head = Head(chunk, self.number, cut.nbytes, self._asked.checked)
            digests = self._digests
            known = digests[chunk] if digests else b""
            hashed = head.checked and not known
            if hashed and passes(cut.nbytes):
                found = send_hashed(sock, head, cut.stretches(memories, scratch), self._link.check_open)
            else:
                blocks = cut.blocks(memories, scratch, hashed=hashed)
                found = send_chunk(sock, head, blocks, self._link.check_open, known)
            if digests:
                digests[chunk] = found
            faults.site("transfer.chunk.sent")
            sent = 1
        finally:
            self.leave(sent)
        return scratch

    def _write(self) -> None:
        """Copy chunks into the lent buffer until there are none left."""
        buffer = self.plan.buffers.get(self._asked.buffer)
        try:
            if buffer is None or self.plan.placed is None:
                raise TransferError("the buffer to write was not lent")
            if self._asked.checked:
                self._write_hashed(buffer)
            else:
                self._write_spans(buffer)
        except Exception as error:
            self._link.say(Failed(self.number, MISUSE, f"could not write the buffer: {error}"))

    def _write_spans(self, buffer: Bytes1D) -> None:
        size = self.plan.span_chunks
        while (first := self._take(size)) >= 0:
            count = min(size, self.num_chunks - first)
            with self.reading(count) as memories:
                if memories is None:
                    return
                self.plan.spans.make(first // size, memories, buffer)
                self._link.say(Wrote(self.number, first, count))
                faults.site("transfer.chunk.sent")
                del memories

    def _write_hashed(self, buffer: Bytes1D) -> None:
        scratch = NO_SCRATCH
        while chunks := self._take_some():
            with self.reading(len(chunks)) as memories:
                if memories is None:
                    return
                if (found := self._written(chunks, memories, buffer)) is None:
                    found = []
                    for chunk in chunks:
                        if self.over:
                            return
                        one, scratch = self._write_chunk(chunk, memories, buffer, scratch)
                        found.append(one)
                wanted = b"".join(self._digests[chunks.start : chunks.stop])
                # One message for some of them: it wakes the target, which has no core to itself.
                self._link.say(Wrote(self.number, chunks.start, len(chunks), wanted, b"".join(found)))
                faults.site("transfer.chunk.sent")
                del memories

    def _written(self, chunks: range, memories: Memories, buffer: Bytes1D) -> list[bytes] | None:
        """Copy chunks; the digests of what the buffer has then. None if that cannot be done at once.

        While the cache of the core that copied has it: the target's core would have to fetch every byte once
        more, at the price of the copy itself. If no digest of a chunk is known yet, this becomes it, so both
        sides are compared; what is not the same has none.
        """
        groups = self.plan.chunks.groups(chunks)
        known = self._digests[chunks.start : chunks.stop]
        if groups.strided:
            return None
        done = groups.between(memories, buffer).copy_hashed(groups.ends, compared=not all(known))
        if done is None:
            return None
        for chunk, digest, (found, same) in zip(chunks, known, done, strict=True):
            if not digest:
                right = found if same else self.plan.read[chunk].digest(memories, NO_SCRATCH)
                self._digests[chunk] = right
        return [found if same else _NO_DIGEST for found, same in done]

    def _write_chunk(
        self, chunk: int, memories: Memories, buffer: Bytes1D, scratch: Bytes1D
    ) -> tuple[bytes, Bytes1D]:
        """The same for one chunk, block by block, or through scratch; its digest, and the scratch."""
        plan, known = self.plan, self._digests[chunk]
        ours, theirs = plan.read[chunk], plan.written[chunk]
        per_chunk = plan.stream.chunk_bytes // plan.block_bytes
        first, last = chunk * per_chunk, min((chunk + 1) * per_chunk, len(plan.blocks))
        strided = max(ours.scratch_bytes, theirs.scratch_bytes)
        if strided or plan.block_bytes != BLOCK:
            if strided > scratch.size:
                scratch = np.empty(strided, np.uint8)
            for number in range(first, last):
                self._copy_block(number, memories, buffer)
            self._digests[chunk] = known or ours.digest(memories, scratch)
            return theirs.digest([buffer], scratch), scratch
        groups = plan.blocks.groups(range(first, last))
        copies = groups.between(memories, buffer)
        hasher = xxhash.xxh3_128()
        begin, same = 0, True
        for end, written in zip(groups.ends, theirs.blocks([buffer], scratch), strict=True):
            copies.copy(begin, end)
            same = same and (bool(known) or copies.same(begin, end))
            for view in written:
                hasher.update(view)
            begin = end
        found = hasher.digest()
        self._digests[chunk] = known or (found if same else ours.digest(memories, scratch))
        return found if same else _NO_DIGEST, scratch

    def _copy_block(self, number: int, memories: list[Bytes1D], buffer: Bytes1D) -> None:
        for place, move in self.plan.blocks[number]:
            copy(move, memories[place], buffer)

    @contextlib.contextmanager
    def reading(self, chunks: int) -> Iterator[Memories | None]:
        """A stretch in which the memory is read and so many chunks are sent; None once the run is over."""
        memories = self.enter()
        done = 0
        try:
            yield memories
            done = chunks
        finally:
            if memories is not None:
                self.leave(done)

    def _take(self, count: int) -> int:
        with self._lock:
            if self.over or self._next >= self.num_chunks:
                return -1
            self._next += count
            return self._next - count

    def _take_some(self) -> range:
        """Chunks to copy next: fewer towards the end, so that all threads end together. Empty: none left."""
        with self._lock:
            if self.over:
                return range(0)
            first, left = self._next, self.num_chunks - self._next
            most = _HASHED_SPAN // self.plan.stream.chunk_bytes
            self._next += min(left, max(1, min(most, left // (2 * self._link.host.streams))))
            return range(first, self._next)

    # ---- the end

    def finish(self, outcome: str) -> None:
        """The run is over; it lets go of the version once nobody is within a chunk. Any number of times."""
        with self._lock:
            if self.over:
                return
            self.over = True
            edition, self._memories = self._edition, None
            quiet, left = not self._inside, self._left
            if quiet:
                self._edition = None
            wait, self.wait = self.wait, None
        self._link.feed.remove(self.number)
        if self._pinging is not None:
            # It holds the run, with the buffer that was lent for it.
            self._link.host.timers.cancel(self._pinging)
        if wait is not None:
            wait.end()
        if edition is not None:
            edition.ended(self._link.target, outcome)
            if quiet:
                edition.left(self)
                if left and outcome == ABORTED and self._asked.buffer >= 0:
                    self._link.say(Sent(self.number))

    def cut_off(self, reason: str) -> None:
        if self.over:
            return
        # A target that reads nothing would hold the memory in a half-sent chunk.
        self._link.host.timers.after(_GRACE_S, self._loosen)
        self.finish(ABORTED)
        self._link.say(Failed(self.number, UNKNOWN_VERSION, reason))

    def await_out(self, timeout_s: float) -> None:
        """Return once no thread reads the memory; a target that holds one up for so long loses its link."""
        with self._out:
            if self._out.wait_for(lambda: not self._inside, timeout_s):
                return
        self._link.close("its version was revoked while it read nothing")
        with self._out:
            if not self._out.wait_for(lambda: not self._inside, _STUCK_S):
                raise TransferError(f"a thread reads a revoked version for {_STUCK_S:g} s")

    def _loosen(self) -> None:
        if self._inside:
            self._link.close("a lease ran out while the target read nothing")
