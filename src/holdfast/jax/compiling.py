"""When JAX compiles: `jax.monitoring` tells of the start and the end of every trace, lowering and compile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, final

import jax

_EVENTS: Final = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
"""Each is told as a scalar when it begins, and as a duration when it ends, also by an exception."""


@final
class _Watch:
    """Turns nested begins and ends, from any thread, into one `enter` and one `leave`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._calls: tuple[Callable[[], None], Callable[[], None]] | None = None
        self._listening = False

    def set(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        with self._lock:
            if self._depth and self._calls is not None:
                self._calls[1]()
            self._calls = (enter, leave)
            if self._depth:
                enter()
            if not self._listening:
                # JAX has no way to take back all of them; this one stays for the life of the process.
                jax.monitoring.register_scalar_listener(self._begun)
                jax.monitoring.register_event_duration_secs_listener(self._ended)
                self._listening = True

    def _begun(self, event: str, value: float | int, **about: str | int) -> None:
        if event in _EVENTS:
            with self._lock:
                self._depth += 1
                if self._depth == 1 and self._calls is not None:
                    self._calls[0]()

    def _ended(self, event: str, duration_secs: float, **about: str | int) -> None:
        if event in _EVENTS:
            with self._lock:
                # An end without a begin: the listener came in the middle of it.
                if self._depth == 0:
                    return
                self._depth -= 1
                if self._depth == 0 and self._calls is not None:
                    self._calls[1]()


_watch: Final = _Watch()


def watch_compiles(enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """As `holdfast.supervise.hooks.watch_compiles` says."""
    _watch.set(enter, leave)
