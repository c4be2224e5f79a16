"""Small repositories, made with the reference library or byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from holdfast.checkpoint.hub.packed import WORDS

Array = np.ndarray[Any, Any]


def sharded(folder: Path, *files: Mapping[str, Array]) -> Path:
    """A repository of several files with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    for at, tensors in enumerate(files, 1):
        name = f"model-{at:05d}-of-{len(files):05d}.safetensors"
        save_file(dict(tensors), folder / name)
        names |= dict.fromkeys(tensors, name)
    text = {"metadata": {"total_size": 0}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(text))
    return folder


def single(folder: Path, tensors: Mapping[str, Array]) -> Path:
    """A repository of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def raw(folder: Path, header: Mapping[str, Any] | bytes, data: bytes, *, length: int | None = None) -> Path:
    """A file of these bytes: header as it is given, `length` as it claims."""
    folder.mkdir(parents=True, exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + text + data)
    return folder


def written(folder: Path) -> dict[str, Array]:
    """All tensors of a repository, as the reference library reads them."""
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def noise(word: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Random bits of a dtype that has one element per byte or more; no signalling NaN is spared."""
    kind = WORDS[word]
    count = int(np.prod(shape)) * kind.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if word == "BOOL" else 256, count, dtype=np.uint8)
    found: Array = bits.view(kind.numpy).reshape(shape)
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two arrays are equal in shape, dtype and every bit."""
    a, b = np.ascontiguousarray(one), np.ascontiguousarray(other)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
