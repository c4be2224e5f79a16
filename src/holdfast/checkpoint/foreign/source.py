"""A checkpoint of another library, as a move sees it: arrays read box by box, scalars, and the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, final

import numpy.typing as npt

from holdfast.arrays import dtype, join
from holdfast.checkpoint.step_reader import Box

Scalar = bool | int | float | complex | str | bytes


class Skipped(NamedTuple):
    """Something that was not moved, and why."""

    name: str
    reason: str


class ForeignArray(ABC):
    """One array of another library's checkpoint.

    `keys` is its path in the tree, `source_name` what the other library calls it. Reading is cheapest in
    boxes that are made of whole `grain`s. `kind` and `impl` are those of `ArrayEntry`.
    """

    keys: tuple[str, ...]
    source_name: str
    dtype: str
    shape: tuple[int, ...]
    grain: tuple[int, ...]
    kind: Literal["array", "key"] = "array"
    impl: str | None = None

    @property
    def name(self) -> str:
        """Its name by Holdfast's rules."""
        return join(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return prod(self.shape) * dtype(self.dtype).itemsize

    @abstractmethod
    def read_into(self, into: npt.NDArray[Any], box: Box) -> None:
        """Fill `into`, which has the shape of the box and this array's dtype.

        Fails: FormatError, CorruptError, StorageError.
        """

    @abstractmethod
    def release(self) -> None:
        """All of it was read: compare what only then can be, and drop what reading kept in memory.

        Fails: CorruptError, StorageError.
        """


@final
@dataclass(slots=True, kw_only=True)
class ForeignStep:
    """What one checkpoint holds; `close` in any case.

    `format` is for people, `step` is None where the checkpoint has no number. `scalars` are by path.
    """

    format: str
    path: str
    step: int | None
    arrays: Sequence[ForeignArray]
    scalars: Sequence[tuple[tuple[str, ...], Scalar]] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    close: Callable[[], None] = lambda: None
