"""Every key of every size is a permutation, and none looks like another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.train.data.permutation import mixed, permuted

keys = st.integers(0, 2**64 - 1)


def whole(size: int, key: int) -> list[int]:
    order: list[int] = permuted(
        np.arange(size, dtype=np.uint64), size, np.full(size, key, np.uint64)
    ).tolist()
    return order


def test_every_small_size_is_a_bijection() -> None:
    for size in range(1, 200):
        for key in (0, 2**64 - size):
            assert sorted(whole(size, key)) == list(range(size)), (size, key)


@given(size=st.integers(1, 20_000), key=keys)
def test_any_size_is_a_bijection(size: int, key: int) -> None:
    assert np.array_equal(np.sort(whole(size, key)), np.arange(size))


@given(size=st.integers(1, 2**62), key=keys, rank=st.integers(0, 2**62 - 1))
def test_an_element_is_computed_alone(size: int, key: int, rank: int) -> None:
    ranks = np.array([0, rank % size, size - 1], np.uint64)
    found = permuted(ranks, size, np.full(3, key, np.uint64))
    alone = [int(permuted(ranks[at : at + 1], size, np.array([key], np.uint64))[0]) for at in range(3)]
    assert found.tolist() == alone
    assert max(alone) < size


def test_keys_give_orders_of_their_own() -> None:
    orders = {tuple(whole(1000, int(key))) for key in mixed(np.arange(100, dtype=np.uint64))}
    assert len(orders) == 100
    # Where elements land says nothing about where they came from: no more stay than of a random order.
    stays = [sum(at == to for at, to in enumerate(order)) for order in orders]
    assert 0.5 < sum(stays) / len(stays) < 2
    # Neighbours do not stay neighbours.
    near = [sum(abs(a - b) == 1 for a, b in pairwise(order)) for order in orders]
    assert sum(near) / len(near) < 6


def test_every_place_is_as_likely_as_any_other() -> None:
    size, num = 16, 32_000
    every = mixed(np.arange(num, dtype=np.uint64))
    landed = permuted(np.full(num, 3, np.uint64), size, every)
    counts = np.bincount(landed.astype(np.int64), minlength=size)
    assert counts.min() > 0.9 * num / size
    assert counts.max() < 1.1 * num / size


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_sizes_that_are_none(size: int) -> None:
    with pytest.raises(UsageError, match="no permutation"):
        permuted(np.zeros(1, np.uint64), size, np.zeros(1, np.uint64))
