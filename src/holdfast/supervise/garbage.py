"""When Python looks for garbage: not while a process starts, which makes objects that stay.

Importing a framework and tracing a program makes a few hundred thousand objects, and Python's collector goes
over them hundreds of times: a sixth of the CPU time of a start. Once a worker trains, what it has by then is
taken out of the collector's sight, so that a full collection in the middle of training is short.
"""

from __future__ import annotations

import gc
from typing import Final

_STARTING: Final = 1_000_000
"""So many new objects, and the collector runs all the same: a start that makes real garbage is bounded."""
_before: list[tuple[int, int, int]] = []


def defer() -> None:
    """Collect seldom from now on, until `resume`."""
    if not _before and gc.isenabled():
        _before.append(gc.get_threshold())
        gc.set_threshold(_STARTING, *_before[0][1:])


def resume() -> None:
    """Collect as before `defer`, but not what is there now. Does nothing without a `defer` before it.

    Thresholds that the program has set itself meanwhile stand.
    """
    if _before:
        before = _before.pop()
        # First what the start has left behind: frozen, it would stay, with every array that hangs on it.
        gc.collect()
        gc.freeze()
        if gc.get_threshold()[0] == _STARTING:
            gc.set_threshold(*before)
