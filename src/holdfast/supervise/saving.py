"""When a run saves, where, and where it finds what it saved."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, final

from holdfast import journal, vault
from holdfast.checkpoint import Checkpointer, SaveHandle
from holdfast.errors import DeadlineError, HoldfastError, UsageError

log = logging.getLogger("holdfast.supervise")

FIRST_GUESS_S: Final = 3600.0
"""Mean time between failures of a run that has had none yet."""
SHORTEST_S: Final = 10.0
"""No saving more often than this by cost, however little it costs."""
Every = int | Literal["auto"] | None


def best_interval_s(
    cost_s: float, elapsed_s: float, failures: int, *, guess_s: float = FIRST_GUESS_S
) -> float:
    """How long to train between two saves so that saving and lost work together cost least (Young, Daly).

    `cost_s` is how long a save holds up training. The time between failures is what was seen, with one
    failure in `guess_s` as the opinion before anything was seen.
    """
    if cost_s < 0 or elapsed_s < 0 or failures < 0 or guess_s <= 0:
        raise UsageError(f"cost_s={cost_s:g}, elapsed_s={elapsed_s:g}, failures={failures} make no sense")
    between_s = (elapsed_s + guess_s) / (failures + 1)
    if cost_s >= 2 * between_s:
        return between_s  # Daly: beyond that, saving as often as it fails is the best there is
    ratio = math.sqrt(cost_s / (2 * between_s))
    best = math.sqrt(2 * cost_s * between_s) * (1 + ratio / 3 + ratio * ratio / 9) - cost_s
    return max(SHORTEST_S, best)


class Loaded(NamedTuple):
    """A state, the steps it has seen, and where it was found: vault or disk."""

    steps: int
    state: Any
    source: str


@final
class RunSaver:
    """The checkpoints of a run, as one worker sees them. Only the saving replica's workers call `save`.

    `writer` is "vault", or the socket of the node's standing vault.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str,
        rank: int = 0,
        world: int = 1,
        writer: str = "vault",
        coordinator: str | Sequence[str] | None = None,
        token: bytes | None = None,
        events: journal.Journal,
    ) -> None:
        self._folder = Path(folder)
        self._settings: dict[str, Any] = {
            "run": run,
            "rank": rank,
            "world": world,
            "writer": writer,
            "coordinator": coordinator if world > 1 else None,
            "token": token,
            "journal": events.path,
        }
        self._standing = writer if writer != "vault" else ""
        if self._standing:
            # The last state stays in one slot, and is offered from there, while the next goes into the other.
            self._settings |= {"slots": 2, "serve": "127.0.0.1:0"}
        self._token = token
        self._rank = rank
        self._events = events
        self._open: Checkpointer | None = None
        self._every: Every = "auto"
        self._world = world
        self._started = self._saved_at = time.monotonic()
        self._cost_s = 0.0
        self._handle: SaveHandle | None = None
        self.failures = 0
        """Losses that this worker has seen."""
        self.last = -1
        """The newest step that this worker saved or loaded."""

    def set_interval(self, every: Every) -> None:
        """Save every so many steps, or by cost ("auto"), or only at the end of the run (None)."""
        if every != "auto" and every is not None and (type(every) is not int or every < 1):
            raise UsageError(f"save_every={every!r}", hint="a number of steps, 'auto', or None")
        # Several workers must come to one answer, and their clocks do not.
        self._every = 100 if every == "auto" and self._world > 1 else every

    def due(self, steps: int) -> bool:
        """Whether a state that has seen so many steps is to be saved."""
        if self._every is None or steps == self.last:
            return False
        if self._every != "auto":
            return steps % self._every == 0
        now = time.monotonic()
        wait_s = best_interval_s(self._cost_s, now - self._started, self.failures)
        return now - self._saved_at >= wait_s

    def save(self, steps: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Save; returns when the state is captured. A failure is told and stops nothing."""
        if steps == self.last:
            return
        began = time.monotonic()
        try:
            self._handle = self._checkpointer().save(steps, state, meta=meta, overwrite=True)
        except UsageError:
            raise
        except HoldfastError as error:
            log.warning("step %d is not saved: %s", steps, error.message)
            self._events.append(journal.SaveSkipped(step=steps, reason=error.message))
            return
        self.last = steps
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - began

    def fence(self) -> None:
        """Wait until the state of the last save may be overwritten. Fails: DeadlineError."""
        if self._handle is not None:
            self._handle.fence()
            self._handle = None

    def vault_address(self) -> str:
        """Where the node's standing vault offers what is staged; empty if there is none."""
        if not self._standing:
            return ""
        try:
            return Path(f"{self._standing}.address").read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def load(
        self, template: Any, *, step: int | None = None, vaults: Sequence[str] = (), wait_s: float = 30.0
    ) -> Loaded | None:
        """The newest state that verifies, or that of `step`; None if there is none.

        The memory of these vaults is asked first, and this node's own; then the folder. Blocks: while
        reading, and up to `wait_s` for a save that a vault is still finishing. Fails: CorruptError (given
        `step`), NoCheckpointError if there are steps and none can be loaded, MismatchError.
        """
        checkpointer = self._checkpointer()
        addresses = list(dict.fromkeys(one for one in (self.vault_address(), *vaults) if one))
        if addresses:
            newest = max(checkpointer.steps(), default=-1)
            held = vault.restore_newest(
                addresses,
                template,
                token=self._token,
                run=str(self._settings["run"]),
                min_step=newest + 1 if step is None else step,
                rank=self._rank,
                world=self._world,
                events=self._events,
            )
            if held is not None and step in (None, held.step):
                self.last = held.step
                return Loaded(held.step, held.tree, "vault")
            # What the vaults are still writing and do not offer lacks the part of a worker that died: it will
            # never be whole.
            wait_s = 0.0
        missing = object()
        found = checkpointer.load(into=template, step=step, init=lambda: missing, wait_s=wait_s)
        if found is missing:
            return None
        assert checkpointer.last_load is not None
        self.last = checkpointer.last_load.step
        return Loaded(self.last, found, "disk")

    def settle(self, timeout_s: float) -> None:
        """Wait until every save is durable or has failed. What is not by then, the vault finishes."""
        if self._open is not None:
            try:
                self._open.wait(timeout_s)
            except DeadlineError as error:
                log.warning("%s", error.message)

    def hand_over(self) -> None:
        """Another replica saves from now on."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _checkpointer(self) -> Checkpointer:
        if self._open is None:
            self._open = Checkpointer(self._folder, **self._settings)
        return self._open
