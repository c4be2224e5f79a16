"""Which source each sample comes from, and which of its samples it is, in closed form.

Weights become whole counts of a block, and one order of a block repeats for ever, so that the count of a
source before sample k is a multiplication and a lookup. The order inside a block is Tijdeman's ("The chairman
assignment problem", 1980): at every sample, the count of every source is less than 1 away from its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from holdfast.errors import UsageError

Indexes = npt.NDArray[np.int64]

LARGEST_BLOCK: Final = 1 << 14
"""Samples of a block, at most. Weights that fit no smaller one are rounded to this denominator."""


def block_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of a block each source gets: exactly the weights where a small block can hold them.

    Else the nearest counts of the largest block, by largest remainder; a weight above 0 never becomes 0.
    """
    # Of the shortest decimal that a float stands for: 0.1 is a tenth.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    if total <= 0 or min(exact) < 0:
        raise UsageError(f"weights {tuple(weights)} make no mixture", hint="0 or more each, and one above 0")
    shares = [weight / total for weight in exact]
    block = math.lcm(*(share.denominator for share in shares))
    if block <= LARGEST_BLOCK:
        return tuple(int(share * block) for share in shares)
    counts = [max(int(share * LARGEST_BLOCK), share > 0) for share in shares]
    lacking = LARGEST_BLOCK - sum(counts)
    if lacking < 0:  # many weights that are next to nothing were rounded up; the largest pays
        counts[counts.index(max(counts))] += lacking
        if min(counts) < 0:
            raise UsageError(f"{len(counts)} sources are too many for a mixture", hint="merge some of them")
        return tuple(counts)
    by_remainder = sorted(range(len(counts)), key=lambda at: (counts[at] - shares[at] * LARGEST_BLOCK, at))
    for at in by_remainder[:lacking]:
        counts[at] += 1
    return tuple(counts)


class _Block(NamedTuple):
    """One period of a mixture."""

    counts: Indexes
    """Samples of each source in it."""
    order: Indexes
    """The source of each place."""
    before: Indexes
    """How many places before it have the same source."""


@lru_cache(maxsize=64)
def _block(weights: tuple[float, ...]) -> _Block:
    counts = np.array(block_counts(weights), np.int64)
    used = np.flatnonzero(counts)  # a source without weight does not change the order of the others
    order = used[_chairmen(counts[used])]
    before = np.empty_like(order)
    for source in used:
        places = np.flatnonzero(order == source)
        before[places] = np.arange(len(places))
    return _Block(counts, order, before)


def _chairmen(counts: Indexes) -> Indexes:
    """The order of a block: Tijdeman's rule, in whole numbers.

    Place k goes to a source that would else fall behind its share, among them to the one whose time runs out
    first. Both moments are fixed for the nth sample of a source, so two heaps do it.
    """
    sizes: list[int] = counts.tolist()
    block, num = sum(sizes), len(sizes)
    slack = max(2 * num - 2, 1)
    taken = [0] * num

    def opens(source: int) -> int:
        """The first place that the next sample of the source may take."""
        return -(-block * (slack * taken[source] + 1) // (sizes[source] * slack)) - 1

    coming = [(opens(source), source) for source in range(num)]
    heapify(coming)
    ready: list[tuple[float, int]] = []  # with the time that runs out
    order = np.empty(block, np.int64)
    for place in range(block):
        while coming and coming[0][0] <= place:
            source = heappop(coming)[1]
            heappush(ready, (block * (slack * (taken[source] + 1) - 1) / sizes[source], source))
        order[place] = chosen = heappop(ready)[1]
        taken[chosen] += 1
        heappush(coming, (opens(chosen), chosen))
    return order


class Draw(NamedTuple):
    """For each of some samples: the number of its source, and its number among the samples of that source."""

    sources: Indexes
    cursors: Indexes


@final
@dataclass(frozen=True, slots=True)
class Mixture:
    """Stages of weights, the first from sample 0 on."""

    starts: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]

    def draw(self, start: int, stop: int) -> Draw:
        """The draws of samples `start` to `stop` - 1. Depends on no sample behind them and on no stage after
        them."""
        ends = (*self.starts[1:], stop)
        base = np.zeros(len(self.weights[0]), np.int64)
        found = []
        for first, last, weights in zip(self.starts, ends, self.weights, strict=True):
            block = _block(weights)
            if max(first, start) < min(last, stop):
                k = np.arange(max(first, start), min(last, stop), dtype=np.int64) - first
                rounds, place = k // len(block.order), k % len(block.order)
                sources = block.order[place]
                cursors = base[sources] + rounds * block.counts[sources] + block.before[place]
                found.append(Draw(sources, cursors))
            if last >= stop:
                break
            base = base + _counted(block, last - first)
        if not found:
            return Draw(np.empty(0, np.int64), np.empty(0, np.int64))
        return Draw(*(np.concatenate(part) for part in zip(*found, strict=True)))

    def counts(self, samples: int) -> Indexes:
        """How many of the first `samples` come from each source."""
        total = np.zeros(len(self.weights[0]), np.int64)
        for first, last, weights in zip(self.starts, (*self.starts[1:], samples), self.weights, strict=True):
            if first < min(last, samples):
                total = total + _counted(_block(weights), min(last, samples) - first)
        return total


def _counted(block: _Block, samples: int) -> Indexes:
    rounds, place = divmod(samples, len(block.order))
    return rounds * block.counts + np.bincount(block.order[:place], minlength=len(block.counts))
