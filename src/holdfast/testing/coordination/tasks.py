"""Scripts of simulated processes while they run, and what they write down.

A script is a generator: it yields what it wants to do and is resumed with the outcome, or the error is raised
in it, so that it reads like the code of a user of the blocking client.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from holdfast.coord import messages as m
from holdfast.coord.calls import OpenCall
from holdfast.errors import (
    BarrierError,
    DeadlineError,
    FencedError,
    HoldfastError,
    KeyExistsError,
    LimitError,
    StaleGenerationError,
    UnreachableError,
)
from holdfast.testing.linearizability import Operation


@dataclass(frozen=True, slots=True)
class Ask:
    """Make a call and wait for its outcome."""

    op: m.Op
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Do nothing for a while, or until something is pushed that `until` likes."""

    seconds: float
    until: Callable[[], bool] | None = None


Wish: TypeAlias = Ask | Rest
Script: TypeAlias = Generator[Wish, Any, Any]


class Task:
    """A running script."""

    __slots__ = (
        "alarm", "call", "invoked", "invoked_at", "live", "main", "op", "script", "slots", "stood_still",
        "timeout_s", "until",
    )  # fmt: skip

    def __init__(self, script: Script, *, main: bool = False) -> None:
        self.script = script
        self.main = main
        """The process ends with it."""
        self.live = True
        self.call: OpenCall | None = None
        self.op: m.Op | None = None
        self.invoked = 0.0
        self.invoked_at = 0.0
        self.timeout_s = 0.0
        self.stood_still = 0.0
        self.slots: tuple[int, ...] = ()
        self.until: Callable[[], bool] | None = None
        self.alarm = 0


class Record:
    """What all members wrote down: calls with their outcomes, and what they were told."""

    def __init__(self) -> None:
        self.history: list[Operation] = []
        self.problems: list[str] = []
        self.stops: dict[int, int] = {}
        """The step of each stop, as members have heard of it."""
        self.calls: dict[tuple[str, int], m.Op] = {}
        """Every call that was ever sent, by incarnation and number."""
        self._count = 0

    def sent(self, incarnation: str, call: m.Call) -> None:
        """A call went out, for the first time or again."""
        before = self.calls.get((incarnation, call.seq))
        # A vote that was given up and is taken up again may have another ballot; either may be the one that
        # counts.
        if not (isinstance(before, m.Meet) and before.kind == m.VOTE and before.ok):
            self.calls[incarnation, call.seq] = call.op

    def stamp(self) -> float:
        self._count += 1
        return float(self._count)


def code_of(error: type[HoldfastError]) -> str:
    """The code of the refusal that is raised so; empty if nobody knows what became of the call."""
    for kind, code in _CODES:
        if issubclass(error, kind):
            return code
    return m.MISUSE


_CODES: Final[tuple[tuple[type[HoldfastError], str], ...]] = (
    (UnreachableError, ""),
    (FencedError, m.FENCED),
    (StaleGenerationError, m.STALE),
    (KeyExistsError, m.EXISTS),
    (LimitError, m.LIMIT),
    (DeadlineError, m.DEADLINE),
    (BarrierError, m.FAILED),
)
