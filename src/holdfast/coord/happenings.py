"""What a client has asked for and what can come of it, as its core hands them out."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias, final

from msgspec.structs import replace

from holdfast.coord import messages as m
from holdfast.errors import HoldfastError

GRACE_S: Final = 0.5
"""How much longer than the coordinator a client waits for the end of a wait."""


@final
class OpenCall:
    """One call of the user. Settled once `result` or `error` is set; `waker` is whoever waits for that."""

    __slots__ = (
        "_ends", "deadline", "error", "generation", "op", "result", "sent", "seq", "told", "waits", "waker",
    )  # fmt: skip

    def __init__(self, seq: int, op: m.Op, generation: int, deadline: float) -> None:
        self.seq = seq
        self.op = op
        self.generation = generation
        self.deadline = deadline
        self._ends = deadline  # moved once, to the end of the grace
        # A read with no time is answered at once; a meeting with none is still the coordinator's to fail.
        self.waits: bool = type(op) in (m.Join, m.Meet) or (type(op) is m.Get and op.timeout_s > 0.0)
        self.sent = False  # on this connection
        self.told = False  # on any
        self.result: m.Result | None = None
        self.error: HoldfastError | None = None
        self.waker: Any = None

    @property
    def settled(self) -> bool:
        return self.result is not None or self.error is not None

    def due(self) -> float:
        """When to ask whether it is `expired`."""
        return self._ends if self.waits and self.sent else self.deadline

    def expired(self, now: float, grace_s: float = GRACE_S) -> bool:
        """Whether it is given up now. The coordinator ends a wait that it knows of, and has `grace_s` for it.

        They count from when this side sees the deadline pass: it may have been away itself until now.
        """
        if now >= self.deadline == self._ends:
            self._ends = now + grace_s
        return now >= self.due()

    def again(self, now: float) -> m.Op:
        """What is sent when it is sent again: the same, with what is left of its time."""
        return replace(self.op, timeout_s=max(0.001, self.deadline - now)) if self.waits else self.op

    def label(self) -> str:
        """The call, for people."""
        what = getattr(self.op, "name", "") or getattr(self.op, "key", "") or getattr(self.op, "prefix", "")
        return f"{type(self.op).__name__} {what!r}" if what else type(self.op).__name__

    def outcome(self) -> Any:
        """The result of a settled call. Fails: with the error that it ended with."""
        if self.error is not None:
            raise self.error
        return self.result


class WatchState:
    """A watch of the user, through all the connections it lives on. `seq` is its present name."""

    __slots__ = ("prefix", "seq", "since", "token")

    def __init__(self, prefix: str, seq: int, token: object) -> None:
        self.prefix = prefix
        self.seq = seq
        self.since = 0
        self.token = token


class Pushed(NamedTuple):
    """Something that the coordinator tells on its own account."""

    push: m.Push


class Noticed(NamedTuple):
    """Changes under a watch, none of them told before."""

    watch: WatchState
    changed: m.Changed


class Over(NamedTuple):
    """The session was refused for good."""

    error: HoldfastError


class Stalled(NamedTuple):
    """The connection stands but nobody answers: close it and make another."""

    reason: str


Happening: TypeAlias = OpenCall | Pushed | Noticed | Over | Stalled
