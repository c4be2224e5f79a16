"""Trees of arrays of any framework as numpy arrays sorted by name, and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.arrays import NUMPY, Adapter, adapter_of, adapters, flatten_tree
from holdfast.arrays import dtype as dtype_of
from holdfast.errors import MismatchError, TreeError
from holdfast.reduce.layout import Entry

_MAX_DEPTH: Final = 64

Values = npt.NDArray[Any]


class _Box(NamedTuple):
    """The box of an array that is read: its number (None: all of them, put together), dtype and shape."""

    ordinal: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@final
class Awaited:
    """An array of a framework, which may still be computed, and lie on a device.

    Its values cannot change, but a program can donate or delete it before they were read.
    """

    __slots__ = ("_adapter", "_leaf", "_ordinal", "dtype", "shape")

    def __init__(self, adapter: Adapter, leaf: Any, box: _Box) -> None:
        self._adapter, self._leaf = adapter, leaf
        self._ordinal, self.dtype, self.shape = box

    def read(self) -> Values:
        """Its values in host memory, which stay whatever becomes of the array afterwards.

        Blocks: until they are computed and copied. Fails: TreeError; whatever the computation failed with.
        """
        leaf = self._leaf
        try:
            if self._ordinal is None:
                return np.asarray(leaf, order="C")
            return self._adapter.host(leaf, self._ordinal).view(self.dtype).reshape(self.shape)
        except (RuntimeError, ValueError) as error:
            if getattr(leaf, "is_deleted", bool)():
                raise TreeError(
                    f"an array of {self.dtype}{list(self.shape)} was donated or deleted before it was read",
                    hint="arrays that were added are donated or deleted after the next lane was added, or "
                    "when all are",
                ) from error
            raise


Leaf = Values | Awaited


class Taken(NamedTuple):
    """The arrays of a tree, sorted by name: numpy's as row-major views where possible, others unread."""

    entries: tuple[Entry, ...]
    leaves: list[Leaf]


def read(leaf: Leaf) -> Values:
    """The values of an array. Blocks and fails as `Awaited.read`."""
    return leaf.read() if isinstance(leaf, Awaited) else leaf


@final
class Structure:
    """How a tree is rebuilt from arrays sorted by name. It keeps no array of the tree it was made from."""

    def __init__(self, tree: Any) -> None:
        flat = flatten_tree(tree)
        names = flat.names()
        order = sorted(range(len(names)), key=names.__getitem__)
        rank = {leaf: at for at, leaf in enumerate(order)}
        self.key: Hashable = flat.structure
        self.names = [names[leaf] for leaf in order]
        self.order = order
        # Rebuilt around a tree of numbers: what rebuilds a tree holds the tree that it was made for.
        skeleton = flat.rebuild([rank[leaf] for leaf in range(len(names))])
        self._places = [rank[leaf] for leaf in range(len(names))]
        self._rebuild = flatten_tree(skeleton).rebuild
        self.outline = _encoded_outline(skeleton)

    def rebuild(self, arrays: Sequence[Values]) -> Any:
        return self._rebuild([arrays[at] for at in self._places])


@final
class Reader:
    """Reads trees of one structure, again and again. What it remembers makes the next one cheap."""

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._known: dict[Hashable, _Box] = {}
        self._kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
        self._entries: tuple[Entry, ...] = ()

    @property
    def structure(self) -> Structure | None:
        return self._structure

    def take(self, tree: Any) -> Taken:
        """Waits for nothing. Fails: TreeError, MismatchError."""
        flat = flatten_tree(tree)
        structure = self._structure
        if structure is None or structure.key != flat.structure:
            fresh = Structure(tree)
            if structure is not None and fresh.names != structure.names:
                raise _other(structure.names, fresh.names)
            structure = self._structure = fresh
            self._kinds, self._entries = [], ()
        known = adapters()
        leaves = [self._leaf(flat.leaves[leaf], known) for leaf in structure.order]
        kinds = [(leaf.dtype, leaf.shape) for leaf in leaves]
        if kinds != self._kinds:
            self._entries = tuple(
                Entry(name, dtype_of(dtype).name, shape)
                for name, (dtype, shape) in zip(structure.names, kinds, strict=True)
            )
            self._kinds = kinds
        return Taken(self._entries, leaves)

    def _leaf(self, leaf: Any, known: Sequence[Adapter]) -> Leaf:
        adapter = adapter_of(leaf, known)
        if adapter is None:
            if isinstance(leaf, str | bytes):
                raise TreeError(f"{leaf!r} has no sum", hint="give trees of numbers")
            return np.asarray(leaf)
        if adapter is NUMPY:
            return np.asarray(leaf, order="C")
        signature = adapter.signature(leaf)
        if signature not in self._known:
            self._known[signature] = _local_box(adapter, leaf)
        return Awaited(adapter, leaf, self._known[signature])


def _local_box(adapter: Adapter, leaf: Any) -> _Box:
    """The one box of an array that lies in this process, or all of several. Fails: TreeError."""
    about = adapter.describe(leaf, *adapter.identity())
    if about.kind == "key":
        raise TreeError("a PRNG key has no sum", hint="leave keys out of what is added")
    here = [(at, ordinal) for at, ordinal in enumerate(about.local) if ordinal >= 0]
    layout = about.layout
    kind = dtype_of(layout.dtype).numpy
    if len(here) == 1:
        at, ordinal = here[0]
        extents = layout.boxes[at, :, 1] - layout.boxes[at, :, 0]
        return _Box(ordinal, kind, tuple(int(extent) for extent in extents))
    if len(here) == len(about.local):
        return _Box(None, kind, tuple(layout.shape))
    raise TreeError(
        f"an array of shape {layout.shape} has {len(here)} of its {len(about.local)} boxes here",
        hint="between replicas, a worker adds arrays of which it has one box, or all",
    )


def _other(mine: Sequence[str], other: Sequence[str]) -> MismatchError:
    problems = [f"{name}: was added before, not now" for name in mine if name not in other]
    problems += [f"{name}: is new" for name in other if name not in mine]
    return MismatchError(
        problems, source="what was added before", hint="add trees of the same arrays every time"
    )


# ---- an outline of plain containers, for members that have never seen a tree


def _encoded_outline(skeleton: Any) -> bytes:
    told = _told(skeleton, 0)
    return b"" if told is None else msgspec.msgpack.encode(told)


def _told(tree: Any, depth: int) -> list[Any] | None:
    if tree is None:
        return ["n"]
    kind = type(tree)
    if kind is int:
        return ["a", tree]
    if kind not in (dict, list, tuple) or depth > _MAX_DEPTH:
        return None
    keys = list(tree) if kind is dict else []
    if any(type(key) not in (str, int) for key in keys):
        return None
    children = [_told(child, depth + 1) for child in (tree.values() if kind is dict else tree)]
    if any(child is None for child in children):
        return None
    return [kind.__name__[0], children, keys]


_CLOSERS: Final[dict[str, Callable[[list[Any], list[Any]], Any]]] = {
    "d": lambda children, keys: dict(zip(keys, children, strict=True)),
    "l": lambda children, keys: children,
    "t": lambda children, keys: tuple(children),
}


def rebuilt(outline: bytes, arrays: Sequence[Values]) -> Any:
    """The tree that an outline tells of. Fails: TreeError."""
    try:
        return _retold(msgspec.msgpack.decode(outline), arrays, 0)
    except (msgspec.MsgspecError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TreeError(
            "this member has added nothing yet, and a peer's tree has containers of its own",
            hint="call prepare() with a tree of the same arrays before the first step",
        ) from error


def _retold(told: Any, arrays: Sequence[Values], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if told[0] == "n":
        return None
    if told[0] == "a":
        return arrays[told[1]]
    kind, children, keys = told
    return _CLOSERS[kind]([_retold(child, arrays, depth + 1) for child in children], keys)
