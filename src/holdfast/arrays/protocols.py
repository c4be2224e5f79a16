"""What a framework implements so that its arrays can be saved, loaded and moved.

An `Adapter` turns the framework's trees and leaves into names, layouts and host memory, and back. Rooms above
the framework line know only these protocols; `adapters` finds the implementation by the names of modules
that the program has already imported, so that nothing here imports a framework.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.arrays.layout import ArrayLayout
from holdfast.clock import Deadline

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


class DeviceCopy(NamedTuple):
    """One run of bytes of a local box of a leaf, and where in host memory it goes."""

    leaf: int
    ordinal: int
    source: int
    target: int
    nbytes: int


class HostMemory(Protocol):
    """Host memory that outlives a save, such as a slot of the vault's arena."""

    address: int
    size: int

    def before_unmap(self, act: Callable[[], bool]) -> None:
        """Have `act` called before the memory goes; it stays mapped for good where that says False."""
        ...


class Copying(Protocol):
    """Copies from devices that were begun.

    `captured`: the program may change its arrays at once; else only after `run`.
    """

    captured: bool

    def run(self, filled: Callable[[int], None], stop: threading.Event, deadline: Deadline) -> None:
        """Copy all; `filled(n)` says that the first n copies are done.

        Blocks: until the arrays are computed and copied, or `stop` is set. Fails: TreeError, DeadlineError,
        StagingError. No device writes to the host memory afterwards, unless that error says `stuck`.
        """
        ...


class Stager(Protocol):
    """Copies arrays from a framework's devices into host memory while the program goes on."""

    def takes(self, leaf: Any) -> bool:
        """Whether the bytes of a leaf can be copied this way."""
        ...

    def prepare(self, leaves: Sequence[Any], copies: Sequence[DeviceCopy], memory: HostMemory) -> None:
        """Do beforehand what a first `begin` would have to. Blocks: while memory is pinned and checked."""
        ...

    def begin(
        self,
        leaves: Sequence[Any],
        copies: Sequence[DeviceCopy],
        memory: HostMemory,
        *,
        fenced: bool,
    ) -> Copying:
        """Begin to copy. `fenced`: the program changes nothing before the copies are done."""
        ...

    def announcements(self) -> list[tuple[str, str]]:
        """The routes taken so far, and why by no better one."""
        ...


class Landing(Protocol):
    """Host memory in which arrays are put together on their way to devices: little of it, used in turn.

    Safe to use from several threads. `close` it, whatever happened.
    """

    def take(self, nbytes: int) -> Bytes1D:
        """Memory for one box of an array.

        Blocks: while arrays that were placed before are on their way, if it is theirs that is wanted.
        """
        ...

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        """The arrays made of boxes that lie in memory from `take`: it is theirs until they have arrived."""
        ...

    def close(self) -> None:
        """Return once all arrays have arrived; then the memory is given back. Fails: what one failed with."""
        ...


@contextmanager
def landed(landings: Iterable[Landing | None]) -> Iterator[None]:
    """Close landings at the end of a block, all of them. The first error is the one that is told."""
    failed = True
    try:
        yield
        failed = False
    finally:
        with ExitStack() as closing:
            if failed:
                closing.enter_context(suppress(Exception))
            for landing in landings:
                if landing is not None:
                    closing.callback(landing.close)


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

    def landing(self, sinks: Sequence[Any]) -> Landing | None:
        """Where arrays for these sinks are put together; None if they keep the memory they are made of."""
        ...

    def pin(self, memory: Bytes1D, sinks: Sequence[Any]) -> Callable[[], None] | None:
        """Prepare a mapping for making arrays for these sinks out of it, again and again.

        Returns what undoes it, to be called when no array is on its way out of it; None where nothing is
        gained. Blocks: while its pages are pinned.
        """
        ...

    def stager(self) -> Stager | None:
        """What copies from this framework's devices; None if it has none but the host."""
        ...


_FRAMEWORKS: Final = {"jax": "holdfast.jax"}


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that this program has imported."""
    return [
        importlib.import_module(module).ADAPTER
        for framework, module in _FRAMEWORKS.items()
        if framework in sys.modules
    ]
