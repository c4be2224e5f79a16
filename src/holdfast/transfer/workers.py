"""Threads that are there when there is work, and that never keep a program from ending."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import final

from holdfast.clock import Deadline

log = logging.getLogger("holdfast.transfer")

KEPT = 4
"""How many threads wait for the next work; those of a burst end with it."""


@final
class Workers:
    """Runs functions at once, each on a thread of its own; a few idle threads are used again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, job: Callable[[], object]) -> bool:
        """Run it; False if closed."""
        with self._lock:
            if self._closed:
                return False
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()
            self._jobs.put(job)
            return True

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a worker of the transfer endpoint failed")
            # A job holds what it worked on: let go of it before the next one comes.
            del job
            with self._lock:
                if self._idle >= KEPT and not self._closed:
                    break
                self._idle += 1
        with self._lock:
            self._threads.discard(threading.current_thread())

    def close(self, timeout_s: float) -> None:
        """Take no more work and wait for the threads to end, `timeout_s` at most."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        deadline = Deadline(timeout_s)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
