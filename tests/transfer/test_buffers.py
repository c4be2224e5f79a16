"""Buffers are used again only when nothing made from them is left."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from holdfast.errors import TransferError
from holdfast.transfer.buffers import BufferSet, BufferSets, adopted, aligned


def test_a_buffer_is_free_when_the_last_view_of_its_root_is_gone() -> None:
    sets = BufferSets(1000)
    one, _ = sets.take()
    one.memory[:3] = 7
    view = sets.hand_out(one)[:3].view(np.int8).reshape(3, 1)
    two, _ = sets.take()
    assert two is not one
    sets.give_back(two)
    again, _ = sets.take()
    assert again is two
    assert view.tolist() == [[7], [7], [7]]
    del view
    gc.collect()
    assert sets.take()[0] is one
    assert sets.made == 2
    sets.close()


def test_more_than_two_are_given_up_when_they_are_free_again() -> None:
    sets = BufferSets(100)
    held = [sets.hand_out(sets.take()[0]) for _ in range(4)]
    assert sets.made == 4
    held.clear()
    one, gone = sets.take()
    assert one.number not in gone
    assert len(gone) == 2
    sets.close()


def test_a_discarded_buffer_is_never_used_again() -> None:
    sets = BufferSets(100)
    one, _ = sets.take()
    sets.discard(one)
    assert sets.take()[0] is not one
    sets.close()
    with pytest.raises(TransferError, match="closed"):
        sets.take()


def test_what_cannot_fit_is_refused_before_it_is_taken() -> None:
    with pytest.raises(TransferError, match="does not fit"):
        BufferSet(0, 1 << 50)


def test_arrays_outlive_their_buffer_set() -> None:
    sets = BufferSets(64)
    one, _ = sets.take()
    root = sets.hand_out(one)
    root[:] = 5
    sets.close()
    assert not _open(one)
    del one
    gc.collect()
    assert (root == 5).all()


@pytest.mark.parametrize("end", ["give_back", "hand_out", "discard"])
def test_closing_leaves_a_run_its_descriptor_until_it_lets_go(end: str) -> None:
    """It may be about to lend it, and the number could be another file's by then."""
    sets = BufferSets(64)
    one, free = sets.take()[0], sets.take()[0]
    sets.give_back(free)
    sets.close()
    assert not _open(free)
    assert _open(one)
    getattr(sets, end)(one)
    assert not _open(one)


def _open(one: BufferSet) -> bool:
    try:
        os.fstat(one.fd)
    except OSError:
        return False
    return True


def test_only_memory_that_cannot_shrink_is_written_for_a_peer() -> None:
    one = BufferSet(0, 5000)
    other = adopted(os.dup(one.fd), 5000)
    other[:4] = (1, 2, 3, 4)
    assert one.memory[:4].tolist() == [1, 2, 3, 4]
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(one.fd, 10)
    with pytest.raises(TransferError, match="announced"):
        adopted(os.dup(one.fd), 1 << 20)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 5000)
    with pytest.raises(TransferError, match=r"no buffer|sealed"):
        adopted(plain, 5000)
    one.close()


def test_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
