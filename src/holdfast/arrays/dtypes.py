"""The dtype table: what an element is called, how wide it is, and how safetensors stores it.

Everything is little-endian and row-major. Dtypes that safetensors has no word for are stored as
U8 with the true dtype kept in the index: one byte per element where ml_dtypes keeps one element
per byte (int4, float4, float6, ...), a trailing dimension of bytes where an element is wider
(complex128). What counts as native was checked against safetensors 0.8 in both directions; its F4
and F6 words mean *packed* elements, which ml_dtypes does not have in memory, so they are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from holdfast.errors import TreeError


@dataclass(frozen=True, slots=True)
class DType:
    """One kind of element: its name, bytes in memory, safetensors word and numpy dtype."""

    name: str
    itemsize: int
    stored: str
    numpy: np.dtype[Any]

    @property
    def native(self) -> bool:
        """Whether safetensors has its own word for this dtype (False: stored as bytes)."""
        return self.stored != "U8" or self.name == "uint8"


_NUMPY_NATIVE = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}

_EXTENDED_NATIVE = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}

_EXTENDED_AS_BYTES = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int1",
    "uint1",
    "int2",
    "uint2",
    "int4",
    "uint4",
    "complex32",
    "bcomplex32",
)


def _table() -> dict[str, DType]:
    words = dict(_NUMPY_NATIVE)
    found: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in words}
    words["complex128"] = "U8"
    found["complex128"] = np.dtype("complex128")
    for name, word in (_EXTENDED_NATIVE | dict.fromkeys(_EXTENDED_AS_BYTES, "U8")).items():
        # Older ml_dtypes lack some of these; what cannot exist in memory needs no entry.
        scalar = getattr(ml_dtypes, name, None)
        if scalar is not None:
            words[name], found[name] = word, np.dtype(scalar)
    return {name: DType(name, found[name].itemsize, words[name], found[name]) for name in words}


TABLE: dict[str, DType] = _table()
"""Every supported dtype by name."""


def dtype(spec: str | np.dtype[Any] | type[Any] | DType) -> DType:
    """The table entry for a dtype name, numpy dtype or scalar type; TreeError if unsupported."""
    if isinstance(spec, str):
        if (found := TABLE.get(spec)) is not None:
            return found
        raise _unsupported(f"unknown dtype {spec!r}")
    if isinstance(spec, DType):
        return spec
    key: Any = spec  # mypy does not see that types are hashable
    return _of_numpy(key)


@lru_cache(maxsize=256)
def _of_numpy(spec: np.dtype[Any] | type[Any]) -> DType:
    try:
        kind = np.dtype(spec)
    except TypeError as error:
        raise _unsupported(f"{spec!r} is not a dtype") from error
    if kind.names is not None or kind.subdtype is not None:
        raise _unsupported(f"structured dtype {kind}", "store each field as an array of its own")
    if kind.kind == "O":
        raise _unsupported("object dtype: its elements are Python objects, not numbers")
    if kind.kind in "SUT":
        raise _unsupported(f"text dtype {kind}", "keep text in the checkpoint's metadata")
    entry = TABLE.get(kind.name)
    if entry is None:
        raise _unsupported(f"unsupported dtype {kind}")
    if entry.numpy != kind:
        raise _unsupported(f"{kind} is not little-endian", f"use array.astype({entry.name!r})")
    return entry


def stored_shape(spec: str | np.dtype[Any] | type[Any] | DType, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape under which safetensors sees an array of this dtype and shape."""
    entry = dtype(spec)
    if entry.native or entry.itemsize == 1:
        return tuple(shape)
    return (*shape, entry.itemsize)


def _unsupported(problem: str, hint: str | None = None) -> TreeError:
    supported = f"supported dtypes: {', '.join(TABLE)}"
    return TreeError(problem, hint=supported if hint is None else f"{hint}; {supported}")
