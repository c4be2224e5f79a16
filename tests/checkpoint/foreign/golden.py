"""What the golden checkpoints hold, and how to unpack them.

`make_orbax.py` and `make_dcp.py` made them, once, with the libraries whose versions are in their names.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from holdfast.arrays import dtype
from holdfast.checkpoint import StepReader, step_manifest
from holdfast.storage import LocalStore

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name.removesuffix(".tar.gz") for path in GOLDEN.glob("*.tar.gz"))
ORBAX = [name for name in NAMES if name.startswith("orbax-")]
MANAGERS = [name for name in NAMES if name.startswith("manager-")]
DCP = [name for name in NAMES if name.startswith("dcp-")]

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


def noise(shape: tuple[int, ...], kind: Any, seed: int) -> Any:
    """Values of any dtype, the same wherever they are made."""
    count = int(np.prod(shape, dtype=np.int64))
    values = (np.arange(count) * 7919 + seed * 104729) % 251 - 100
    return (values / 8).astype(np.float32).astype(kind).reshape(shape)


W = noise((8, 8), np.float32, 1)
STATE: Arrays = {
    "params/dense/kernel": W,
    "params/dense/bias": noise((8,), ml_dtypes.bfloat16, 2),
    "params/norm": noise((3,), np.float16, 3),
    "params/f8": noise((5,), ml_dtypes.float8_e4m3fn, 4),
    "opt/0/count": np.asarray(17, np.int32),
    "opt/0/mu/dense/kernel": noise((8, 8), np.float32, 5),
    "layers/0/w": noise((2, 3), np.float64, 6),
    "layers/1/w": noise((3, 2), np.int8, 7),
    "flags": np.asarray([True, False, True]),
    "dots.and~1slash~0tilde": noise((2,), np.complex64, 8),
}
"""By Holdfast's names. The kernel and its moment are sharded over four devices or writers."""


def unpacked(name: str, into: Path) -> Path:
    """The checkpoint of that name, in a folder of its own."""
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        archive.extractall(into / name, filter="data")
    return into / name


def packed(folder: Path, name: str) -> Path:
    """Put a folder into the golden ones."""
    target = GOLDEN / f"{name}.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=_anonymous)
    return target


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def stored(path: Path, step: int) -> Arrays:
    """The arrays of a step in a Holdfast folder, every block verified."""
    store = LocalStore(path)
    manifest = step_manifest(store, step)
    reader = StepReader(store, manifest)
    return {
        entry.name: reader.read(entry, tuple((0, size) for size in entry.shape))
        .view(dtype(entry.dtype).numpy)
        .reshape(entry.shape)
        for entry in manifest.arrays
    }


def scalars(path: Path, step: int) -> dict[str, tuple[str, str]]:
    """The scalars of a step, as (type, text)."""
    return {one.name: (one.type, one.value) for one in step_manifest(LocalStore(path), step).scalars}


def assert_equal(found: Arrays, expected: Arrays) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
