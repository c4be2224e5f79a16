"""Disks that misbehave, for recordings: one that fails, one that forgets to sync, one that is slow."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import final

from holdfast.testing.recording import Kind, RecordingFiles

Which = Callable[[Kind, str], bool]


@final
class FailingFiles(RecordingFiles):
    """Fails one operation after `arm`, or that one and all later ones."""

    def __init__(self, base: str | os.PathLike[str]) -> None:
        super().__init__(base)
        self.failed: str | None = None
        self.num_seen = 0
        self._at: int | None = None
        self._errno = errno.EIO
        self._lasting = False
        self._guard = threading.Lock()

    def arm(self, at: int, number: int = errno.EIO, *, lasting: bool = False) -> None:
        """Fail operation number `at` from now with errno `number`; with `lasting`, all that follow too."""
        with self._guard:
            self.num_seen, self.failed = 0, None
            self._at, self._errno, self._lasting = at, number, lasting

    def disarm(self) -> None:
        """Work again."""
        with self._guard:
            self._at = None

    def admit(self, kind: Kind, path: str) -> bool:
        with self._guard:
            if self._at is None:
                return True
            now = self.num_seen
            self.num_seen += 1
            if now < self._at or (now > self._at and not self._lasting):
                return True
            self.failed = self.failed or f"{kind} {os.path.basename(path)}"
        raise OSError(self._errno, os.strerror(self._errno), path)


@final
class ForgetfulFiles(RecordingFiles):
    """Leaves out the operations that `which` picks: a program with a missing sync."""

    def __init__(self, base: str | os.PathLike[str], which: Which) -> None:
        super().__init__(base)
        self.num_forgotten = 0
        self._which = which

    def admit(self, kind: Kind, path: str) -> bool:
        if self._which(kind, path):
            self.num_forgotten += 1
            return False
        return True


@final
class SlowFiles(RecordingFiles):
    """Takes `delay_s` before each operation that `which` picks, so that others get ahead of it."""

    def __init__(self, base: str | os.PathLike[str], which: Which, delay_s: float) -> None:
        super().__init__(base)
        self._which = which
        self._delay_s = delay_s
        self._never = threading.Event()

    def admit(self, kind: Kind, path: str) -> bool:
        if self._which(kind, path):
            self._never.wait(self._delay_s)
        return True
