"""A window of steps recorded by `jax.profiler`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import final

import jax

from holdfast.train.settings import LogConfig

log = logging.getLogger("holdfast.train")


@final
class ProfileWindow:
    """Records `profile_steps` steps from `profile_start` on into a folder; a failure is told of, no more."""

    def __init__(self, config: LogConfig, folder: Path) -> None:
        self._first = config.profile_start
        self._last = config.profile_start + config.profile_steps - 1
        self._folder = folder
        self._open = False

    def before(self, step: int) -> None:
        """Step `step` begins. One that was restarted inside the window records what is left of it."""
        if self._first <= step <= self._last and not self._open:
            try:
                jax.profiler.start_trace(str(self._folder))
                self._open = True
            except Exception as error:
                log.warning("no profile: %s", error)
                self._last = -1

    def after(self, step: int, result: object) -> None:
        """Step `step` is over. Blocks: at the end of the window, until `result` is computed."""
        if self._open and step >= self._last:
            jax.block_until_ready(result)  # type: ignore[no-untyped-call]
            self.close()

    def close(self) -> None:
        """End the window, if one is open."""
        if self._open:
            self._open = False
            try:
                jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
                log.info("profile of steps %d to %d in %s", self._first, self._last, self._folder)
            except Exception as error:
                log.warning("the profile is not written: %s", error)
