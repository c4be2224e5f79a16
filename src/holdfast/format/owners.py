"""The shard grid of an array: cut points per dimension, and who wrote each cell.

Owners are listed in row-major order of the cells and coded as arithmetic runs
(first, step, count): a grid written by parts 0 to 511 in order is the single run (0, 1, 512).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from operator import lt

import numpy as np
import numpy.typing as npt

from holdfast.arrays.text import show
from holdfast.errors import FormatError
from holdfast.format.limits import MAX_CELLS

Run = tuple[int, int, int]
Cuts = tuple[tuple[int, ...], ...]
Cell = tuple[tuple[int, ...], tuple[int, ...]]


def encode_owners(owners: Sequence[int]) -> tuple[Run, ...]:
    """The runs of a list of part numbers; greedy, longest run from each start."""
    runs: list[Run] = []
    at, total = 0, len(owners)
    while at < total:
        first = owners[at]
        step = owners[at + 1] - first if at + 1 < total else 0
        end = min(at + 2, total)
        while end < total and owners[end] - owners[end - 1] == step:
            end += 1
        runs.append((first, step, end - at))
        at = end
    return tuple(runs)


def owner_array(runs: Sequence[Run], expected_count: int) -> npt.NDArray[np.int64]:
    """The part number of each cell; FormatError unless there are exactly `expected_count`."""
    check_owners(runs, expected_count)
    table = np.array(runs, np.int64).reshape(-1, 3)
    first, step, count = table.T
    begin = np.cumsum(count) - count
    place = np.arange(expected_count) - np.repeat(begin, count)
    owners: npt.NDArray[np.int64] = np.repeat(first, count) + np.repeat(step, count) * place
    return owners


def decode_owners(runs: Sequence[Run], expected_count: int) -> list[int]:
    """The part number of each cell; FormatError unless there are exactly `expected_count`."""
    check_owners(runs, expected_count)
    owners: list[int] = []
    for first, step, count in runs:
        owners += range(first, first + step * count, step) if step else [first] * count
    return owners


def check_owners(runs: Sequence[Run], expected_count: int, known: bytes | None = None) -> None:
    """FormatError unless the runs cover `expected_count` cells and name only known parts.

    `known[p]` is 1 where part p exists. Nothing is expanded, so a forged count costs nothing.
    """
    if expected_count > MAX_CELLS:
        raise FormatError(f"a shard grid of {expected_count} cells; the limit is {MAX_CELLS}")
    total = 0
    for first, step, count in runs:
        last = first + step * (count - 1)
        low, high = min(first, last), max(first, last)
        total += count
        if count < 1 or total > expected_count or low < 0:
            raise FormatError(f"owner run {show((first, step, count))} does not fit {expected_count} cells")
        if known is not None and (high >= len(known) or 0 in known[low : high + 1 : abs(step) or 1]):
            raise FormatError(f"owner run {show((first, step, count))} names a part that is not there")
    if total != expected_count:
        raise FormatError(f"owners are given for {total} of {expected_count} cells")


def num_cells(cuts: Cuts) -> int:
    """The number of cells of a shard grid; 1 for a 0-d array."""
    found = 1
    for points in cuts:
        found *= len(points) - 1
    return found


def owned(runs: Sequence[Run], part: int) -> Iterator[int]:
    """The numbers of the cells that `part` owns, rising; in time of the runs, not of the cells."""
    base = 0
    for first, step, count in runs:
        if step == 0:
            if part == first:
                yield from range(base, base + count)
        else:
            at, odd = divmod(part - first, step)
            if not odd and 0 <= at < count:
                yield base + at
        base += count


def cell(cuts: Cuts, number: int) -> Cell:
    """The (start, stop) of a cell, given its row-major number."""
    spans = []
    for points in reversed(cuts):
        number, at = divmod(number, len(points) - 1)
        spans.append((points[at], points[at + 1]))
    return tuple(s[0] for s in reversed(spans)), tuple(s[1] for s in reversed(spans))


def cells(cuts: Cuts) -> Iterator[Cell]:
    """The (start, stop) of each cell, in row-major order."""
    for spans in product(*(tuple(pairwise(points)) for points in cuts)):
        yield tuple(span[0] for span in spans), tuple(span[1] for span in spans)


def cuts_problem(cuts: Cuts, shape: Sequence[int]) -> str | None:
    """Why `cuts` is not a shard grid of an array of `shape`, or None.

    Points rise strictly from 0 to the dimension; a dimension of 0 has the one empty span (0, 0).
    """
    if len(cuts) != len(shape):
        return f"cuts {len(cuts)} dimensions, but its shape has {len(shape)}"
    for dim, (points, size) in enumerate(zip(cuts, shape, strict=True)):
        if size == 0:
            good = points == (0, 0)
        else:
            good = len(points) >= 2 and points[0] == 0 and points[-1] == size
            good = good and all(map(lt, points, points[1:]))
        if not good:
            return f"cuts dimension {dim} of size {size} at {show(points)}"
    if num_cells(cuts) > MAX_CELLS:
        return f"has a shard grid of {num_cells(cuts)} cells; the limit is {MAX_CELLS}"
    return None
