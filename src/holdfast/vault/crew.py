"""A few daemon threads that run functions.

`concurrent.futures.ThreadPoolExecutor` refuses work as soon as the interpreter begins to exit, before
`atexit` handlers run; a save that is still being written could then not be finished. These threads work to
the end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, final

Result = TypeVar("Result")


@final
class Crew:
    """`size` threads with one queue."""

    def __init__(self, size: int, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, act: Callable[..., Result], *args: Any) -> Future[Result]:
        """Have a thread call `act(*args)`."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act(*args))
            # Whatever it was belongs to the one who waits for the result.
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future

    def close(self, timeout_s: float) -> None:
        """End the threads once the queue is empty; threads that are stuck are left to the process's end."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            work = self._work.get()  # ends with the None of close(), or with the process
            if work is None:
                return
            work()
