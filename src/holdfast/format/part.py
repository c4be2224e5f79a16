"""The layout of one part file: from the slices a writer holds to header bytes and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

from holdfast.arrays.dtypes import dtype, stored_shape
from holdfast.format.index import Slice
from holdfast.format.packing import pack
from holdfast.format.safetensors import METADATA, Tensor, encode_header

_ESCAPED: Final = "~" + METADATA


class Piece(NamedTuple):
    """A slice that a writer holds of an array with this dtype and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]


class PartLayout(NamedTuple):
    """A part file before its bytes exist. `slices` are in the order of the pieces given;
    `order` lists their indexes as they lie in the file, which begins with `header`."""

    header: bytes
    slices: tuple[Slice, ...]
    order: tuple[int, ...]
    size: int


def lay_out(part: int, pieces: Sequence[Piece], *, file: int = 0) -> PartLayout:
    """Where each piece goes in the part file: packed, aligned, behind a padded header.

    Nothing in it depends on the step or attempt, so one layout serves every save of a run; the
    block checksums are what binds the bytes to their save.
    """
    shapes = [tuple(b - a for a, b in zip(p.start, p.stop, strict=True)) for p in pieces]
    kinds = [dtype(p.dtype) for p in pieces]
    sizes = [prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    order, offsets, total = pack(sizes)
    tensors = [
        Tensor(
            tensor_name(pieces[i].name, pieces[i].shape, pieces[i].start, pieces[i].stop),
            kinds[i].stored,
            stored_shape(kinds[i], shapes[i]),
            offsets[i],
            offsets[i] + sizes[i],
        )
        for i in order
    ]
    header = encode_header(tensors, part_metadata(part, file))
    slices = tuple(
        Slice(p.name, p.start, p.stop, file, len(header) + offset, size)
        for p, offset, size in zip(pieces, offsets, sizes, strict=True)
    )
    return PartLayout(header, slices, tuple(order), len(header) + total)


def tensor_name(name: str, shape: Sequence[int], start: Sequence[int], stop: Sequence[int]) -> str:
    """The safetensors name of a slice: the array's own, plus `~[0:4,8:16]` unless it is whole.

    In array names `~` is always followed by a digit, so the two cannot be confused; the same goes
    for the one reserved word, which is written `~__metadata__`.
    """
    base = _ESCAPED if name == METADATA else name
    if tuple(stop) == tuple(shape) and not any(start):
        return base
    return f"{base}~[{','.join(f'{a}:{b}' for a, b in zip(start, stop, strict=True))}]"


def part_metadata(part: int, file: int = 0) -> dict[str, str]:
    """The `__metadata__` of a part file, for people and other tools; Holdfast does not read it."""
    return {"holdfast": "1", "part": str(part), "file": str(file)}
