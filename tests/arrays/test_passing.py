"""Bodies that are hashed on their way through a socket: every cut, both directions, and what goes wrong."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arrays import Bytes1D, copying
from holdfast.arrays.copying import address_of
from holdfast.arrays.passing import Passage, passes
from holdfast.arrays.scattering import SHORTEST
from holdfast.transfer.streams import set_blocking

HEAD, DIGEST = 28, 16
needs_library = pytest.mark.skipif(
    copying.library is None, reason="built without a C compiler: Python sends, receives and hashes"
)
_random = np.random.default_rng(2).integers(0, 256, 2 << 20, dtype=np.uint8)


def table(*stretches: Bytes1D) -> npt.NDArray[np.uint64]:
    return np.array([(address_of(one), one.size) for one in stretches], np.uint64).reshape(-1, 2)


def cut(data: Bytes1D, at: Sequence[int]) -> list[Bytes1D]:
    """A body in pieces; the places are taken as far as they lie within it."""
    bounds = [0, *sorted({place for place in at if 0 < place < data.size}), data.size]
    return [data[begin:end] for begin, end in itertools.pairwise(bounds)]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        set_blocking(a)
        set_blocking(b)
        yield a, b


def send_all(sock: socket.socket, passage: Passage) -> None:
    while passage.left:
        passage.send(sock)


@needs_library
@given(
    size=st.integers(SHORTEST, 3000) | st.sampled_from([262_143, 262_144, 262_145, 262_160, 600_001]),
    sent=st.lists(st.integers(0, 600_000), max_size=90),
    taken=st.lists(st.integers(0, 600_000), max_size=90),
)
def test_a_body_arrives_with_its_digest_however_it_is_cut(
    size: int, sent: list[int], taken: list[int]
) -> None:
    a, b = socket.socketpair()
    with a, b:
        set_blocking(a)
        set_blocking(b)
        body, into = _random[:size], np.zeros(size, np.uint8)
        head, tail, seen = _random[-HEAD:].copy(), np.zeros(DIGEST, np.uint8), np.zeros(DIGEST, np.uint8)
        passage = Passage(table(head, *cut(body, sent), tail), head=HEAD, tail=DIGEST)
        thread = threading.Thread(target=send_all, args=(a, passage))
        thread.start()
        try:
            assert b.recv(HEAD, socket.MSG_WAITALL) == head.tobytes()
            received = Passage(table(*cut(into, taken), seen), head=0, tail=DIGEST)
            while received.left:
                received.receive(b)
        finally:
            thread.join(30.0)
    assert received.is_right()
    assert np.array_equal(into, body)
    assert seen.tobytes() == tail.tobytes() == xxhash.xxh3_128_digest(body.data)


@needs_library
@pytest.mark.parametrize("at", [0, 1, 63, 64, 1000, 4999])
def test_a_byte_that_changed_on_the_way_is_seen(pair: tuple[socket.socket, socket.socket], at: int) -> None:
    wire = bytearray(_random[:5000].tobytes())
    digest = xxhash.xxh3_128_digest(wire)
    wire[at] ^= 1
    pair[0].sendall(wire + digest)
    into, seen = np.zeros(5000, np.uint8), np.zeros(DIGEST, np.uint8)
    received = Passage(table(into, seen), head=0, tail=DIGEST)
    assert not received.is_right(), "nothing has come"
    while received.left:
        received.receive(pair[1])
    assert not received.is_right()


@needs_library
def test_time_that_is_up_and_an_end_in_the_middle(pair: tuple[socket.socket, socket.socket]) -> None:
    into, seen = np.zeros(5000, np.uint8), np.zeros(DIGEST, np.uint8)
    received = Passage(table(into, seen), head=0, tail=DIGEST)
    assert received.receive(pair[1]) == 0
    pair[0].sendall(_random[:700].tobytes())
    assert received.receive(pair[1]) == 700
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="No data available") as caught:
        received.receive(pair[1])
    assert caught.value.errno == errno.ENODATA
    assert not received.is_right()
    assert np.array_equal(into[:700], _random[:700])
    assert not into[700:].any()


@needs_library
def test_a_sender_whose_target_is_slow_or_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    tail = np.zeros(DIGEST, np.uint8)
    passage = Passage(table(_random, tail), head=0, tail=DIGEST)
    moved = passage.send(pair[0])  # as much as the kernel takes
    assert 0 < moved < _random.size
    assert passage.send(pair[0]) == 0
    assert passage.left == _random.size + DIGEST - moved
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        passage.send(pair[0])


@needs_library
def test_a_socket_that_was_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    passage = Passage(table(_random[:1000], np.zeros(DIGEST, np.uint8)), head=0, tail=DIGEST)
    pair[0].close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        passage.send(pair[0])


def test_short_bodies_and_a_package_without_the_library_pass_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not passes(SHORTEST - 1)
    monkeypatch.setattr(copying, "library", None)
    assert not passes(1 << 20)
