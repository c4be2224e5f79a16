"""Whatever a peer sends: a message, a chunk, or an end of its connection; never a crash, never memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import TransferError
from holdfast.transfer.manifest import published
from holdfast.transfer.messages import FromSource, FromTarget, Prepare
from holdfast.transfer.publication import Shelf
from holdfast.transfer.route import Segment, Stream, route_digest
from holdfast.transfer.served import served_plan
from holdfast.transfer.timers import Timers
from holdfast.transfer.workers import Workers

INTS = st.integers(-(2**63), 2**64 - 1) | st.integers(-4, 40)
VALUES = st.recursive(
    st.none() | st.booleans() | INTS | st.floats() | st.binary(max_size=50) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
SEGMENTS = st.builds(
    lambda array, box, start, run, dims: [array, box, start, run, dims],
    INTS, INTS, INTS, INTS, st.lists(st.tuples(INTS, INTS), max_size=4),
)  # fmt: skip
LIKELY = st.builds(
    lambda start, run, dims: [0, 0, start, run, dims],
    st.integers(0, 60), st.integers(1, 16),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), max_size=2),
)  # fmt: skip
PREPARES = st.builds(
    lambda chunk_bytes, segments: [6, 1, 1, "policy", "digest", "manifest", chunk_bytes, segments],
    INTS, st.lists(SEGMENTS, max_size=4),
)  # fmt: skip
BODIES = (
    st.binary(max_size=300)
    | st.builds(lambda tag, rest: [tag, *rest], st.integers(0, 20), st.lists(VALUES, max_size=9)).map(
        msgspec.msgpack.encode
    )
    | PREPARES.map(msgspec.msgpack.encode)
)
"""Frames of any bytes, of any MessagePack with a known tag, and of Prepare with any numbers."""

WHOLE = np.arange(16, dtype=np.float32).reshape(4, 4)
SIZE = WHOLE.nbytes


@settings(max_examples=200)
@given(body=BODIES)
def test_any_frame_is_a_message_or_none(body: bytes) -> None:
    for kind in (FromTarget, FromSource):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            msgspec.msgpack.Decoder[Any](kind).decode(body)


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    timers = Timers("test")
    workers = Workers("test")
    found = Shelf(timers, workers)
    found.publish("policy", lambda: published({"w": WHOLE}), 1, lease_s=600.0, keep=2)
    yield found
    timers.close()
    workers.close(5.0)


def accepted(shelf: Shelf, chunk_bytes: int, segments: Sequence[Segment]) -> Stream:
    """The stream that a source would send. Fails: TransferError."""
    manifest = shelf.find("policy").digest
    name = route_digest(segments, chunk_bytes, manifest)
    return served_plan(Prepare(1, 1, "policy", name, manifest, chunk_bytes, tuple(segments)), shelf).stream


@settings(max_examples=300)
@given(segments=st.lists(SEGMENTS | LIKELY, min_size=1, max_size=4), chunk_bytes=INTS)
def test_a_source_sends_what_it_published_and_no_more(
    shelf: Shelf, segments: list[Any], chunk_bytes: int
) -> None:
    """A few bytes of a request never become many more bytes than were published."""
    try:
        stream = accepted(shelf, chunk_bytes, msgspec.convert(segments, tuple[Segment, ...]))
    except (msgspec.MsgspecError, TransferError, OverflowError):
        return
    assert 0 < stream.nbytes <= 16 * SIZE
    for chunk in range(stream.num_chunks):
        for _, one in stream.pieces(chunk):
            last = one.target + one.run + sum((count - 1) * step for count, _, step in one.dims)
            assert 0 <= one.target < last <= SIZE


@pytest.mark.parametrize(
    "segment",
    [
        Segment(0, 0, 0, 4, ((1 << 62, 0),)),
        Segment(0, 0, 0, 64, ((1 << 40, 0),)),
        Segment(0, 0, 0, 4, ((1000, 0), (1000, 0))),
        Segment(0, 0, 0, 4, ((1 << 20, 1 << 20),)),
    ],
)
def test_rows_on_top_of_each_other_are_refused(shelf: Shelf, segment: Segment) -> None:
    """They would make any number of bytes out of a few."""
    with pytest.raises(TransferError):
        accepted(shelf, 4096, [segment])


def test_the_same_slice_many_times_is_refused(shelf: Shelf) -> None:
    with pytest.raises(TransferError):
        accepted(shelf, 4096, [Segment(0, 0, 0, SIZE)] * 10_000)


@pytest.mark.parametrize("chunk_bytes", [0, -1, -(2**63), 2**62])
def test_a_chunk_size_that_makes_no_sense_is_refused(shelf: Shelf, chunk_bytes: int) -> None:
    with pytest.raises(TransferError):
        accepted(shelf, chunk_bytes, [Segment(0, 0, 0, 4)])


@settings(max_examples=100)
@given(length=st.integers(2**16, 2**32 - 1), kind=st.sampled_from([b"\xc6", b"\xdb", b"\xdd", b"\xdf"]))
def test_a_large_claim_within_a_frame_takes_no_memory(length: int, kind: bytes) -> None:
    """bin 32, str 32, array 32 and map 32 with nothing behind them."""
    decoder = msgspec.msgpack.Decoder[Any](FromTarget)
    body = b"\x98\x06\x01\x01\xa1x\xa1x\xa1x\x01" + kind + length.to_bytes(4, "big")
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(body)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_deep_nesting_is_no_message() -> None:
    for depth in (100, 10_000, 1_000_000):
        with pytest.raises((msgspec.MsgspecError, RecursionError)):
            msgspec.msgpack.Decoder[Any](FromTarget).decode(b"\x91" * depth)


def test_numbers_survive_the_way() -> None:
    encoded = msgspec.msgpack.encode(
        Prepare(1, 1, "n", "d", "m", 2**40, (Segment(1, 2, 3, 2**40, ((2, 3),)),))
    )
    found = msgspec.msgpack.Decoder[Any](FromTarget).decode(encoded)
    assert isinstance(found, Prepare)
    assert found.segments[0].nbytes == 2**41
    assert math.log2(found.chunk_bytes) == 40
