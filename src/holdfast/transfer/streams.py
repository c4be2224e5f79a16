"""Chunks on data connections: sending and receiving without a copy, and how many may be under way.

Data sockets block, with timeouts in the kernel: a call moves a whole chunk, and returns early only if
nothing moved for a while or the connection is gone. Usable on its own.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, final

import numpy as np
import xxhash

from holdfast.arrays import Bytes1D
from holdfast.arrays.copying import Numbers, address_of
from holdfast.arrays.passing import Passage
from holdfast.transfer.chunks import DIGEST_BYTES, Views
from holdfast.transfer.messages import CHUNK_HEAD, CHUNK_MAGIC
from holdfast.wire import ConnectionLost

TICK_S: Final = 0.25
"""How long a call on a data socket waits in the kernel before it looks around."""
HEAD_BYTES: Final = CHUNK_HEAD.size
_MAX_VIEWS: Final = 1024
_WHOLE: Final = socket.MSG_WAITALL
_CLOSED: Final = "the peer closed a data connection"


def set_blocking(sock: socket.socket) -> None:
    """Make a socket fit for chunks."""
    sock.settimeout(None)
    tick = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)


class Head(NamedTuple):
    """What stands before the bytes of a chunk."""

    chunk: int
    run: int
    nbytes: int
    checked: bool


def pack_head(head: Head) -> bytes:
    """The head as bytes, with a checksum of its own."""
    tail = DIGEST_BYTES if head.checked else 0
    start = CHUNK_HEAD.pack(CHUNK_MAGIC, head.chunk, head.run, head.nbytes, tail, 0)[:-4]
    return start + xxhash.xxh32_intdigest(start).to_bytes(4, "little")


def unpack_head(data: bytes) -> Head:
    """The head in these bytes. Fails: ConnectionLost, for nobody knows where the next one begins."""
    magic, chunk, run, nbytes, tail, check = CHUNK_HEAD.unpack(data)
    if magic != CHUNK_MAGIC or check != xxhash.xxh32_intdigest(data[:-4]) or tail not in (0, DIGEST_BYTES):
        raise ConnectionLost("the head of a chunk arrived damaged")
    return Head(chunk, run, nbytes, bool(tail))


def send_chunk(
    sock: socket.socket,
    head: Head,
    blocks: Sequence[Views],
    idle: Callable[[], None],
    known: bytes = b"",
) -> bytes:
    """Send a chunk, each block hashed just after the kernel copied it; the digest, `known` if given.

    After, not before: the copy reads ahead through memory, and leaves the block in the cache for the hash.
    Fails: OSError.
    """
    lead: Views = [pack_head(head)]
    if not head.checked or known:
        tail = [known] if head.checked else []
        send(sock, [*lead, *(view for block in blocks for view in block), *tail], idle)
        return known
    hasher = xxhash.xxh3_128()
    update = hasher.update
    for block in blocks[:-1]:
        send(sock, [*lead, *block] if lead else block, idle)
        lead = []
        for view in block:
            update(view)
    for view in blocks[-1]:
        update(view)
    found = hasher.digest()
    send(sock, [*lead, *blocks[-1], found], idle)
    return found


def send_hashed(sock: socket.socket, head: Head, body: Numbers, idle: Callable[[], None]) -> bytes:
    """The same for a body whose stretches are given by address and size, without Python. Fails: OSError."""
    lead, tail = np.frombuffer(pack_head(head), np.uint8), np.empty(DIGEST_BYTES, np.uint8)
    passage = Passage(_around(body, lead, tail), head=lead.size, tail=tail.size)
    while passage.left:
        if not passage.send(sock):
            idle()
    return tail.tobytes()


def receive_hashed(sock: socket.socket, body: Numbers, moved: Callable[[int], None]) -> bool:
    """`receive_chunk` for a checked body whose stretches are given by address and size, without Python.

    Fails: OSError, ConnectionLost.
    """
    tail = np.empty(DIGEST_BYTES, np.uint8)
    passage = Passage(_around(body, tail), head=0, tail=tail.size)
    try:
        while passage.left:
            moved(passage.receive(sock))
    except OSError as error:
        if error.errno == errno.ENODATA:
            raise ConnectionLost(_CLOSED) from None
        raise
    return passage.is_right()


def _around(body: Numbers, *others: Bytes1D) -> Numbers:
    """A table of stretches with one before it, if two are given, and one behind it."""
    *lead, tail = ([[address_of(one), one.size]] for one in others)
    return np.concatenate([*(np.array(one, np.uint64) for one in lead), body, np.array(tail, np.uint64)])


def receive_chunk(
    sock: socket.socket, head: Head, blocks: Sequence[Views], moved: Callable[[int], None]
) -> bool:
    """Receive a chunk, each block hashed as soon as it is there; whether it is what was sent.

    Fails: OSError, ConnectionLost.
    """
    if not head.checked:
        for block in blocks:
            receive(sock, block, moved)
        return True
    hasher = xxhash.xxh3_128()
    update = hasher.update
    sent = bytearray(DIGEST_BYTES)
    for block in blocks[:-1]:
        receive(sock, block, moved)
        for view in block:
            update(view)
    receive(sock, [*blocks[-1], memoryview(sent)], moved)
    for view in blocks[-1]:
        update(view)
    return hasher.digest() == sent


def send(sock: socket.socket, views: Views, idle: Callable[[], None]) -> None:
    """Send all views, one after the other.

    Blocks: until the peer took them; calls `idle` each time nothing moved for TICK_S, which ends it by
    raising. Fails: OSError.
    """
    rest = views
    while rest:
        try:
            if len(rest) == 1:
                sent = sock.send(rest[0])
                if sent == len(rest[0]):
                    return
            else:
                sent = sock.sendmsg(rest[:_MAX_VIEWS])
        except BlockingIOError:
            idle()
            continue
        rest = _after(rest, sent)


def receive(sock: socket.socket, views: Views, moved: Callable[[int], None]) -> None:
    """Fill all views, one after the other.

    Blocks: until they are full; calls `moved` with the bytes of each step, 0 when nothing came for TICK_S. It
    ends the call by raising. Fails: OSError, ConnectionLost at the end of the stream.
    """
    rest = views
    while rest:
        try:
            if len(rest) == 1:
                got = sock.recv_into(rest[0], 0, _WHOLE)
                if got == len(rest[0]):
                    moved(got)
                    return
            else:
                got = sock.recvmsg_into(rest[:_MAX_VIEWS], 0, _WHOLE)[0]
        except BlockingIOError:
            moved(0)
            continue
        if got == 0:
            raise ConnectionLost(_CLOSED)
        moved(got)
        rest = _after(rest, got)


def _after(views: list[Any], done: int) -> list[Any]:
    """What is left of the views after `done` bytes."""
    for at, view in enumerate(views):
        size = len(view)
        if done < size:
            return [view[done:], *views[at + 1 :]]
        done -= size
    return []


class Outgoing(Protocol):
    """A run as its source sends it."""

    num_chunks: int
    window: int

    def size(self, chunk: int) -> int: ...


Sending = TypeVar("Sending", bound=Outgoing)


class _Queued(Generic[Sending]):
    __slots__ = ("next", "run", "under_way")

    def __init__(self, run: Sending) -> None:
        self.run = run
        self.next = 0
        self.under_way = 0


@final
class Feed(Generic[Sending]):
    """Which chunk goes next: runs take turns, and of each at most its window is under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: dict[int, _Queued[Sending]] = {}
        self._turns: deque[int] = deque()
        self._closed = False

    def add(self, number: int, run: Sending) -> None:
        with self._changed:
            self._runs[number] = _Queued(run)
            self._turns.append(number)
            self._changed.notify_all()

    def remove(self, number: int) -> None:
        """No further chunk of this run is given out."""
        with self._changed:
            if self._runs.pop(number, None) is not None:
                self._turns.remove(number)

    def credit(self, number: int, nbytes: int) -> None:
        """So many bytes have been consumed."""
        with self._changed:
            queued = self._runs.get(number)
            if queued is not None and nbytes > 0:
                queued.under_way = max(0, queued.under_way - nbytes)
                self._changed.notify_all()

    def take(self) -> tuple[Sending, int] | None:
        """The next chunk to send; None once closed. Blocks: until there is one."""
        with self._changed:
            while not self._closed:
                for _ in range(len(self._turns)):
                    number = self._turns[0]
                    self._turns.rotate(-1)
                    found = self._next(self._runs[number])
                    if found is not None:
                        return found
                self._changed.wait()
            return None

    def _next(self, queued: _Queued[Sending]) -> tuple[Sending, int] | None:
        run, chunk = queued.run, queued.next
        if chunk >= run.num_chunks:
            return None
        size = run.size(chunk)
        if queued.under_way and queued.under_way + size > run.window:
            return None
        queued.under_way += size
        queued.next += 1
        return run, chunk

    def close(self) -> None:
        """Nothing goes any more; blocked `take`s return."""
        with self._changed:
            self._closed = True
            self._runs.clear()
            self._turns.clear()
            self._changed.notify_all()
