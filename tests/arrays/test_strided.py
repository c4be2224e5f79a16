"""Moves against brute force, byte by byte."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arrays import Move, coalesce, move
from holdfast.errors import LayoutError, UsageError
from tests.arrays.strategies import byte_pairs, moves, untimed


@untimed
@given(moves(), st.integers(0, 7), st.integers(0, 7))
def test_apply_copies_exactly_its_bytes(
    made: tuple[Move, int, int], skew_source: int, skew_target: int
) -> None:
    one, from_size, to_size = made
    # Skewed views exercise every alignment of the real addresses.
    source = np.arange(from_size + skew_source, dtype=np.uint64).astype(np.uint8)[skew_source:]
    target = np.full(to_size + skew_target, 255, np.uint8)[skew_target:]
    expected = target.copy()
    for a, b in byte_pairs(one):
        expected[b] = source[a]
    one.apply(source, target)
    assert np.array_equal(target, expected)


@untimed
@given(moves())
def test_nbytes_and_spans(made: tuple[Move, int, int]) -> None:
    one, _, _ = made
    pairs = byte_pairs(one)
    sources, targets = zip(*pairs, strict=True)
    assert one.nbytes == len(pairs)
    assert one.source_span() == (min(sources), max(sources) + 1)
    assert one.target_span() == (min(targets), max(targets) + 1)
    assert list(sources) == sorted(set(sources)), "source bytes rise"


@untimed
@given(moves(), st.data())
def test_clip_keeps_exactly_the_bytes_in_range(made: tuple[Move, int, int], data: st.DataObject) -> None:
    one, _, _ = made
    first, last = one.source_span()
    lo = data.draw(st.integers(first - 2, last + 2))
    hi = data.draw(st.integers(first - 2, last + 2))
    parts = one.clip(lo, hi)
    assert [pair for part in parts for pair in byte_pairs(part)] == [
        pair for pair in byte_pairs(one) if lo <= pair[0] < hi
    ]
    assert len(parts) <= 2 * len(one.dims) + 1


@untimed
@given(moves(), st.integers(1, 70), st.integers(0, 500))
def test_blocks_are_exact(made: tuple[Move, int, int], block: int, shift: int) -> None:
    one = made[0].shifted(source=shift)
    expected = sorted({source // block for source, _ in byte_pairs(one)})
    assert one.blocks(block).tolist() == expected


@untimed
@given(moves(), st.data())
def test_coalesce_keeps_every_byte_and_joins_what_clip_cut(
    made: tuple[Move, int, int], data: st.DataObject
) -> None:
    one, _, _ = made
    first, last = one.source_span()
    at = sorted(data.draw(st.lists(st.integers(first, last), max_size=5)))
    parts = [part for lo, hi in zip([first, *at], [*at, last], strict=True) for part in one.clip(lo, hi)]
    joined = coalesce(data.draw(st.permutations(parts)))
    assert sorted(pair for part in joined for pair in byte_pairs(part)) == sorted(byte_pairs(one))
    assert len(joined) <= len(parts)
    for part in joined:  # whatever was merged still nests, so it can be clipped again
        sources = [source for source, _ in byte_pairs(part)]
        assert sources == sorted(set(sources))


def test_coalesce_joins_rows_cut_apart() -> None:
    whole = Move(0, 100, 8, ((10, 32, 16),))
    rows = [Move(32 * i, 100 + 16 * i, 8) for i in range(10)]
    assert coalesce([whole.clip(0, 128)[0], *rows[4:]]) == [whole]
    halves = [Move(0, 100, 4, whole.dims), Move(4, 104, 4, whole.dims)]
    assert coalesce(halves) == [whole]
    assert coalesce([Move(8, 8, 8), Move(0, 0, 8)]) == [Move(0, 0, 16)]
    assert coalesce([Move(0, 0, 8), Move(8, 16, 8)]) == [Move(0, 0, 8), Move(8, 16, 8)]
    assert coalesce([]) == []


def test_coalesce_never_makes_dims_that_do_not_nest() -> None:
    # b reads the bytes of a's next row: touching runs, but one Move of both would not nest.
    a, b = Move(0, 0, 4, ((3, 6, 100),)), Move(4, 4, 4, ((3, 6, 100),))
    assert coalesce([a, b]) == [a, b]


def test_contiguous_slices_have_no_dims() -> None:
    box = [(0, 4), (0, 5), (0, 6)]
    assert move((1, 0, 0), (3, 5, 6), box, box, 4) == Move(120, 120, 240)
    assert move((), (), (), (), 8) == Move(0, 0, 8)
    inner = move((0, 1, 0), (4, 3, 6), box, [(0, 4), (1, 3), (0, 6)], 4)
    assert inner == Move(24, 0, 48, ((4, 120, 48),))


def test_nothing_to_copy_is_none() -> None:
    assert move((0, 2), (3, 2), [(0, 3), (0, 4)], [(0, 3), (0, 4)], 4) is None


def test_large_moves_make_few_objects_and_blocks_need_no_rows() -> None:
    column = move((0, 0), (1 << 20, 8), [(0, 1 << 20), (0, 64)], [(0, 1 << 20), (0, 8)], 4)
    assert column == Move(0, 0, 32, ((1 << 20, 256, 32),))
    assert column.blocks(8 << 20).tolist() == list(range(32))
    assert len(column.clip(1000, 100_000_001)) <= 3


def test_errors_name_the_bounds() -> None:
    small, large = np.zeros(8, np.uint8), np.zeros(64, np.uint8)
    one = Move(0, 0, 4, ((4, 8, 4),))
    with pytest.raises(LayoutError, match=r"source bytes 0\.\.28, but the buffer has 8"):
        one.apply(small, large)
    with pytest.raises(LayoutError, match="target bytes"):
        one.apply(large, small)
    with pytest.raises(LayoutError, match="source"):
        one.shifted(source=-1).apply(large, large.copy())
    with pytest.raises(UsageError, match="contiguous 1-d uint8"):
        one.apply(np.zeros(64, np.int8), large)
    with pytest.raises(UsageError, match="contiguous 1-d uint8"):
        one.apply(np.zeros(128, np.uint8)[::2], large)
    frozen = np.zeros(64, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        one.apply(large, frozen)
    with pytest.raises(UsageError, match="positive"):
        one.blocks(0)
    with pytest.raises(LayoutError, match="not inside both boxes"):
        move((0,), (5,), [(0, 4)], [(0, 8)], 1)


def test_apply_runs_beside_other_threads() -> None:
    # Only a smoke test that threads may share buffers: each copies its own part.
    source = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(source)
    parts = [Move(i << 20, i << 20, 16, ((1 << 15, 32, 32),)) for i in range(4)]
    threads = [threading.Thread(target=part.apply, args=(source, target)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    pieces = target.reshape(-1, 32)
    assert np.array_equal(pieces[:, :16], source.reshape(-1, 32)[:, :16])
    assert not pieces[:, 16:].any()
