"""Arrays of a framework that is not there: they are computed when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import pytest

from holdfast.arrays import ArrayLayout, Bytes1D, Description
from holdfast.reduce import leaves
from tests.reduce.crew import DEADLINE_S


@final
class Gated:
    """An array whose values can be read once it is `computed`; `asked` says that somebody waits for them."""

    def __init__(self, values: npt.NDArray[Any], *, computed: bool = True) -> None:
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype
        self.computed, self.asked = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.deleted = False
        if computed:
            self.computed.set()

    def is_deleted(self) -> bool:
        return self.deleted


@final
class GatedAdapter:
    """As much of an adapter as sums need."""

    def identity(self) -> tuple[int, int]:
        return 0, 1

    def claims(self, leaf: Any) -> bool:
        return isinstance(leaf, Gated)

    def signature(self, leaf: Gated) -> Hashable:
        return leaf.shape, leaf.dtype

    def describe(self, leaf: Gated, rank: int, world: int) -> Description:
        return Description(ArrayLayout.whole(leaf.dtype.name, leaf.shape, holders=(0,)), local=(0,))

    def host(self, leaf: Gated, ordinal: int) -> Bytes1D:
        leaf.asked.set()
        assert leaf.computed.wait(DEADLINE_S), "nobody computed it"
        if leaf.deleted:
            raise RuntimeError("Array has been deleted")
        if leaf.error is not None:
            raise leaf.error
        return leaf.values.reshape(-1).view(np.uint8)


_ADAPTER: Final = GatedAdapter()


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such arrays are known."""
    monkeypatch.setattr(leaves, "adapters", lambda: [_ADAPTER])


def fold_threads() -> list[threading.Thread]:
    """Those of all reducers in this process."""
    return [thread for thread in threading.enumerate() if "-fold-" in thread.name]
