"""The thread that makes the log durable: one sync at a time, for all records that gathered meanwhile."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import final

from holdfast.coord.log import Log
from holdfast.coord.segment import Snapshot


@final
class Committer:
    """Calls `done(number)` in the loop after each sync, or `failed(error)` once. Start one for a log."""

    def __init__(
        self,
        log: Log,
        loop: asyncio.AbstractEventLoop,
        *,
        done: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._log = log
        self._loop = loop
        self._done = done
        self._failed = failed
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-coord-sync", daemon=True)
        self._snapshots: list[threading.Thread] = []
        self._thread.start()

    def request(self) -> None:
        """Sync what is in the log now. Not again before `done` was called."""
        self._wanted.put(True)

    def keep(self, taken: Snapshot) -> None:
        """Finish a snapshot, in a thread of its own: a sync must not wait for it."""
        thread = threading.Thread(
            target=self._keep, args=[taken], name="holdfast-coord-snapshot", daemon=True
        )
        self._snapshots = [each for each in self._snapshots if each.is_alive()]
        self._snapshots.append(thread)
        thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the threads; what is under way is finished first."""
        self._wanted.put(False)
        for thread in (self._thread, *self._snapshots):
            thread.join(timeout_s)

    def _run(self) -> None:
        while self._wanted.get():
            try:
                number = self._log.sync()
            except Exception as error:
                self._tell(self._failed, error)
                return
            self._tell(self._done, number)

    def _keep(self, taken: Snapshot) -> None:
        try:
            self._log.finish_snapshot(taken)
        except Exception as error:
            self._tell(self._failed, error)

    def _tell(self, listener: Callable[..., None], what: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(listener, what)
