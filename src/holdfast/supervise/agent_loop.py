"""What an agent waits on: descriptors and streams, in one thread."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from typing import Any, final

from holdfast.supervise.stream import Stream


@final
class Loop:
    """Calls back when a descriptor can be read or a stream has something."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, Stream[Any]] = {}
        self._writing: set[int] = set()

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Call `call` whenever `fd` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def add_stream(self, stream: Stream[Any], call: Callable[[], None]) -> None:
        """The same for a stream; what it has to send is sent as the peer reads."""
        self.add(stream.fileno(), call)
        self._streams[stream.fileno()] = stream

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        self._streams.pop(fd, None)
        self._writing.discard(fd)

    def turn(self, timeout_s: float) -> None:
        """Serve what is ready. Blocks: until something is, `timeout_s` at most."""
        for fd, stream in self._streams.items():
            if stream.has_backlog != (fd in self._writing):
                self._want(fd, writing=stream.has_backlog)
        for key, events in self._selector.select(max(0.0, timeout_s)):
            if events & selectors.EVENT_WRITE and (stream_ := self._streams.get(key.fd)) is not None:
                stream_.flush()
            # One call back may have removed what another was for.
            current = self._selector.get_map().get(key.fd)
            if events & selectors.EVENT_READ and current is not None and current.data is key.data:
                key.data()

    def _want(self, fd: int, *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        self._selector.modify(fd, events, self._selector.get_key(fd).data)
        (self._writing.add if writing else self._writing.discard)(fd)

    def close(self) -> None:
        self._selector.close()
