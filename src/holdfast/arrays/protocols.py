"""What a framework implements so that its arrays can be saved, loaded and moved.

An `Adapter` turns the framework's trees and leaves into names, layouts and host memory, and back. Rooms above
the framework line know only these protocols; `adapters` finds the implementation by the names of modules
that the program has already imported, so that nothing here imports a framework.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.arrays.layout import ArrayLayout

Bytes1D = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Description:
    """What an array is, where its boxes lie over all ranks, and which of them lie here.

    `layout` has ranks as holders. `local[i]` is the ordinal to pass to `Adapter.memory` for box i, -1 if the
    box is not in this process. A typed PRNG key is described by its key data: kind "key" and its `impl`.
    """

    layout: ArrayLayout
    local: tuple[int, ...]
    kind: Literal["array", "key"] = "array"
    impl: str | None = None
    axes: tuple[str | None, ...] | None = None


class Memory(NamedTuple):
    """Row-major host bytes of one box; valid as long as `keep` is held."""

    address: int
    keep: object


class FlatTree(NamedTuple):
    """A tree taken apart. Equal `structure` means equal names in the same order."""

    leaves: list[Any]
    structure: Hashable
    names: Callable[[], list[str]]
    rebuild: Callable[[Sequence[Any]], Any]


class Source(Protocol):
    """How the arrays of a framework are read."""

    def signature(self, leaf: Any) -> Hashable:
        """Equal for leaves with equal descriptions; cheap, it is asked at every save."""
        ...

    def describe(self, leaf: Any, rank: int, world: int) -> Description: ...

    def ready(self, leaves: Sequence[Any]) -> None:
        """Return once the values of all leaves are computed."""
        ...

    def memory(self, leaf: Any, ordinal: int) -> Memory:
        """The bytes of one local box. Reading them must not outlive the caller's hold on `leaf`."""
        ...

    def host(self, leaf: Any, ordinal: int) -> Bytes1D:
        """The bytes of one local box, to be read for as long as the result is held.

        They stay what they are even if the framework frees or reuses the leaf's own memory meanwhile.
        """
        ...


class Sink(Protocol):
    """What one leaf of a template asks for."""

    description: Description


class Placement(NamedTuple):
    """The bytes of the local boxes of one array, in the dtype of its sink.

    `alias` says that the memory is this array's own and may be kept; otherwise it must be copied.
    """

    sink: Any
    boxes: dict[int, Bytes1D]
    alias: bool


class Adapter(Source, Protocol):
    """A framework."""

    def identity(self) -> tuple[int, int]:
        """This process's rank and the number of processes."""
        ...

    def claims(self, leaf: Any) -> bool:
        """Whether `leaf` is an array, or the description of one, of this framework."""
        ...

    def flatten(self, tree: Any) -> FlatTree: ...

    def sink(self, leaf: Any, rank: int, world: int) -> Sink:
        """The sink for a template leaf."""
        ...

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        """The arrays made from a batch of bytes, one for each of this adapter's sinks in it."""
        ...


_FRAMEWORKS: Final = {"jax": "holdfast.jax"}


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that this program has imported."""
    return [
        importlib.import_module(module).ADAPTER
        for framework, module in _FRAMEWORKS.items()
        if framework in sys.modules
    ]
