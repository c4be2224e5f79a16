"""Any bytes: whole frames or an end of the connection, never a crash, never memory beyond the limit."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire import ConnectionLost, FrameSplitter, framed

LIMIT = 1 << 16
BODIES = st.lists(st.binary(max_size=300), max_size=20)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """The data in pieces of these sizes, again and again."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        pieces.append(data[at : at + sizes[turn % len(sizes)]])
        at += sizes[turn % len(sizes)]
        turn += 1
    return pieces


@given(BODIES, st.lists(st.integers(1, 700), min_size=1, max_size=8))
def test_bodies_come_out_whole_and_in_order_however_they_were_cut(
    bodies: list[bytes], sizes: list[int]
) -> None:
    splitter = FrameSplitter(max_frame=LIMIT)
    found = [body for piece in cut(b"".join(map(framed, bodies)), sizes) for body in splitter.feed(piece)]
    assert found == bodies
    assert splitter.num_pending == 0


@given(BODIES, st.binary(min_size=1, max_size=200), st.data())
def test_a_frame_that_is_not_whole_waits(bodies: list[bytes], last: bytes, data: st.DataObject) -> None:
    splitter = FrameSplitter(max_frame=LIMIT)
    whole = framed(last)
    cut_at = data.draw(st.integers(1, len(whole) - 1))
    assert splitter.feed(b"".join(map(framed, bodies)) + whole[:cut_at]) == bodies
    assert splitter.num_pending == cut_at
    assert splitter.feed(whole[cut_at:]) == [last]


@given(st.lists(st.binary(max_size=2000), max_size=30))
def test_any_bytes_are_frames_or_the_end(pieces: list[bytes]) -> None:
    splitter = FrameSplitter(max_frame=1000)
    try:
        for piece in pieces:
            assert all(len(body) <= 1000 for body in splitter.feed(piece))
            assert splitter.num_pending < 1004 + len(piece)
    except ConnectionLost:
        pass


@pytest.mark.parametrize("length", [LIMIT + 1, 1 << 30, 2**32 - 1])
def test_a_large_claim_takes_no_memory(length: int) -> None:
    splitter = FrameSplitter(max_frame=LIMIT)
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionLost, match=f"announced a frame of {length:,} bytes"):
            splitter.feed(struct.pack("<I", length) + b"x")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_large_frame_in_many_pieces_is_put_together_once() -> None:
    """Linear work: a megabyte in pieces of 16 bytes would otherwise take minutes."""
    splitter = FrameSplitter(max_frame=1 << 20)
    body = bytes(range(256)) * 4096
    found = [part for piece in cut(framed(body), [16]) for part in splitter.feed(piece)]
    assert found == [body]


def test_the_limit_can_change_between_frames() -> None:
    splitter = FrameSplitter(max_frame=10)
    assert splitter.feed(framed(b"small")) == [b"small"]
    splitter.max_frame = 100
    assert splitter.feed(framed(b"x" * 100)) == [b"x" * 100]
    with pytest.raises(ConnectionLost):
        splitter.feed(framed(b"x" * 101))
