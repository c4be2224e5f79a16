"""The ways bytes take, behind one small interface.

process   both endpoints in one process: copied straight from the source's memory
memfd     one node: the source copies straight into the target's buffer, which was lent to it
tcp       chunks on data connections, received straight into the buffer
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Final, Protocol, final

import numpy as np

from holdfast.transfer.buffers import BufferSet
from holdfast.transfer.chunks import DIGEST_BYTES, Copies, span_chunks
from holdfast.transfer.legs import Leg
from holdfast.transfer.links import Channel
from holdfast.transfer.messages import IN_PROCESS, OVER_TCP, Forget, FromSource, Lend, Wrote
from holdfast.transfer.served import ServedRun
from holdfast.transfer.serving import TargetLink
from holdfast.transfer.workers import Workers

_NO_SCRATCH: Final = np.empty(0, np.uint8)


class Mover(Protocol):
    """How the bytes of a link's runs come to the target."""

    name: str

    def ready(self, plan: int, buffers: BufferSet) -> int:
        """Make the buffer known to the peer; what `Run.buffer` is to say. Fails: ConnectionLost."""
        ...

    def unready(self, plan: int, buffer: int) -> None:
        """The buffer was given up."""
        ...

    def started(self, leg: Leg) -> None:
        """The peer has begun. Must not block."""
        ...

    def wrote(self, leg: Leg, message: Wrote) -> None:
        """The peer has written chunks. Must not block."""
        ...

    def settled(self, leg: Leg) -> bool:
        """The run is over: whether the peer will write nothing more, as far as it is the peer who writes."""
        ...


@final
class TcpMover:
    """Chunks come on the data connections; the threads that read those do it all."""

    name = "tcp"

    def ready(self, plan: int, buffers: BufferSet) -> int:
        return OVER_TCP

    def unready(self, plan: int, buffer: int) -> None:
        pass

    def started(self, leg: Leg) -> None:
        pass

    def wrote(self, leg: Leg, message: Wrote) -> None:
        leg.failed("", "wrote into a buffer that it does not have")

    def settled(self, leg: Leg) -> bool:
        return True


@final
class ProcessMover:
    """Our own threads copy, from the memory of an endpoint in this process.

    Nothing is hashed: the bytes cross no boundary on which they could be damaged.
    """

    name = "process"

    def __init__(self, workers: Workers, threads: int, served: TargetLink) -> None:
        self._workers = workers
        self._threads = threads
        self._served = served

    def ready(self, plan: int, buffers: BufferSet) -> int:
        return IN_PROCESS

    def unready(self, plan: int, buffer: int) -> None:
        pass

    def started(self, leg: Leg) -> None:
        run = self._served.run(leg.number)
        if run is None:
            return  # the source says why
        stream = leg.route.stream
        size = span_chunks(stream, self._threads)
        if leg.route.copies is None:
            leg.route.copies = Copies(run.plan.stream, stream, size * stream.chunk_bytes)
        spans = deque(range(len(leg.route.copies)))
        for _ in range(min(self._threads, len(spans))):
            self._workers.submit(lambda: self._copy(leg, run, spans, size))

    def _copy(self, leg: Leg, run: ServedRun, spans: deque[int], size: int) -> None:
        stream, copies = leg.route.stream, leg.route.copies
        assert copies is not None
        while (span := _popped(spans)) is not None:
            chunks = range(span * size, min((span + 1) * size, stream.num_chunks))
            with run.reading(len(chunks)) as memories:
                if memories is None:
                    return  # the source says why
                with leg.writing(chunks) as ours:
                    if not ours:
                        return  # the run is over
                    copies.make(span, memories, leg.memories[0])
                del memories

    def wrote(self, leg: Leg, message: Wrote) -> None:
        leg.failed("", "wrote into a buffer that it does not have")

    def settled(self, leg: Leg) -> bool:
        return True


def _popped(spans: deque[int]) -> int | None:
    """The next of what several threads take from; None if there is none."""
    with contextlib.suppress(IndexError):
        return spans.popleft()
    return None


@final
class MemfdMover:
    """The peer writes into our buffer, and reads back what it has written.

    What it reads back shows that the bytes are where it wanted them, not that we shall look for them there.
    So the first checked run into a buffer is hashed by us as well, where our own plan says that it lies;
    after that, the places of both are known to be the same.
    """

    name = "memfd"

    def __init__(self, workers: Workers, threads: int, channel: Channel[FromSource]) -> None:
        self._workers = workers
        self._threads = threads
        self._channel = channel
        self._lent: set[tuple[int, int]] = set()
        self._proven: set[tuple[int, int]] = set()
        self._proving: dict[Leg, _Proof] = {}

    def ready(self, plan: int, buffers: BufferSet) -> int:
        if (plan, buffers.number) not in self._lent:
            self._channel.send(Lend(plan, buffers.number, buffers.nbytes), (buffers.fd,))
            self._lent.add((plan, buffers.number))
        return buffers.number

    def unready(self, plan: int, buffer: int) -> None:
        if (plan, buffer) in self._lent:
            self._lent.discard((plan, buffer))
            self._proven.discard((plan, buffer))
            self._channel.send(Forget(plan, buffer))

    def started(self, leg: Leg) -> None:
        if leg.checked and leg.lent not in self._proven:
            self._proving[leg] = _Proof(leg, self._workers, self._threads)

    def wrote(self, leg: Leg, message: Wrote) -> None:
        chunks = range(message.chunk, message.chunk + message.count)
        damaged = _damaged(message) if leg.checked else None
        if (proof := self._proving.get(leg)) is not None and damaged is None:
            for chunk, digest in zip(chunks, _each(message.digest), strict=True):
                proof.add(chunk, digest)
            return
        with leg.writing(chunks) as ours:
            if ours and damaged is not None:
                leg.damaged(damaged)

    def settled(self, leg: Leg) -> bool:
        if self._proving.pop(leg, None) is not None and leg.complete and leg.error is None:
            self._proven.add(leg.lent)
        return leg.sent


@final
class _Proof:
    """Chunks of one run that its peer has written and we have not hashed yet."""

    def __init__(self, leg: Leg, workers: Workers, threads: int) -> None:
        self._leg = leg
        self._workers = workers
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._active = 0

    def add(self, chunk: int, expected: bytes) -> None:
        with self._lock:
            self._waiting.append((chunk, expected))
            if self._active >= self._threads:
                return
            self._active += 1
        self._workers.submit(self._work)

    def _work(self) -> None:
        scratch = _NO_SCRATCH
        leg = self._leg
        while True:
            with self._lock:
                if not self._waiting:
                    self._active -= 1
                    return
                chunk, expected = self._waiting.popleft()
            with leg.writing(range(chunk, chunk + 1)) as ours:
                if not ours:
                    continue
                cut = leg.route.cuts[chunk]
                if cut.scratch_bytes > scratch.size:
                    scratch = np.empty(cut.scratch_bytes, np.uint8)
                if cut.digest(leg.memories, scratch) != expected:
                    leg.damaged(chunk)


def _damaged(message: Wrote) -> int | None:
    """The first chunk that was not read back as it was to be written. Nothing read back is no proof."""
    nbytes = message.count * DIGEST_BYTES
    if message.count < 1 or len(message.digest) != nbytes or len(message.found) != nbytes:
        return message.chunk
    if message.digest == message.found:
        return None
    pairs = zip(_each(message.digest), _each(message.found), strict=True)
    return message.chunk + next(at for at, (wanted, found) in enumerate(pairs) if wanted != found)


def _each(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
