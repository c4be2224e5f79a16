"""Chunks and control frames on sockets, and who sends next; no endpoint in sight."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.arrays import Move
from holdfast.errors import LayoutError, PeerLostError, UsageError
from holdfast.transfer.chunks import BLOCK, SMALL, Copies, Cut, Cuts, Memories
from holdfast.transfer.links import Channel, address_of, dial
from holdfast.transfer.messages import Done, FromTarget
from holdfast.transfer.route import Piece, Stream, Stretch
from holdfast.transfer.streams import (
    HEAD_BYTES,
    Feed,
    Head,
    pack_head,
    receive,
    receive_chunk,
    send_chunk,
    set_blocking,
    unpack_head,
)
from holdfast.wire import ConnectionLost
from tests.checkpoint.children import open_files
from tests.transfer.test_endpoint import until

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    set_blocking(a)
    set_blocking(b)
    with a, b:
        yield a, b


def blocks(data: bytearray, rng: random.Random) -> list[list[memoryview]]:
    """The same bytes in blocks of views, cut anywhere."""
    cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(40))})
    views = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
    return [views[at : at + 7] for at in range(0, len(views), 7)]


def no_matter(*_: object) -> None:
    pass


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_chunk_arrives_however_it_is_cut(pair: Pair, checked: bool) -> None:
    rng = random.Random(1)
    for size in (1, 1000, 3_000_000):
        data, into = bytearray(rng.randbytes(size)), bytearray(size)
        head = Head(3, 4, size, checked)
        thread = threading.Thread(target=send_chunk, args=(pair[0], head, blocks(data, rng), no_matter))
        thread.start()
        start = bytearray(HEAD_BYTES)
        receive(pair[1], [memoryview(start)], no_matter)
        assert unpack_head(bytes(start)) == head
        assert receive_chunk(pair[1], head, blocks(into, rng), no_matter)
        thread.join()
        assert into == data


def test_every_flipped_bit_of_a_chunk_is_noticed(pair: Pair) -> None:
    rng = random.Random(2)
    for _ in range(50):
        data = rng.randbytes(64)
        a, b = socket.socketpair()
        with a, b:
            send_chunk(a, Head(0, 1, 64, True), [[data]], no_matter)
            sent = bytearray(b.recv(1000))
        at = rng.randrange(len(sent))
        sent[at] ^= 1 << rng.randrange(8)
        pair[0].sendall(sent)
        start = bytearray(HEAD_BYTES)
        receive(pair[1], [memoryview(start)], no_matter)
        if at < HEAD_BYTES:
            with pytest.raises(ConnectionLost, match="damaged"):
                unpack_head(bytes(start))
            receive(pair[1], [memoryview(bytearray(80))], no_matter)
        else:
            assert not receive_chunk(pair[1], Head(0, 1, 64, True), [[bytearray(64)]], no_matter)


def test_waiting_looks_around_and_the_end_is_noticed(pair: Pair) -> None:
    looked = []

    def moved(nbytes: int) -> None:
        looked.append(nbytes)
        if nbytes == 0:
            pair[0].close()

    with pytest.raises(ConnectionLost, match="closed"):
        receive(pair[1], [memoryview(bytearray(5))], moved)
    assert looked == [0]


def test_heads_say_what_they_were_made_of() -> None:
    head = Head(7, 1 << 60, 4 << 20, True)
    assert unpack_head(pack_head(head)) == head
    with pytest.raises(ConnectionLost):
        unpack_head(b"x" * HEAD_BYTES)


# ---- who sends next


@dataclass
class Outgoing:
    num_chunks: int
    window: int
    name: str = ""

    def size(self, chunk: int) -> int:
        return 10


def test_runs_take_turns_within_their_windows() -> None:
    feed: Feed[Outgoing] = Feed()
    a, b = Outgoing(3, 100, "a"), Outgoing(3, 15, "b")
    feed.add(1, a)
    feed.add(2, b)
    taken = [feed.take() for _ in range(4)]
    assert [(run.name, chunk) for run, chunk in filter(None, taken)] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("a", 2),
    ]
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(feed.take()))
    waiting.start()
    feed.credit(2, 10)
    waiting.join(5)
    assert found == [(b, 1)]
    feed.remove(2)
    feed.credit(2, 10)  # of a run that is over: nothing happens
    ending = threading.Thread(target=lambda: found.append(feed.take()))
    ending.start()
    feed.close()
    ending.join(5)
    assert found[1] is None


def test_a_chunk_larger_than_its_window_still_goes() -> None:
    feed: Feed[Outgoing] = Feed()
    feed.add(1, Outgoing(2, 1))
    assert feed.take() is not None


# ---- control frames


def test_a_damaged_control_frame_ends_the_connection() -> None:
    for flip in (None, 9, 14, 20):
        a, b = socket.socketpair()
        with a, b:
            there, here = socket.socketpair()
            out: Channel[FromTarget] = Channel(there, msgspec.msgpack.Decoder(FromTarget))
            out.send(Done(1, "committed"))
            frame = bytearray(here.recv(1000))
            if flip is not None:
                frame[flip] ^= 4
            a.sendall(frame)
            channel: Channel[FromTarget] = Channel(b, msgspec.msgpack.Decoder(FromTarget))
            if flip is None:
                assert channel.receive(timeout_s=5)[0] == Done(1, "committed")
            else:
                with pytest.raises(ConnectionLost):
                    channel.receive(timeout_s=5)
            for one in (out, channel):
                one.close()
            here.close()


def test_addresses() -> None:
    assert str(address_of("127.0.0.1:80")) == "tcp://127.0.0.1:80"
    assert str(address_of("tcp://[::1]:80")) == "tcp://[::1]:80"
    assert address_of("tcp://host:1#ab").incarnation == "ab"
    for wrong in ("host", "host:99999", "unix:/x", "tcp://host:1#xyz", "a b:1"):
        with pytest.raises(UsageError):
            address_of(wrong)


def test_a_socket_that_nobody_listens_at_is_closed() -> None:
    before = len(open_files())
    with pytest.raises(PeerLostError, match="cannot connect") as caught:
        dial("\0holdfast-transfer-nobody", 5.0)
    assert until(lambda: len(open_files()) <= before), caught.value  # which refers to all that is left


# ---- chunks in memory


def test_small_and_strided_pieces_go_through_scratch_and_large_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 255, 5_000_000, dtype=np.uint8)
    large, strided, small = 3_000_000, 64 * 100, 10
    stream = Stream(
        [
            Stretch(0, Move(0, 1000, large)),
            Stretch(0, Move(large, 4_000_000, 64, ((100, 64, 1000),))),
            Stretch(0, Move(large + strided, 5, small)),
        ],
        4 << 20,
    )
    cut = Cuts(stream)[0]
    scratch = np.zeros(cut.scratch_bytes, np.uint8)
    cut.gather([memory], scratch)
    wire = b"".join(view.tobytes() for block in cut.blocks([memory], scratch) for view in block)
    rows = [memory[4_000_000 + n * 1000 :][:64].tobytes() for n in range(100)]
    assert wire == memory[1000 : 1000 + large].tobytes() + b"".join(rows) + memory[5:15].tobytes()
    sizes = [sum(len(view) for view in block) for block in cut.blocks([memory], scratch)]
    assert set(sizes[:-1]) == {BLOCK}
    assert Cut([Piece(0, Move(0, 0, SMALL + 1))], SMALL + 1).scratch_bytes == 0
    assert Cut([Piece(0, Move(0, 0, SMALL))], SMALL).scratch_bytes == SMALL
    into, at_once = np.zeros_like(memory), np.zeros_like(memory)
    for number in range(len(copies := Copies(stream, stream, 100_000))):
        for place, move in copies[number]:
            assert place == 0
            move.apply(memory, into)
        copies.make(number, Memories([memory]), at_once)
    assert np.array_equal(at_once, into)
    assert np.count_nonzero(into) == sum(
        np.count_nonzero(part) for part in (memory[5:15], memory[1000 : 1000 + large])
    ) + sum(np.count_nonzero(np.frombuffer(row, np.uint8)) for row in rows)


@pytest.mark.parametrize("short", ["source", "target"])
def test_a_copy_beyond_its_memory_is_refused(short: str) -> None:
    stream = Stream([Stretch(0, Move(0, 0, 1000)), Stretch(1, Move(1000, 50, 1000))], 1 << 20)
    memories = Memories([np.ones(1000, np.uint8), np.ones(1050 - (short == "source"), np.uint8)])
    target = np.zeros(2050 - (short == "target"), np.uint8)
    copies = Copies(stream, stream.within({0: 0, 1: 1000}), 1 << 20)
    with pytest.raises(LayoutError, match="within"):
        copies.make(0, memories, target)
    assert not target.any()


def test_a_copy_whose_end_wraps_around_is_refused() -> None:
    stream = Stream([Stretch(0, Move(0, 2**64 - 8, 16))], 1 << 20)
    with pytest.raises(OverflowError):
        Copies(stream, stream.within({0: -(2**64 - 8)}), 1 << 20).make(
            0, Memories([np.ones(64, np.uint8)]), np.zeros(64, np.uint8)
        )
