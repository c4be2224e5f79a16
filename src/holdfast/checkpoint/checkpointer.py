"""`Checkpointer`: save and load the state of a run in one folder."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

import msgspec

from holdfast import journal
from holdfast.arrays import NUMPY, Rename, adapters
from holdfast.checkpoint import retention, upkeep
from holdfast.checkpoint.handle import SaveHandle
from holdfast.checkpoint.loading import LoadOptions, LoadReport
from holdfast.checkpoint.saver import OnError, Saver, SaverConfig
from holdfast.checkpoint.search import StepSearch
from holdfast.checkpoint.slots import OnBusy
from holdfast.checkpoint.steps import (
    PINS,
    StepInfo,
    readable_steps,
    step_info,
    step_manifest,
    steps_in,
)
from holdfast.clock import Deadline
from holdfast.coord import check_addresses
from holdfast.errors import (
    DeadlineError,
    HoldfastError,
    NoCheckpointError,
    UsageError,
)
from holdfast.format import Problem, check_meta, step_folder, verify_step
from holdfast.storage import Files, LocalStore
from holdfast.vault import WORK, CoordinatorAt, Crew, ServeAt

log = logging.getLogger("holdfast.checkpoint")


@final
class Checkpointer:
    """Saves and loads the state of a run.

        ckpt = Checkpointer("runs/demo/ckpt", keep=3)
        handle = ckpt.save(step, {"params": params, "opt": opt_state}, meta={"samples": n})
        state = ckpt.load(into={"params": params, "opt": opt_state})

    `save` returns when the state is captured: no later step can change it. A vault process then takes it to
    disk; `handle.staged()` waits until it survives this process, `handle.durable()` until it is committed.

    With several processes, all of them make a Checkpointer for the same folder and call `save` and `load` for
    the same steps in the same order.

    Args:
        path: the folder; made at the first save.
        keep: how many of the latest steps to keep, or a policy (`latest(3) | every(1000)`), or None for all.
        on_busy: what `save` does while earlier saves hold all slots: "wait", "skip" or "queue".
        on_error: "warn" logs a failed save and goes on; "raise" raises it at the next call as well.
        writer: "vault" (a process beside this one), "thread", or the path of a standing vault's socket.
        slots: saves that may be under way at once; each takes host memory the size of the saved state.
        memory_limit: bytes that all slots together never exceed.
        rank, world: which of how many processes this is; asked of the framework if not given.
        copies: other folders with copies of the same steps, read where a block here is bad.
        threads: threads that read and write.
        deadline_s: the longest that a save may take, or wait for a slot or another rank.
        recycle: overwrite files of pruned steps instead of making new ones.
        journal: file for events; True for `journal.jsonl` in the folder, False for none.
        run: name of the run, stored in every save.
        coordinator: address of the run's coordinator, or several; the ranks then agree through it, not
            through the folder.
        serve: an address, such as "127.0.0.1:0", at which the vault offers the newest staged state
            (`vault_address`), so that `holdfast.vault.restore` takes it from memory.
        token: the run's token, for the coordinator and for those who restore from the vault.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | retention.Policy | None = 3,
        on_busy: OnBusy = "wait",
        on_error: OnError = "warn",
        writer: str = "vault",
        slots: int = 1,
        memory_limit: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        copies: Sequence[str | os.PathLike[str]] = (),
        threads: int = 4,
        deadline_s: float = 600.0,
        recycle: bool = True,
        journal: str | os.PathLike[str] | bool = True,
        run: str = "run",
        coordinator: str | Sequence[str] | None = None,
        serve: str | None = None,
        token: bytes | None = None,
        files: Files | None = None,
    ) -> None:
        if on_error not in ("warn", "raise"):
            raise UsageError(f"on_error={on_error!r} is unknown", hint="use 'warn' or 'raise'")
        if on_busy not in ("wait", "skip", "queue"):
            raise UsageError(f"on_busy={on_busy!r} is unknown", hint="use wait, skip or queue")
        if serve is not None and writer == "thread":
            raise UsageError("serve= needs a vault; writer='thread' has none", hint="use writer='vault'")
        if (rank is None) != (world is None):
            raise UsageError("rank and world go together", hint="give both or neither")
        self._store = LocalStore(path, files=files)
        self._copies = [LocalStore(copy, files=files) for copy in copies]
        self._policy = _policy(keep)
        self._identity = None if rank is None or world is None else (rank, world)
        self._journal_path = _journal_path(self._store, journal)
        self._settings: dict[str, Any] = {
            "on_busy": on_busy,
            "on_error": on_error,
            "writer": writer,
            "slots": slots,
            "memory_limit": memory_limit,
            "threads": threads,
            "deadline_s": deadline_s,
            "recycle": recycle,
            "run": run,
            "coordinator": None
            if coordinator is None
            else CoordinatorAt(check_addresses(coordinator), run, token),
            "serve": None if serve is None else ServeAt(serve, run, token),
        }
        self._threads = threads
        self._deadline_s = deadline_s
        self._recycle = recycle
        self._events: Any = None
        self._saver: Saver | None = None
        self._lock = threading.Lock()
        self._upkeep = Crew(1, "holdfast-upkeep")
        self._closed = False
        self.last_load: LoadReport | None = None

    # ---- saving

    def save(
        self,
        step: int,
        tree: Any,
        *,
        meta: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Save a tree of arrays and Python scalars as `step`; returns when it is captured.

        Called by: all processes, for the same steps in the same order. Blocks: for one memory copy of what
        this process writes, and for a free slot if all are busy (`on_busy`). A wrong argument raises, and so
        does a folder, vault or rank that is not there at the first save. Any later failure is on the handle,
        in the log and in the journal, and training goes on (`on_error`).

        `meta` is JSON; retention reads "samples" and "metrics" in it. A step that exists and verifies is
        replaced only with `overwrite`.
        """
        if type(step) is not int or step < 0:
            raise UsageError(f"{step!r} is not a step", hint="steps are whole numbers from 0")
        encoded = msgspec.json.encode(check_meta(meta or {}))
        handle = SaveHandle(step)
        self._opened_saver().save(handle, tree, encoded, overwrite)
        return handle

    def prepare(self, tree: Any) -> None:
        """Make plan, vault and memory for trees like this one, so that the first save is as fast as the rest.

        Called by: all processes. Blocks: while memory the size of the state is faulted in.
        """
        self._opened_saver().prepare(tree)

    @property
    def vault_pid(self) -> int | None:
        """The process id of the vault that this checkpointer spawned, if it has."""
        return self._saver.vault_pid if self._saver is not None else None

    @property
    def vault_address(self) -> str:
        """Where the vault offers staged state, if it was asked to (`serve=`); a new vault has a new one."""
        return self._saver.vault_address if self._saver is not None else ""

    @property
    def host_bytes(self) -> int:
        """Host memory taken for saves; it never exceeds the budget."""
        return self._saver.host_bytes if self._saver is not None else 0

    def wait(self, timeout_s: float = 600.0) -> None:
        """Wait until every save is committed or has failed, and old steps are removed.

        Fails: DeadlineError.
        """
        deadline = Deadline(timeout_s)
        try:
            done = self._saver is None or self._saver.wait(timeout_s)
            self._upkeep.submit(lambda: None).result(deadline.remaining() if done else 0.0)
        except TimeoutError:
            done = False
        if not done:
            raise DeadlineError(
                f"saves were still under way after {timeout_s:g} s", hint="a slow or stuck disk?"
            )

    def _opened_saver(self) -> Saver:
        with self._lock:
            if self._closed:
                raise UsageError("this Checkpointer is closed", hint="make a new one")
            if self._saver is None:
                rank, world = self._who()
                self._store.make_root()
                self._saver = Saver(
                    self._store,
                    SaverConfig(rank=rank, world=world, journal_path=self._journal_path, **self._settings),
                    events=self._opened_journal(),
                    on_commit=self._committed,
                )
                atexit.register(self._exit)
            return self._saver

    def _who(self) -> tuple[int, int]:
        if self._identity is None:
            known = adapters()
            self._identity = (known[0] if known else NUMPY).identity()
        return self._identity

    # ---- loading

    def load(
        self,
        into: Any = None,
        step: int | None = None,
        *,
        init: Callable[[], Any] | None = None,
        parts: str | Sequence[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        cast: bool = False,
        verify: bool = True,
        wait_s: float = 30.0,
    ) -> Any:
        """The newest step that is complete and verifies (or exactly `step`), in the shape of a template.

        `into` is a tree of arrays or of shape/dtype/sharding descriptions; leaves come back as what they are
        there, on whatever mesh. Without it the result is nested dicts of numpy arrays. `parts` are name
        patterns: what they do not select keeps the template's own leaf. `rename` maps names of the template
        to names in the checkpoint. Missing, extra and misshapen arrays are listed all at once; `strict=False`
        leaves missing ones as they are in the template and ignores extra ones.

        `init` makes the state of a run that has never saved anything; without it an empty folder is an
        error. It is not called when there are steps but none of them can be loaded.

        Called by: each process for itself. Blocks: while reading; first up to `wait_s` for a save that a
        vault is still finishing. Fails: NoCheckpointError, MismatchError, CorruptError (given `step`).
        """
        options = LoadOptions(
            parts=(parts,) if isinstance(parts, str) else parts,
            rename=rename,
            strict=strict,
            cast=cast,
            verify=verify,
            threads=self._threads,
        )
        rank, world = self._who()
        search = StepSearch((self._store, *self._copies), note=self._note, rank=rank, world=world)
        try:
            if step is not None:
                return search.load(step, into, options)
            search.await_writers(wait_s)
            if init is not None and not search.steps():
                return init()
            return search.load_newest(into, options)
        finally:
            self.last_load = search.report or self.last_load

    # ---- the steps in the folder

    def steps(self) -> list[int]:
        """The committed steps, ascending, in this folder or one of its copies."""
        return steps_in(self._store, *self._copies)

    def latest(self) -> int | None:
        """The newest committed step."""
        return max(self.steps(), default=None)

    def info(self, step: int | None = None) -> StepInfo:
        """What a step is, from its manifest alone: size, time, metadata."""
        return step_info(self._store, self._existing(step))

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The user's metadata of a step."""
        return dict(self.info(step).meta)

    def verify(
        self, step: int | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Problem]:
        """Everything that is wrong with a step; an empty list means whole and verified."""
        folder = step_folder(self._existing(step))
        return list(verify_step(self._store, folder, progress=progress))

    def pin(self, step: int) -> None:
        """Keep a step whatever the retention policy says."""
        step_manifest(self._store, step)
        self._store.make_folder(WORK)
        self._store.make_folder(WORK, PINS)
        self._store.create(WORK, PINS, step_folder(step), data=b"")

    def unpin(self, step: int) -> None:
        """Leave a step to the retention policy again."""
        self._store.remove(WORK, PINS, step_folder(step))

    def prune(self, *, dry_run: bool = False) -> list[int]:
        """Remove the steps that the policy does not keep; returns them.

        The newest step and pinned ones always stay, and so does a step whose manifest cannot be read.
        """
        infos, _ = readable_steps(self._store)
        removed = []
        for step in retention.doomed(infos, self._policy, now=time.time()):
            if not dry_run:
                upkeep.remove_step(self._store, step, recycle=self._recycle)
                self._note(journal.StepPruned(step=step))
            removed.append(step)
        return removed

    def _existing(self, step: int | None) -> int:
        if step is not None:
            return step
        latest = self.latest()
        if latest is None:
            raise NoCheckpointError(
                f"there is no step in {self._store.root}", hint="nothing has been saved there yet"
            )
        return latest

    def _committed(self, step: int) -> None:
        """Retention, after a commit; on a thread of its own, and never a reason to fail."""
        if self._who()[0] == 0 and not isinstance(self._policy, retention.Everything):
            self._upkeep.submit(self._prune_quietly)

    def _prune_quietly(self) -> None:
        try:
            self.prune()
        except HoldfastError as error:
            log.warning("old steps could not be removed (they will be next time): %s", error)

    # ---- the end

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for the saves under way, then end the vault.

        Fails: DeadlineError if saves are still under way at the end of the time; a vault then finishes them
        alone. With `on_error="raise"` the failure of a save that was not seen yet is raised here.
        """
        atexit.unregister(self._exit)
        with self._lock:
            self._closed = True
            saver, self._saver = self._saver, None
        finished = saver.close(timeout_s) if saver is not None else True
        self._upkeep.close(timeout_s)
        if self._events is not None:
            self._events.close(timeout_s=5.0)
        if not finished:
            raise DeadlineError(
                f"saves were still under way after {timeout_s:g} s",
                hint="a vault finishes them alone; writer='thread' cannot",
            )
        if saver is not None:
            saver.check()

    def _exit(self) -> None:
        """At the end of a program that did not close: a vault can be left to finish, threads cannot."""
        alone = self._saver is not None and self._saver.survives_trainer
        try:
            self.close(2.0 if alone else self._deadline_s)
        except HoldfastError as error:
            if not alone:
                log.warning("%s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps())

    def _opened_journal(self) -> journal.Journal | None:
        # Looking into a folder that is not there must not make it.
        if self._events is None and self._journal_path is not None and os.path.isdir(self._store.root):
            self._events = journal.Journal(self._journal_path, component="trainer")
        found: journal.Journal | None = self._events
        return found

    def _note(self, event: journal.Event) -> None:
        events = self._opened_journal()
        if events is not None:
            events.append(event)


def _policy(keep: int | retention.Policy | None) -> retention.Policy:
    if keep is None:
        return retention.everything()
    return keep if isinstance(keep, retention.Policy) else retention.latest(keep)


def _journal_path(store: LocalStore, where: str | os.PathLike[str] | bool) -> str | None:
    if isinstance(where, bool):
        return os.path.join(store.root, "journal.jsonl") if where else None
    return os.path.abspath(os.fspath(where))
