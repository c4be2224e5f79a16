"""What two endpoints say to each other.

A target dials a source: one control connection, and `streams` data connections that belong to it. On each,
first the handshake of `wire`, then:

    target                                              source
    Greeting(incarnation, node, link)       ------->    link 0: control; else a data connection of that link
                                            <-------    Greeted(incarnation, node, link, local) or Refused
    Describe(seq, name, version, wait_s)    ------->
                                            <-------    Described(seq, version, manifest) or Refused
    Prepare(seq, plan, name, segments)      ------->    checked against the manifest before anything else
                                            <-------    Prepared(seq) or Refused
    Lend(plan, buffer, nbytes) + descriptor ------->    memory to write into, where both share a node
    Run(seq, run, plan, version, ...)       ------->    may wait for a version that is not published yet
                                            <-------    Ping, while it waits
                                            <-------    Started(seq, run, version, scalars) or Refused
                                            <=======    chunks, on the data connections (or Wrote)
    Credit(run, nbytes)                     ------->    so many bytes are consumed: as many more may come
                                            <-------    Sent(run) or Failed(run, message)
                                            <-------    or Loan(seq, run, ...) + descriptor: read it yourself
    Confirm(seq, run)                       ------->    was it lent until now?
                                            <-------    Confirmed(seq) or Refused
    Done(run, outcome)                      ------->    the lease of this target on the version is over
    Forget(plan)                            ------->

A control frame is that of `wire` and holds 8 bytes xxh3_64 and MessagePack. A chunk on a data connection is
CHUNK_HEAD, its bytes, and the xxh3_128 of these if the run is checked: behind them, so that either end hashes
what its cache still has. With shared memory the source writes into the target's buffer, reads back what is
there now while its cache has it, and says Wrote. A source whose memory is shared already lends it instead,
for reading: the target copies what it wants, and asks afterwards whether it was lent all the time.
`seq` numbers the questions of a target, `plan` its plans, and `run` its runs, of which many may be under way.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from msgspec import Struct

from holdfast.transfer.manifest import Manifest, Scalar
from holdfast.transfer.route import Placed, Segment

CHUNK_HEAD: Final = struct.Struct("<4sIQIII")
"""MAGIC, chunk, run, bytes, bytes of the digest behind them (16 or 0), xxh32 of all that stands before it."""
CHUNK_MAGIC: Final = b"hfC1"

MAX_CONTROL: Final = 64 << 20
MAX_GREETING: Final = 4096

COMMITTED: Final = "committed"
ABORTED: Final = "aborted"
UNKNOWN: Final = "unknown"

NEWEST: Final = -1
"""As a version: the newest there is."""


class Greeting(Struct, frozen=True, array_like=True, tag=1):
    """`link` is 0 on a control connection; on a data connection it names the control connection."""

    incarnation: str
    node: str
    name: str
    link: int = 0
    expects: str = ""


class Greeted(Struct, frozen=True, array_like=True, tag=2):
    """`local` is a Unix socket on the same node that takes descriptors, if there is one."""

    incarnation: str
    node: str
    link: int
    local: str = ""


class Refused(Struct, frozen=True, array_like=True, tag=3):
    """`code` is one of those below."""

    seq: int
    code: str
    message: str
    hint: str = ""


UNKNOWN_VERSION: Final = "unknown-version"  # or name: gone, or not published in time
MISMATCH: Final = "mismatch"  # the version does not fit the plan
STALE: Final = "stale"  # another incarnation than expected
MISUSE: Final = "misuse"
LIMIT: Final = "limit"
NOT_LENT: Final = "not-lent"  # the memory of this version cannot be lent


class Describe(Struct, frozen=True, array_like=True, tag=4):
    """`version` NEWEST asks for the newest; `wait_s` is how long to wait for it to be published.

    `brief` leaves the arrays out of the manifest that is returned.
    """

    seq: int
    name: str
    version: int = NEWEST
    wait_s: float = 0.0
    ping_s: float = 1.0
    brief: bool = False


class Described(Struct, frozen=True, array_like=True, tag=5):
    """`versions` are all that are published, oldest first; `digest` is that of the whole manifest."""

    seq: int
    version: int
    versions: tuple[int, ...]
    digest: str
    manifest: Manifest


class Prepare(Struct, frozen=True, array_like=True, tag=6):
    """A route, to be run many times. `placed` says where its slices go in buffers lent to the source."""

    seq: int
    plan: int
    name: str
    digest: str
    manifest: str
    chunk_bytes: int
    segments: tuple[Segment, ...]
    placed: tuple[Placed, ...] = ()


class Prepared(Struct, frozen=True, array_like=True, tag=7):
    seq: int


class Run(Struct, frozen=True, array_like=True, tag=8):
    """Send it. `window` is how many bytes may be under way; `buffer` says which lent buffer to write, or one
    of OVER_TCP, IN_PROCESS and BORROWED.
    """

    seq: int
    run: int
    plan: int
    digest: str
    version: int
    window: int
    checked: bool
    wait_s: float = 0.0
    ping_s: float = 1.0
    buffer: int = -1


OVER_TCP: Final = -1
IN_PROCESS: Final = -2
BORROWED: Final = -3


class Started(Struct, frozen=True, array_like=True, tag=9):
    seq: int
    run: int
    version: int
    scalars: tuple[Scalar, ...]


class Credit(Struct, frozen=True, array_like=True, tag=10):
    run: int
    nbytes: int


class Sent(Struct, frozen=True, array_like=True, tag=11):
    """Everything is sent, or the run is over; a lent buffer is not written any more."""

    run: int


class Wrote(Struct, frozen=True, array_like=True, tag=12):
    """`count` chunks, from `chunk` on, are in the shared buffer now. Of a checked run, `digest` has the
    digests of what was to be written, one after the other, and `found` those of what the buffer has.
    """

    run: int
    chunk: int
    count: int
    digest: bytes = b""
    found: bytes = b""


class Failed(Struct, frozen=True, array_like=True, tag=13):
    run: int
    code: str
    message: str


class Lend(Struct, frozen=True, array_like=True, tag=14):
    """The descriptor of a buffer comes with it."""

    plan: int
    buffer: int
    nbytes: int


class Done(Struct, frozen=True, array_like=True, tag=15):
    """Also stops a run that is still under way."""

    run: int
    outcome: str


class Ping(Struct, frozen=True, array_like=True, tag=16):
    """The source is at work on, or waits for, what was asked with `seq`."""

    seq: int


class Forget(Struct, frozen=True, array_like=True, tag=17):
    """A plan, or only one of its buffers, is not used any more."""

    plan: int
    buffer: int = -1


class Loan(Struct, frozen=True, array_like=True, tag=18):
    """The source's own memory, to be read until the run is over; its descriptor comes with it.

    `offsets` say where in it the boxes of the manifest's arrays lie, one after the other.
    """

    seq: int
    run: int
    version: int
    scalars: tuple[Scalar, ...]
    nbytes: int
    offsets: tuple[int, ...]


class Confirm(Struct, frozen=True, array_like=True, tag=19):
    """Whether what was lent for a run is the same still; else what was read of it is worth nothing."""

    seq: int
    run: int


class Confirmed(Struct, frozen=True, array_like=True, tag=20):
    seq: int


FromTarget: TypeAlias = Describe | Prepare | Lend | Run | Credit | Done | Forget | Ping | Confirm
FromSource: TypeAlias = (
    Refused | Described | Prepared | Started | Sent | Wrote | Failed | Ping | Loan | Confirmed
)
