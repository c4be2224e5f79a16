"""Random shapes, layouts and Moves for the property tests of arrays/."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from holdfast.arrays import ArrayLayout, Move, move

untimed = settings(deadline=None)
"""A busy machine may stall any one example; the tests named speed are the ones that time."""

DTYPES = ("uint8", "float16", "float32", "float64", "complex128", "bfloat16", "int4")

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)
holder_sets = st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True).map(tuple)


@st.composite
def cut_points(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Ascending cuts from 0 to size, now and then with an empty cell."""
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    return (0, *sorted(inner), size)


@st.composite
def grids(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> ArrayLayout:
    """A grid layout with random cuts and replica sets."""
    cuts = [draw(cut_points(size)) for size in shape]
    num_cells = int(np.prod([len(points) - 1 for points in cuts]))
    holders = draw(st.lists(holder_sets, min_size=num_cells, max_size=num_cells))
    return ArrayLayout.grid(dtype, shape, cuts, holders)


@st.composite
def splits(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> ArrayLayout:
    """A layout of recursively split boxes in random order, mostly no grid."""
    boxes = [[[0, size] for size in shape]]
    for _ in range(draw(st.integers(0, 5))):
        which = draw(st.integers(0, len(boxes) - 1))
        wide = [dim for dim, (start, stop) in enumerate(boxes[which]) if stop - start > 1]
        if not wide:
            continue
        dim = draw(st.sampled_from(wide))
        start, stop = boxes[which][dim]
        at = draw(st.integers(start + 1, stop - 1))
        box = boxes.pop(which)
        boxes += [[*box[:dim], part, *box[dim + 1 :]] for part in ([start, at], [at, stop])]
    boxes = draw(st.permutations(boxes))
    holders = draw(st.lists(holder_sets, min_size=len(boxes), max_size=len(boxes)))
    array = np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2)
    return ArrayLayout(dtype, shape, array, tuple(holders))


@st.composite
def layouts(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> ArrayLayout:
    """Any valid layout of an array."""
    if 0 in shape or draw(st.booleans()):
        return draw(grids(dtype, shape))
    return draw(splits(dtype, shape))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Move, int, int]:
    """A Move between two random boxes, and the sizes of their buffers."""
    itemsize = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    lo, hi, source, target = [], [], [], []
    for _ in range(draw(st.integers(0, 4))):
        start, count = draw(st.integers(0, 3)), draw(st.integers(1, 4))
        margins = [draw(st.sampled_from((0, 0, 0, 1, 3))) for _ in range(4)]
        lo.append(start + 3)
        hi.append(start + 3 + count)
        source.append((lo[-1] - margins[0], hi[-1] + margins[1]))
        target.append((lo[-1] - margins[2], hi[-1] + margins[3]))
    made = move(lo, hi, source, target, itemsize)
    assert made is not None
    from_size, to_size = (
        itemsize * int(np.prod([stop - start for start, stop in box])) for box in (source, target)
    )
    return made, from_size, to_size


def byte_pairs(one: Move) -> list[tuple[int, int]]:
    """Every (source byte, target byte) of a Move, by brute force."""
    pairs = []
    for indices in itertools.product(*(range(count) for count, _, _ in one.dims)):
        source = one.source + sum(i * dim[1] for i, dim in zip(indices, one.dims, strict=True))
        target = one.target + sum(i * dim[2] for i, dim in zip(indices, one.dims, strict=True))
        pairs += [(source + byte, target + byte) for byte in range(one.run)]
    return pairs


def raw(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array's bytes as a flat uint8 copy."""
    return np.frombuffer(array.tobytes(), np.uint8).copy()
