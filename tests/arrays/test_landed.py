"""Landings are all closed at the end of a block, and the first error is the one that is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import pytest

from holdfast.arrays import Bytes1D, Placement, landed


@final
class Ground:
    """A landing of which only the end matters."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_closed = 0

    def take(self, nbytes: int) -> Bytes1D:
        raise NotImplementedError

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        raise NotImplementedError

    def close(self) -> None:
        self.num_closed += 1
        if self.error is not None:
            raise self.error


def test_all_are_closed() -> None:
    grounds = [Ground(), Ground()]
    with landed([grounds[0], None, grounds[1]]):
        assert [one.num_closed for one in grounds] == [0, 0]
    assert [one.num_closed for one in grounds] == [1, 1]


def test_an_array_that_did_not_arrive_is_told() -> None:
    grounds = [Ground(), Ground(OSError("lost")), Ground()]
    with pytest.raises(OSError, match="lost"), landed(grounds):
        pass
    assert [one.num_closed for one in grounds] == [1, 1, 1]


@pytest.mark.parametrize("first", [ValueError("first"), KeyboardInterrupt("first")])
def test_what_failed_first_is_told(first: BaseException) -> None:
    grounds = [Ground(OSError("lost")), Ground()]
    with pytest.raises(type(first), match="first"), landed(grounds):
        raise first
    assert [one.num_closed for one in grounds] == [1, 1]


def test_those_that_are_added_meanwhile_are_closed_too() -> None:
    found: dict[int, Ground] = {}
    with landed(found.values()):
        found[0] = Ground()
    assert found[0].num_closed == 1
