"""The target's end of a link: questions to one peer, and chunks coming in from it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, final

import msgspec
import numpy as np

from holdfast import faults
from holdfast.arrays import Bytes1D
from holdfast.arrays.passing import passes
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, HoldfastError, PeerLostError, StalledError, TransferError
from holdfast.transfer.buffers import BufferSet, borrowed
from holdfast.transfer.chunks import DIGEST_BYTES
from holdfast.transfer.legs import Leg, NotLentError, error_of
from holdfast.transfer.links import Address, Channel, Identity, call, dial
from holdfast.transfer.messages import (
    Credit,
    Done,
    Failed,
    FromSource,
    Greeted,
    Loan,
    Ping,
    Refused,
    Run,
    Sent,
    Started,
    Wrote,
)
from holdfast.transfer.movers import MemfdMover, Mover, ProcessMover, TcpMover
from holdfast.transfer.patience import LATE_S, Patience, late_s
from holdfast.transfer.serving import TargetLink
from holdfast.transfer.streams import (
    HEAD_BYTES,
    Head,
    receive,
    receive_chunk,
    receive_hashed,
    set_blocking,
    unpack_head,
)
from holdfast.transfer.workers import Workers
from holdfast.wire import ConnectionLost

log = logging.getLogger("holdfast.transfer")

_decoder: Final = msgspec.msgpack.Decoder(FromSource)
_NO_SCRATCH: Final = np.empty(0, np.uint8)
_DRAIN: Final = 1 << 16
_LOOK_S: Final = 0.05
_LEAST_S: Final = 0.01
"""What a connection gets of a deadline that is all but over."""
_CREDITS: Final = 4
"""In so many parts the window is given back: while it is said, and heard, nobody moves bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an endpoint moves bytes, and how long it waits."""

    streams: int = 2
    window_bytes: int = 128 << 20
    chunk_bytes: int = 16 << 20
    connect_s: float = 5.0
    first_byte_s: float = 30.0
    idle_s: float = 10.0
    transports: tuple[str, ...] = ("process", "memfd", "tcp")


class Host(Protocol):
    """What a link needs of its endpoint."""

    identity: Identity
    settings: Settings
    workers: Workers

    def served_here(self, incarnation: str, link: int) -> TargetLink | None:
        """The other end of a link to an endpoint in this process."""
        ...


class _Question:
    """A question and, when it is there, its answer."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.heard = time.monotonic()
        self.found: Any = None
        self.fds: list[int] = []
        self.error: HoldfastError | None = None

    def answered(self, message: Any, fds: list[int]) -> None:
        """Takes the descriptors."""
        self.found = message
        self.fds, fds[:] = fds[:], []
        self.event.set()

    def close(self) -> None:
        """Let go of descriptors that nobody took."""
        while self.fds:
            os.close(self.fds.pop())

    def fail(self, error: HoldfastError) -> None:
        self.error = error
        self.event.set()


@final
class PeerLink:
    """Connections to one peer, shared by all plans and runs that use it."""

    def __init__(self, host: Host, address: Address, patience: Patience) -> None:
        """Blocks: until all connections stand, `connect_s` for each and `patience` for all at most.

        Fails: PeerLostError, StalledError, HandshakeError; TransferCancelled, seen before each connection.
        """
        self.peer = str(address)
        self.lost: str = ""
        self._host = host
        self._settings = host.settings
        self._seqs = itertools.count(1)
        self._asked: dict[int, _Question | Leg] = {}
        self._legs: dict[int, Leg] = {}
        self._lock = threading.Lock()
        self._data: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        sock, greeted, local = self._dial(address, patience)
        self.incarnation = greeted.incarnation
        self.number = greeted.link
        self._channel: Channel[FromSource] = Channel(sock, _decoder)
        try:
            self.mover: Mover = self._mover(address, greeted, local, patience)
        except BaseException:
            self._channel.close()
            for one in self._data:
                one.close()
            raise
        self._start(self._listen)
        for one in self._data:
            self._start(partial(self._receive, one))

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"holdfast-pull {self.peer}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- connecting

    def _dial(self, address: Address, patience: Patience) -> tuple[socket.socket, Greeted, bool]:
        """A control connection: a local one if the peer is on this node and takes descriptors."""
        sock, greeted = self._greeted(address, 0, address.incarnation, patience)
        me, allowed = self._host.identity, self._settings.transports
        here = "process" in allowed and self._host.served_here(greeted.incarnation, greeted.link) is not None
        if here or not greeted.local or not me.node or greeted.node != me.node or "memfd" not in allowed:
            return sock, greeted, False
        with contextlib.suppress(PeerLostError, StalledError):  # then over TCP
            local, again = self._greeted(f"\0{greeted.local}", 0, greeted.incarnation, patience)
            sock.close()
            return local, again, True
        return sock, greeted, False

    def _greeted(
        self, address: Address | str, link: int, expects: str, patience: Patience
    ) -> tuple[socket.socket, Greeted]:
        patience.check()
        deadline = Deadline(max(_LEAST_S, min(self._settings.connect_s, patience.remaining())))
        sock = dial(address, deadline.timeout_s)
        try:
            remaining = max(_LEAST_S, deadline.remaining())
            return sock, call(sock, self._host.identity, self.peer, link, expects, remaining)
        except BaseException:
            sock.close()
            raise

    def _mover(self, address: Address, greeted: Greeted, local: bool, patience: Patience) -> Mover:
        served = self._host.served_here(greeted.incarnation, greeted.link)
        if served is not None and "process" in self._settings.transports:
            return ProcessMover(self._host.workers, self._settings.streams, served)
        if local:
            return MemfdMover(self._host.workers, self._settings.streams, self._channel)
        for _ in range(self._settings.streams):
            sock, _ = self._greeted(address, self.number, self.incarnation, patience)
            set_blocking(sock)
            self._data.append(sock)
        return TcpMover()

    # ---- asking

    def ask(self, make: Callable[[int], object], patience: Patience, phase: str) -> Any:
        """The answer to a question.

        Blocks: until the peer answers; one that is silent for idle_s, or that much late, ends it.
        Fails: PeerLostError, StalledError, TransferCancelled, and what the peer refuses it with.
        """
        question = _Question()
        try:
            return self._ask(question, make, patience, phase)
        finally:
            question.close()

    def _ask(self, question: _Question, make: Callable[[int], object], patience: Patience, phase: str) -> Any:
        seq = self._expect(question)
        idle_s = self._settings.idle_s
        late = Deadline(patience.remaining() + idle_s / 2)
        try:
            self.say(make(seq))
            look_s, looked = min(_LOOK_S, idle_s / 4), question.heard
            while not question.event.wait(look_s):
                patience.check()
                now = time.monotonic()
                if now - looked > look_s + late_s(idle_s):
                    question.heard = now  # we were stopped ourselves: the silence was ours
                looked = now
                silent = now - question.heard
                if silent > idle_s:
                    # What the connection still holds, perhaps half a frame, must not meet the next question.
                    self.lose(f"no answer to {phase} (idle_s={idle_s:g})")
                if silent > idle_s or late.expired():
                    raise StalledError(
                        f"{self.peer}: no answer to {phase}; silent for {silent:.1f} s",
                        hint="the peer is stopped, stuck or cut off",
                    )
        finally:
            if self._answered(seq) is None:
                question.event.wait(LATE_S)  # it is being answered just now, perhaps with descriptors
        if question.error is not None:
            raise question.error
        if isinstance(question.found, Refused):
            raise error_of(self.peer, question.found)
        return question.found

    def borrow(self, make: Callable[[int], Run], patience: Patience) -> tuple[Loan, Bytes1D]:
        """What the peer lends for a run, and where it lies here. Fails: as `ask` does; TransferError."""
        question = _Question()
        try:
            loan = self._ask(question, make, patience, "run")
            if isinstance(loan, Started):
                raise NotLentError(f"{self.peer}: it knows of no loans, and sends")
            if not isinstance(loan, Loan) or len(question.fds) != 1:
                raise TransferError(f"{self.peer}: it lent nothing")
            return loan, borrowed(question.fds.pop(), loan.nbytes)
        finally:
            question.close()

    def begin(self, leg: Leg, make: Callable[[int], Run]) -> None:
        """Ask for a run. Fails: PeerLostError."""
        with self._lock:
            if not self.lost:
                self._legs[leg.number] = leg
        leg.seq = self._expect(leg)
        leg.heard = time.monotonic()
        self.say(make(leg.seq))

    def end(self, leg: Leg, outcome: str) -> None:
        """The run is over; tell the peer what became of it. Never fails."""
        with self._lock:
            found = self._legs.pop(leg.number, None)
            self._asked.pop(leg.seq, None)
        if found is not None:
            self.tell(Done(leg.number, outcome))

    def _expect(self, asker: _Question | Leg) -> int:
        seq = next(self._seqs)
        with self._lock:
            if self.lost:
                raise self.lost_error()
            self._asked[seq] = asker
        return seq

    def _answered(self, seq: int) -> _Question | Leg | None:
        with self._lock:
            return self._asked.pop(seq, None)

    def say(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Fails: PeerLostError."""
        try:
            self._channel.send(message, fds, timeout_s=self._settings.idle_s)
        except ConnectionLost as error:
            self.lose(error.message)
            raise self.lost_error() from error

    def tell(self, message: object) -> None:
        """Say it if that is possible."""
        if not self.lost:
            with contextlib.suppress(PeerLostError):
                self.say(message)

    @property
    def ping_s(self) -> float:
        """How often a peer that we wait for is to show that it is there."""
        return self._settings.idle_s / 4

    def ready(self, plan: int, buffers: BufferSet) -> int:
        """Make a buffer known to the peer; what `Run.buffer` is to say. Fails: PeerLostError."""
        try:
            return self.mover.ready(plan, buffers)
        except ConnectionLost as error:
            self.lose(error.message)
            raise self.lost_error() from error

    def unready(self, plan: int, buffer: int) -> None:
        """A buffer was given up. Never fails."""
        if not self.lost:
            with contextlib.suppress(ConnectionLost):
                self.mover.unready(plan, buffer)

    # ---- listening

    def _listen(self) -> None:
        try:
            while True:
                try:
                    message, fds = self._channel.receive(timeout_s=3600.0)
                except DeadlineError:
                    continue
                self._handle(message, fds)
                for fd in fds:
                    os.close(fd)
        except ConnectionLost as error:
            self.lose(error.message)
        except Exception as error:
            log.exception("the link to %s failed", self.peer)
            self.lose(f"the link failed: {error}")

    def _handle(self, message: FromSource, fds: list[int]) -> None:
        match message:
            case Ping():
                self._alive(message.seq)
            case Wrote():
                leg = self._legs.get(message.run)
                if leg is not None:
                    self.mover.wrote(leg, message)
            case Sent():
                leg = self._legs.get(message.run)
                if leg is not None:
                    leg.sent = True
            case Failed():
                leg = self._legs.get(message.run)
                if leg is not None:
                    leg.failed(message.code, message.message)
            case _:
                asker = self._answered(message.seq)
                if isinstance(asker, _Question):
                    asker.answered(message, fds)
                elif asker is not None and isinstance(message, Started | Refused):
                    asker.answered(message)
                    if isinstance(message, Started):
                        self.mover.started(asker)

    def _alive(self, seq: int) -> None:
        """The peer is at work on what was asked with `seq`; its work on something else would say nothing."""
        with self._lock:
            found = [leg for leg in self._legs.values() if leg.seq == seq]
            asker = self._asked.get(seq)
        for one in [*found, *([asker] if asker is not None else [])]:
            one.heard = time.monotonic()

    def _receive(self, sock: socket.socket) -> None:
        """Take chunks from one data connection until it ends."""
        head = memoryview(bytearray(HEAD_BYTES))
        scratch = _NO_SCRATCH
        try:
            while True:
                receive(sock, [head], self._check_open)
                found = unpack_head(bytes(head))
                leg = self._legs.get(found.run)
                if leg is None:
                    self._drain(sock, found)
                else:
                    scratch = self._take(sock, leg, found, scratch)
                del leg
        except Exception as error:  # whatever it is, nobody may wait for what is not read any more
            self.lose(f"a data connection broke: {getattr(error, 'strerror', None) or error}")
        finally:
            sock.close()

    def _take(self, sock: socket.socket, leg: Leg, head: Head, scratch: Bytes1D) -> Bytes1D:
        """Receive a chunk into its place; returns the scratch, grown if need be."""
        if head.chunk >= leg.route.stream.num_chunks or head.nbytes != leg.route.stream.size(head.chunk):
            raise ConnectionLost(f"chunk {head.chunk} of {head.nbytes:,} bytes was not asked for")
        if head.checked != leg.checked:
            raise ConnectionLost(f"chunk {head.chunk} has a digest or none, against what was asked")
        if not leg.enter((head.chunk,)):
            self._drain(sock, head)
            return scratch
        done: tuple[int, ...] = ()
        try:
            cut = leg.route.cuts[head.chunk]
            if cut.scratch_bytes > scratch.size:
                scratch = np.empty(cut.scratch_bytes, np.uint8)

            def moved(nbytes: int) -> None:
                if nbytes:
                    leg.moved_at = leg.heard = time.monotonic()
                elif self.lost:
                    raise ConnectionLost(self.lost)

            if head.checked and passes(head.nbytes):
                right = receive_hashed(sock, cut.stretches(leg.memories, scratch), moved)
            else:
                blocks = cut.blocks(leg.memories, scratch, hashed=head.checked)
                right = receive_chunk(sock, head, blocks, moved)
            if not right:
                leg.damaged(head.chunk)
                return scratch
            cut.scatter(scratch, leg.memories)
            faults.site("transfer.chunk.received")
            done = (head.chunk,)
        finally:
            leg.leave(done)
        window = self._settings.window_bytes
        if leg.route.nbytes > window and (nbytes := leg.owed(head.nbytes, window // _CREDITS)):
            self.say(Credit(leg.number, nbytes))
        return scratch

    def _drain(self, sock: socket.socket, head: Head) -> None:
        """Read past a chunk of a run that is over."""
        left = head.nbytes + head.checked * DIGEST_BYTES
        waste = memoryview(bytearray(min(left, _DRAIN)))
        while left:
            part = waste[: min(left, _DRAIN)]
            receive(sock, [part], self._check_open)
            left -= len(part)

    def _check_open(self, nbytes: int) -> None:
        if not nbytes and self.lost:
            raise ConnectionLost(self.lost)

    # ---- the end

    def lost_error(self) -> PeerLostError:
        return PeerLostError(
            f"{self.peer}: {self.lost}",
            hint="the version before stays in service; the next run connects again",
        )

    def lose(self, reason: str) -> None:
        """The connections are of no more use: fail all that waits on them."""
        with self._lock:
            if self.lost:
                return
            self.lost = reason or "closed"
            legs, asked = list(self._legs.values()), list(self._asked.values())
            self._asked.clear()
        self._channel.shutdown()
        for sock in self._data:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for one in (*legs, *asked):
            one.fail(self.lost_error())

    def close(self) -> None:
        """End the connections and their threads."""
        self.lose("this endpoint closed the link")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)
        self._channel.close()
