"""The trees that are moved: one array, or many, of the same bytes in all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

_LINE = 64
_PATTERN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """`num_arrays` arrays of float32, `nbytes` in all."""

    nbytes: int
    num_arrays: int

    def __post_init__(self) -> None:
        if self.nbytes < _LINE * self.num_arrays:
            raise ValueError(f"{self.nbytes} bytes are too few for {self.num_arrays} arrays")

    @property
    def title(self) -> str:
        size = f"{self.nbytes / 2**30:g} GiB" if self.nbytes >= 2**30 else f"{self.nbytes / 2**20:g} MiB"
        return f"{size} in {'one array' if self.num_arrays == 1 else f'{self.num_arrays:,} arrays'}"

    def encoded(self) -> dict[str, int]:
        """As the child processes get it."""
        return asdict(self)

    def sizes(self) -> list[int]:
        """The bytes of each array: whole lines, as equal as they can be, the rest in the last."""
        lines, each = self.nbytes // _LINE, self.nbytes // _LINE // self.num_arrays
        return [_LINE * each] * (self.num_arrays - 1) + [_LINE * (lines - each * (self.num_arrays - 1))]


def lines(nbytes: int) -> NDArray[np.uint8]:
    """Memory that begins at a line, its pages touched: XLA takes over only such."""
    room = np.zeros(nbytes + _LINE, np.uint8)
    start = -room.ctypes.data % _LINE
    found = room[start : start + nbytes]
    found.fill(0)
    return found


def filled(spec: TreeSpec) -> NDArray[np.uint8]:
    """All bytes of the tree, one array after the other; no two stretches of 8 MiB are equal."""
    flat = lines(sum(spec.sizes()))
    pattern = np.random.default_rng(4).integers(0, 256, _PATTERN_BYTES, np.uint8)
    for at in range(0, flat.nbytes, _PATTERN_BYTES):
        part = flat[at : at + _PATTERN_BYTES]
        part[:] = pattern[: part.nbytes]
        part[:8] = np.frombuffer(np.uint64(at).tobytes(), np.uint8)
    return flat


def cut(flat: NDArray[np.uint8], spec: TreeSpec) -> dict[str, NDArray[np.float32]]:
    """The tree over these bytes; its arrays are views."""
    tree, at = {}, 0
    for number, size in enumerate(spec.sizes()):
        tree[f"w{number:04}"] = flat[at : at + size].view(np.float32)
        at += size
    return tree


def digest(tree: dict[str, Any]) -> str:
    """Of all bytes, in the order of the names."""
    found = xxhash.xxh3_128()
    for name in sorted(tree):
        found.update(np.ascontiguousarray(tree[name]).view(np.uint8).data)
    return found.hexdigest()
