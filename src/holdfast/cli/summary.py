"""`holdfast ckpt show`: what the manifest of one step says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from holdfast.arrays import decode_scalar, match
from holdfast.cli import terminal
from holdfast.cli.terminal import Column
from holdfast.format import ArrayEntry, Manifest, ScalarEntry, decode_owners, num_cells
from holdfast.storage import Store


def selected(manifest: Manifest, patterns: Sequence[str]) -> list[ArrayEntry]:
    """The arrays that any of the name patterns matches; all of them without a pattern."""
    return [entry for entry in manifest.arrays if not patterns or match(patterns, entry.name)]


def say(manifest: Manifest, arrays: Sequence[ArrayEntry], *, pinned: bool, now: float) -> None:
    """The manifest for people."""
    created, old = terminal.moment(manifest.created), terminal.age(now - manifest.created)
    num_arrays = terminal.count(len(manifest.arrays), "array")
    writer = ", ".join(f"{name} {version}" for name, version in sorted(manifest.writer.items()))
    lines = {
        "save id": str(manifest.save),
        "created": f"{created} UTC (age {old})",
        "size": f"{terminal.size(manifest.nbytes)} ({manifest.nbytes:,} bytes) in {num_arrays}",
        "parts": str(len(manifest.parts)),
        "pinned": "yes" if pinned else "no",
        "format": f"version {manifest.version}",
        "written by": writer or "unknown",
    }
    terminal.say(f"step {manifest.save.step}")
    for name, value in lines.items():
        terminal.say(f"  {name:<10}  {value}")
    if manifest.meta:
        terminal.say("\nmeta")
        text = json.dumps(manifest.meta, indent=2, ensure_ascii=False)
        terminal.say("\n".join(f"  {line}" for line in text.splitlines()))
    if manifest.scalars:
        terminal.say("\nscalars")
        columns = (Column("NAME", fold=True), Column("TYPE"), Column("VALUE", fold=True))
        rows = [
            (entry.name, entry.type, terminal.shorten(scalar_text(entry), 60)) for entry in manifest.scalars
        ]
        terminal.say_table(columns, rows, indent=2)
    if arrays:
        terminal.say("\narrays")
        _say_arrays(arrays)


def _say_arrays(arrays: Sequence[ArrayEntry]) -> None:
    columns = (
        Column("NAME", fold=True),
        Column("DTYPE"),
        Column("SHAPE"),
        Column("GRID"),
        Column("BYTES", right=True),
        Column("PARTS"),
    )
    rows = [
        (
            entry.name,
            dtype_text(entry),
            shape_text(entry.shape),
            "x".join(map(str, grid(entry))) or "-",
            f"{entry.nbytes:,}",
            terminal.ranges(parts(entry), ","),
        )
        for entry in arrays
    ]
    terminal.say_table(columns, rows, indent=2)


def as_json(
    store: Store, manifest: Manifest, arrays: Sequence[ArrayEntry], *, pinned: bool
) -> dict[str, Any]:
    """The manifest as one object."""
    save = manifest.save
    return {
        "path": store.root,
        "step": save.step,
        "save": {"run": save.run, "step": save.step, "attempt": save.attempt},
        "created": terminal.iso(manifest.created),
        "bytes": manifest.nbytes,
        "pinned": pinned,
        "format_version": manifest.version,
        "writer": manifest.writer,
        "meta": manifest.meta,
        "parts": [
            {"part": part.part, "index": part.index, "digest": part.digest, "bytes": part.nbytes}
            for part in manifest.parts
        ],
        "scalars": [
            {"name": entry.name, "type": entry.type, "value": scalar_json(entry)}
            for entry in manifest.scalars
        ],
        "arrays": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "kind": entry.kind,
                "impl": entry.impl,
                "axes": None if entry.axes is None else list(entry.axes),
                "grid": list(grid(entry)),
                "bytes": entry.nbytes,
                "parts": parts(entry),
            }
            for entry in arrays
        ],
    }


# ---- words for parts of a manifest


def dtype_text(entry: ArrayEntry) -> str:
    """The dtype; a PRNG key says so."""
    return entry.dtype if entry.kind == "array" else f"{entry.dtype} key({entry.impl})"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as JAX writes it: `(8, 6)`, `(3,)`, `()`."""
    return str(tuple(shape))


def grid(entry: ArrayEntry) -> tuple[int, ...]:
    """Into how many pieces each dimension is cut."""
    return tuple(len(points) - 1 for points in entry.cuts)


def parts(entry: ArrayEntry) -> list[int]:
    """The parts that hold some of an array, ascending."""
    return sorted(set(decode_owners(entry.owners, num_cells(entry.cuts))))


def scalar_text(entry: ScalarEntry) -> str:
    """A Python scalar as Python shows it."""
    return repr(decode_scalar(entry.type, entry.value))


def scalar_json(entry: ScalarEntry) -> Any:
    """A scalar as JSON: itself where JSON has it, else its text as stored ("nan", hex bytes, ...)."""
    value = decode_scalar(entry.type, entry.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return entry.value
