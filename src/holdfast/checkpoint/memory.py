"""Memory for loaded arrays.

Arrays that go to devices are put together in memory of a landing, which has little of it and uses it again
(`Runway`). All others keep the memory they are loaded into, and get fresh memory for it (`Allocator`): the
first touch of a page, not reading or hashing, is what bounds a load into fresh memory, so large arrays
come from huge-page regions. Arrays of middling size share slabs of bounded size: an array that stays alive
holds on to its slab at most. Small ones go to scratch and are copied out, so that a single scalar can never
keep a slab.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple, final

from holdfast.arrays import Bytes1D, Landing
from holdfast.arrays.pages import region

_ALIGN: Final = 64  # what zero-copy placement asks for
_SMALL: Final = 1 << 20
_SLAB: Final = 64 << 20
AHEAD: Final = 256 << 20
"""Bytes that readers take while arrays that are whole wait to be placed."""


class Allocation(NamedTuple):
    """Memory for one box; `owned` says that it may be kept by the array made from it."""

    data: Bytes1D
    owned: bool


@final
class Allocator:
    """Hands out the memory of one load."""

    def __init__(self) -> None:
        self._slab = region(0)[:0]
        self._scratch = region(0)[:0]

    def allocate(self, nbytes: int) -> Allocation:
        """Aligned memory for `nbytes`."""
        if nbytes >= _SLAB // 2:
            return Allocation(region(nbytes)[:nbytes], owned=True)
        if nbytes >= _SMALL:
            data, self._slab = _carve(self._slab, nbytes)
            return Allocation(data, owned=True)
        data, self._scratch = _carve(self._scratch, nbytes)
        return Allocation(data, owned=False)


def _carve(slab: Bytes1D, nbytes: int) -> tuple[Bytes1D, Bytes1D]:
    """The first `nbytes` of a slab and its aligned rest; a new slab if this one is too small."""
    rounded = -(-nbytes // _ALIGN) * _ALIGN
    if rounded > slab.size:
        slab = region(_SLAB)
    return slab[:nbytes], slab[rounded:]


@final
class Runway:
    """Takes memory for boxes when they are first read into, and keeps readers from running ahead of placing.

    A landing gives more than it should have rather than wait for boxes that are being filled. Boxes that are
    full, and that nobody has come to place yet, are worth waiting for: whoever places waits for no reader.
    """

    def __init__(self, ahead: int = AHEAD) -> None:
        self._ahead = ahead
        self._taken = 0
        self._num_waiting = 0
        self._stopped = False
        self._changed = threading.Condition()

    def take(self, landing: Landing, nbytes: int) -> Bytes1D:
        """Memory for a box.

        Blocks: while much is taken and whole boxes are waiting to be seen to, until `stop`; and as the
        landing does.
        """
        with self._changed:
            while self._taken + nbytes > self._ahead and self._num_waiting and not self._stopped:
                self._changed.wait()  # for the thread that has them next: it takes them, or stops
            self._taken += nbytes
        return landing.take(nbytes)

    def handed(self) -> None:
        """Some boxes are whole: a reader says so before it hands them on."""
        with self._changed:
            self._num_waiting += 1

    def seen(self) -> None:
        """What was handed on has been seen to: placed, if it made an array whole."""
        with self._changed:
            self._num_waiting -= 1
            self._changed.notify_all()

    def placed(self, nbytes: int) -> None:
        """The memory of so many bytes of boxes is the landing's again."""
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody will place any more: readers end what they are at."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
