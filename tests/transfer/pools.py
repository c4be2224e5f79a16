"""A landing for numpy arrays: they are put together as those of a device are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import pytest

from holdfast.arrays import NUMPY, Bytes1D, Placement


@final
class Pool:
    """Memory that is spoiled as soon as arrays were made of it: these are copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.placed = 0
        self.closed = 0
        self.fails: Exception | None = None
        monkeypatch.setattr(type(NUMPY), "landing", lambda _numpy, _sinks: self)

    def take(self, nbytes: int) -> Bytes1D:
        self.taken += 1
        return np.full(nbytes, 0xEE, np.uint8)

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        self.placed += len(batch)
        found = NUMPY.place([one._replace(alias=False) for one in batch])
        for one in batch:
            for data in one.boxes.values():
                data[:] = 0xDD  # used for something else
        return found

    def close(self) -> None:
        self.closed += 1
