"""What a client and the coordinator say to each other.

    client                                   coordinator
    ------ handshake (wire.handshake) ------
    Hello(run, incarnation, sid, ...)  --->  who is calling, and whether it has called before
                                       <---  Answer(0, Welcome(sid, term, service, ...)) or Answer(0, Refused)
    Call(seq, acked, generation, op)   --->
                                       <---  Answer(seq, result)        exactly one for each call
                                       <---  Answer(0, push)            at any moment

A frame is a little-endian u32 length and that many bytes of MessagePack. `run` and `incarnation` are bound to
the connection by its Hello, the service by the connection itself (a restarted service has none of the old
connections), the generation comes with every call, and the slot follows from the incarnation: so every
request carries all of them and none can be made up.

A call that was sent and not answered when a connection broke is sent again, with the same `seq`, on the next
one. The coordinator remembers its answers to calls that change something until the client says, with `acked`,
that it has no call at or below that number open; so a repeated call changes nothing twice.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

PROTOCOL = 1


class Hello(Struct, frozen=True, array_like=True, tag=1):
    """The first message on a connection. `sid` is 0, or what Welcome gave on an earlier connection.

    `seen_error` is the number of the last error report the client has had.
    """

    run: str
    incarnation: str
    sid: int = 0
    name: str = ""
    seen_error: int = 0


# ---- calls: who is in the run


class Join(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Take part in the next generation. `slot` is -1 for any. `failed` reports a commit that failed."""

    slot: int
    timeout_s: float
    standby: bool = False
    failed: bool = False


class Leave(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Go, on purpose."""

    reason: str = ""


class Beat(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A sign of life with progress. `joined` says that this client takes part in the run."""

    step: int = -1
    phase: str = ""
    joined: bool = False


class Bury(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """An agent knows that a process is dead: no need to wait for its heartbeats to stop."""

    incarnation: str
    reason: str


# ---- calls: waiting for each other


class Meet(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Wait for the others. `kind` is one of KINDS; `slots` is None for everybody in the generation.

    `ok` and `note` are this member's ballot in a vote.
    """

    kind: str
    name: str
    timeout_s: float
    slots: tuple[int, ...] | None = None
    ok: bool = True
    note: bytes = b""


BARRIER = "barrier"
VOTE = "vote"
LIVE = "live"
FINISH = "finish"
KINDS = (BARRIER, VOTE, LIVE, FINISH)


class Cancel(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Fail the open epoch of a barrier."""

    name: str
    reason: str = ""


# ---- calls: keys and values


class Put(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Set a key. `owned`: it vanishes with this incarnation. `create`: only if it is absent."""

    key: str
    value: bytes
    owned: bool = False
    create: bool = False


class Swap(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """Set a key if its value is `expected` (None: absent)."""

    key: str
    expected: bytes | None
    value: bytes
    owned: bool = False


class Get(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """Read a key; `timeout_s` > 0 waits until it is there."""

    key: str
    timeout_s: float = 0.0


class Scan(Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Keys that begin with `prefix`, in order, those after `after` only, `limit` at most."""

    prefix: str
    after: str = ""
    limit: int = 1000


class Delete(Struct, frozen=True, array_like=True, tag=11, gc=False):
    """Remove a key, or all keys that begin with it."""

    key: str
    prefix: bool = False


class Add(Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Add to a 64-bit counter; an absent one is 0."""

    key: str
    by: int = 1


class Watch(Struct, frozen=True, array_like=True, tag=13, gc=False):
    """Be told of changes to keys that begin with `prefix`, later than `since` (0: from now, with what is
    there).

    The seq of this call names the watch.
    """

    prefix: str
    since: int = 0


class Unwatch(Struct, frozen=True, array_like=True, tag=14, gc=False):
    watch: int


# ---- calls: trouble


class Report(Struct, frozen=True, array_like=True, tag=15, gc=False):
    """Tell every member of an error."""

    message: str


class Preempt(Struct, frozen=True, array_like=True, tag=16, gc=False):
    """Ask the run to stop at a step that all agree on. `past` is the last stop this client is done with."""

    reason: str
    past: int = 0


class At(Struct, frozen=True, array_like=True, tag=17, gc=False):
    """This member begins no step after `step` before it knows where stop `stop` is."""

    stop: int
    step: int


class Status(Struct, frozen=True, array_like=True, tag=18, gc=False):
    """How things stand, for people."""


class Bye(Struct, frozen=True, array_like=True, tag=19, gc=False):
    """This session is over: forget it. A member that says it without Leave or a finished run is dead."""


class Roster(Struct, frozen=True, array_like=True, tag=20, gc=False):
    """Who is in the generation. Not part of Joined: telling every member of every member is quadratic."""


Op: TypeAlias = (
    Join | Leave | Beat | Bury | Meet | Cancel | Put | Swap | Get | Scan | Delete | Add | Watch | Unwatch
    | Report | Preempt | At | Status | Bye | Roster
)  # fmt: skip


class Call(Struct, frozen=True, array_like=True, gc=False):
    seq: int
    acked: int
    generation: int
    op: Op


# ---- results


class Done(Struct, frozen=True, array_like=True, tag=1, gc=False):
    """It was done; `revision` is that of the change, or 0."""

    revision: int = 0


class Refused(Struct, frozen=True, array_like=True, tag=2, gc=False):
    """It was not done, and nothing changed. `code` is one of CODES; `names` are those to blame."""

    code: str
    message: str
    hint: str = ""
    names: tuple[str, ...] = ()


STALE = "stale"  # of an earlier generation
FENCED = "fenced"  # superseded, declared dead, left, or a session that is forgotten
MISUSE = "misuse"  # a call that makes no sense for this caller
DEADLINE = "deadline"  # the wait ran out
FAILED = "failed"  # the barrier failed: a death, a cancel, another waiter's deadline, the end of a generation
EXISTS = "exists"  # a key that was to be created is there
LIMIT = "limit"  # too large or too many
OVER = "over"  # the coordinator is stopping, or serves another run
CODES = (STALE, FENCED, MISUSE, DEADLINE, FAILED, EXISTS, LIMIT, OVER)


class MemberInfo(Struct, frozen=True, array_like=True, gc=False):
    slot: int
    incarnation: str
    name: str
    lanes: tuple[int, ...] = ()


class Joined(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The generation. `slot` is -1 for a standby; `lanes` are this member's."""

    generation: int
    slot: int
    size: int
    lanes: tuple[int, ...] = ()


class Met(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """All that counted were there. `absent` were let off: out of sync (barrier) or dead (live, finish).

    In a vote, `ok` is the conjunction of all ballots, `reason` says who was against, and `notes` are those
    that were not empty, by slot. `live` are the incarnations of a live set, by slot.
    """

    epoch: int
    absent: tuple[int, ...] = ()
    ok: bool = True
    reason: str = ""
    notes: tuple[tuple[int, bytes], ...] = ()
    live: tuple[tuple[int, str], ...] = ()


class Value(Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The value of a key, None if absent, and the revision of its last change."""

    value: bytes | None
    revision: int


class Swapped(Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Whether the value was set; if not, the one that stands."""

    done: bool
    value: bytes | None
    revision: int


class Item(Struct, frozen=True, array_like=True, gc=False):
    """A key with its value; None says that it was removed."""

    key: str
    value: bytes | None
    revision: int


class Items(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Keys in order; `more` says that the limit cut them off."""

    items: tuple[Item, ...]
    more: bool = False


class Count(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """A counter, or how many keys went."""

    count: int
    revision: int


STOP_ANNOUNCED = -1
STOP_OVER = -2


class Stop(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """A stop: announced (`step` is STOP_ANNOUNCED, and members answer At), decided, or over."""

    stop: int
    step: int
    reason: str = ""


class Members(Struct, frozen=True, array_like=True, tag=11, gc=False):
    """The members of a generation, by slot."""

    generation: int
    members: tuple[MemberInfo, ...]


class Overview(Struct, frozen=True, array_like=True, tag=10, gc=False):
    """How things stand. Everything in it is for people; tables of `coord status` show it."""

    run: str
    term: int
    service: str
    generation: int
    forming: bool
    finished: bool
    members: tuple[MemberState, ...]
    standbys: tuple[str, ...]
    waiting: tuple[Waiting, ...]
    keys: int
    key_bytes: int
    sessions: int
    watches: int
    records: int
    stop: Stop | None = None


class MemberState(Struct, frozen=True, array_like=True, gc=False):
    """`state` is alive, suspect, vacant or done; `silent_s` is how long nothing was heard."""

    slot: int
    incarnation: str
    name: str
    state: str
    step: int
    phase: str
    silent_s: float
    out_of_sync: bool


class Waiting(Struct, frozen=True, array_like=True, gc=False):
    """An open epoch: who is there, who is not, for how long."""

    kind: str
    name: str
    epoch: int
    present: tuple[int, ...]
    missing: tuple[int, ...]
    for_s: float


# ---- pushes


class Welcome(Struct, frozen=True, array_like=True, tag=32):
    """The session stands; `fresh` says that it is new."""

    sid: int
    term: int
    service: str
    generation: int
    fresh: bool
    heartbeat_s: float
    max_frame: int


class Rally(Struct, frozen=True, array_like=True, tag=33, gc=False):
    """Please join again. `urgent`: the generation is over; otherwise somebody would like to come in."""

    generation: int
    urgent: bool
    reason: str


class Trouble(Struct, frozen=True, array_like=True, tag=34, gc=False):
    """A member reported an error."""

    number: int
    slot: int
    name: str
    message: str


class Changed(Struct, frozen=True, array_like=True, tag=35, gc=False):
    """Changes under a watch, in order. `reset`: this is all there is; forget what you knew."""

    watch: int
    items: tuple[Item, ...]
    reset: bool = False


class Patience(Struct, frozen=True, array_like=True, tag=36, gc=False):
    """A wait goes on: `names` are still missing."""

    seq: int
    waited_s: float
    names: tuple[str, ...]


class Lost(Struct, frozen=True, array_like=True, tag=37, gc=False):
    """A member died or is vacant."""

    slot: int
    incarnation: str
    name: str
    reason: str


Result: TypeAlias = (
    Done | Refused | Joined | Met | Value | Swapped | Items | Count | Stop | Overview | Members
)
Push: TypeAlias = Welcome | Rally | Trouble | Changed | Patience | Lost | Stop | Refused


class Answer(Struct, frozen=True, array_like=True, gc=False):
    """The result of call `seq`, or a push if `seq` is 0."""

    seq: int
    body: (
        Done | Refused | Joined | Met | Value | Swapped | Items | Count | Stop | Overview | Members
        | Welcome | Rally | Trouble | Changed | Patience | Lost
    )  # fmt: skip
