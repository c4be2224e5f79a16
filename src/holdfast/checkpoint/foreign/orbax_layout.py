"""What an exported step becomes in Orbax: names, leaf types, and the JSON files that say so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final, final

from holdfast.arrays import decode_scalar, match, split
from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.foreign.orbax_tree import ARRAYS, DICT, SEQUENCE, STEP, STRINGS, TREE
from holdfast.checkpoint.foreign.report import Renamed
from holdfast.checkpoint.foreign.source import Scalar, Skipped
from holdfast.errors import TreeError, UsageError
from holdfast.format import ArrayEntry, Manifest

_HANDLER: Final = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


@final
class ExportTree:
    """What of a step goes to Orbax, under which names. Fails: UsageError for nothing, or two of one name."""

    def __init__(
        self,
        library: ModuleType,
        manifest: Manifest,
        patterns: Sequence[str] | None,
        rename: Callable[[str], str],
        empty: Sequence[str],
    ) -> None:
        self.skipped: list[Skipped] = []
        self.renamed: list[Renamed] = []
        self.arrays: list[tuple[str, ArrayEntry]] = []
        self.scalars: dict[str, Scalar | None] = {}
        self._patterns = patterns
        self._rename = rename
        for array in manifest.arrays:
            name = self._taken(array.name, _array_problem(library, array))
            if name is not None:
                self.arrays.append((name, array))
        for scalar in manifest.scalars:
            value = decode_scalar(scalar.type, scalar.value)
            name = self._taken(scalar.name, _scalar_problem(value))
            if name is not None:
                self.scalars[name] = value
        self.scalars.update(dict.fromkeys(empty))
        self._check_names([*(name for name, _ in self.arrays), *self.scalars])
        self.sequences = _sequences([split(name) for name in self.names()])

    def names(self) -> list[str]:
        """Those of all leaves, sorted."""
        return sorted([*(name for name, _ in self.arrays), *self.scalars])

    def _taken(self, path: str, problem: str | None) -> str | None:
        """The new name of a leaf; None if it stays behind."""
        if self._patterns is not None and not match(self._patterns, path):
            problem = "matches none of the patterns that were given"
        if problem is not None:
            self.skipped.append(Skipped(path, problem))
            return None
        name = self._rename(path)
        if name != path:
            self.renamed.append(Renamed(path, name))
        return name

    def _check_names(self, names: list[str]) -> None:
        """Orbax joins keys by dots, so that names which are apart here may be the same there."""
        seen: dict[str, str] = {}
        for name in names:
            stored = stored_name(name)
            if not stored:
                raise UsageError(
                    "the step is a single array; Orbax needs a name for it", hint="--map '=NAME'"
                )
            if stored in seen:
                raise TreeError(
                    f"{name} and {seen[stored]} would both be {stored!r} in Orbax",
                    hint="rename one: --map OLD=NEW",
                )
            seen[stored] = name
        if not names:
            raise UsageError(
                "nothing in the step is to be moved", hint="its arrays match none of the patterns"
            )


def stored_name(name: str) -> str:
    """What Orbax calls an array in its store."""
    return ".".join(split(name))


def _array_problem(library: Any, entry: ArrayEntry) -> str | None:
    if not entry.nbytes:
        return "Orbax does not store arrays without elements"
    try:
        library.dtype(dtype_of(entry.dtype).numpy)
    except (ValueError, TypeError):
        return f"tensorstore has no dtype {entry.dtype}"
    return None


def _scalar_problem(value: Scalar | None) -> str | None:
    if isinstance(value, bytes):
        return "Orbax stores no bytes"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "Orbax stores no integer beyond 64 bits"
    return None


def _sequences(paths: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """The nodes whose children are called 0, 1, 2, ...: lists, as far as names can tell."""
    children: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            children.setdefault(path[:depth], set()).add(key)
    return {node for node, keys in children.items() if keys == {str(at) for at in range(len(keys))}}


def describe(folder: str, tree: ExportTree, manifest: Manifest) -> None:
    """The JSON files that say what the arrays are, durable."""
    leaves: dict[str, Any] = {}
    kinds: dict[str, tuple[str, ArrayEntry | None]] = {
        **{name: ("scalar" if value is not None else "None", None) for name, value in tree.scalars.items()},
        **{name: ("string", None) for name, value in tree.scalars.items() if isinstance(value, str)},
        **{name: ("np.ndarray" if one.kind == "array" else "jax.Array", one) for name, one in tree.arrays},
    }
    for name in tree.names():
        path, (word, _) = split(name), kinds[name]
        leaves[repr(path)] = {
            "key_metadata": [
                {"key": key, "key_type": SEQUENCE if path[:at] in tree.sequences else DICT}
                for at, key in enumerate(path)
            ],
            "value_metadata": {"value_type": word, "skip_deserialize": word == "None"},
        }
    now = int(manifest.created * 1e9)
    keys = [
        {
            "array_metadata": {
                "param_name": stored_name(name),
                "write_shape": list(entry.shape),
                "chunk_shape": list(entry.shape),
                "ext_metadata": {"random_key_impl": entry.impl},
            }
        }
        for name, entry in tree.arrays
        if entry.kind == "key"
    ]
    described = {
        TREE: {
            "tree_metadata": leaves,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        },
        STEP: {
            "item_handlers": _HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": {"holdfast": {"step": manifest.save.step, "meta": manifest.meta}},
        },
    }
    strings = {stored_name(name): value for name, value in tree.scalars.items() if isinstance(value, str)}
    if strings:
        described[STRINGS] = _nested(strings)
    if keys:
        described[os.path.join(ARRAYS, "process_0")] = {"array_metadatas": keys}
    for name, content in described.items():
        _write(os.path.join(folder, name), json.dumps(content, allow_nan=False))
    _write(os.path.join(folder, "commit_success.txt"), f"Checkpoint commit was successful to {folder}")


def _nested(strings: dict[str, str]) -> dict[str, Any]:
    """Strings as Orbax finds them: by a JSON pointer, in which `/` nests and `~` escapes."""
    root: dict[str, Any] = {}
    for name, value in strings.items():
        *above, last = (key.replace("~1", "/").replace("~0", "~") for key in name.split("/"))
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return root


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
