"""What a move did, array by array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from holdfast.checkpoint.foreign.source import Skipped


class MovedArray(NamedTuple):
    """An array that was moved and read back; `digest` is the xxh3_128 of its bytes, equal on both sides.

    An array that was cut into pieces has the digest of the pieces' digests.
    """

    name: str
    source_name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


class Renamed(NamedTuple):
    """What is called otherwise than by its path in the source."""

    path: str
    name: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a move did. Every array in it has been checked: shape, dtype and bytes."""

    source: str
    target: str
    format: str
    step: int
    arrays: tuple[MovedArray, ...]
    scalars: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    renamed: tuple[Renamed, ...]
    nbytes: int
    seconds: float
