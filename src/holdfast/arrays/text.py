"""Strings that came from users or from disk: checked before they are stored, cut when shown."""

from __future__ import annotations

from typing import Final

MAX_NAME: Final = 4096
"""Characters in the name of an array or scalar, a logical axis or a PRNG implementation."""


def show(value: object) -> str:
    """`value` for an error message: ASCII, at most 100 characters, whatever it holds."""
    text = ascii(value[:200] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 100 else text[:97] + "..."


def reason(error: Exception) -> str:
    """A parser's own words, cut: they may quote a key of any length."""
    text = str(error)
    return text if len(text) <= 300 else text[:297] + "..."


def text_problem(value: object, most: int = MAX_NAME) -> str | None:
    """Why `value` cannot be stored as text, or None. Lone surrogates have no UTF-8 form."""
    if not isinstance(value, str):
        return f"is {type(value).__name__}, not a string"
    if len(value) > most:
        return f"has {len(value)} characters; at most {most} are allowed"
    if value.isascii():
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"has a lone surrogate at character {error.start}, which is not Unicode text"
    return None
