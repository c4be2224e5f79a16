"""The state that is saved: a model's worth of arrays, the same for every subject."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

MIB = 1 << 20
_COLUMNS = (384, 768, 1536, 3072)  # divisible by 12, so that 3 and 4 shards both cut evenly
_ROWS = 12

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """How large a state is and of what it is made."""

    nbytes: int
    num_large: int
    num_small: int
    low: int
    high: int

    def __str__(self) -> str:
        return (
            f"{self.nbytes / 2**30:.3g} GiB in {self.num_large} arrays of {self.low / MIB:.2g} to "
            f"{self.high / MIB:.2g} MiB and {self.num_small:,} tiny ones"
        )


def spec_of(nbytes: int, *, smoke: bool = False) -> StateSpec:
    """The issue's state at 1.5 GiB; other sizes keep its proportions."""
    if smoke:
        return StateSpec(nbytes, 12, 20, nbytes // 48, nbytes // 4)
    scale = nbytes / (1.5 * 2**30)
    return StateSpec(nbytes, 300, 2000, max(int(MIB * scale), 1 << 16), int(64 * MIB * scale))


def _large_sizes(spec: StateSpec) -> list[int]:
    """Sizes from low to high, log-uniform but bent towards small so that they add up."""
    places = np.linspace(0.0, 1.0, spec.num_large)
    ratio = math.log(spec.high / spec.low)

    def sizes(bend: float) -> Array:
        return np.asarray(spec.low * np.exp(ratio * places**bend))

    small, large = 0.1, 50.0
    for _ in range(60):
        bend = (small + large) / 2
        if sizes(bend).sum() > spec.nbytes:
            small = bend
        else:
            large = bend
    return [int(size) for size in sizes(small)]


def shapes(spec: StateSpec) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Name, shape and dtype of every array, the same at every call."""
    rng = np.random.default_rng(20_240)
    dtypes = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
    sizes = rng.permutation(_large_sizes(spec))
    for number, size in enumerate(sizes.tolist()):
        dtype = dtypes[number % 2]
        # At least 12 rows of the chosen width must fit.
        fits = [c for c in _COLUMNS if c * _ROWS * dtype.itemsize <= size] or [12]
        columns = int(rng.choice(fits))
        rows = max(1, round(size / (columns * dtype.itemsize * _ROWS))) * _ROWS
        yield f"large/{number:04}", (rows, columns), dtype
    for number in range(spec.num_small):
        yield f"small/{number:04}", (int(rng.integers(1, 1024)),), dtypes[number % 2]


def host_arrays(spec: StateSpec) -> Iterator[tuple[str, Array]]:
    """The arrays, one after the other: random bits, so that nothing compresses."""
    rng = np.random.default_rng(7)
    for name, shape, dtype in shapes(spec):
        count = math.prod(shape) * dtype.itemsize
        words = rng.integers(0, 2**64, -(-count // 8), np.uint64)
        yield name, words.view(np.uint8)[:count].view(dtype).reshape(shape)


def nest(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The flat state as the two-level tree that a trainer would have."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        group, _, leaf = name.partition("/")
        tree.setdefault(group, {})[leaf] = value
    return tree


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are equal to the bit, NaNs included."""
    return (
        a.shape == b.shape
        and a.dtype.itemsize == b.dtype.itemsize
        and bool(np.array_equal(_bytes(a), _bytes(b)))
    )


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
