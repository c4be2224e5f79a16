"""What goes into the coordinator's core and what comes out.

    Coordinator.step(event, now=...) -> list[Effect]

Events and effects are all that the core knows of the world. `now` is seconds on a clock that never goes back;
the core has no other. The edge carries out the effects in order:

    Write   append the record to the log. Records are numbered from 1 in the order of their writing.
    Send    give a message to a connection, once record `after` is written (`sync`: and on the disk).
            `after` is 0 if nothing needs to be waited for. Messages to one connection keep their order. A
            body that goes to many is one object, so it need be encoded once only.
    Close   end a connection, after what was sent to it.
    Note    tell the journal and the log for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from holdfast.coord.messages import Answer, Call, Hello
from holdfast.coord.records import Record


class Opened(NamedTuple):
    """A connection passed the handshake and said Hello."""

    conn: int
    hello: Hello


class Received(NamedTuple):
    """A call came in."""

    conn: int
    call: Call


class Closed(NamedTuple):
    """A connection is gone."""

    conn: int


class Tick(NamedTuple):
    """The moment that `Coordinator.wake_at` named has come."""


Event: TypeAlias = Opened | Received | Closed | Tick


class Write(NamedTuple):
    number: int
    record: Record


class Send(NamedTuple):
    conn: int
    answer: Answer
    after: int = 0
    sync: bool = False


class Close(NamedTuple):
    conn: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling people. `kind` is a word; `fields` say more."""

    kind: str
    text: str
    fields: tuple[tuple[str, object], ...] = ()


Effect: TypeAlias = Write | Send | Close | Note
