"""Python scalars as exact text, and back."""

from __future__ import annotations

import math
import re
from typing import Final

from holdfast.arrays.text import show, text_problem
from holdfast.errors import FormatError, TreeError

Scalar = bool | int | float | complex | str | bytes | None

MAX_SCALAR: Final = 1 << 20
"""Characters in the text of one scalar."""
_TOO_LONG: Final = "store long values as a uint8 array"
_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-][0-9]+|-?inf|nan")
_INT = re.compile(r"-?[0-9]{1,19}|-?0x[0-9a-f]+")


def encode_scalar(value: object) -> tuple[str, str]:
    """The (type, text) of a Python scalar; `decode_scalar` gives back the same value and type.

    Types: none, bool, int, float, complex, str, bytes. Exact: ints of any size, -0.0, infinities,
    every finite float; all NaNs become one. Subclasses are refused, since they would not come back.
    """
    kind = "none" if value is None else type(value).__name__
    text = _text(value)
    if text is None:
        raise TreeError(
            f"cannot store a scalar of type {type(value).__qualname__}",
            hint="use bool, int, float, complex, str, bytes or None, or make it an array",
        )
    if problem := text_problem(text, MAX_SCALAR):
        raise TreeError(f"cannot store a {kind} scalar: its text {problem}", hint=_TOO_LONG)
    return kind, text


def decode_scalar(kind: str, text: str) -> Scalar:
    """The scalar that `encode_scalar` turned into (kind, text); FormatError for anything else."""
    if len(text) > MAX_SCALAR:
        raise FormatError(f"a scalar of {len(text)} characters; the limit is {MAX_SCALAR}")
    try:
        value = _value(kind, text)
        # Only the one spelling that the encoder uses is accepted, so equal values have equal files.
        if encode_scalar(value) == (kind, text):
            return value
    except (ValueError, OverflowError):
        pass
    raise FormatError(f"{show(text)} is not a {show(kind)} scalar")


def _text(value: object) -> str | None:
    if value is None:
        return ""
    kind = type(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        assert isinstance(value, int)
        # Hex beyond 64 bits: Python refuses to convert very long decimals, never hex.
        return str(value) if -(2**63) <= value < 2**63 else hex(value)
    if kind is float:
        assert isinstance(value, float)
        return "nan" if math.isnan(value) else value.hex()
    if kind is complex:
        assert isinstance(value, complex)
        return f"{_text(value.real)},{_text(value.imag)}"
    if kind is bytes:
        assert isinstance(value, bytes)
        return value.hex()
    return value if kind is str and isinstance(value, str) else None


def _value(kind: str, text: str) -> Scalar:
    match kind:
        case "none":
            return None
        case "bool":
            return text == "true"
        case "int" if _INT.fullmatch(text):
            return int(text, 16 if "x" in text else 10)
        case "float":
            return _float(text)
        case "complex":
            real, _, imag = text.partition(",")
            return complex(_float(real), _float(imag))
        case "str":
            return text
        case "bytes":
            return bytes.fromhex(text)
    raise ValueError(kind)


def _float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise ValueError(text)
    return float.fromhex(text)
