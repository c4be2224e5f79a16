"""The routes by which state leaves its devices: which is taken, which were left, and what was said of it."""

from __future__ import annotations

import logging
import threading
from typing import Final, final

log = logging.getLogger("holdfast.jax")

ARENA: Final = "pinned arena"
PINNED_HOST: Final = "pinned_host"
PAGEABLE: Final = "pageable"
_NAMES: Final = (ARENA, PINNED_HOST, PAGEABLE)
NUM_ROUTES: Final = len(_NAMES)


@final
class Routes:
    """Routes by number, the best first. One that failed is left for good, and that is said once."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._failed: set[int] = set()
        self._over_limit = False
        self._told: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def best(self, *, pinned: bool = True) -> int:
        """The route that the next copies take; the first one only into pinned memory."""
        usable = (at for at in range(self.first, NUM_ROUTES) if at not in self._failed and (at or pinned))
        return next(usable, NUM_ROUTES - 1)

    def name(self) -> str:
        """That of the best route."""
        return _NAMES[self.best()]

    def announcements(self) -> list[tuple[str, str]]:
        """The routes taken so far, and why by no better one."""
        return list(self._told)

    def tell(self, number: int, reason: str = "") -> None:
        """Say that a route is taken, and why, if it is not the best; each once."""
        told = (_NAMES[number], reason)
        with self._lock:
            known = told in self._told
            if not known:
                self._told.append(told)
        if reason and not known:
            log.warning("state leaves the devices by way of %s: %s", *told)
        elif not known:
            log.info("state leaves the devices by way of the %s", told[0])

    def leave(self, number: int, reason: str) -> None:
        """Take a route no more, and say so."""
        with self._lock:
            known = number in self._failed
            self._failed.add(number)
        if not known:
            self.tell(self.best(pinned=False), reason)

    def over_limit(self, reason: str) -> None:
        """Say, once, that some memory is not pinned and takes the next route."""
        if not self._over_limit:
            self._over_limit = True
            self.tell(self.best(pinned=False), reason)
