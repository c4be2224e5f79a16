"""Makes the golden files of format version 1: `python -m tests.format.make_golden`.

The output is the same bytes on every machine; test_golden.py checks that. Never regenerate the
files to make a test pass: steps that users have saved would no longer load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from holdfast import format as fmt
from holdfast.arrays import encode_scalar
from holdfast.arrays.dtypes import dtype
from holdfast.format.manifest import owned_cells

GOLDEN = Path(__file__).parent / "golden" / "v1"
SAVE = fmt.SaveId("golden", 1200, "a1")
OTHER = fmt.SaveId("golden", 1200, "b2")
STEP = fmt.step_folder(SAVE.step)
RAMP = np.arange(48, dtype=np.float32).reshape(8, 6) / 4 - 5

Files = dict[str, bytes]


def block_digests(data: bytes | bytearray, save: fmt.SaveId, part: int) -> str:
    """The digests of all blocks of a part file, as `PartFile.blocks` has them."""
    ranges = [fmt.block_range(block, len(data)) for block in range(fmt.num_blocks(len(data)))]
    return "".join(
        fmt.block_digest(data[begin:end], fmt.block_seed(save, part, block)).hex()
        for block, (begin, end) in enumerate(ranges)
    )


@dataclass(frozen=True)
class Array:
    """An array to save: its value, its grid, and who owns each cell."""

    value: np.ndarray[Any, Any]
    cuts: tuple[tuple[int, ...], ...] | None = None
    owners: tuple[int, ...] = (0,)
    axes: tuple[str | None, ...] | None = None
    impl: str | None = None


def golden_arrays() -> dict[str, Array]:
    """Several dtypes, ranks and shardings; the values are exact in every dtype."""
    both = (0, 1)
    return {
        "params/w": Array(RAMP, ((0, 4, 8), (0, 6)), both, ("embed", "mlp")),
        "params/grid": Array(
            np.arange(24, dtype=np.int16).reshape(4, 6), ((0, 2, 4), (0, 5, 6)), (0, 1, 1, 0)
        ),
        "params/page": Array(np.arange(1024, dtype=np.uint32), None, (1,)),
        "params/b": Array(np.arange(-3, 4).astype(ml_dtypes.bfloat16), None, (0,), (None,)),
        "params/f8": Array(np.arange(4).astype(ml_dtypes.float8_e4m3fn), None, (1,)),
        "params/q": Array(np.arange(-8, 8).astype(ml_dtypes.int4), None, (1,)),
        "params/fft": Array(np.array([1 + 2j, -0.5j, 3], np.complex64), None, (0,)),
        "params/wide": Array(np.array([1 + 2j, -0.5j], np.complex128), None, (1,)),
        "opt/count": Array(np.array(7, np.int32), None, (0,)),
        "opt/empty": Array(np.zeros((0, 3), np.float32), None, (1,)),
        "mask": Array(np.arange(9) % 2 == 0, None, (0,)),
        "rng": Array(np.array([0, 42], np.uint32), None, (1,), impl="threefry2x32"),
    }


def golden_scalars() -> dict[str, Any]:
    return {
        "step": 1200, "big": -(2**100), "lr": 3e-4, "loss": float("nan"), "floor": -0.0,
        "name": "naïve ☃", "done": False, "nothing": None, "phase": 1 - 2j, "blob": b"\x00\xff",
    }  # fmt: skip


META: dict[str, Any] = {"tokens": 2**40, "best": {"loss": 2.5, "tags": ["a", None, True]}}


def make_step(save: fmt.SaveId, arrays: Mapping[str, Array], scalars: Mapping[str, Any], meta: Any) -> Files:
    """All files of a step folder by name."""
    entries = [_entry(name, array) for name, array in arrays.items()]
    files: Files = {}
    parts = []
    for part in sorted({owner for array in arrays.values() for owner in array.owners}):
        index = _make_part(save, part, arrays, entries, files)
        name = fmt.index_name(part, save.attempt)
        files[name] = fmt.encode_index(index)
        parts.append(_part_entry(part, name, files[name], index.nbytes))
    files[fmt.MANIFEST] = fmt.encode_manifest(
        fmt.Manifest(
            save=save,
            created=1767225600.25,
            nbytes=sum(entry.nbytes for entry in entries),
            writer={"holdfast": "0.1.0"},
            meta=meta,
            parts=tuple(parts),
            scalars=tuple(fmt.ScalarEntry(k, *encode_scalar(v)) for k, v in scalars.items()),
            arrays=tuple(entries),
        )
    )
    return files


def _entry(name: str, array: Array) -> fmt.ArrayEntry:
    shape = array.value.shape
    return fmt.ArrayEntry(
        name=name,
        dtype=dtype(array.value.dtype).name,
        shape=shape,
        kind="key" if array.impl else "array",
        impl=array.impl,
        axes=array.axes,
        cuts=array.cuts or tuple((0, dim) for dim in shape),
        owners=fmt.encode_owners(array.owners),
    )


def _make_part(
    save: fmt.SaveId,
    part: int,
    arrays: Mapping[str, Array],
    entries: Sequence[fmt.ArrayEntry],
    files: Files,
) -> fmt.PartIndex:
    """Write one data file into `files`; returns its index."""
    pieces = [
        fmt.Piece(entry.name, entry.dtype, entry.shape, start, stop)
        for entry in entries
        for start, stop in owned_cells(entry, part)
    ]
    layout = fmt.lay_out(part, pieces)
    name = fmt.data_name(part, save.attempt)
    data = bytearray(layout.header)
    for i in layout.order:
        at = tuple(slice(a, b) for a, b in zip(pieces[i].start, pieces[i].stop, strict=True))
        data += arrays[pieces[i].name].value[at].tobytes()
    files[name] = bytes(data)
    blocks = block_digests(data, save, part)
    return fmt.PartIndex(
        version=fmt.VERSION,
        save=save,
        part=part,
        files=(fmt.PartFile(name, layout.size, blocks),),
        slices=layout.slices,
    )


def _part_entry(part: int, name: str, data: bytes, nbytes: int) -> fmt.PartEntry:
    return fmt.PartEntry(part=part, index=name, size=len(data), digest=fmt.digest(data), nbytes=nbytes)


def golden_step() -> Files:
    return make_step(SAVE, golden_arrays(), golden_scalars(), META)


def flip(data: bytes, bit: int) -> bytes:
    """`data` with one bit flipped; negative bits count from the end."""
    at, shift = divmod(bit % (8 * len(data)), 8)
    return data[:at] + bytes([data[at] ^ (1 << shift)]) + data[at + 1 :]


def reroot(body: bytes) -> bytes:
    """A manifest of these bytes (without the opening brace), with the right root."""
    return b'{"root":"' + fmt.digest(body).encode() + b'",' + body


def reindex(files: Files, part: int) -> Files:
    """`files` with the digests above a changed data file made to match it."""
    data_name, name = fmt.data_name(part, SAVE.attempt), fmt.index_name(part, SAVE.attempt)
    index = fmt.decode_index(files[name])
    data = files[data_name]
    file = fmt.PartFile(data_name, len(data), block_digests(data, index.save, part))
    changed = fmt.encode_index(msgspec.structs.replace(index, files=(file,)))
    manifest = fmt.decode_manifest(files[fmt.MANIFEST])
    parts = tuple(
        _part_entry(part, name, changed, entry.nbytes) if entry.part == part else entry
        for entry in manifest.parts
    )
    top = fmt.encode_manifest(msgspec.structs.replace(manifest, parts=parts))
    return files | {name: changed, fmt.MANIFEST: top}


def damaged_steps() -> dict[str, tuple[Files, str, str]]:
    """Each damage by name: the step's files, the error's type, and what its text must contain."""
    good = golden_step()
    older = golden_arrays() | {"params/w": replace(golden_arrays()["params/w"], value=RAMP - 1)}
    stale = make_step(OTHER, older, golden_scalars(), META)
    one, two = fmt.data_name(0, "a1"), fmt.data_name(1, "a1")
    index, index_two = fmt.index_name(0, "a1"), fmt.index_name(1, "a1")
    body = good[fmt.MANIFEST][43:]
    huge = good | {one: (1 << 40).to_bytes(8, "little") + good[one][8:]}
    return {
        "bit-in-data": (
            good | {two: flip(good[two], 8 * 4096 + 3)},
            "CorruptError", f"{two}: block 0 (bytes 0 to {len(good[two])}) is damaged",
        ),
        "bit-in-header": (
            good | {one: flip(good[one], 8 * 20)},
            "CorruptError", f"{one}: block 0 (bytes 0 to {len(good[one])}) is damaged",
        ),
        "bit-in-index": (
            good | {index: flip(good[index], 8 * 60)},
            "CorruptError", f"{index}: digest",
        ),
        "bit-in-manifest": (
            good | {fmt.MANIFEST: flip(good[fmt.MANIFEST], -8 * 40)},
            "CorruptError", "manifest.json: the root says",
        ),
        "truncated-part": (
            good | {two: good[two][:-1]},
            "CorruptError", f"{two}: {len(good[two]) - 1} bytes, but the index says",
        ),
        "swapped-parts": (
            good | {one: good[two], two: good[one]},
            "CorruptError", f"{one}: {len(good[two])} bytes, but the index says {len(good[one])}",
        ),
        "swapped-indexes": (
            good | {index: good[index_two], index_two: good[index]},
            "CorruptError", f"{index}: {len(good[index_two])} bytes, but the manifest says",
        ),
        "stale-part": (
            good | {one: stale[fmt.data_name(0, "b2")]},
            "CorruptError", f"{one}: block 0",
        ),
        "stale-index": (
            good | {index: stale[fmt.index_name(0, "b2")]},
            "CorruptError", f"{index}: digest",
        ),
        "oversized-header": (
            reindex(huge, 0),
            "FormatError", f"{one}: offset 0 says the header is 1099511627776 bytes",
        ),
        "newer-version": (
            good | {fmt.MANIFEST: reroot(body.replace(b'"version":1', b'"version":2', 1))},
            "VersionError", "manifest.json: format version 2, this Holdfast reads up to 1",
        ),
        "other-format": (
            good | {fmt.MANIFEST: reroot(body.replace(b'"holdfast"', b'"orbax"', 1))},
            "FormatError", "manifest.json: format 'orbax', expected 'holdfast'",
        ),
        "missing-index": (
            {name: data for name, data in good.items() if name != index_two},
            "FormatError", f"{index_two} is missing",
        ),
        "missing-part": (
            {name: data for name, data in good.items() if name != one},
            "FormatError", f"{one} is missing",
        ),
    }  # fmt: skip


def golden_files() -> dict[str, bytes]:
    """Every golden file by its path below `GOLDEN`; damaged steps hold only what differs."""
    good = golden_step()
    out = {f"{STEP}/{name}": data for name, data in good.items()}
    cases = {}
    for case, (files, error, text) in damaged_steps().items():
        missing = sorted(set(good) - set(files))
        cases[case] = {"error": error, "text": text, "missing": missing}
        for name, data in files.items():
            if data != good[name]:
                out[f"damaged/{case}/{name}"] = data
    out["damaged/expected.json"] = json.dumps(cases, indent=1).encode() + b"\n"
    return out


def main() -> None:
    for name, data in golden_files().items():
        path = GOLDEN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{len(data):8d}  {path}")


if __name__ == "__main__":
    main()
