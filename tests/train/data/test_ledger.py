"""The ledger proves that every sample was consumed once, in order, however batches were cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.train.data import Ledger

words = st.lists(st.integers(0, 2**64 - 1), max_size=40).map(lambda ids: np.array(ids, np.uint64))


def consumed(ids: np.ndarray[tuple[int], np.dtype[np.uint64]], *cuts: int) -> Ledger:
    ledger = Ledger.empty()
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, stop in pairwise(bounds):
        ledger = ledger.advance(start, stop, ids[start:stop])
    return ledger


@given(ids=words, cuts=st.lists(st.integers(0, 100), max_size=5))
def test_the_cuts_do_not_matter(ids: np.ndarray[tuple[int], np.dtype[np.uint64]], cuts: list[int]) -> None:
    assert consumed(ids, *cuts) == consumed(ids)
    assert consumed(ids).samples == len(ids)


@given(ids=words.filter(lambda ids: len(ids) > 1), at=st.integers(0, 100), to=st.integers(0, 100))
def test_order_and_contents_matter(
    ids: np.ndarray[tuple[int], np.dtype[np.uint64]], at: int, to: int
) -> None:
    at, to = at % len(ids), to % len(ids)
    other = ids.copy()
    other[[at, to]] = ids[[to, at]]
    assert (consumed(other).digest == consumed(ids).digest) == np.array_equal(other, ids)
    other = ids.copy()
    other[at] ^= np.uint64(1) << np.uint64(to)
    assert consumed(other).digest != consumed(ids).digest


def reference(salt: int) -> int:
    """One word of the ledger of samples 0..9 with identities 0..9, in Python's own integers."""

    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    return sum(mix(mix((k + salt) % 2**64) ^ k) for k in range(10)) % 2**64


def test_it_is_sixteen_bytes_that_a_checkpoint_can_hold() -> None:
    ledger = consumed(np.arange(10, dtype=np.uint64))
    assert ledger.digest == f"{reference(0x9E3779B97F4A7C15):016x}{reference(0xC2B2AE3D27D4EB4F):016x}"
    assert ledger.digest == "991a74bb8494e2541d4746b63867452e"  # what checkpoints on disk hold
    assert ledger.words.dtype == np.uint64
    assert ledger.words.tobytes().__len__() == 16
    assert Ledger.restored(10, ledger.words) == ledger
    assert Ledger.empty().digest == "0" * 32


@pytest.mark.parametrize(
    ("start", "stop", "what"),
    [(4, 6, "again"), (0, 6, "again"), (6, 8, "after a gap"), (5, 4, "backwards")],
)
def test_gaps_and_repeats_are_refused(start: int, stop: int, what: str) -> None:
    ledger = consumed(np.arange(5, dtype=np.uint64))
    with pytest.raises(UsageError, match=f"consumed {what}: the ledger is at 5"):
        ledger.advance(start, stop, np.zeros(max(stop - start, 0), np.uint64))


def test_identities_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match=r"int64\[2\] for the identities of 2 samples"):
        Ledger.empty().advance(0, 2, np.zeros(2, np.int64))
    with pytest.raises(UsageError, match=r"uint64\[3\] for the identities of 2 samples"):
        Ledger.empty().advance(0, 2, np.zeros(3, np.uint64))
    with pytest.raises(UsageError, match="not a ledger"):
        Ledger.restored(3, np.zeros(3, np.uint64))
