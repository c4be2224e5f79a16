"""Counts as people write them: 768, 200K, 1.5B."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from holdfast.errors import UsageError

_NUMBER: Final = re.compile(
    r"(?P<digits>\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:e\+?(?P<power>\d{1,2}))?(?P<suffix>[kmbt]?)"
)
_SUFFIX: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST: Final = 2**63 - 1


def parse_count(text: str) -> int:
    """The whole number that `text` stands for: digits, with K, M, B or T for 10³, 10⁶, 10⁹, 10¹².

    Decimal, not floating point: 1.1B is 1,100,000,000 exactly. Fails: UsageError, if it is no such number,
    is not whole, or does not fit into 63 bits.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"{text!r} is not a count", hint="write 768, 200K, 1.5B or 2T")
    value = (
        Decimal(match["digits"].replace("_", "")) * 10 ** int(match["power"] or 0) * _SUFFIX[match["suffix"]]
    )
    if value != value.to_integral_value():
        raise UsageError(
            f"{text!r} is not a whole number", hint="add a suffix (K, M, B, T) or drop the fraction"
        )
    if value > _MOST:
        raise UsageError(f"{text!r} is more than 2⁶³", hint="check the suffix")
    return int(value)


def short_count(value: float) -> str:
    """About `value` in four digits or fewer and a suffix: 956M, 1.5B, 768."""
    for suffix, size in reversed(_SUFFIX.items()):
        if suffix and abs(value) >= size:
            return f"{value / size:.4g}{suffix.upper()}"
    return f"{value:.4g}"
