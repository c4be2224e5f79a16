"""Whether the node's agent is there: it holds a lock on a file, which the kernel drops however it ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import final


@final
class Orphanhood:
    """Decides when a part without an agent ends: after `orphan_s` in which nobody held the lease."""

    def __init__(self, orphan_s: float) -> None:
        self._orphan_s = orphan_s
        self._since: float | None = None

    def see(self, held: bool, now: float) -> bool:
        """Take a look at the lease into account; True if it was free for too long."""
        if held:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self._orphan_s

    @property
    def since(self) -> float | None:
        """Since when the lease is free; None while it is held."""
        return self._since


def lease_held(path: str) -> bool:
    """Whether somebody holds an exclusive flock on the file; a file that is not there is held by nobody.

    The table of locks is read first: taking the lock, even for a moment, could turn an agent away that comes
    to take it. Only a lock that is in no table is tried.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _listed(fd):
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
    finally:
        os.close(fd)  # and with it a lock that was taken


def _listed(fd: int) -> bool:
    with suppress(OSError), open("/proc/locks", encoding="ascii", errors="replace") as table:
        found = os.fstat(fd)
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        # 1: FLOCK  ADVISORY  WRITE 4242 fd:00:1234567 0 EOF
        rows = [words for words in map(str.split, table) if len(words) > 5]
        return any(words[1] == "FLOCK" and words[3] == "WRITE" and words[5] == place for words in rows)
    return False
