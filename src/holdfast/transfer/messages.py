"""What two endpoints say to each other.

A target dials a source: one control connection, and `streams` data connections that belong to it. On each,
first the handshake of `wire`, then:

    target                                              source
    Greeting(incarnation, node, link)       ------->    link 0: control; else a data connection of that link
                                            <-------    Greeted(incarnation, node, link, local) or Refused
    Describe(seq, name, version, wait_s)    ------->
                                            <-------    Described(seq, version, manifest) or Refused
    Prepare(seq, digest, name, segments)    ------->    checked against the manifest before anything else
                                            <-------    Prepared(seq)
    Run(seq, run, digest, version, ...)     ------->    may wait for a version that is not published yet
                                            <-------    Started(seq, version, scalars) or Refused
                                            <=======    chunks, on the data connections (or Wrote)
    Credit(run, nbytes)                     ------->    so many bytes are consumed: as many more may come
                                            <-------    Sent(run) or Failed(run, message)
    Done(run, outcome)                      ------->    the lease of this target on the version is over
    Cancel(run)                             ------->

A control frame is a little-endian u32 length and MessagePack. A chunk on a data connection is CHUNK_HEAD and
then its bytes; with shared memory the source writes into the target's buffer and says Wrote. `seq` numbers
the questions of a target; `run` its runs, of which many may be under way.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from msgspec import Struct

from holdfast.transfer.manifest import Manifest, Scalar
from holdfast.transfer.route import Segment

CHUNK_HEAD: Final = struct.Struct("<4sIQI16s4x")
"""MAGIC, chunk, run, bytes, xxh3_128 of the bytes (or zeros)."""
CHUNK_MAGIC: Final = b"hfC1"

COMMITTED: Final = "committed"
ABORTED: Final = "aborted"
UNKNOWN: Final = "unknown"
OUTCOMES: Final = (COMMITTED, ABORTED, UNKNOWN)


class Greeting(Struct, frozen=True, array_like=True, tag=1):
    """`link` is 0 on a control connection; on a data connection it names the control connection."""

    incarnation: str
    node: str
    link: int = 0
    expects: str = ""


class Greeted(Struct, frozen=True, array_like=True, tag=2):
    """`local` is an address on the same node that passes descriptors, if there is one."""

    incarnation: str
    node: str
    link: int
    local: str = ""


class Refused(Struct, frozen=True, array_like=True, tag=3):
    """`code` is one of CODES."""

    seq: int
    code: str
    message: str
    hint: str = ""


UNKNOWN_NAME: Final = "unknown-name"
UNKNOWN_VERSION: Final = "unknown-version"  # gone, or not published in time
MISMATCH: Final = "mismatch"  # the version does not fit the plan
STALE: Final = "stale"  # another incarnation than expected
MISUSE: Final = "misuse"
LIMIT: Final = "limit"
CODES: Final = (UNKNOWN_NAME, UNKNOWN_VERSION, MISMATCH, STALE, MISUSE, LIMIT)


class Describe(Struct, frozen=True, array_like=True, tag=4):
    """`version` -1 asks for the newest; `wait_s` is how long to wait for it to be published."""

    seq: int
    name: str
    version: int = -1
    wait_s: float = 0.0


class Described(Struct, frozen=True, array_like=True, tag=5):
    """`versions` are all that are published, oldest first."""

    seq: int
    version: int
    versions: tuple[int, ...]
    manifest: Manifest


class Prepare(Struct, frozen=True, array_like=True, tag=6):
    """A route, to be run many times. With shared memory, `placed` are the offsets of the segments in it,
    and the descriptors of the target's buffers come with the frame.
    """

    seq: int
    name: str
    digest: str
    manifest: str
    chunk_bytes: int
    segments: tuple[Segment, ...]
    placed: tuple[Segment, ...] = ()


class Prepared(Struct, frozen=True, array_like=True, tag=7):
    seq: int


class Run(Struct, frozen=True, array_like=True, tag=8):
    """Send it. `window` is how many bytes may be under way; `buffer` which shared buffer to write, or -1."""

    seq: int
    run: int
    digest: str
    version: int
    window: int
    checked: bool
    wait_s: float = 0.0
    buffer: int = -1


class Started(Struct, frozen=True, array_like=True, tag=9):
    seq: int
    version: int
    scalars: tuple[Scalar, ...]


class Credit(Struct, frozen=True, array_like=True, tag=10):
    run: int
    nbytes: int


class Sent(Struct, frozen=True, array_like=True, tag=11):
    run: int


class Wrote(Struct, frozen=True, array_like=True, tag=12):
    """Chunks that are in the shared buffer now, with their digests (empty if unchecked)."""

    run: int
    chunks: tuple[int, ...]
    digests: tuple[bytes, ...]


class Failed(Struct, frozen=True, array_like=True, tag=13):
    run: int
    message: str


class Cancel(Struct, frozen=True, array_like=True, tag=14):
    run: int
    reason: str = ""


class Done(Struct, frozen=True, array_like=True, tag=15):
    run: int
    outcome: str


class Ping(Struct, frozen=True, array_like=True, tag=16):
    """A sign of life, in either direction, while a run waits."""


FromTarget: TypeAlias = Describe | Prepare | Run | Credit | Cancel | Done | Ping
FromSource: TypeAlias = Refused | Described | Prepared | Started | Sent | Wrote | Failed | Ping
