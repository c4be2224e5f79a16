"""A small, pure reader of whole steps: what the format promises, in as few lines as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors

from holdfast import format as fmt
from holdfast.arrays.dtypes import dtype
from holdfast.errors import CorruptError, FormatError


def deserialize(data: bytes) -> dict[str, dict[str, Any]]:
    """What the real safetensors library makes of a file: dtype, shape and data by tensor name."""
    return dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]


Read = Callable[[str], bytes]


def verify(read_file: Read) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of a step, after checking every byte of it; FormatError if anything is wrong.

    `read_file(name)` returns a file's bytes and raises KeyError where there is none.
    """
    manifest = fmt.decode_manifest(_read(read_file, fmt.MANIFEST))
    arrays = {entry.name: np.zeros(entry.shape, dtype(entry.dtype).numpy) for entry in manifest.arrays}
    for part in manifest.parts:
        index = fmt.part_index(manifest, part.part, _read(read_file, part.index))
        for number, file in enumerate(index.files):
            data = _read(read_file, file.name)
            _check_file(index, number, data)
            for piece in index.slices:
                if piece.file == number:
                    _place(arrays[piece.name], piece, data)
    return arrays


def _check_file(index: fmt.PartIndex, number: int, data: bytes) -> None:
    file = index.files[number]
    if len(data) != file.size:
        raise CorruptError(f"{file.name}: {len(data)} bytes, but the index says {file.size}")
    for block in range(fmt.num_blocks(file.size)):
        begin, end = fmt.block_range(block, file.size)
        fmt.check_block(index, number, block, data[begin:end])
    _, tensors, start = fmt.decode_header(
        lambda at, length: data[at : at + length], len(data), name=file.name
    )
    places = sorted((start + t.begin, t.end - t.begin) for t in tensors)
    assert places == sorted((s.offset, s.nbytes) for s in index.slices if s.file == number)


def _place(array: np.ndarray[Any, Any], piece: fmt.Slice, data: bytes) -> None:
    count = piece.nbytes // array.dtype.itemsize
    values = np.frombuffer(data, array.dtype, count, piece.offset)
    at = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
    array[at] = values.reshape(piece.shape)


def _read(read_file: Read, name: str) -> bytes:
    try:
        return read_file(name)
    except KeyError:
        raise FormatError(f"{name} is missing") from None
