"""Blends from a JSON file: what feeds which split, with which weights.

    {"train": {"web": 0.7, "code": 0.3}, "valid": {"held-out": 1}}     sources of each split, whole
    {"web": 0.7, "code": 0.3}                                         sources that data.split cuts
    {"train": ["70", "web", "30", "code"], "valid": ["held-out"]}     as Megatron-LM's per-split files have it
    ["70", "web", "30", "code"]

Paths are relative to the folder that the file lies in.
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from holdfast.errors import DataError
from holdfast.train.data.config import SPLITS, TINY, Source

_MOST_BYTES: Final = 16 << 20
_HINT: Final = 'for example {"train": {"web": 0.7, "code": 0.3}, "valid": {"held-out": 1}}'


def read_blend(path: str) -> tuple[Source, ...]:
    """The sources that the file names. Fails: DataError with the file, and the offset where it is no JSON."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", file=path, hint="check the path") from error
    if len(data) > _MOST_BYTES:
        raise DataError(f"{path} has more than {_MOST_BYTES:,} bytes", file=path, hint="is it a blend?")
    try:
        told = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", file=path, offset=0, hint=_HINT) from None
    folder = os.path.dirname(os.path.abspath(path))
    if isinstance(told, dict) and told and set(told) <= set(SPLITS):
        return tuple(
            Source(path=_placed(folder, name), weight=weight, split=split)
            for split in SPLITS
            for name, weight in _pairs(path, f"{split}: ", told.get(split) or [])
        )
    return tuple(Source(path=_placed(folder, name), weight=weight) for name, weight in _pairs(path, "", told))


def _placed(folder: str, name: str) -> str:
    return name if name == TINY else os.path.normpath(os.path.join(folder, name))


def _pairs(path: str, where: str, told: Any) -> list[tuple[str, float]]:
    """Names and weights, from an object or from a list in Megatron's way: paths alone, or weight and path in
    turn."""
    if isinstance(told, dict):
        return [(name, _weight(path, f"{where}{name}", weight)) for name, weight in told.items()]
    if not isinstance(told, list):
        raise _refused(path, f"{where}{_short(told)} is neither an object nor a list")
    numbers = [_number(item) for item in told]
    if all(number is None for number in numbers):
        weights, names = [1.0] * len(told), told
    elif len(told) % 2 == 0 and None not in numbers[::2]:
        weights = [
            _weight(path, f"{where}{name}", weight)
            for name, weight in zip(told[1::2], numbers[::2], strict=True)
        ]
        names = told[1::2]
    else:
        raise _refused(path, f"{where}a list holds paths alone, or a weight before each path")
    for name in names:
        if not isinstance(name, str) or not name:
            raise _refused(path, f"{where}{_short(name)} stands where a path is expected")
    return list(zip(names, weights, strict=True))


def _number(item: Any) -> float | None:
    if isinstance(item, bool) or not isinstance(item, int | float | str):
        return None
    try:
        return float(item)
    except ValueError:
        return None


def _weight(path: str, where: str, value: Any) -> float:
    number = None if isinstance(value, str) else _number(value)
    if number is None or not 0 <= number < float("inf"):
        raise _refused(path, f"{where}: the weight is {_short(value)}, which is no number from 0 on")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refused(path: str, what: str) -> DataError:
    return DataError(f"{path}: {what}", file=path, hint=_HINT)
