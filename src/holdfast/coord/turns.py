"""What is to be done at the end of a loop's present turn, as one callback for all clients that share it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Final, final


@final
class Turn:
    """Collects what is to be done once all that is ready now has run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._due: list[Callable[[], None]] = []

    def add(self, act: Callable[[], None]) -> None:
        if not self._due:
            loop = self._loop()
            assert loop is not None
            loop.call_soon(self._end)
        self._due.append(act)

    def _end(self) -> None:
        due, self._due = self._due, []
        for act in due:
            act()


_turns: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Turn]] = weakref.WeakKeyDictionary()


def turn_of(loop: asyncio.AbstractEventLoop) -> Turn:
    """The present turn of a loop."""
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = Turn(loop)
    return found
