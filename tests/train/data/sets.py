"""Token sets, written byte by byte as the published layout says, without the code under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}


def index_bytes(lengths: Sequence[int], *, code: str = "H", bounds: Sequence[int] | None = None) -> bytes:
    """An .idx file of sequences of these lengths; documents have one each, or those between `bounds`."""
    bounds = range(len(lengths) + 1) if bounds is None else bounds
    data = b"MMIDIDX\x00\x00"
    data += struct.pack("<Q", 1)
    data += struct.pack("<B", CODES[code])
    data += struct.pack("<Q", len(lengths))
    data += struct.pack("<Q", len(bounds))
    for length in lengths:
        data += struct.pack("<i", length)
    at = 0
    for length in lengths:
        data += struct.pack("<q", at)
        at += length * struct.calcsize(f"<{code}")
    for bound in bounds:
        data += struct.pack("<q", bound)
    return data


def write_set(
    path: Path, documents: Sequence[Sequence[int]], *, code: str = "H", bounds: Sequence[int] | None = None
) -> str:
    """Write PATH.bin and PATH.idx; the prefix."""
    tokens = [token for document in documents for token in document]
    path.with_name(f"{path.name}.bin").write_bytes(struct.pack(f"<{len(tokens)}{code}", *tokens))
    index = index_bytes([len(document) for document in documents], code=code, bounds=bounds)
    path.with_name(f"{path.name}.idx").write_bytes(index)
    return str(path)


def counting(num_documents: int, length: int, *, first: int = 0) -> list[list[int]]:
    """Documents of consecutive numbers, so that a token says where it was taken from."""
    return [list(range(first + at * length, first + (at + 1) * length)) for at in range(num_documents)]
