"""Output whose reader goes away (`| head`), for work that must not end with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, final


@contextmanager
def not_needed() -> Iterator[None]:
    """While inside, what is written to stdout or stderr and cannot be goes nowhere, and ends nothing."""
    before = sys.stdout, sys.stderr
    ours = _Output(sys.stdout), _Output(sys.stderr)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            stream.flush()
        sys.stdout, sys.stderr = before


@final
class _Output:
    """A stream that leads nowhere from the first write that fails on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self._leads_nowhere()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._leads_nowhere()

    def _leads_nowhere(self) -> None:
        """Also for what is still in its buffer, which Python writes once more at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, self._stream.fileno())
        finally:
            os.close(nowhere)
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
