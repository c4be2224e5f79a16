"""Where a coordinator can be reached.

    tcp://127.0.0.1:4711      tcp://[::1]:4711
    unix:/run/holdfast.sock
    file:/shared/run/coord    a file with one such address per line, read again at each attempt

Several may be given: they are tried in turn.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from holdfast.errors import UsageError

_TCP: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/\s]+)):(\d{1,5})")
_HINT: Final = "use tcp://HOST:PORT, unix:/path or file:/path"
_MAX_FILE: Final = 64 << 10


class Address(NamedTuple):
    """One place. `path` is that of a Unix socket; without one, `host` and `port` are of TCP."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@lru_cache(64)
def parse(text: str) -> Address:
    """The place that a tcp or unix address names. Fails: UsageError."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise UsageError(f"{text!r} has no absolute path", hint=_HINT)
        return Address(path=path)
    found = _TCP.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise UsageError(f"{text!r} is no address of a coordinator", hint=_HINT)
    return Address(found[1] or found[2], int(found[3]))


def check_addresses(addresses: str | Iterable[str]) -> tuple[str, ...]:
    """The addresses as a tuple, each of them well formed, paths from here on absolute. Fails: UsageError."""
    texts = (addresses,) if isinstance(addresses, str) else tuple(addresses)
    if not texts:
        raise UsageError("no address of a coordinator was given", hint=_HINT)
    return tuple(map(_absolute, texts))


def _absolute(text: str) -> str:
    kind, _, path = text.partition(":")
    if kind in ("file", "unix"):
        if not path:
            raise UsageError(f"{text!r} has no path", hint=_HINT)
        return f"{kind}:{os.path.abspath(path)}"
    parse(text)
    return text


def candidates(addresses: Sequence[str]) -> tuple[list[Address], str]:
    """The places to try now, in order, and what was wrong with those that are not among them."""
    found: list[Address] = []
    troubles: list[str] = []
    for text in addresses:
        if not text.startswith("file:"):
            found.append(parse(text))
            continue
        try:
            with open(text.removeprefix("file:"), encoding="utf-8") as file:
                lines = file.read(_MAX_FILE).split("\n")
            found += [parse(line.strip()) for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError, UsageError) as error:
            # It may not be written yet, or its coordinator may be about to write another.
            troubles.append(f"{text}: {getattr(error, 'strerror', None) or error}")
    return list(dict.fromkeys(found)), "; ".join(troubles)
