"""A coordinator that an agent started ends some time after its agent has, unless another one adopts it."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
import time
from typing import Final, final

_log = logging.getLogger("holdfast.coord")

_LOOK_S: Final = 1.0


@final
class OrphanWatch:
    """Sends this process SIGTERM once nobody has held the lock on `lease` for `orphan_s` seconds.

    The lock is an flock: it goes with the agent that held it, however that died.
    """

    def __init__(self, lease: str, orphan_s: float) -> None:
        self._lease = lease
        self._orphan_s = orphan_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdfast-orphans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join(5.0)

    def _watch(self) -> None:
        free_since: float | None = None
        while not self._closed.wait(min(_LOOK_S, self._orphan_s / 10)):
            now = time.monotonic()
            if is_held(self._lease):
                free_since = None
            elif free_since is None:
                free_since = now
            elif now - free_since >= self._orphan_s:
                _log.warning("no agent held %s for %.0f s: the coordinator ends", self._lease, self._orphan_s)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def is_held(path: str) -> bool:
    """Whether a process holds the lock on the file; also if that cannot be found out.

    No descriptor left, or a disk that is away for a while: that says nothing about the agent.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # Shared: those who look do not take each other for the agent.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
