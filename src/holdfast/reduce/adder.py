"""The one adder: every sum of two lanes or subtrees, anywhere, is made here, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.reduce.banks import Flat, private
from holdfast.reduce.layout import BLOCK, Block
from holdfast.reduce.tree import Recipe

Operand = npt.NDArray[Any]
_MAX_DEPTH: Final = 64
"""Of a tree: more lanes than 2**64 there are not."""


def add(left: Operand, right: Operand, out: Operand) -> None:
    """left + right in the dtype of the operands, rounded once. `out` may be either of them.

    Always whole blocks of the layout, page-aligned: the vector loop of numpy then does all of it.
    """
    np.add(left, right, out=out)


def quiet() -> np.errstate:
    """Without warnings: infinities and NaNs in gradients are the caller's business."""
    return np.errstate(all="ignore")


@final
class Scratch:
    """Temporary blocks that stay in the cache. Not for two threads at once."""

    def __init__(self) -> None:
        self._pages: list[Flat] = []

    def block(self, number: int, like: Block) -> Operand:
        """Temporary number `number`, as large as a block and in its dtype."""
        while len(self._pages) <= number:
            assert number < _MAX_DEPTH
            self._pages.append(private(BLOCK, ()))
        return self._pages[number].memory[: like.hi - like.lo].view(like.dtype)


def evaluate(
    recipe: Recipe, roots: Sequence[Flat], total: Flat, at: int, block: Block, scratch: Scratch
) -> None:
    """Make block number `at` of the total out of those of the roots."""
    if not recipe.additions:
        np.copyto(total.blocks[at], roots[0].blocks[at])
        return
    operands = [root.blocks[at] for root in roots]
    operands += [scratch.block(number, block) for number in range(recipe.num_temporaries)]
    operands.append(total.blocks[at])  # TOTAL is -1
    for left, right, out in recipe.additions:
        add(operands[left], operands[right], operands[out])
