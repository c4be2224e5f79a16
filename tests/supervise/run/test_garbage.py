"""When a worker's garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from holdfast.supervise import garbage


class _Ring:
    itself: object


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    garbage.resume()
    gc.set_threshold(*before)
    gc.unfreeze()


def test_collections_are_deferred_while_a_worker_starts_and_spare_what_it_made_then() -> None:
    before = gc.get_threshold()
    garbage.defer()
    garbage.defer()
    assert gc.get_threshold() == (1_000_000, *before[1:])
    garbage.resume()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() > 0


def test_what_a_start_leaves_behind_does_not_stay() -> None:
    garbage.defer()
    ring = _Ring()
    ring.itself = ring
    gone = weakref.ref(ring)
    del ring
    assert gone() is not None, "this test needs garbage that only the collector finds"
    garbage.resume()
    assert gone() is None


def test_without_a_start_nothing_is_changed() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    garbage.resume()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)


def test_thresholds_of_the_program_stand() -> None:
    garbage.defer()
    gc.set_threshold(5000, 20, 20)
    garbage.resume()
    assert gc.get_threshold() == (5000, 20, 20)


def test_a_program_that_collects_nothing_keeps_to_that() -> None:
    before = gc.get_threshold()
    gc.disable()
    try:
        garbage.defer()
        assert gc.get_threshold() == before
    finally:
        gc.enable()
