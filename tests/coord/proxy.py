"""A small TCP proxy in front of the coordinator, that can break every connection through it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

from holdfast.errors import HoldfastError


@final
class Proxy:
    """Listens on `address`; passes bytes on to the TCP address in the `discovery` file of that moment."""

    def __init__(self, discovery: Path) -> None:
        self._discovery = discovery
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, action: object, *args: object) -> None:
        thread = threading.Thread(target=action, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target(), timeout=5.0)
            except (OSError, HoldfastError, StopIteration):
                near.close()  # as a kernel does for a port that nobody serves
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            self._start(self._pump, near, far)
            self._start(self._pump, far, near)

    def _target(self) -> tuple[str, int]:
        lines = self._discovery.read_text().split()
        host, _, port = next(line for line in lines if line.startswith("tcp://"))[6:].rpartition(":")
        return host, int(port)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sockets.discard(source)
        source.close()

    def drop(self) -> int:
        """Break all connections at once; how many there were."""
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return len(sockets) // 2

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join(5.0)
