"""The user's metadata: a JSON object, checked where it is handed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.arrays.text import show, text_problem
from holdfast.errors import TreeError
from holdfast.format.limits import MAX_MANIFEST, MAX_META_DEPTH, MAX_META_INT_BITS


def check_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `meta` in plain JSON types (tuples become lists).

    Raises TreeError with the path of what JSON cannot hold exactly: other types, NaN and
    infinities, keys that are not strings, lone surrogates, very long ints, deep nesting.
    """
    if not isinstance(meta, Mapping):
        raise TreeError(f"meta must be a dict, not {type(meta).__name__}")
    copy = _copy(meta, "meta", 0)
    assert isinstance(copy, dict)
    return copy


def _copy(value: object, path: str, depth: int) -> object:
    # Exact about bool before int; subclasses such as np.float64 or IntEnum become the plain type.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if problem := text_problem(value, MAX_MANIFEST):
            raise TreeError(f"{path} {problem}")
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > MAX_META_INT_BITS:
            raise TreeError(f"{path} is an int of {value.bit_length()} bits", hint="store a string")
        return int.__index__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TreeError(
                f"{path} is {float(value)}, which JSON cannot hold",
                hint="store it as a string, or as a scalar of the saved tree",
            )
        return float.__float__(value)
    if depth >= MAX_META_DEPTH:
        raise TreeError(f"{path[:200]} is nested deeper than {MAX_META_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if problem := text_problem(key):
                raise TreeError(f"a key of {path}, {show(key)}, {problem}")
        return {str(k): _copy(v, f"{path}[{show(k)}]", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise TreeError(
        f"{path} is a {type(value).__qualname__}, which JSON cannot hold",
        hint="use dict, list, str, int, float, bool and None; arrays belong into the saved tree",
    )
