"""Buffers are used again only when nothing made from them is left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from holdfast.arrays import Bytes1D
from holdfast.arrays.copying import address_of
from holdfast.errors import TransferError
from holdfast.transfer.buffers import BufferSet, BufferSets, adopted, aligned


def test_a_buffer_is_free_when_the_last_view_of_its_root_is_gone() -> None:
    sets = BufferSets(1000)
    one, _ = sets.take()
    one.memory[:3] = 7
    view = _handed_out(sets, one)[:3].view(np.int8).reshape(3, 1)
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
    held = [_handed_out(sets, sets.take()[0]) for _ in range(4)]
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
    root = _handed_out(sets, one)
    root[:] = 5
    sets.close()
    assert not _open(one)
    del one
    gc.collect()
    assert (root == 5).all()


@pytest.mark.parametrize("end", ["give_back", "hand out", "discard"])
def test_closing_leaves_a_run_its_descriptor_until_it_lets_go(end: str) -> None:
    """It may be about to lend it, and the number could be another file's by then."""
    sets = BufferSets(64)
    one, free = sets.take()[0], sets.take()[0]
    sets.give_back(free)
    sets.close()
    assert not _open(free)
    assert _open(one)
    ends: dict[str, Callable[[BufferSet], object]] = {
        "give_back": sets.give_back,
        "hand out": partial(_handed_out, sets),
        "discard": sets.discard,
    }
    ends[end](one)
    assert not _open(one)


class Pinned:
    """Remembers which memories are pinned."""

    def __init__(self, fail: bool = False) -> None:
        self.now: list[int] = []
        self.times = 0
        self.fail = fail

    def __call__(self, memory: Bytes1D) -> list[Callable[[], None]]:
        if self.fail:
            raise MemoryError("cannot be pinned")
        start = address_of(memory)
        self.now.append(start)
        self.times += 1
        return [lambda: self.now.remove(start)]


def test_a_buffer_is_pinned_once_and_until_it_is_given_up() -> None:
    pinned = Pinned()
    sets = BufferSets(100, pin=pinned)
    for _ in range(5):
        _handed_out(sets, sets.take()[0])
    assert pinned.times == 1, "its runs use it again"
    held = [_handed_out(sets, sets.take()[0]) for _ in range(4)]
    assert len(pinned.now) == pinned.times == 4
    held.clear()
    sets.take()
    assert len(pinned.now) == 2, "those that are surplus"
    sets.close()
    assert len(pinned.now) == 1, "a run has one of them"


def test_closing_unpins_nothing_that_is_on_its_way_to_a_device() -> None:
    pinned = Pinned()
    sets = BufferSets(100, pin=pinned)
    one, _ = sets.take()
    with sets.handed_out(one):
        sets.close()
        assert pinned.now
    assert not pinned.now


def test_what_failed_on_its_way_to_a_device_stays_pinned() -> None:
    pinned = Pinned()
    sets = BufferSets(100, pin=pinned)
    one, _ = sets.take()
    with pytest.raises(RuntimeError, match="device"), sets.handed_out(one):
        raise RuntimeError("the device is gone")
    sets.close()
    assert pinned.now, "it may be read even now"
    assert not _open(one)


def test_a_buffer_that_cannot_be_pinned_leaves_nothing_open() -> None:
    sets = BufferSets(100, pin=Pinned(fail=True))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        sets.take()
    assert len(os.listdir("/proc/self/fd")) == before
    assert sets.made == 0


def _handed_out(sets: BufferSets, one: BufferSet) -> Bytes1D:
    with sets.handed_out(one) as root:
        return root


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
