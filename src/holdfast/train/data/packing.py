"""Samples from windows of a token stream: inputs, targets, what counts, and which tokens may see each
other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypedDict

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


class Batch(TypedDict):
    """Samples as the step takes them; n samples of s tokens each."""

    tokens: Ints
    """[n, s]; what the model reads."""
    targets: Ints
    """[n, s]; what it is to say next."""
    mask: npt.NDArray[np.float32]
    """[n, s]; 1 where the target counts in the loss, else 0."""
    segments: Ints
    """[n, s]; equal for tokens that may see each other, from 1 on in each sample. 0 is for padding, of which
    there is none here."""
    positions: Ints
    """[n, s]; of each token in its segment, from 0 on."""


KEYS: Final = ("tokens", "targets", "mask", "segments", "positions")


def document_starts(documents: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], width: int) -> Flags:
    """[n, width]: whether a document begins at each token of the windows that begin at `starts`.

    The first column is always False: whatever a window begins with, it begins a segment anyway.
    """
    flags = np.zeros((len(starts), width), np.bool_)
    lo = np.searchsorted(documents, starts, side="right")
    counts = np.searchsorted(documents, starts + (width - 1), side="right") - lo
    rows = np.repeat(np.arange(len(starts)), counts)
    # For each flag: the number of the document, counted from the first one that begins in its window.
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    flags[rows, documents[np.repeat(lo, counts) + within] - starts[rows]] = True
    return flags


def pack(windows: Ints, begins: Flags | None, *, ignored: Sequence[int] = ()) -> Batch:
    """The batch of some windows, each one token longer than a sample.

    `begins` says where documents begin, None that they are not to be separated. Targets in `ignored` do not
    count.
    """
    num, seq_len = windows.shape[0], windows.shape[1] - 1
    targets = windows[:, 1:].copy()
    columns = np.arange(seq_len, dtype=np.int32)
    if begins is None:
        counted = np.ones((num, seq_len), np.bool_)
        segments = np.ones((num, seq_len), np.int32)
        positions = np.tile(columns, (num, 1))
    else:
        counted = ~begins[:, 1:]
        inner = begins[:, :-1]
        segments = np.cumsum(inner, axis=1, dtype=np.int32) + np.int32(1)
        positions = columns - np.maximum.accumulate(np.where(inner, columns, np.int32(0)), axis=1)
    for token in ignored:
        counted &= targets != token
    return Batch(
        tokens=windows[:, :-1].copy(),
        targets=targets,
        mask=counted.astype(np.float32),
        segments=segments,
        positions=positions,
    )
