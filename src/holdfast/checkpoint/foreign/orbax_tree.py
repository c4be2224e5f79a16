"""What an Orbax checkpoint says about itself, in JSON: the tree of names, and what each leaf is.

`_METADATA` lists the leaves with their paths and types, `array_metadatas/process_N` the implementations of
PRNG keys, `_strings.json` the strings, `_CHECKPOINT_METADATA` the items of a step with their handlers. Read
and checked here; nothing here needs tensorstore.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import msgspec

from holdfast.arrays.text import reason, show
from holdfast.errors import FormatError, StorageError

TREE: Final = "_METADATA"
STEP: Final = "_CHECKPOINT_METADATA"
STRINGS: Final = "_strings.json"
ARRAYS: Final = "array_metadatas"
OCDBT: Final = "manifest.ocdbt"
PROCESS: Final = "ocdbt.process_"
TEMPORARY: Final = ".orbax-checkpoint-tmp"
"""In the name of every folder that Orbax has not finished."""
MAX_JSON: Final = 1 << 30

SEQUENCE: Final = 1
DICT: Final = 2
KINDS: Final[Mapping[str, Literal["array", "scalar", "string", "empty"]]] = {
    "jax.Array": "array",
    "np.ndarray": "array",
    "scalar": "scalar",
    "string": "string",
    "None": "empty",
    "Dict": "empty",
    "List": "empty",
    "Tuple": "empty",
    "NamedTuple": "empty",
}
"""Orbax's names of leaf types. Others belong to handlers that a user registered."""


class _Key(msgspec.Struct):
    key: str | int
    key_type: int


class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(msgspec.Struct):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _Tree(msgspec.Struct):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False
    custom_metadata: Any = None


class _ArrayMetadata(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _ArrayItem(msgspec.Struct):
    array_metadata: _ArrayMetadata


class _Arrays(msgspec.Struct):
    array_metadatas: tuple[_ArrayItem, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf: its path, Orbax's name of it, and the word for its type."""

    keys: tuple[str, ...]
    stored: str
    type: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree as its metadata describe it. `complete` says that every chunk of every array was written."""

    leaves: tuple[Leaf, ...]
    ocdbt: bool
    zarr3: bool
    complete: bool
    key_impls: Mapping[str, str]
    strings: Mapping[str, str]
    custom: Any


def read_tree(path: str) -> Tree:
    """The tree in a folder that has `_METADATA`. Fails: FormatError, StorageError."""
    file = os.path.join(path, TREE)
    found = _decoded(file, _Tree)
    leaves = []
    for leaf in found.tree_metadata.values():
        keys = tuple(str(one.key) for one in leaf.key_metadata)
        leaves.append(Leaf(keys, ".".join(keys), leaf.value_metadata.value_type))
    ocdbt = os.path.isfile(os.path.join(path, OCDBT))
    if not ocdbt and found.use_ocdbt is not False and _unmerged(path):
        raise FormatError(
            f"{path}: the files of its processes were never merged: there is no {OCDBT}",
            hint="the save was interrupted; take an earlier step",
        )
    return Tree(
        leaves=tuple(leaves),
        ocdbt=ocdbt,
        zarr3=found.use_zarr3,
        complete=found.store_array_data_equal_to_fill_value,
        key_impls=_key_impls(path),
        strings=_strings(path, [leaf.stored for leaf in leaves if KINDS.get(leaf.type) == "string"]),
        custom=found.custom_metadata,
    )


def _unmerged(path: str) -> bool:
    return any(name.startswith(PROCESS) for name in os.listdir(path))


def read_json(file: str) -> Any:
    """A JSON file. Fails: FormatError, StorageError."""
    return _decoded(file, Any)


def _decoded(file: str, kind: Any) -> Any:
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_JSON + 1)
    except OSError as error:
        raise StorageError.from_os(error, doing="read", path=file) from error
    if len(data) > MAX_JSON:
        raise FormatError(f"{file}: more than {MAX_JSON:,} bytes")
    try:
        # By Python's own reader: Orbax writes with Python's, which has NaN and infinities.
        value = json.loads(data.decode())
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()  # fails for halves of pairs, which are no text
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{file}: not what Orbax writes there: {reason(error)}",
            hint="the file is damaged, or from a version of Orbax that is not known (0.11 and 0.12 are)",
        ) from None


def _key_impls(path: str) -> dict[str, str]:
    """The implementation of each PRNG key, by Orbax's name of it; all processes say the same."""
    folder, found = os.path.join(path, ARRAYS), {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        decoded = _decoded(os.path.join(folder, name), _Arrays)
        for item in decoded.array_metadatas:
            impl = (item.array_metadata.ext_metadata or {}).get("random_key_impl")
            if isinstance(impl, str):
                found[item.array_metadata.param_name] = impl
    return found


def _strings(path: str, names: list[str]) -> dict[str, str]:
    """The strings, each under a JSON pointer made of its name, so that a `/` in it nests."""
    if not names:
        return {}
    file = os.path.join(path, STRINGS)
    table, found = _decoded(file, Any), {}
    for name in names:
        value = table
        for key in name.split("/"):
            unescaped = key.replace("~1", "/").replace("~0", "~")
            value = value.get(unescaped) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise FormatError(f"{file}: has no text under {show(name)}")
        found[name] = value
    return found
