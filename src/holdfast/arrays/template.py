"""What a caller wants of a named tree that lies elsewhere: in a checkpoint, or with another process.

A template is a tree of arrays or descriptions of arrays. It is compared with what there is before anything is
read or moved, and all that does not fit is listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, final

from holdfast.arrays.dtypes import dtype as dtype_of
from holdfast.arrays.layout import ArrayLayout
from holdfast.arrays.names import match, unflatten
from holdfast.arrays.numpy_adapter import NUMPY
from holdfast.arrays.protocols import Adapter, Description, FlatTree, Sink, adapters
from holdfast.arrays.trees import adapter_of, flatten_tree
from holdfast.errors import MismatchError, UsageError

Rename = Mapping[str, str] | Callable[[str], str]

_HINT: Final = (
    "parts= selects a subset, rename= maps names, cast=True converts dtypes, strict=False ignores missing "
    "and extra arrays"
)


class StoredArray(Protocol):
    """An array as its source describes it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> Literal["array", "key"]: ...
    @property
    def impl(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a source is wanted, and how far it may differ from the template."""

    parts: Sequence[str] | None = None
    rename: Rename | None = None
    strict: bool = True
    cast: bool = False

    def takes(self, name: str) -> bool:
        return self.parts is None or match(self.parts, name)

    def stored_name(self, name: str) -> str:
        """The name in the source of what the template calls `name`."""
        if self.rename is None:
            return name
        if isinstance(self.rename, Mapping):
            return self.rename.get(name, name)
        renamed = self.rename(name)
        if not isinstance(renamed, str):
            raise UsageError(f"rename({name!r}) returned {renamed!r}, not a name")
        return renamed


@final
class Wanted:
    """One leaf of the template: `stored` is its name in the source; `sink` is None for a Python scalar."""

    __slots__ = ("adapter", "at", "cast_from", "name", "sink", "stored")

    def __init__(self, at: int, name: str, stored: str) -> None:
        self.at = at
        self.name = name
        self.stored = stored
        self.sink: Sink | None = None
        self.adapter: Adapter = NUMPY
        self.cast_from: str | None = None

    def layout(self) -> ArrayLayout:
        """Where the bytes are wanted, in the dtype they have at the source."""
        assert self.sink is not None
        layout = self.sink.description.layout
        if self.cast_from is None:
            return layout
        return ArrayLayout(self.cast_from, layout.shape, layout.boxes, layout.holders)


class _AsStored:
    """An array of the source as its own template."""

    def __init__(self, stored: StoredArray) -> None:
        self.shape = stored.shape
        self.dtype = dtype_of(stored.dtype).numpy


@final
class Template:
    """A template matched with a source; `wanted` has what is to be fetched. Fails: MismatchError.

    `tree` None asks for everything, in numpy. `source` is the word for the other side in messages.
    """

    def __init__(
        self,
        tree: Any,
        arrays: Mapping[str, StoredArray],
        scalars: Collection[str],
        selection: Selection,
        *,
        rank: int,
        world: int,
        source: str,
    ) -> None:
        self._arrays = arrays
        self._scalars = scalars
        self._selection = selection
        self._rank = rank
        self._world = world
        self._source = source
        self._own = tree is None
        self.flat = self._own_tree() if tree is None else flatten_tree(tree)
        self.wanted = self._match()

    def _own_tree(self) -> FlatTree:
        names = [name for name in (*self._arrays, *self._scalars) if self._selection.takes(name)]
        return FlatTree(
            list(names),
            None,
            lambda: names,
            lambda leaves: unflatten(dict(zip(names, leaves, strict=True))),
        )

    def _match(self) -> list[Wanted]:
        problems: list[str] = []
        wanted: list[Wanted] = []
        known = adapters()
        used: set[str] = set()
        for at, (name, leaf) in enumerate(zip(self.flat.names(), self.flat.leaves, strict=True)):
            if not self._selection.takes(name):
                continue
            one = Wanted(at, name, self._selection.stored_name(name))
            used.add(one.stored)
            if one.stored not in self._arrays and one.stored not in self._scalars:
                if self._selection.strict:
                    shown = name if one.stored == name else f"{one.stored} (wanted as {name})"
                    problems.append(f"{shown}: not in the {self._source}")
                continue
            problem = self._attach(one, leaf, known)
            if problem is not None:
                problems.append(f"{name}: {problem}")
            wanted.append(one)
        problems += self._extra(used)
        if problems:
            raise MismatchError(problems, source=self._source, hint=_HINT)
        return wanted

    def _extra(self, used: set[str]) -> list[str]:
        """What the source has and the template does not."""
        selection = self._selection
        if not selection.strict or selection.rename is not None:
            return []
        names = (name for name in (*self._arrays, *self._scalars) if name not in used)
        return [
            f"{name}: in the {self._source}, not in the template" for name in names if selection.takes(name)
        ]

    def _attach(self, one: Wanted, leaf: Any, known: Sequence[Adapter]) -> str | None:
        """Give `one` its sink; returns what is wrong with the template leaf."""
        stored = self._arrays.get(one.stored)
        if self._own:
            # Without a template everything comes back in numpy, as stored; a key as its data.
            if stored is not None:
                one.sink = NUMPY.sink(_AsStored(stored), self._rank, self._world)
            return None
        adapter = adapter_of(leaf, known)
        if (adapter is None) != (stored is None):
            kinds = ("a Python scalar", "an array")
            wants, has = kinds if adapter is None else kinds[::-1]
            return f"the template has {wants}, the {self._source} {has}"
        if adapter is None or stored is None:
            return None
        one.adapter = adapter
        one.sink = adapter.sink(leaf, self._rank, self._world)
        return self._compare(one, one.sink.description, stored)

    def _compare(self, one: Wanted, want: Description, stored: StoredArray) -> str | None:
        layout = want.layout
        if (want.kind, want.impl) != (stored.kind, stored.impl):
            return (
                f"the template wants {_kind(want.kind, want.impl)}, the {self._source} has "
                f"{_kind(stored.kind, stored.impl)}"
            )
        if layout.shape != stored.shape:
            return f"shape {layout.shape} wanted, {stored.shape} saved"
        if layout.dtype != stored.dtype:
            if not self._selection.cast or want.kind == "key":
                return f"dtype {layout.dtype} wanted, {stored.dtype} saved (cast=True converts)"
            one.cast_from = stored.dtype
        return None


def _kind(kind: str, impl: str | None) -> str:
    return f"a {impl} PRNG key" if kind == "key" else "a plain array"
