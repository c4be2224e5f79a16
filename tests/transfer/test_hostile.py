"""Peers that break the rules: it costs them their connection, and nobody else anything."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError, TransferError
from holdfast.transfer.links import address_of, dial
from holdfast.transfer.messages import (
    Credit,
    Describe,
    Described,
    Done,
    Forget,
    Lend,
    Ping,
    Prepare,
    Refused,
    Run,
    Started,
)
from holdfast.transfer.route import Placed, Segment, route_digest
from holdfast.wire import ClientHandshake, framed
from tests.checkpoint.children import Children
from tests.transfer.children import PeerProcess, array, peers
from tests.transfer.raw import RawTarget, closed_within, frame
from tests.transfer.test_fuzz import BODIES

pytestmark = pytest.mark.process

TREE = [array("w", (64, 64))]
PROMPT_S = 5.0
MEMORY = 48 << 20
TOKEN = b"an example of a token, 32 bytes."
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
encode = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def module_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    started = Children(tmp_path_factory.mktemp("children"))
    yield started
    started.end_all()


@pytest.fixture(scope="module")
def pair(module_children: Children) -> tuple[PeerProcess, PeerProcess]:
    source, target = peers(module_children, 2, transports=["tcp"], idle_s=3.0)
    source.publish(TREE, 1)
    target.prepare([source.address], TREE)
    target.pulled(1)
    return source, target


@pytest.fixture
def source(pair: tuple[PeerProcess, PeerProcess]) -> Iterator[PeerProcess]:
    """A source that serves somebody else all the while, and has no more memory afterwards than before."""
    before = pair[0].usage()
    yield pair[0]
    pair[1].pulled(1)
    pair[0].settled(before, slack_bytes=MEMORY, timeout_s=PROMPT_S)


def offer(token: bytes | None = None) -> bytes:
    shake = ClientHandshake(purpose="transfer", run="run", token=token, nonce=secrets.token_bytes(32))
    return shake.offer()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        bytes(4) * 100,  # four zero bytes end a process that serves JAX's transfers
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 2049) + b"x" * 2049,
        framed(b""),
        framed(b"\xc1"),
        framed(b"\x91" * 2000),
        framed(encode([1, b"holdfast/1", "coord", "run", False, bytes(32)])),
        framed(encode([1, b"holdfast/1", "transfer", "other", False, bytes(32)])),
        offer(TOKEN),
        offer() + offer(),
        offer() + framed(encode([3, b"x"])),
        offer() + framed(encode([3, b""])) + framed(b"\xc1"),
        offer() + framed(encode([3, b""])) + framed(encode([1, "x", "\xff", "x", 2**64 - 1, ""])),
        offer() + framed(encode([3, b""])) + framed(b"\x94\x01\xa2\xff\xfe\xa1x\xa1x"),
        offer() + framed(encode([3, b""])) + framed(encode([1, "x", "x", "x", 77, ""])),
        offer() + framed(encode([3, b""])) + struct.pack("<I", 2**31),
    ],
    ids=[
        "http", "tls", "zeros", "4 GB", "too long", "empty", "no MessagePack", "deep", "purpose", "run",
        "token", "two offers", "wrong proof", "no greeting", "greeting beyond 63 bits", "greeting no UTF-8",
        "data of no link", "2 GB greeting",
    ],
)  # fmt: skip
def test_strangers_are_turned_away(source: PeerProcess, said: bytes) -> None:
    with dial(address_of(source.address), PROMPT_S) as sock:
        sock.sendall(said)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert closed_within(sock, PROMPT_S)


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(said=st.lists(st.binary(max_size=600), min_size=1, max_size=5), raw=st.booleans())
def test_any_bytes_in_place_of_a_handshake(
    pair: tuple[PeerProcess, PeerProcess], said: list[bytes], raw: bool
) -> None:
    with dial(address_of(pair[0].address), PROMPT_S) as sock, suppress(OSError):
        for each in said:
            sock.sendall(each if raw else framed(each))
    pair[1].pulled(1)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 5,
        struct.pack("<IB", 2**32 - 1, 0),
        struct.pack("<IB", (64 << 20) + 1, 0),
        struct.pack("<IB", 3, 200) + b"\xc4\x01x",
        frame(b""),
        frame(b"\xc1"),
        frame(encode([99])),
        frame(encode([4, 1, 2, 3])),
        frame(b"\x93\x04\x01\xa2\xff\xfe"),
        frame(b"\x91" * 5000),
        frame(encode(Ping(1)))[:-1] + b"\x00",
        frame(encode([1, "x", "x", "x", 0, ""])),
        frame(encode(Started(1, 1, 1, ()))),
    ],
    ids=[
        "noise", "4 GB", "64 MiB", "descriptors", "empty", "no MessagePack", "unknown tag", "mistyped",
        "no UTF-8", "deep", "checksum", "second greeting", "what only a source says",
    ],
)  # fmt: skip
def test_who_breaks_the_rules_is_out(source: PeerProcess, said: bytes) -> None:
    with RawTarget(source.address) as client:
        client.say(Describe(1, "policy"))
        assert isinstance(client.hear(), Described)
        client.sock.sendall(said)
        with suppress(OSError):
            client.sock.shutdown(socket.SHUT_WR)
        assert closed_within(client.sock, PROMPT_S)


ANY_FRAMES = given(bodies=st.lists(BODIES, min_size=1, max_size=10))


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@ANY_FRAMES
def test_any_frames_in_place_of_questions(pair: tuple[PeerProcess, PeerProcess], bodies: list[bytes]) -> None:
    answer_frames(pair, bodies)


@pytest.mark.full
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@ANY_FRAMES
def test_many_frames_in_place_of_questions(
    pair: tuple[PeerProcess, PeerProcess], bodies: list[bytes]
) -> None:
    answer_frames(pair, bodies)


def answer_frames(pair: tuple[PeerProcess, PeerProcess], bodies: list[bytes]) -> None:
    with RawTarget(pair[0].address) as client, suppress(OSError):
        client.send(*bodies)
        client.sock.shutdown(socket.SHUT_WR)
        assert closed_within(client.sock, PROMPT_S)
    pair[1].pulled(1)


def described(client: RawTarget) -> Described:
    client.say(Describe(1, "policy"))
    found = client.hear()
    assert isinstance(found, Described)
    return found


def prepare(client: RawTarget, chunk_bytes: int, *segments: Segment) -> Any:
    """Ask for segments; the answer, or None if the connection is closed instead."""
    digest = described(client).digest
    name = route_digest(segments, chunk_bytes, digest)
    try:
        client.say(Prepare(2, 1, "policy", name, digest, chunk_bytes, segments))
        return client.hear(PROMPT_S)
    except (HoldfastError, OSError):
        return None


@pytest.mark.parametrize("chunk_bytes", [0, -1, 2**62, 2**63 - 1])
def test_a_nonsensical_chunk_size(source: PeerProcess, chunk_bytes: int) -> None:
    with RawTarget(source.address) as client:
        found = prepare(client, chunk_bytes, Segment(0, 0, 0, 64 * 64 * 4))
        assert found is None or isinstance(found, Refused) or chunk_bytes > 1 << 30


@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 0, 0, 1 << 40),
        Segment(0, 0, -1, 4),
        Segment(0, 7, 0, 4),
        Segment(9, 0, 0, 4),
        Segment(0, 0, 0, 4, ((1 << 62, 0),)),
        Segment(0, 0, 0, 4, ((1 << 40, 1),)),
    ],
)
def test_a_slice_that_was_not_published(source: PeerProcess, segment: Segment) -> None:
    with RawTarget(source.address) as client:
        found = prepare(client, 1 << 20, segment)
        assert found is None or isinstance(found, Refused)


def test_a_digest_that_is_not_that_of_the_slices(source: PeerProcess) -> None:
    with RawTarget(source.address) as client:
        digest = described(client).digest
        client.say(Prepare(2, 1, "policy", "0" * 32, digest, 1 << 20, (Segment(0, 0, 0, 4),)))
        assert isinstance(client.hear(), Refused)


@settings(max_examples=80, deadline=None, suppress_health_check=QUIET)
@given(
    messages=st.lists(
        st.one_of(
            st.builds(Describe, st.integers(0, 9), st.sampled_from(["policy", "x"]), st.integers(-3, 5),
                      st.floats(), st.floats(), st.booleans()),
            st.builds(Run, st.integers(0, 9), st.integers(-1, 3), st.integers(-1, 3), st.text(max_size=3),
                      st.integers(-3, 5), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(),
                      st.floats(), st.integers(-3, 3)),
            st.builds(Credit, st.integers(-1, 3), st.integers(-(2**63), 2**63 - 1)),
            st.builds(Done, st.integers(-1, 3), st.sampled_from(["committed", "aborted", "unknown", "x"])),
            st.builds(Forget, st.integers(-1, 3), st.integers(-3, 3)),
            st.builds(Lend, st.integers(-1, 3), st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)),
        ),
        max_size=8,
    ),
    prepared=st.booleans(),
)  # fmt: skip
def test_questions_that_are_well_formed_and_make_no_sense(
    pair: tuple[PeerProcess, PeerProcess], messages: list[Any], prepared: bool
) -> None:
    """NaN, infinity, the largest and the smallest of everything, with a plan and without."""
    with RawTarget(pair[0].address) as client, suppress(OSError, HoldfastError):
        if prepared:
            prepare(client, 4096, Segment(0, 0, 0, 64 * 64 * 4))
        for message in messages:
            client.say(message)
        client.sock.shutdown(socket.SHUT_WR)
        closed_within(client.sock, 1.0)
    pair[1].pulled(1)


def test_bytes_from_the_wrong_side_on_a_data_connection(source: PeerProcess) -> None:
    """Only the source speaks there."""
    with RawTarget(source.address) as client, client.data() as sock, suppress(OSError):
        sock.settimeout(PROMPT_S)
        sock.sendall(secrets.token_bytes(1 << 20))


def test_a_flood_of_connections_that_say_nothing(
    pair: tuple[PeerProcess, PeerProcess], source: PeerProcess
) -> None:
    """Others are served all the while."""
    with ExitStack() as stack:
        place = address_of(source.address)
        for _ in range(600):
            with suppress(OSError, TransferError):
                stack.enter_context(dial(place, PROMPT_S))
        began = time.monotonic()
        pair[1].pulled(1)
        pair[1].prepare([source.address], TREE, plan="beside a flood")
        pair[1].pulled(1, plan="beside a flood")
        assert time.monotonic() - began < PROMPT_S
        pair[1].do("close_plan", plan="beside a flood")


def test_a_flood_of_questions(pair: tuple[PeerProcess, PeerProcess], source: PeerProcess) -> None:
    """One that never reads the answers."""
    with RawTarget(source.address) as client:
        client.sock.setblocking(False)
        flood = b"".join(frame(encode(Describe(seq, "policy"))) for seq in range(20_000))
        sent = 0
        ends = time.monotonic() + 1.0
        while sent < len(flood) and time.monotonic() < ends:
            try:
                sent += client.sock.send(flood[sent : sent + (1 << 16)])
            except BlockingIOError:
                pair[1].pulled(1)
            except OSError:
                break
        began = time.monotonic()
        pair[1].pulled(1)
        assert time.monotonic() - began < PROMPT_S


def test_a_flood_of_plans(source: PeerProcess) -> None:
    """A slice that is asked for costs a few hundred bytes, which go with the connection."""
    segments = tuple(Segment(0, 0, 4 * n, 4) for n in range(4096))
    before = source.usage()["resident"]
    with RawTarget(source.address) as client:
        manifest = described(client).digest
        name = route_digest(segments, 4096, manifest)
        refused = 0
        with suppress(HoldfastError, OSError):
            for plan in range(100):
                client.say(Prepare(plan, plan, "policy", name, manifest, 4096, segments))
                refused += isinstance(client.hear(PROMPT_S), Refused)
        taken = source.usage()["resident"] - before
    assert taken < 200 << 20, f"{taken >> 20} MiB, {refused} refused"


def test_a_flood_of_waiting_runs(pair: tuple[PeerProcess, PeerProcess], source: PeerProcess) -> None:
    """Runs of a version that never comes: waiting costs no thread each."""
    with RawTarget(source.address) as client, suppress(HoldfastError, OSError):
        segments = (Segment(0, 0, 0, 64 * 64 * 4),)
        prepare(client, 4096, *segments)
        digest = route_digest(segments, 4096, described(client).digest)
        for run in range(1, 2001):
            client.say(Run(run, run, 1, digest, 99, 1 << 20, True, 1e6, 1.0))
        pair[1].pulled(1)
        assert source.usage()["threads"] < 100


@contextmanager
def descriptor(kind: str) -> Iterator[int]:
    """What a target might lend instead of a sealed buffer of 64 KiB."""
    nbytes = 16 if kind == "small" else 1 << 16
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        if kind != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        if kind == "read-only":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["small", "pipe", "unsealed", "read-only", "none", "three", "outside"])
def test_memory_that_is_not_what_was_announced(children: Children, kind: str) -> None:
    """A source that wrote there would be killed by a signal."""
    source, victim = peers(children, 2)
    source.publish(TREE, 1)
    victim.prepare([source.address], TREE)
    for _ in range(2):  # both buffers are lent
        victim.pulled(1)
    before = source.usage()
    nbytes = 64 * 64 * 4
    offset = 1 << 20 if kind == "outside" else 0
    with RawTarget(source.address, local=True) as client, descriptor(kind) as fd:
        found = described(client).digest
        segments = (Segment(0, 0, 0, nbytes),)
        name = route_digest(segments, 4096, found)
        with suppress(HoldfastError, OSError):
            client.say(Prepare(2, 1, "policy", name, found, 4096, segments, (Placed(offset),)))
            client.hear(PROMPT_S)
            fds = {"none": (), "three": (fd, fd, fd)}.get(kind, (fd,))
            client.say(Lend(1, 0, 1 << 16), *fds)
            client.say(Run(3, 1, 1, name, 1, 1 << 20, True, 0.0, 1.0, 0))
            assert not isinstance(client.hear(PROMPT_S), Started)
    victim.pulled(1)
    source.settled(before)


def test_descriptors_that_nobody_announced(children: Children) -> None:
    """They are closed: a source does not run out of its own."""
    source, victim = peers(children, 2)
    source.publish(TREE, 1)
    before = source.usage()
    with RawTarget(source.address, local=True) as client, descriptor("sealed") as fd:
        with suppress(OSError):
            for _ in range(200):
                socket.send_fds(client.sock, [frame(encode(Ping(1)))], [fd] * 10)
        victim.prepare([source.address], TREE)
        victim.pulled(1)
        assert source.usage()["memfds"] <= before["memfds"] + 40
