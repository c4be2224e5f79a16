"""The order in which tensors lie in a part file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

ALIGN: Final = 4096
"""The start of a data section, and the most alignment that packing gives."""


def pack(sizes: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Pack tensors without holes: (indexes in file order, offset of each tensor, total bytes).

    Direct I/O wants big tensors to start on a page, and placing bytes on a device without a copy
    wants every tensor aligned to its items; but safetensors refuses holes, so there is no padding
    to align with. The order alone does it. Tensors are sorted by the largest power of two (at most
    4096) that divides their size, descending. What precedes a tensor is then a sum of multiples of
    its own power of two, so each tensor starts on a multiple of that: those of k * 4 KiB on a page,
    those of k * 64 bytes on a cache line, and all others at least on a multiple of their item size,
    which divides their size. Ties keep their order, so equal input gives equal files.
    """
    # `size & -size` is the lowest set bit; an empty tensor disturbs nobody and goes first.
    order = sorted(range(len(sizes)), key=lambda i: -min(sizes[i] & -sizes[i] or ALIGN, ALIGN))
    ends = list(accumulate((sizes[i] for i in order), initial=0))
    offsets = [0] * len(sizes)
    for place, i in enumerate(order):
        offsets[i] = ends[place]
    return order, offsets, ends[-1]
