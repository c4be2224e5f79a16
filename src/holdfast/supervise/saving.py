"""When a run saves, where, and where it finds what it saved."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, final

from holdfast import journal, vault
from holdfast.checkpoint import Checkpointer, Mirror, Policy, SaveHandle, SaveState, committed_steps
from holdfast.clock import Deadline
from holdfast.errors import (
    HoldfastError,
    LeaseError,
    MismatchError,
    NoCheckpointError,
    StorageError,
    UsageError,
    VaultError,
)
from holdfast.storage import StoreOptions, opened
from holdfast.vault.neighbourhood import address_in

log = logging.getLogger("holdfast.supervise")

FIRST_GUESS_S: Final = 3600.0
"""Mean time between failures of a run that has had none yet."""
SHORTEST_S: Final = 10.0
"""No saving more often than this by cost, however little it costs."""
Every = int | Literal["auto"] | None
Keep = int | Policy | None
MirrorAt = str | os.PathLike[str] | Mirror | None
_DRAIN_S: Final = 45.0
"""How long a worker that ends waits for disk and mirror: less than its agent allows it for its end."""
_STAGE_S: Final = 30.0
_LOOK: Final = StoreOptions(timeout_s=10.0, retry_s=10.0)
"""For a look at what is saved while a recovery waits for it."""
_BRIEFLY_S: Final = 1.0
_HANDED_S: Final = _STAGE_S + 2 * _BRIEFLY_S
"""As long as a worker that fails may go on staging its last save: others hear before that that it is gone."""
_ASK_S: Final = 0.05
_FIRST_STEPS: Final = 100
"""Until the first save, whose cost is not known, where workers save together."""
_SHORTEST_STEP_S: Final = 1e-3
_OTHER: Final = (
    "is it the state of another program? Give this run a name of its own: launch --run NAME, join(name=). To "
    "go on from parts of it, give `restore` an `init` that takes them with Checkpointer.load(parts=, rename=)"
)
SAVE_S: Final = 570.0
"""The longest that a save may take, or wait for the one before it: a little less than the phase "save"."""


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
    """A state, the steps it has seen, and where it was found: vault, disk or mirror."""

    steps: int
    state: Any
    source: str


@final
class RunSaver:
    """The checkpoints of a run, as one worker sees them. Only the saving replica's workers call `save`.

    `writer` is "vault", or the socket of the node's standing vault. `vaults` are those of other nodes: each
    an address, or `file:` and the file that says it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str,
        rank: int = 0,
        world: int = 1,
        writer: str = "vault",
        vaults: Sequence[str] = (),
        coordinator: str | Sequence[str] | None = None,
        token: bytes | None = None,
        events: journal.Journal,
        keep: Keep = 3,
        mirror: MirrorAt = None,
    ) -> None:
        self._folder = os.fspath(folder)  # or a URL, which is no path
        self._settings: dict[str, Any] = {
            "run": run,
            "rank": rank,
            "world": world,
            "writer": writer,
            "coordinator": coordinator if world > 1 else None,
            "token": token,
            "journal": events.path,
            "keep": keep,
            "mirror": mirror,
            "deadline_s": SAVE_S,
        }
        self._standing = writer if writer != "vault" else ""
        if self._standing:
            # The last state stays in one slot, and is offered from there, while the next goes into the other.
            self._settings |= {"slots": 2, "serve": "127.0.0.1:0"}
        self._vaults = tuple(vaults)
        self._token = token
        self._rank = rank
        self._events = events
        self._open: Checkpointer | None = None
        self._every: Every = "auto"
        self._pace: tuple[int, float] | None = None
        """A step of this worker and when it was, to know how long one takes."""
        self._tried = -1
        """The newest step that was to be saved: the same for all workers, also where one could not."""
        self._next: tuple[int, int] | None = None
        """That step, and the one that all workers save next."""
        self._world = world
        self._started = self._saved_at = time.monotonic()
        self._cost_s = 0.0
        self._handle: SaveHandle | None = None
        self._newest: SaveHandle | None = None
        self._found = -1
        self._refused = ""
        self._fences = False
        self.failures = 0
        """Losses that this worker has seen."""
        self.last = -1
        """The newest step that this worker has captured for a save, or found saved; `saved` says if it is."""

    def set_interval(self, every: Every) -> None:
        """Save every so many steps, or by cost ("auto"), or only at the end of the run (None)."""
        if every != "auto" and every is not None and (type(every) is not int or every < 1):
            raise UsageError(f"save_every={every!r}", hint="a number of steps, 'auto', or None")
        self._every = every

    def due(self, steps: int, agreed: Callable[[str, str], str]) -> bool:
        """Whether a state that has seen so many steps is to be saved.

        `agreed` gives the value that all workers of the run go by. Fails: CoordError.
        """
        if self._every is None or steps == self.last:
            return False
        if self._every != "auto":
            return steps % self._every == 0
        if self._world > 1:
            return steps >= self._common_step(steps, agreed)
        now = time.monotonic()
        wait_s = best_interval_s(self._cost_s, now - self._started, self.failures)
        return now - self._saved_at >= wait_s

    def _common_step(self, steps: int, agreed: Callable[[str, str], str]) -> int:
        """The next step to save, for all workers of a replica: each has a clock, the first answer stands."""
        now = time.monotonic()
        if self._pace is None:
            self._pace = steps - 1, now
        begun_at, begun = self._pace
        since = max(self._tried, begun_at)
        if self._next is None or self._next[0] != since:
            if self.last < 0:
                wait = _FIRST_STEPS
            else:
                step_s = max(_SHORTEST_STEP_S, (now - begun) / max(1, steps - 1 - begun_at))
                wait = round(best_interval_s(self._cost_s, now - self._started, self.failures) / step_s)
            self._next = since, int(agreed(f"save after {since}", str(since + max(1, wait))))
        return self._next[1]

    def save(self, steps: int, state: Any, meta: Mapping[str, Any], *, again: bool = False) -> None:
        """Save, unless that was done; `again`: even then, and with patience. Returns when it is captured.

        A failure is told and stops nothing.
        """
        self._tried = steps
        if steps == self.last and not again:
            return
        began = time.monotonic()
        try:
            # A program that waited for the fence before it made this state will do so before the next.
            fenced, self._fences = self._fences, False
            self._handle = self._captured(steps, state, meta, fenced, _HANDED_S if again else 0.0)
            self._newest = self._handle
        except UsageError:
            raise
        except HoldfastError as error:
            log.warning("step %d is not saved: %s", steps, error.message)
            self._events.append(journal.SaveSkipped(step=steps, reason=error.message))
            self._newest, self._refused = None, error.message
            return
        self.last = steps
        self._saved_at = time.monotonic()
        self._cost_s = self._saved_at - began

    def _captured(
        self, steps: int, state: Any, meta: Mapping[str, Any], fenced: bool, patience_s: float
    ) -> SaveHandle:
        """A save that has begun, within `patience_s` if another worker is yet to hand over to this one."""
        deadline = Deadline(patience_s)
        while True:
            try:
                return self._checkpointer().save(steps, state, meta=meta, overwrite=True, fenced=fenced)
            except LeaseError:
                if deadline.expired():
                    raise
                time.sleep(min(_ASK_S, deadline.remaining()))

    def saved(self, steps: int) -> bool:
        """Whether the state that has seen so many steps is known to be durable."""
        newest = self._newest
        if newest is not None and newest.step == steps:
            return newest.state is SaveState.DURABLE
        return steps == self._found

    @property
    def why(self) -> str:
        """What became of the last save, where it is not durable; for people."""
        if self._newest is None:
            return self._refused
        error = self._newest.error
        return f"its save is {self._newest.state}" if error is None else error.message

    @property
    def copies(self) -> bool:
        """Whether a state may still be being captured, so that `fence` may block."""
        return self._handle is not None

    def fence(self) -> None:
        """Wait until the state of the last save may be overwritten. Fails: DeadlineError.

        To be called before the state changes: who does so may have it copied meanwhile.
        """
        self._fences = True
        if self._handle is not None:
            began = time.monotonic()
            self._handle.fence()
            self._handle = None
            self._cost_s += time.monotonic() - began

    def vault_address(self) -> str:
        """Where the node's standing vault offers what is staged; empty if there is none."""
        return _address(f"file:{self._standing}.address") if self._standing else ""

    def load(
        self, template: Any, *, step: int | None = None, vaults: Sequence[str] = (), wait_s: float = 30.0
    ) -> Loaded | None:
        """The newest state that verifies, or that of `step`; None if there is none.

        The memory of this node's own vault, of those of other nodes and of `vaults` is asked first; then the
        folder, where it has a newer step or they have none. Blocks: while reading, and up to `wait_s` for a
        save that a vault is still finishing. Fails: CorruptError (given `step`), NoCheckpointError if there
        are steps and none can be loaded, MismatchError.
        """
        checkpointer = self._checkpointer()
        others = map(_address, self._vaults)
        addresses = list(dict.fromkeys(one for one in (self.vault_address(), *vaults, *others) if one))
        if addresses:
            newest = max(self._saved(checkpointer), default=-1)
            held = vault.restore_newest(
                addresses,
                template,
                token=self._token,
                run=str(self._settings["run"]),
                # What is as new on the disk is nearer here.
                min_step=max(0, newest) if step is None else step,
                max_step=step,
                rank=self._rank,
                world=self._world,
                events=self._events,
            )
            if held is not None:
                # In memory only, as far as is known here: the end of a run must not take it for saved.
                return Loaded(held.step, held.tree, "vault")
            # What the vaults are still writing and do not offer lacks the part of a worker that died: it will
            # never be whole.
            wait_s = 0.0
        missing = object()
        try:
            found = checkpointer.load(into=template, step=step, init=lambda: missing, wait_s=wait_s)
        except MismatchError as error:
            raise MismatchError(
                error.problems, source=f"what is saved in {self._folder}", hint=_OTHER
            ) from None
        except NoCheckpointError as error:
            raise NoCheckpointError(
                error.message,
                hint=f"`holdfast ckpt verify --all {self._folder}` names what is damaged; a run of another "
                "name begins anew: launch --run, join(name=)",
            ) from None
        if found is missing:
            return None
        assert checkpointer.last_load is not None
        self.last = self._found = checkpointer.last_load.step
        near = opened(self._folder).root in checkpointer.last_load.blocks
        return Loaded(self.last, found, "disk" if near or not self._settings["mirror"] else "mirror")

    def _saved(self, checkpointer: Checkpointer) -> list[int]:
        """The steps that are saved; none if their place does not answer, for memory may do without it."""
        try:
            # A mirror is asked only where the folder has nothing: one that is away must not delay a recovery.
            return committed_steps(opened(self._folder, _LOOK)) or checkpointer.steps()
        except StorageError as error:
            log.warning("what is saved is not known, the vaults are asked alone: %s", error.message)
            return []

    def settle(self, timeout_s: float) -> None:
        """Wait until every save is durable or has failed. Fails: DeadlineError; the vault goes on with it."""
        if self._open is not None:
            self._open.wait(timeout_s)

    def hand_over(self, *, ends: bool = False) -> None:
        """Another replica saves from now on, this worker fails, or the run ends.

        Blocks: until what was captured is staged; the vault goes on with it alone. Only at the end of the run
        the disk and the mirror are waited for.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        try:
            if self._handle is not None:
                self._handle.staged(_STAGE_S)
            opened.close(_DRAIN_S if ends else _BRIEFLY_S, drain=ends)
        except HoldfastError as error:  # of a save: it was told, and stops nothing
            log.info("%s", error.message)

    def _checkpointer(self) -> Checkpointer:
        if self._open is None:
            self._open = Checkpointer(self._folder, **self._settings)
        return self._open


def _address(where: str) -> str:
    """As `address_in`; empty where no vault says its address."""
    try:
        return address_in(where)
    except VaultError:
        return ""
