"""`holdfast coord get`: keys and values for people. Values are bytes; most of them are text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from holdfast.cli import terminal
from holdfast.cli.terminal import Column

_SHOWN = 60
"""Characters of a value in a table."""


def say_one(key: str, value: bytes, *, json_: bool) -> None:
    """One value: alone on its line, or as an object."""
    if json_:
        terminal.say_json(_entry(key, value))
    else:
        terminal.say(text(value))


def say_all(found: Mapping[str, bytes], *, json_: bool) -> None:
    """Several keys, in order."""
    if json_:
        terminal.say_json({"keys": [_entry(key, value) for key, value in found.items()]})
    elif found:
        columns = (Column("KEY", fold=True), Column("BYTES", right=True), Column("VALUE"))
        rows = [
            (key, f"{len(value):,}", terminal.shorten(text(value), _SHOWN)) for key, value in found.items()
        ]
        terminal.say_table(columns, rows)
    else:
        terminal.note("no such keys")


def text(value: bytes) -> str:
    """The value as text, or as Python would write it if it is none."""
    plain = _plain(value)
    return repr(value) if plain is None else plain


def _plain(value: bytes) -> str | None:
    try:
        decoded = value.decode()
    except UnicodeDecodeError:
        return None
    return decoded if decoded.replace("\n", " ").replace("\t", " ").isprintable() else None


def _entry(key: str, value: bytes) -> dict[str, Any]:
    return {"key": key, "bytes": len(value), "text": _plain(value), "base64": b64encode(value).decode()}
