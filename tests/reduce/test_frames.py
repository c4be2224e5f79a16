"""Frames in memory that is used again: cut anywhere, of any size, and equal to those of messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.reduce.frames import Chunk, Inbox
from holdfast.reduce.messages import Data, decoded, encoded
from holdfast.wire import ConnectionLost, framed

SIZES = st.sampled_from([0, 1, 3, 255, 256, 65_531, 65_532, 65_533, 70_000, 300_000])


def fed(inbox: Inbox, data: bytes, cut: int) -> list[bytes]:
    """The bodies in `data`, put into the inbox in pieces of `cut` bytes at most."""
    bodies = []
    at = 0
    while at < len(data):
        space = inbox.space()
        assert len(space)
        piece = data[at : at + min(cut, len(space))]
        space[: len(piece)] = piece
        bodies += [bytes(body) for body in inbox.took(len(piece))]
        at += len(piece)
    return bodies


@given(st.lists(SIZES, max_size=12), st.sampled_from([1021, 4099, 65_536, 1 << 21]))
def test_bodies_come_whole_and_in_order_however_they_are_cut(sizes: list[int], cut: int) -> None:
    bodies = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    assert fed(Inbox(max_frame=1 << 20), b"".join(map(framed, bodies)), cut) == bodies


def test_a_head_that_comes_byte_by_byte() -> None:
    assert fed(Inbox(max_frame=100), framed(b"one") + framed(b"") + framed(b"two"), 1) == [
        b"one",
        b"",
        b"two",
    ]


def test_a_frame_beyond_the_limit_is_refused_before_there_is_memory_for_it() -> None:
    inbox = Inbox(max_frame=100)
    with pytest.raises(ConnectionLost, match="4,000,000,000 bytes; 100 are allowed"):
        fed(inbox, (4_000_000_000).to_bytes(4, "little"), 4)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 20), SIZES)
def test_a_chunk_is_the_frame_of_its_message(request: int, block: int, size: int) -> None:
    payload = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    frame = bytes(Chunk().frame(request, block, payload))
    assert frame == encoded(Data(request, block, payload.data))
    message = decoded(memoryview(frame)[4:])
    assert isinstance(message, Data)
    assert (message.request, message.block, bytes(message.payload)) == (request, block, payload.tobytes())


def test_a_chunk_is_used_again() -> None:
    chunk = Chunk()
    large, small = np.full(1000, 7, np.uint8), np.full(10, 9, np.uint8)
    first, expected = chunk.frame(1, 2, large), encoded(Data(1, 3, small.data))
    assert bytes(chunk.frame(1, 3, small)) == expected
    assert bytes(first[: len(expected)]) == expected  # it lies where the first one was
