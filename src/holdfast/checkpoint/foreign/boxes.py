"""How an array is cut to be moved: cells that lie in files of bounded size, tiles that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from holdfast.checkpoint.step_reader import Box

Cuts = tuple[tuple[int, ...], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of an array."""
    return tuple((0, size) for size in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(hi - lo for lo, hi in box)


def nbytes(box: Box, itemsize: int) -> int:
    """The bytes of a box."""
    return prod(extent(box)) * itemsize


def cut(shape: Sequence[int], grain: Sequence[int], itemsize: int, most: int) -> tuple[int, ...]:
    """The shape of boxes of at most `most` bytes, made of whole grains, cut along the first dimensions.

    `grain` is what the source can only read at once. A single grain beyond `most` stays whole.
    """
    found = list(shape)
    for dim, size in enumerate(shape):
        total = prod(found) * itemsize
        if total <= most:
            break
        rest = total // found[dim]
        unit = max(1, min(grain[dim], size))
        found[dim] = min(size, max(1, most // (rest * unit)) * unit)
    return tuple(found)


def cuts(shape: Sequence[int], cell: Sequence[int]) -> Cuts:
    """The cut points of the grid of cells of a shape; an empty dimension has the one empty span."""
    return tuple(
        (*range(0, size, step), size) if size else (0, 0) for size, step in zip(shape, cell, strict=True)
    )


def is_contiguous(tile: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether tiles of this shape, in row-major order, follow each other in the bytes of an array."""
    cut_dims = [dim for dim, (part, size) in enumerate(zip(tile, shape, strict=True)) if part < size]
    return not cut_dims or all(part == 1 for part in tile[: cut_dims[-1]])


def pieces(box: Box, tile: Sequence[int]) -> Iterator[Box]:
    """Boxes of at most the shape `tile` that make up `box`, in row-major order."""
    if not box:
        yield ()
        return
    (lo, hi), step = box[0], max(1, tile[0])
    for at in range(lo, hi, step):
        for rest in pieces(box[1:], tile[1:]):
            yield ((at, min(at + step, hi)), *rest)


def overlap(one: Box, two: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True))
    return found if all(lo < hi for lo, hi in found) else None


def within(box: Box, origin: Box) -> tuple[slice, ...]:
    """The slices of `box` in an array that holds just `origin`."""
    return tuple(slice(lo - base, hi - base) for (lo, hi), (base, _) in zip(box, origin, strict=True))
