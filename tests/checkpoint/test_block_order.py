"""Blocks are read in an order that makes arrays whole early."""

from __future__ import annotations

import random

import numpy as np
import pytest

from holdfast.arrays import Bytes1D, Landing, Move
from holdfast.checkpoint.reading import BlockRead, Destination, in_turn

NOTHING: Bytes1D = np.empty(0, np.uint8)
MIB = 1 << 20


class NoLanding:
    """Is there, which is all that matters here."""


LANDING: Landing = NoLanding()  # type: ignore[assignment]


def cut_over(parts: int, arrays: int, blocks_each: float, nbytes: int) -> list[BlockRead]:
    """Blocks of a step whose arrays are cut over all parts, each slice so many blocks long."""
    found: dict[tuple[int, int], BlockRead] = {}
    for number in range(arrays):
        destination = Destination(number, 0, NOTHING, False, landing=LANDING, nbytes=nbytes)
        first, last = number * blocks_each, (number + 1) * blocks_each
        for part in range(parts):
            for block in range(int(first), -int(-last // 1)):
                read = found.setdefault((part, block), BlockRead(part, 0, block))
                read.copies.append((Move(0, 0, 1), destination))
    return [found[key] for key in sorted(found)]


def most_open(blocks: list[BlockRead]) -> int:
    """The most arrays that are begun and not whole at any time."""
    left: dict[int, int] = {}
    for block in blocks:
        for _, destination in block.copies:
            left[destination.array] = left.get(destination.array, 0) + 1
    begun: dict[int, int] = {}
    most = 0
    for block in blocks:
        for _, destination in block.copies:
            begun[destination.array] = begun.get(destination.array, 0) + 1
        most = max(most, len(begun))
        begun = {array: count for array, count in begun.items() if count < left[array]}
    return most


@pytest.mark.parametrize("blocks_each", [0.5, 1.3, 3.0, 7.7])
def test_few_arrays_are_begun_at_a_time_however_many_parts_they_are_cut_over(blocks_each: float) -> None:
    blocks = cut_over(parts=16, arrays=100, blocks_each=blocks_each, nbytes=64 * MIB)
    ordered = in_turn(blocks)
    assert most_open(blocks) >= 99, "part by part, nearly all are"
    # Those of one block, and at each end one that reaches into the next.
    assert most_open(ordered) <= 1 / blocks_each + 2
    assert sorted(map(id, ordered)) == sorted(map(id, blocks))
    for part in range(16):
        order = [block.block for block in ordered if block.part == part]
        assert order == sorted(order), "each part is read from front to back"


def test_small_arrays_and_those_without_a_landing_go_first_in_the_order_they_had() -> None:
    large = cut_over(parts=2, arrays=3, blocks_each=1.0, nbytes=MIB)
    small = cut_over(parts=2, arrays=3, blocks_each=1.0, nbytes=MIB - 1)
    kept = [BlockRead(9, 0, 0, [(Move(0, 0, 1), Destination(7, 0, NOTHING, True, nbytes=64 * MIB))])]
    mixed = [*large, *small, *kept]
    random.Random(0).shuffle(mixed)
    early = {id(block) for block in (*small, *kept)}
    first = [id(block) for block in mixed if id(block) in early]
    assert [id(block) for block in in_turn(mixed)][: len(first)] == first
    assert in_turn([]) == []
