"""Reading Orbax checkpoints, as orbax-checkpoint 0.11 and 0.12 write them, through tensorstore.

Four layouts: the arrays are zarr (version 2 or 3), each in a folder of its own or all of them in one OCDBT
store. To zarr a chunk that is not there is one full of zeros, so every chunk is looked for before anything is
read: half a checkpoint is an error, not a model with holes.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.arrays import dtype as dtype_of
from holdfast.arrays import join
from holdfast.arrays.text import reason
from holdfast.checkpoint.foreign.orbax_tree import (
    KINDS,
    STEP,
    TEMPORARY,
    TREE,
    Leaf,
    Tree,
    read_json,
    read_tree,
)
from holdfast.checkpoint.foreign.source import ForeignArray, ForeignStep, Scalar, Skipped
from holdfast.checkpoint.step_reader import Box
from holdfast.errors import DeadlineError, FormatError, TreeError, UsageError
from holdfast.format.limits import MAX_META_DEPTH

_WAIT_S: Final = 600.0
"""The longest that opening or reading one box may take."""

_TRIMMED: Final = 1 << 20
"""Bytes from which on memory is given back after a read: it takes longer than a small read does."""

_JSON: Final = ("metadata", "metrics")
"""Files that Orbax's JSON handlers write."""

_EMPTY: Final = {
    "None": "None is structure, not a value",
    "Dict": "an empty dict is structure, not a value",
    "List": "an empty list is structure, not a value",
    "Tuple": "an empty tuple is structure, not a value",
    "NamedTuple": "an empty namedtuple is structure, not a value",
}


_LOST: Final = object()


def tensorstore() -> ModuleType:
    """The tensorstore library. Fails: UsageError where it is not installed."""
    try:
        return importlib.import_module("tensorstore")
    except ImportError:
        raise UsageError(
            "Orbax checkpoints are read and written through tensorstore, which is not installed",
            hint="pip install 'holdfast[orbax]'",
        ) from None


def trim() -> None:
    """Give freed memory back: glibc keeps what tensorstore's threads freed, several chunks of it."""
    give = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if give is not None:
        give(0)


def opened(path: str, *, step: int | None, item: str | None = None) -> ForeignStep:
    """The checkpoint in a folder: one tree, or a step whose items are trees and JSON.

    With one tree its names are those in the tree; with several, each begins with its item's name. `item`
    takes one of them. Opens every array and looks for all its chunks; reads none of them.

    Fails: FormatError naming what is missing or damaged; StorageError; UsageError.
    """
    found = _items(path, item)
    reading = _Reading(tensorstore())
    for name, folder in found.trees.items():
        tree = read_tree(folder)
        reading.add(folder, tree, (name,) if len(found.trees) > 1 else ())
        if tree.custom:
            found.meta.setdefault("custom_metadata", tree.custom)
    meta = _finite(found.meta, (), found.skipped)
    return ForeignStep(
        format=f"Orbax ({', '.join(sorted(reading.layouts))})",
        path=path,
        step=_exported_step(found.meta) if step is None else step,
        arrays=reading.arrays,
        scalars=reading.scalars,
        meta=meta,
        skipped=[*found.skipped, *reading.skipped],
    )


def _exported_step(meta: dict[str, Any]) -> int | None:
    """The step that `export_orbax` wrote down; None for what it did not make."""
    found: Any = meta
    for key in ("custom_metadata", "holdfast", "step"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if type(found) is int and found >= 0 else None


def _finite(value: Any, keys: tuple[str, ...], skipped: list[Skipped]) -> Any:
    """JSON without the entries that have a NaN or an infinity, such as the metric of a run that diverged."""
    if isinstance(value, dict) and len(keys) < MAX_META_DEPTH:  # deeper ones are refused as a whole
        kept = {key: _finite(one, (*keys, key), skipped) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one is not _LOST}
    if isinstance(value, list) and len(keys) < MAX_META_DEPTH:
        items = [_finite(one, (*keys, str(at)), skipped) for at, one in enumerate(value)]
        return _LOST if _LOST in items else items
    if isinstance(value, float) and not math.isfinite(value):
        skipped.append(Skipped(join(keys), f"{value}, which the metadata of a step cannot hold"))
        return _LOST
    return value


@dataclass(slots=True)
class _Items:
    trees: dict[str, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


def _items(path: str, wanted: str | None) -> _Items:
    """The trees of a checkpoint by item, its JSON, and what is neither."""
    found, handlers = _Items(), {}
    if os.path.isfile(os.path.join(path, STEP)):
        described = read_json(os.path.join(path, STEP))
        described = described if isinstance(described, dict) else {}
        found.meta = {key: described[key] for key in ("metrics", "custom_metadata") if described.get(key)}
        if isinstance(described.get("item_handlers"), dict):
            handlers = described["item_handlers"]
    if os.path.isfile(os.path.join(path, TREE)):
        if wanted is not None:
            raise UsageError(f"{path} is one tree and has no items", hint="leave the item out")
        found.trees[""] = path
        return found
    names = sorted(one.name for one in os.scandir(path) if one.is_dir())
    if wanted is not None and wanted not in names:
        raise UsageError(f"{path} has no item {wanted!r}", hint=f"its items: {', '.join(names) or 'none'}")
    for name in names:
        folder = os.path.join(path, name)
        json = next((one for one in _JSON if os.path.isfile(os.path.join(folder, one))), None)
        if TEMPORARY in name:
            raise unfinished(folder)
        if wanted not in (None, name):
            found.skipped.append(Skipped(name, f"the item {wanted} was asked for"))
        elif os.path.isfile(os.path.join(folder, TREE)):
            found.trees[name] = folder
        elif json is not None:
            found.meta[name] = read_json(os.path.join(folder, json))
        else:
            kind = str(handlers.get(name, "an unknown handler")).rpartition(".")[2]
            found.skipped.append(Skipped(name, f"an item of {kind}, which is neither a tree nor JSON"))
    if not found.trees:
        raise FormatError(
            f"{path}: none of its items is a tree of arrays ({', '.join(names) or 'there are none'})",
            hint="the save was interrupted, or the step was not copied completely",
        )
    return found


def unfinished(path: str) -> FormatError:
    """What to say of a folder that Orbax never finished."""
    return FormatError(
        f"{path} was never finished: Orbax renames a folder when all of it is written",
        hint="take another step",
    )


@final
class _Reading:
    """From trees to arrays and scalars."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self.layouts: set[str] = set()
        self.arrays: list[ForeignArray] = []
        self.scalars: list[tuple[tuple[str, ...], Scalar]] = []
        self.skipped: list[Skipped] = []

    def add(self, folder: str, tree: Tree, prefix: tuple[str, ...]) -> None:
        self.layouts |= {"OCDBT" if tree.ocdbt else "plain", "zarr3" if tree.zarr3 else "zarr2"}
        store = _Tensors(self._library, folder, tree)
        for leaf in tree.leaves:
            keys = (*prefix, *leaf.keys)
            match KINDS.get(leaf.type):
                case "empty":
                    self.skipped.append(Skipped(join(keys), _EMPTY[leaf.type]))
                case "string":
                    self.scalars.append((keys, tree.strings[leaf.stored]))
                case None:
                    why = f"a leaf of type {leaf.type}, which a handler of its own wrote"
                    self.skipped.append(Skipped(join(keys), why))
                case kind:
                    self._tensor(store, tree, leaf, keys, scalar=kind == "scalar")

    def _tensor(
        self, store: _Tensors, tree: Tree, leaf: Leaf, keys: tuple[str, ...], *, scalar: bool
    ) -> None:
        try:
            array = OrbaxArray(store, keys, leaf.stored, tree.key_impls.get(leaf.stored))
        except TreeError as error:
            self.skipped.append(Skipped(join(keys), error.message))
            return
        if scalar and not array.shape:
            value = np.empty((), dtype_of(array.dtype).numpy)
            array.read_into(value, ())
            self.scalars.append((keys, _python(value)))
        else:
            self.arrays.append(array)


def _python(value: npt.NDArray[Any]) -> Scalar:
    """The Python scalar that Orbax itself would restore."""
    found = value.item()
    if isinstance(found, bool | int | float | complex):
        return found
    return float(found)  # of a dtype that numpy does not know, such as bfloat16


@final
class _Tensors:
    """The arrays of one tree, by Orbax's names of them."""

    def __init__(self, library: ModuleType, folder: str, tree: Tree) -> None:
        self.library = library
        self.folder = folder
        self._tree = tree
        base = {"driver": "file", "path": os.path.join(os.path.abspath(folder), "")}
        self._kvstore: dict[str, Any] = {"driver": "ocdbt", "base": base} if tree.ocdbt else base
        self._keys = self.done("open", "", library.KvStore.open(self._kvstore))

    def done(self, what: str, name: str, future: Any) -> Any:
        """The result of one of the library's futures. Fails: FormatError in its words."""
        try:
            return future.result(timeout=_WAIT_S)
        except TimeoutError:
            raise DeadlineError(f"{self.folder}: to {what} {name} took longer than {_WAIT_S:.0f} s") from None
        # The library raises these for files that are missing, damaged or not to be read.
        except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
            raise FormatError(
                f"{self.folder}: cannot {what} {name or 'the store'}: {reason(error)}",
                hint="the checkpoint is damaged or was not copied completely; take another copy or step",
            ) from None

    def opened(self, name: str) -> Any:
        """The tensorstore of an array, all of whose chunks are there."""
        driver = "zarr3" if self._tree.zarr3 else "zarr"
        place = self._kvstore.get("path", "") + name + "/"
        spec = {"driver": driver, "kvstore": {**self._kvstore, "path": place}}
        found = self.done("open", name, self.library.open(spec, open=True, read=True))
        if self._tree.complete:
            self._check_chunks(name, found)
        return found

    def _check_chunks(self, name: str, found: Any) -> None:
        prefix = f"{name}/"
        span = self.library.KvStore.KeyRange(prefix, f"{name}0")  # "0" follows "/"
        there = set(self.done("list", name, self._keys.list(span, strip_prefix_length=len(prefix.encode()))))
        missing = [key for key in self._chunk_keys(name, found) if key.encode() not in there]
        if missing:
            raise FormatError(
                f"{self.folder}: {name} lacks {len(missing):,} of its chunks, such as {missing[0]}",
                hint="it was not copied completely, or a file was removed; take another copy or step",
            )

    def _chunk_keys(self, name: str, found: Any) -> Iterator[str]:
        """The keys of all chunks of an array, below its own."""
        metadata = found.spec().to_json()["metadata"]
        chunk = found.chunk_layout.write_chunk.shape or ()
        counts = [range(-(-size // part)) for size, part in zip(found.shape, chunk, strict=True)]
        if self._tree.zarr3:
            encoding = metadata.get("chunk_key_encoding", {"name": "default"})
            version2 = encoding["name"] == "v2"
            separator = encoding.get("configuration", {}).get("separator", "." if version2 else "/")
            head = [] if version2 else ["c"]
        else:
            separator, head = metadata.get("dimension_separator", "."), []
        for cell in product(*counts):
            yield separator.join([*head, *map(str, cell)]) or "0"


@final
class OrbaxArray(ForeignArray):
    """A zarr array. Reading decodes whole chunks: its memory is that of the chunks that a box meets."""

    def __init__(self, store: _Tensors, keys: tuple[str, ...], stored: str, impl: str | None) -> None:
        self._store = store
        self._tensor = store.opened(stored)
        self.keys = keys
        self.source_name = stored
        self.dtype = dtype_of(self._tensor.dtype.numpy_dtype).name
        self.shape = tuple(map(int, self._tensor.shape))
        self.grain = tuple(map(int, self._tensor.chunk_layout.read_chunk.shape or self.shape))
        self.kind = "array" if impl is None else "key"
        self.impl = impl

    def read_into(self, into: npt.NDArray[Any], box: Box) -> None:
        part = self._tensor[tuple(slice(lo, hi) for lo, hi in box)] if box else self._tensor
        np.copyto(into, self._store.done("read", self.source_name, part.read(order="C")))
        if into.nbytes >= _TRIMMED:
            trim()

    def release(self) -> None:
        pass
