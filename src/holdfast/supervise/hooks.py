"""What a framework does for supervision; found by name, so that nothing here imports a framework.

    start_world      the workers of a replica become one world of the framework
    watch_compiles   a compile is announced when it begins and when it ends

The implementation lies below the framework line (`holdfast.jax.world`, `holdfast.jax.compiling`) and is
looked up at the call, the way `holdfast.arrays.adapters` finds adapters.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.coord import CoordClient
    from holdfast.supervise.messages import Seat

_FRAMEWORKS: Final = {"jax": "holdfast.jax"}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a world must know of its run."""

    name: str
    folder: Path
    node: int


def start_world(
    client: CoordClient, seat: Seat, workers: int, run: RunInfo, *, framework: str = "jax"
) -> Callable[[], None]:
    """Make the `workers` processes of `seat.replica` one world; gives what to call to leave it.

    To be called by every worker of the replica, in the same attempt, before the framework has touched a
    device. A replica of one worker needs no world: then it does nothing.

    Blocks: until all workers of the attempt are there. Fails: WorldError, UsageError; where a peer never
    comes, the framework ends this process after its deadline.

    `leave` waits for the other workers of the world, a few seconds at most, and cuts no peer off.
    """
    if workers == 1:
        return _nothing
    start = _implementation(framework, "world", "start_world")
    return cast("Callable[[], None]", start(client, seat, workers, run))


def watch_compiles(enter: Callable[[], None], leave: Callable[[], None]) -> bool:
    """Call `enter` when this process begins to trace or compile, and `leave` when that is over.

    Calls come in pairs, never nested, from whichever thread compiles; they must not raise. A later call
    replaces the pair. Gives whether there is a framework to watch: one that is imported later is not seen
    until the next call.
    """
    present = [name for name in _FRAMEWORKS if name in sys.modules]
    for framework in present:
        _implementation(framework, "compiling", "watch_compiles")(enter, leave)
    return bool(present)


def _implementation(framework: str, module: str, name: str) -> Callable[..., object]:
    room = _FRAMEWORKS.get(framework)
    if room is None:
        raise UsageError(
            f"there is no support for the framework {framework!r}", hint=f"one of: {', '.join(_FRAMEWORKS)}"
        )
    found: Callable[..., object] = getattr(importlib.import_module(f"{room}.{module}"), name)
    return found


def _nothing() -> None:
    """Leave no world."""
