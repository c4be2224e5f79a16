"""Malformed, oversized, slow, replayed: it costs the sender its connection, and nobody else anything."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.coord.connections import Limits
from holdfast.coord.kernel import Event
from holdfast.coord.link import Link, encoded
from holdfast.coord.messages import Add, Call, Count, Done, Get, Hello, Join, Put, Value, Watch
from holdfast.coord.settings import Settings
from holdfast.errors import HandshakeError
from holdfast.wire import framed
from tests.coord.serving import Raw, Serving, closed_within

TOKEN = b"an example of a token, 32 bytes."
LIMITS = Limits(
    handshake_s=30.0, frame_s=30.0, unread_s=1.0, unread_bytes=1 << 20, frame_bytes=1 << 20, strangers=20,
    connections=40,
)  # fmt: skip
PROMPT_S = 5.0
"""Far longer than anything here takes, and far shorter than a hang."""
A_SWEEP_S = 0.4
"""In which the server looks once for what is overdue."""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path / "coord", token=TOKEN, limits=LIMITS) as running:
        yield running


@pytest.fixture
def victim(serving: Serving) -> Iterator[Raw]:
    """A client that must not notice anything."""
    with serving.client() as client:
        client.call(Put("mine", b"safe"))
        yield client
        found = client.call(Get("mine"), timeout_s=PROMPT_S)
        assert isinstance(found, Value)
        assert found.value == b"safe"
        assert serving.error is None


def offer() -> bytes:
    return Link(run="run", token=TOKEN, nonce=secrets.token_bytes(32)).reply


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 2049) + b"x" * 2049,
        framed(b""),
        framed(b"\xc1"),
        framed(b"\x91" * 2000),
        framed(msgspec.msgpack.encode([1, b"holdfast/9", "coord", "run", True, bytes(32)])),
        framed(msgspec.msgpack.encode([1, b"holdfast/1", "coord", "run", False, bytes(32)])),
        framed(msgspec.msgpack.encode([1, b"holdfast/1", "coord", "run", True, bytes(31)])),
        framed(msgspec.msgpack.encode([1, b"holdfast/1", "coord", "run"])),
        framed(msgspec.msgpack.encode([3, bytes(32)])),
        encoded(Hello("run", "x")),
        offer() + framed(msgspec.msgpack.encode([3, bytes(32)])),
        offer() + framed(msgspec.msgpack.encode([3, b""])) + encoded(Hello("run", "x")),
        offer() + offer(),
        offer() + encoded(Hello("run", "x")),
    ],
    ids=[
        "http", "tls", "4 GB", "too long", "empty", "no MessagePack", "deep", "version", "no token",
        "short nonce", "few fields", "proof first", "hello first", "wrong proof", "empty proof", "two offers",
        "no proof",
    ],
)  # fmt: skip
def test_strangers_are_turned_away(serving: Serving, victim: Raw, said: bytes) -> None:
    before = serving.server._core.ledger.number
    with serving.socket() as sock:
        sock.sendall(said)
        assert closed_within(sock, PROMPT_S)
    assert serving.server._core.ledger.number == before


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", (1 << 20) + 1),
        framed(b""),
        framed(b"\xc1"),
        framed(b"\x91" * 5000),
        framed(msgspec.msgpack.encode([1, 0, 0, [99]])),
        framed(msgspec.msgpack.encode([1, 0, 0, [7, 1, 2]])),
        framed(msgspec.msgpack.encode([1, 0, 0, [7, "k", "not bytes"]])),
        framed(msgspec.msgpack.encode([2**64 - 1, 0, 0, [9, "k"]])[:-1]),
        framed(msgspec.msgpack.encode([1, 0, 0, [9, b"\xff\xfe"]])),
        framed(b"\x94\x01\x00\x00\x92\x09\xa2\xff\xfe"),
        encoded(Hello("run", "x")),
    ],
    ids=[
        "4 GB", "too long", "empty", "no MessagePack", "deep", "unknown call", "few fields", "mistyped",
        "cut", "bytes for text", "no UTF-8", "second hello",
    ],
)  # fmt: skip
def test_who_breaks_the_rules_is_out(serving: Serving, victim: Raw, said: bytes) -> None:
    with serving.client() as client:
        assert isinstance(client.call(Add("n")), Count)
        client.send(said)
        assert closed_within(client.sock, PROMPT_S)


def test_numbers_beyond_64_bits_harm_nobody(serving: Serving, victim: Raw) -> None:
    with serving.client() as client:
        client.send(framed(msgspec.msgpack.encode([2**64 - 1, 2**64 - 1, 2**64 - 1, [9, "k"]])))
        client.send(framed(msgspec.msgpack.encode([1, 0, -(2**63), [12, "n", 2**63]])))
        assert victim.call(Get("mine")) is not None


@pytest.mark.process
@pytest.mark.parametrize(
    "said", [b"", b"\x10", offer()[:20], offer()], ids=["nothing", "a byte", "half", "offer"]
)
def test_a_slow_handshake_is_cut_short(serving: Serving, victim: Raw, said: bytes) -> None:
    serving.server.limits = replace(LIMITS, handshake_s=0.4)
    began = time.monotonic()
    with serving.socket() as sock:
        sock.sendall(said)
        assert closed_within(sock, PROMPT_S)
        assert time.monotonic() - began > 0.3


@pytest.mark.process
def test_a_drop_at_a_time_is_cut_short_too(serving: Serving, victim: Raw) -> None:
    """Every byte comes in time; the frame does not."""
    with serving.client() as client:
        serving.server.limits = replace(LIMITS, frame_s=0.4)
        whole = bytes(encoded(Call(1, 0, 0, Put("k", b"x" * 1000))))
        began = time.monotonic()
        done = False
        for at in range(len(whole)):
            try:
                client.send(whole[at : at + 1])
            except OSError:
                done = True
                break
            if closed_within(client.sock, 0.01):
                done = True
                break
        assert done
        assert time.monotonic() - began > 0.3


@pytest.mark.process
def test_a_pause_between_frames_is_no_offence(
    serving: Serving, victim: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [time.monotonic()]  # the server's, which a pause of the machine does not move
    for module in ("connections", "service"):
        monkeypatch.setattr(f"holdfast.coord.{module}.monotonic", lambda: clock[0])
    with serving.client() as client:
        serving.server.limits = replace(LIMITS, frame_s=0.4)
        for _ in range(3):
            whole = bytes(encoded(Call(client._seq + 1, client._seq, 0, Add("n"))))
            client._seq += 1
            client.send(whole[:7])
            assert not closed_within(client.sock, 0.05)
            clock[0] += 0.3
            assert not closed_within(client.sock, A_SWEEP_S)
            client.send(whole[7:])
            client.answer(client._seq)
        clock[0] += 1.0
        assert not closed_within(client.sock, A_SWEEP_S)


def test_a_replayed_client_gets_nothing(serving: Serving, victim: Raw) -> None:
    with serving.client() as client:
        client.call(Add("n"))
        recorded = bytes(client.said)
    with serving.socket() as sock:
        sock.sendall(recorded)
        assert closed_within(sock, PROMPT_S)
    assert victim.call(Add("n", 0)) == Count(1, serving.server._core.ledger.number)


def test_a_replayed_server_deceives_nobody(serving: Serving) -> None:
    """A man in the middle who recorded the server's side of a handshake."""
    with serving.socket() as sock:
        sock.sendall(offer())
        challenge = sock.recv(4096)
    here, there = socket.socketpair()
    with here, there:
        link = Link(run="run", token=TOKEN, nonce=secrets.token_bytes(32))
        there.sendall(challenge)
        with pytest.raises(HandshakeError, match="the server does not know the run's token"):
            link.feed(here.recv(4096))


def test_a_reflected_handshake_gets_nowhere(serving: Serving, victim: Raw) -> None:
    """Without the token, let a second connection to the server answer the challenge of the first."""
    with serving.socket() as one, serving.socket() as two:
        one.sendall(offer())
        challenge = one.recv(4096)
        fields = msgspec.msgpack.decode(challenge[4:])
        two.sendall(framed(msgspec.msgpack.encode([1, b"holdfast/1", "coord", "run", True, fields[3]])))
        reflected = msgspec.msgpack.decode(two.recv(4096)[4:])
        one.sendall(framed(msgspec.msgpack.encode([3, reflected[4]])) + encoded(Hello("run", "mirror")))
        assert closed_within(one, PROMPT_S)


def test_a_flood_of_strangers_leaves_room(serving: Serving, victim: Raw) -> None:
    """Of too many connections that say nothing, the oldest go; whoever knows the token gets in."""
    silent = [serving.socket() for _ in range(100)]
    try:
        with serving.client() as client:
            assert isinstance(client.call(Add("n")), Count)
        assert closed_within(silent[0], PROMPT_S)
        assert len(serving.server._connections) <= LIMITS.strangers + 3
    finally:
        for sock in silent:
            sock.close()


def test_too_many_clients_are_refused_and_the_others_stay(serving: Serving, victim: Raw) -> None:
    with ExitStack() as open_ones:
        clients = [open_ones.enter_context(serving.client()) for _ in range(LIMITS.connections - 1)]
        assert turned_away(serving)
        for client in clients:
            assert client.call(Get("mine")) is not None


def turned_away(serving: Serving) -> bool:
    """Whether one connection more is closed; the reset can come before `connect` is through."""
    try:
        sock = serving.socket()
    except ConnectionResetError:
        return True
    with sock:
        return closed_within(sock, PROMPT_S)


def test_half_open_connections_are_closed(serving: Serving, victim: Raw) -> None:
    with serving.client() as client:
        client.sock.shutdown(socket.SHUT_WR)
        assert closed_within(client.sock, PROMPT_S)


def test_a_reset_in_the_middle_of_a_frame(serving: Serving, victim: Raw) -> None:
    for _ in range(20):
        client = serving.client()
        client.send(struct.pack("<I", 1000) + b"x" * 10)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


@pytest.mark.process
def test_who_reads_too_little_is_out(tmp_path: Path) -> None:
    """The limit on bytes: it asks for far more than it reads."""
    limits = Limits(unread_bytes=1 << 20, unread_s=600.0)
    with Serving(tmp_path, limits=limits) as serving, serving.client() as victim, serving.client() as client:
        assert isinstance(victim.call(Put("large", bytes(500_000))), Done)
        ends = time.monotonic() + PROMPT_S
        with suppress(OSError):
            while not client.gone_from(serving):
                assert time.monotonic() < ends
                for _ in range(20):
                    client.ask(Get("large"))
                assert isinstance(victim.call(Add("n"), timeout_s=PROMPT_S), Count)
        client.await_gone(serving, PROMPT_S)
        assert isinstance(victim.call(Add("n"), timeout_s=PROMPT_S), Count)


@pytest.mark.process
def test_who_stops_reading_is_out_after_a_while(tmp_path: Path) -> None:
    """The limit on time: too little waits for it to reach the limit on bytes."""
    limits = Limits(unread_bytes=1 << 40, unread_s=0.4)
    with Serving(tmp_path, limits=limits) as serving, serving.client() as victim, serving.client() as client:
        assert isinstance(victim.call(Put("large", bytes(1_000_000))), Done)
        # At once: who asks again when its time is over finds nobody.
        client.send(b"".join(bytes(encoded(Call(seq, 0, 0, Get("large")))) for seq in range(1, 21)))
        client.await_gone(serving, PROMPT_S)
        assert isinstance(victim.call(Add("n"), timeout_s=PROMPT_S), Count)


@pytest.mark.process
def test_a_flood_of_calls_does_not_starve_others(serving: Serving, victim: Raw) -> None:
    """In one turn of the loop, one connection has a hundred or so calls served, however many it sent."""
    flood = b"".join(bytes(encoded(Call(seq, seq - 1, 0, Get("mine")))) for seq in range(1, 10_001))
    turns, steps, flushes = [0], serving.server.step, serving.server._flush

    def step(event: Event, now: float) -> None:
        turns[-1] += 1
        steps(event, now)

    def flush() -> None:
        turns.append(0)
        flushes()

    with serving.client() as client:
        serving.server.step = step  # type: ignore[method-assign]
        serving.server._flush = flush  # type: ignore[method-assign]
        client.sock.sendall(flood)
        began = time.monotonic()
        victim.call(Get("mine"), timeout_s=PROMPT_S)
        waited = time.monotonic() - began
        client.answer(10_000)
    print(f"a call beside a flood: {waited * 1e3:.1f} ms; {len(turns)} turns of {max(turns)} calls at most")
    assert sum(turns) >= 10_000
    assert max(turns) < 300
    assert waited < PROMPT_S


def test_a_client_of_another_run_is_told_so(serving: Serving) -> None:
    with pytest.raises(HandshakeError, match="turned away: another run is served here than 'other'"):
        Raw(serving.address, token=TOKEN, run="other")


def test_a_client_without_the_token_is_told_so(serving: Serving) -> None:
    with pytest.raises(HandshakeError, match="turned away: the client has no token and this end has one"):
        Raw(serving.address)


@pytest.fixture(scope="module")
def open_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(
        tmp_path_factory.mktemp("coord"), limits=LIMITS, settings=Settings(last_call_s=0.0, session_s=0.05)
    ) as running:
        yield running


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(st.binary(max_size=600), min_size=1, max_size=5), raw=st.booleans())
def test_any_bytes_in_place_of_a_handshake(open_serving: Serving, said: list[bytes], raw: bool) -> None:
    with open_serving.socket() as sock, suppress(OSError):
        for each in said:
            sock.sendall(each if raw else framed(each))
    with open_serving.client() as client:
        assert isinstance(client.call(Add("n"), timeout_s=PROMPT_S), Count)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=50)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
OPS = st.builds(lambda tag, rest: [tag, *rest], st.integers(0, 22), st.lists(VALUES, max_size=7))
CALLS = st.builds(
    lambda seq, acked, generation, op: msgspec.msgpack.encode([seq, acked, generation, op]),
    st.integers(0, 50), st.integers(0, 50), st.integers(-1, 3), OPS | VALUES,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies=st.lists(CALLS | st.binary(max_size=100), min_size=1, max_size=10))
def test_any_bytes_in_place_of_calls(open_serving: Serving, bodies: list[bytes]) -> None:
    with open_serving.client() as client:
        with suppress(OSError):
            client.send(b"".join(map(framed, bodies)))
        with open_serving.client() as other:
            assert isinstance(other.call(Add("n"), timeout_s=PROMPT_S), Count)
    assert open_serving.error is None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ops=st.lists(
        st.one_of(
            st.builds(Join, st.integers(-5, 5), st.floats(), st.booleans(), st.booleans()),
            st.builds(Get, st.text(max_size=5), st.floats()),
            st.builds(Add, st.text(max_size=3), st.integers(-(2**63), 2**63 - 1)),
            st.builds(Watch, st.text(max_size=3), st.integers(-(2**63), 2**63 - 1)),
        ),
        max_size=8,
    ),
    timeout=st.floats(),
)
def test_calls_that_are_well_formed_and_make_no_sense(
    open_serving: Serving, ops: list[Join | Get | Add | Watch], timeout: float
) -> None:
    """NaN, infinity, the largest and the smallest of everything."""
    with open_serving.client() as client:
        for op in ops:
            client.ask(op)
        with open_serving.client() as other:
            assert isinstance(other.call(Add("fine"), timeout_s=PROMPT_S), Count)
    assert open_serving.error is None


def test_the_limits_leave_ordinary_clients_alone(tmp_path: Path) -> None:
    """The defaults, with a megabyte each way."""
    with Serving(tmp_path) as serving, serving.client() as client:
        value = secrets.token_bytes(1 << 20)
        client.call(Put("k", value))
        for _ in range(24):  # a client that asks for more without reading is no ordinary one
            client.ask(Get("k"))
        for seq in range(2, 26):
            found = client.answer(seq).body
            assert isinstance(found, Value)
            assert found.value == value
