"""What the coordinator writes to its log: every change of what it must still know after its own death.

`calls` name the calls that a record answers, as (sid, seq, acked): the answer is remembered with them, so
that a call that is sent again is answered again and not carried out again.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from holdfast.coord.messages import Met, Refused

CallId: TypeAlias = tuple[int, int, int]


class Started(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A coordinator process took over."""

    term: int
    service: str


class Came(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A client was given a session."""

    sid: int
    incarnation: str
    name: str


class Went(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A session is over: its keys vanish, its slot is vacant, it is refused from now on.

    `ends`: the generation is over with it.
    """

    sid: int
    reason: str
    ends: bool
    calls: tuple[CallId, ...] = ()


class Formed(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """A generation: (slot, sid, lanes, asked) of each member. The same number again if nothing changed.

    `asked` is the slot that the member asked for, -1 for any.
    """

    generation: int
    members: tuple[tuple[int, int, tuple[int, ...], int], ...]
    calls: tuple[CallId, ...]


class Replaced(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """A restarted member took its slot back in the running generation."""

    slot: int
    sid: int
    asked: int
    calls: tuple[CallId, ...]


class Settled(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """An epoch of a barrier, vote, live set or completion is over.

    `owed` are sids that get the result when they come. `together` are slots that are in step again.
    """

    kind: str
    name: str
    epoch: int
    result: Met | Refused
    calls: tuple[CallId, ...]
    owed: tuple[int, ...] = ()
    together: tuple[int, ...] = ()


class Told(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """A late caller was given the result it was owed."""

    kind: str
    name: str
    epoch: int
    calls: tuple[CallId, ...]


class Parted(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """A member has finished: its going is no death."""

    sid: int


class KeySet(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """`how` is the call that did it: "put", "swap" or "add". `owner` is a sid, or 0."""

    key: str
    value: bytes
    owner: int
    how: str
    calls: tuple[CallId, ...]


class KeysGone(Struct, frozen=True, array_like=True, tag=10, gc=False):
    keys: tuple[str, ...]
    calls: tuple[CallId, ...]


class Stopping(Struct, frozen=True, array_like=True, tag=11, gc=False):
    """A stop was asked for. `by` is the sid of the member that will go then, 0 if all are to stop."""

    stop: int
    reason: str
    by: int
    calls: tuple[CallId, ...]


class StopSet(Struct, frozen=True, array_like=True, tag=12, gc=False):
    """The step at which all stop."""

    stop: int
    step: int


class Said(Struct, frozen=True, array_like=True, tag=13, gc=False):
    """An error report."""

    number: int
    slot: int
    name: str
    message: str
    calls: tuple[CallId, ...]


class Ended(Struct, frozen=True, array_like=True, tag=14, gc=False):
    """The generation is over for a reason that is no death: members are asked to join again."""

    reason: str


Record: TypeAlias = (
    Started | Came | Went | Formed | Replaced | Settled | Told | Parted | KeySet | KeysGone | Stopping |
    StopSet | Said | Ended
)  # fmt: skip
