"""Strided copies between typed elements: in one dtype bit for bit, or with an explicit cast."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from holdfast.arrays import Bytes1D, DType, Move

_TILE: Final = 128
"""Of the dim that is contiguous at the target, where the source is not: measured 2 to 3 times as fast as one
copy, because the lines that are read for one row of the target are still in the cache for the next."""


def copy(move: Move, source: Bytes1D, kind: DType, target: Bytes1D, to: DType, *, back: bool = False) -> None:
    """Copy the elements of `move` (which counts elements) from `source` to `target`, cast if dtypes differ.

    With `back` the other way round: what the move calls its target is read.
    """
    read, write = (to, kind) if back else (kind, to)
    if read is write:  # opaque elements: no NaN and no denormal is looked at
        element = np.dtype(f"u{kind.itemsize}") if kind.itemsize <= 8 else np.dtype(("V", kind.itemsize))
        kinds = element, element
    else:
        kinds = kind.numpy, to.numpy
    for piece in _tiles(move):
        near = _view(source, kinds[0], piece.source, piece, 1)
        far = _view(target, kinds[1], piece.target, piece, 2)
        if back:
            near, far = far, near
        with np.errstate(all="ignore"):  # a cast that overflows gives what numpy gives: inf
            np.copyto(far, near, casting="unsafe")


def _view(data: Bytes1D, kind: np.dtype[Any], start: int, move: Move, side: int) -> np.ndarray[Any, Any]:
    size = kind.itemsize
    counts = (*(dim[0] for dim in move.dims), move.run)
    steps = (*(dim[side] * size for dim in move.dims), size)
    return np.ndarray(counts, kind, data.data, start * size, steps)


def _tiles(move: Move) -> list[Move]:
    """The move in pieces whose rows at the target are short, if it turns dims around."""
    if move.run > 1:
        return [move]
    for at, (count, from_step, to_step) in enumerate(move.dims[:-1]):
        if to_step == 1 and count > _TILE:
            before, after = move.dims[:at], move.dims[at + 1 :]
            return [
                Move(
                    move.source + start * from_step,
                    move.target + start,
                    1,
                    (*before, (min(_TILE, count - start), from_step, to_step), *after),
                )
                for start in range(0, count, _TILE)
            ]
    return [move]
