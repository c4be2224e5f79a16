"""What became of a save: captured, then staged, then durable; or failed, or skipped."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Generator
from typing import Any, final

from holdfast.checkpoint.tiers import Copied
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, HoldfastError


class SaveState(enum.StrEnum):
    """The states of a save, in order; failed and skipped are final too."""

    CAPTURING = "capturing"
    CAPTURED = "captured"
    STAGED = "staged"
    DURABLE = "durable"
    FAILED = "failed"
    SKIPPED = "skipped"


_RANK = {SaveState.CAPTURING: 0, SaveState.CAPTURED: 1, SaveState.STAGED: 2, SaveState.DURABLE: 3}


@final
class SaveHandle:
    """One save. Its methods may be called from any thread, any number of times.

    `staged` and `durable` raise the save's own error if it failed. A skipped save reports `skipped` and
    counts as neither.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.started = time.monotonic()
        self._state = SaveState.CAPTURING
        self._error: HoldfastError | None = None
        self._copied = Copied()
        self._changed = threading.Condition()

    @property
    def state(self) -> SaveState:
        return self._state

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved because a save was still under way (`on_busy="skip"`)."""
        return self._state is SaveState.SKIPPED

    @property
    def error(self) -> HoldfastError | None:
        """Why the save failed, if it did."""
        return self._error

    def fence(self) -> None:
        """Wait until later steps may overwrite or donate the saved arrays.

        Call it before the next donating call. Where `save` copies before it returns, as on CPU, there is
        nothing to wait for; after `save(fenced=True)` it waits for the copies from the devices. A save that
        failed holds nothing back either; `durable` tells of it. Fails: DeadlineError.
        """
        self._wait(SaveState.CAPTURED, 600.0)

    def staged(self, timeout_s: float = 600.0) -> None:
        """Wait until the save survives the death of this process (with a vault).

        Fails: DeadlineError, or the error of the save.
        """
        self._reach(SaveState.STAGED, timeout_s)

    def durable(self, timeout_s: float = 600.0) -> None:
        """Wait until the step is committed to storage. Fails: DeadlineError, or the error of the save."""
        self._reach(SaveState.DURABLE, timeout_s)

    def mirrored(self, timeout_s: float = 600.0) -> None:
        """Wait until the step is whole on the mirror (`Checkpointer(mirror=)`) as well.

        Fails: DeadlineError, which says why copying fails if it does; MirrorError if the step will not be
        there; UsageError if there is no mirror; or the error of the save.
        """
        deadline = Deadline(timeout_s)
        self.durable(timeout_s)
        if not self.skipped:
            self._copied.wait(self.step, deadline, timeout_s)

    async def until_staged(self, timeout_s: float = 600.0) -> None:
        """`staged` for asyncio."""
        await asyncio.to_thread(self.staged, timeout_s)

    async def until_durable(self, timeout_s: float = 600.0) -> None:
        """`durable` for asyncio."""
        await asyncio.to_thread(self.durable, timeout_s)

    async def until_mirrored(self, timeout_s: float = 600.0) -> None:
        """`mirrored` for asyncio."""
        await asyncio.to_thread(self.mirrored, timeout_s)

    def __await__(self) -> Generator[Any, None, None]:
        return self.until_durable().__await__()

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, {self._state})"

    def _reach(self, wanted: SaveState, timeout_s: float) -> None:
        self._wait(wanted, timeout_s)
        if self._error is not None:
            raise self._error

    def _wait(self, wanted: SaveState, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        with self._changed:
            while _RANK.get(self._state, 99) < _RANK[wanted]:
                remaining = deadline.remaining()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise DeadlineError(
                        f"the save of step {self.step} is {self._state} after {timeout_s:g} s, "
                        f"not yet {wanted}",
                        hint="a slow or stuck disk? the save goes on; wait again with a longer timeout",
                    )

    def _advance(self, state: SaveState, error: HoldfastError | None = None) -> bool:
        """Move on to a later state; False if the save is over or further already."""
        with self._changed:
            current = _RANK.get(self._state, 99)
            if current >= _RANK.get(state, 98):
                return False
            self._state, self._error = state, error
            self._changed.notify_all()
        return True
