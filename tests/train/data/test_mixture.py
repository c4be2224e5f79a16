"""Shares are kept at every sample, cursors are in closed form, and stages leave the past alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.train.data.mixture import LARGEST_BLOCK, Mixture, block_counts

tenths = st.lists(st.integers(0, 30), min_size=1, max_size=7).filter(any)
free = st.lists(st.floats(0, 1e6), min_size=1, max_size=7).filter(lambda w: sum(w) > 1e-3)


def plain(*weights: float) -> Mixture:
    return Mixture((0,), (weights,))


@given(weights=tenths, samples=st.integers(1, 2_000))
def test_every_source_is_within_one_of_its_share_at_every_sample(weights: list[int], samples: int) -> None:
    draw = plain(*(weight / 10 for weight in weights)).draw(0, samples)
    counts = np.cumsum(draw.sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, samples + 1)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - shares).max() < 1


@given(weights=free)
def test_counts_of_a_block_are_the_weights_to_the_last_unit(weights: list[float]) -> None:
    counts = block_counts(weights)
    block, total = sum(counts), sum(map(Fraction, map(repr, weights)))
    assert 1 <= block <= LARGEST_BLOCK
    for count, weight in zip(counts, weights, strict=True):
        exact = Fraction(repr(weight)) / total * block
        # One that is next to nothing is rounded up to 1, and the largest pays for that.
        assert abs(count - exact) < (1 if block < LARGEST_BLOCK else len(weights))
        assert (count > 0) == (weight > 0)


def test_decimal_weights_are_taken_as_written() -> None:
    assert block_counts((0.1, 0.2, 0.7)) == (1, 2, 7)
    assert block_counts((3, 7)) == block_counts((0.3, 0.7)) == (3, 7)
    assert block_counts((1 / 3, 2 / 3)) == (1, 2)
    assert block_counts((0.1234567, 0.8765433)) == (2023, 14361)
    assert block_counts((1e-12, 1)) == (1, LARGEST_BLOCK - 1)


@settings(max_examples=30)
@given(weights=free, cuts=st.lists(st.integers(0, 40_000), min_size=2, max_size=4).map(sorted))
def test_cursors_count_the_samples_of_a_source(weights: list[float], cuts: list[int]) -> None:
    mixture = plain(*weights)
    first, last = cuts[0], min(cuts[-1], cuts[0] + 500)
    draw = mixture.draw(first, last)
    before = mixture.counts(first)
    for source in range(len(weights)):
        mine = draw.cursors[draw.sources == source]
        assert np.array_equal(mine, before[source] + np.arange(len(mine)))
    assert mixture.counts(last).sum() == last


stages = st.lists(
    st.tuples(st.integers(1, 300), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))),
    min_size=1,
    max_size=4,
).filter(lambda found: all(any(weights) for _, weights in found))


@settings(max_examples=50)
@given(told=stages, split=st.integers(0, 1_000), more=st.integers(0, 1_000))
def test_stages_carry_the_cursors_and_a_later_one_changes_nothing(
    told: list[tuple[int, tuple[int, int, int]]], split: int, more: int
) -> None:
    starts = (0, *np.cumsum([length for length, _ in told[:-1]]).tolist())
    weights = tuple(tuple(map(float, one)) for _, one in told)
    mixture = Mixture(starts, weights)
    whole = mixture.draw(0, split + more)
    one, two = mixture.draw(0, split), mixture.draw(split, split + more)
    assert np.array_equal(whole.sources, np.concatenate([one.sources, two.sources]))
    assert np.array_equal(whole.cursors, np.concatenate([one.cursors, two.cursors]))
    for source in range(3):
        mine = whole.cursors[whole.sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))
        assert mixture.counts(split + more)[source] == len(mine)
    assume(split > starts[-1])
    longer = Mixture((*starts, split), (*weights, (1.0, 1.0, 1.0)))
    assert np.array_equal(longer.draw(0, split).cursors, one.cursors)


def test_a_source_without_weight_yet_changes_nothing() -> None:
    assert np.array_equal(plain(3, 7).draw(0, 50).sources, plain(3, 7, 0).draw(0, 50).sources)


@pytest.mark.parametrize("weights", [(0.0,), (1.0, -0.5)])
def test_weights_that_make_no_mixture(weights: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="make no mixture"):
        block_counts(weights)


def test_more_sources_than_a_block_holds() -> None:
    with pytest.raises(UsageError, match="too many"):
        block_counts([1e-9] * LARGEST_BLOCK + [1.0, 2.0])
