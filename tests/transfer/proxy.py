"""A TCP proxy that can stop forwarding, reset, slow down and flip bytes, as a bad network does."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Literal, Self, final

from holdfast.transfer.messages import CHUNK_HEAD, CHUNK_MAGIC

Direction = Literal["up", "down"]
"""`up` is what the target says, `down` what the source says."""
_PIECE: Final = 1 << 16
_TIMEOUT_S: Final = 20.0


@final
class Proxy:
    """Forwards to `upstream` ("tcp://host:port") until told otherwise. `address` is its own.

    `count["down"]` and `count["up"]` are the bytes forwarded so far, over all connections.
    """

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self.upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.count: dict[Direction, int] = {"up": 0, "down": 0}
        self.num_connections = 0
        self._lock = threading.Condition()
        self._flowing = True
        self._closed = False
        self._rate: float | None = None
        self._edits: list[Callable[[Direction, int, bytearray], bool]] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="test-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self.upstream, timeout=_TIMEOUT_S)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((near, far))
                self.num_connections += 1
            self._start(self._pump, near, far, "up")
            self._start(self._pump, far, near, "down")

    def _pump(self, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(_PIECE)):
                with self._lock:
                    self._lock.wait_for(lambda: self._flowing or self._closed)
                    at = self.count[direction]
                    self._edits = [edit for edit in self._edits if not edit(direction, at, data)]
                    self.count[direction] += len(data)
                    if self._rate is not None and direction == "down":
                        self._lock.wait_for(lambda: self._closed, len(data) / self._rate)
                    # An edit may have stopped the flow: then what it saw goes no further either.
                    self._lock.wait_for(lambda: self._flowing or self._closed)
                sink.sendall(data)
        # Half a close is passed on as a close: neither end of ours uses one.
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def stop_forwarding(self) -> None:
        """Swallow nothing and pass on nothing, on connections old and new: the network is gone."""
        with self._lock:
            self._flowing = False

    def forward(self) -> None:
        """Go on, without any of the faults."""
        with self._lock:
            self._flowing = True
            self._rate = None
            self._edits = []
            self._lock.notify_all()

    def slow_down(self, bytes_per_s: float) -> None:
        """At most so many bytes per second of each connection from the source."""
        with self._lock:
            self._rate = bytes_per_s

    def reset(self) -> None:
        """Reset every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
                sock.close()

    def at(self, nbytes: int, act: Callable[[], None], direction: Direction = "down") -> None:
        """Call `act` once, when so many bytes of a direction have come (`act` may be `stop_forwarding`)."""
        self._edit(lambda way, at, data: way == direction and at + len(data) >= nbytes and _did(act))

    def flip(self, offset: int, direction: Direction = "down") -> threading.Event:
        """Flip a bit of the byte number `offset` of a direction, counted over all connections."""
        done = threading.Event()

        def edit(way: Direction, at: int, data: bytearray) -> bool:
            if way != direction or not at <= offset < at + len(data):
                return False
            data[offset - at] ^= 0x40
            done.set()
            return True

        self._edit(edit)
        return done

    def corrupt_chunk(self, part: Literal["head", "bytes"]) -> threading.Event:
        """Flip a bit in the next chunk that passes: in its header, or in its bytes."""
        done = threading.Event()
        inside = 5 if part == "head" else CHUNK_HEAD.size + 3

        def edit(way: Direction, at: int, data: bytearray) -> bool:
            found = data.find(CHUNK_MAGIC)
            if way != "down" or found < 0 or found + inside >= len(data):
                return False
            data[found + inside] ^= 0x04
            done.set()
            return True

        self._edit(edit)
        return done

    def _edit(self, edit: Callable[[Direction, int, bytearray], bool]) -> None:
        with self._lock:
            self._edits.append(edit)

    def close(self) -> None:
        """End everything, threads included."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive(), "the proxy did not stop"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _did(act: Callable[[], None]) -> bool:
    act()
    return True
