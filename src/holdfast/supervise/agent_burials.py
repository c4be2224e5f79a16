"""Tells the coordinator of deaths and hears of those it declares, on a thread of its own.

The agent's loop never waits for anybody.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import Final, final

from holdfast.coord import Changed, CoordClient
from holdfast.errors import HoldfastError

_log = logging.getLogger("holdfast.agent")

_CONNECT_S: Final = 2.0
_CALL_S: Final = 5.0
_CLOSE_S: Final = 5.0
_LOOK_S: Final = 5.0
"""How often it is looked whether the session still stands."""


@final
class Undertaker:
    """An agent's session with the coordinator. It is made at once, so that a burial is one message.

    A burial that no coordinator takes is tried again until one does: while it restarts, for example. Changes
    of the keys that begin with `watched` are put into `changes`.
    """

    def __init__(self, address: str, *, run: str, token: bytes, name: str, watched: str) -> None:
        self._address = address
        self._run = run
        self._token = token
        self._name = name
        self._watched = watched
        self._changes: queue.SimpleQueue[Changed] = queue.SimpleQueue()
        self._client: CoordClient | None = None
        self._queue: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._asked = threading.Event()
        self.sessions: int | None = None
        """Clients of the coordinator besides this one, as of the last `count_sessions`."""
        self._thread = threading.Thread(target=self._work, name="holdfast-undertaker", daemon=True)
        self._thread.start()

    def bury(self, incarnation: str, reason: str) -> None:
        """Declare a process dead that has ended. Never blocks."""
        self._queue.put((incarnation, reason))

    def taken(self) -> list[Changed]:
        """The changes that have come since the last call. Never blocks."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._changes.get_nowait())
        return found

    def count_sessions(self) -> None:
        """Have `sessions` brought up to date. Never blocks."""
        if not self._asked.is_set():
            self._asked.set()
            self._queue.put(("", ""))

    def close(self) -> None:
        """End the session. Blocks: until the thread is done, a few seconds at most. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        try:
            while self._session() is None and not self._closing.is_set():
                pass
            while (item := self._next()) is not None:
                incarnation, reason = item
                while not self._tell(incarnation, reason) and not self._closing.is_set():
                    self._closing.wait(0.02)
        finally:
            if self._client is not None:
                self._client.close()

    def _next(self) -> tuple[str, str] | None:
        """What to do next; None at the end. A session that the coordinator ended is made anew meanwhile."""
        while True:
            try:
                return self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                self._session()

    def _session(self) -> CoordClient | None:
        if self._client is not None and self._client.is_over:
            self._client.close()
            self._client = None
        if self._client is None:
            began = time.monotonic()
            try:
                self._client = self._connected()
            except HoldfastError as error:
                _log.debug("no coordinator yet: %s", error.message)
                # A refusal comes at once: do not ask a thousand times a second.
                self._closing.wait(max(0.0, 0.1 - (time.monotonic() - began)))
        return self._client

    def _connected(self) -> CoordClient:
        client = CoordClient(
            self._address,
            run=self._run,
            token=self._token,
            name=self._name,
            connect_timeout_s=_CONNECT_S,
        )
        try:
            client.watch(self._watched, self._changes.put, timeout_s=_CALL_S)
        except BaseException:
            client.close()
            raise
        return client

    def _tell(self, incarnation: str, reason: str) -> bool:
        client = self._session()
        if client is None:
            return False
        try:
            if incarnation:
                client.bury(incarnation, reason, timeout_s=_CALL_S)
            else:
                self.sessions = client.status(timeout_s=_CALL_S).sessions - 1
                self._asked.clear()
            return True
        except HoldfastError as error:
            _log.warning("cannot tell the coordinator that %s: %s", reason, error.message)
            return False
