"""A transfer under way, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

from holdfast.clock import Deadline
from holdfast.errors import DeadlineError
from holdfast.transfer.messages import ABORTED, COMMITTED

log = logging.getLogger("holdfast.transfer")


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a transfer brought. `tree` is whole and verified; nothing changes it while it is held.

    `transports` says how the bytes of each peer came: process, memfd, lent or tcp. `checked` is whether they
    were to be hashed where they crossed from one memory into another's: not within a process, nor out of
    memory that was lent. `fresh_buffers` is how many buffers had to be allocated for this run; `connects` how
    many peers had to be connected to.
    """

    tree: Any
    version: int
    nbytes: int
    seconds: float
    transports: dict[str, str]
    checked: bool
    fresh_buffers: int = 0
    connects: int = 0
    peer_bytes: dict[str, int] = field(default_factory=dict)


@final
class Transfer:
    """A transfer under way: `result()` in a thread, `await` in asyncio."""

    def __init__(self, peers: tuple[str, ...]) -> None:
        self.peers = peers
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._result: TransferResult | None = None
        self._error: BaseException | None = None
        self._progress: Callable[[], tuple[int, int]] = _nothing
        self._cancel: Callable[[], None] | None = None
        self._cancelled = False

    # ---- for its caller

    def result(self, timeout_s: float | None = None) -> TransferResult:
        """What the transfer brought.

        Blocks: until it is over, which its own deadline bounds, or `timeout_s` (DeadlineError; the transfer
        goes on). Fails: TransferError and its kinds, MismatchError.
        """
        if timeout_s is not None:
            timeout_s = Deadline(timeout_s).timeout_s
        if not self._done.wait(timeout_s):
            done, total = self.progress()
            raise DeadlineError(
                f"waited {timeout_s:g} s for the transfer from {', '.join(self.peers)}: {done:,} of "
                f"{total:,} bytes so far",
                hint="it goes on: call result() again, or cancel()",
            )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        return self._done.is_set()

    def progress(self) -> tuple[int, int]:
        """Bytes that have arrived, and all."""
        return self._progress()

    @property
    def outcome(self) -> Literal["running", "committed", "aborted"]:
        """For its target an outcome is never unknown: it decides."""
        if not self._done.is_set():
            return "running"
        return COMMITTED if self._error is None else ABORTED

    def cancel(self) -> None:
        """Stop it, unless it is over: then nothing happens. `result()` raises TransferCancelled."""
        with self._lock:
            self._cancelled = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    def add_done_callback(self, callback: Callable[[Transfer], object]) -> None:
        """Call it when the transfer is over, in whatever thread ends it; at once if it is."""
        self._when_done(partial(callback, self))

    def _when_done(self, call: Callable[[], object]) -> None:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(call)
                return
        _call(call)

    async def wait(self) -> TransferResult:
        """What the transfer brought. Being cancelled here cancels the transfer."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def wake() -> None:
            # The loop may be closed by now: then nobody waits.
            try:
                loop.call_soon_threadsafe(over.set)
            except RuntimeError:
                log.debug("nobody waits any more")

        self._when_done(wake)
        try:
            await over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)

    def __await__(self) -> Generator[Any, None, TransferResult]:
        return self.wait().__await__()

    # ---- for the plan that drives it

    def attach(self, progress: Callable[[], tuple[int, int]], cancel: Callable[[], None]) -> None:
        with self._lock:
            self._progress, self._cancel = progress, cancel
            cancelled = self._cancelled
        if cancelled:
            cancel()

    def finish(self, result: TransferResult | None, error: BaseException | None) -> Callable[[], None]:
        """Keep what came of it; calling what is returned, which does not hold that, makes it known."""
        # The last figures stay; what counted them goes, and the buffers with it.
        last = self._progress()
        with self._lock:
            self._result, self._error = result, error
            self._progress, self._cancel = lambda: last, None
        return partial(_end, self._done, self._lock, self._callbacks)


def _end(done: threading.Event, lock: threading.Lock, callbacks: list[Callable[[], object]]) -> None:
    with lock:
        done.set()  # none is added from now on
    while callbacks:
        _call(callbacks.pop(0))


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("a callback of a transfer failed")


def _nothing() -> tuple[int, int]:
    return 0, 0
