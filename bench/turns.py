"""In which order a round measures its subjects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def in_turn(items: Sequence[_T], number: int) -> list[_T]:
    """The items in an order of this round's own, the same in every run.

    Who came before leaves traces (free memory, the disk's queue, the clock of the processor), and an order
    that only rotates gives every subject the same neighbour in all rounds.
    """
    return random.Random(number).sample(items, len(items))
