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
from holdfast.checkpoint.loading import READERS, LoadOptions, LoadReport
from holdfast.checkpoint.saver import WRITERS, OnError, Saver, SaverConfig
from holdfast.checkpoint.search import StepSearch
from holdfast.checkpoint.slots import OnBusy
from holdfast.checkpoint.steps import (
    PINS,
    StepInfo,
    readable_steps,
    step_info,
    step_manifest,
)
from holdfast.checkpoint.tiers import Mirror, MirrorTier
from holdfast.clock import Deadline
from holdfast.coord import check_addresses
from holdfast.errors import (
    DeadlineError,
    HoldfastError,
    NoCheckpointError,
    UsageError,
)
from holdfast.format import MANIFEST, Problem, check_meta, step_folder, verify_step
from holdfast.storage import Files, Store, StoreOptions, is_url, opened
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
        path: the folder, made at the first save; or a place in an object store (`s3://bucket/run`).
        keep: how many of the latest steps to keep, or a policy (`latest(3) | every(1000)`), or None for all.
        on_busy: what `save` does while earlier saves hold all slots: "wait", "skip" or "queue".
        on_error: "warn" logs a failed save and goes on; "raise" raises it at the next call as well.
        writer: "vault" (a process beside this one), "thread", or the path of a standing vault's socket.
        slots: saves that may be under way at once; each takes host memory the size of the saved state.
        memory_limit: bytes that all slots together never exceed.
        rank, world: which of how many processes this is; asked of the framework if not given.
        copies: other folders with copies of the same steps, read where a block here is bad.
        mirror: a second place, such as "s3://bucket/run", to which the vault copies committed steps in the
            background, and from which loads take what the folder lacks; or a `Mirror` with which steps, how
            long they stay, and how fast.
        threads: threads that read and write. Without it 4 write and 16 read: most wait for the disk while
            some copy.
        deadline_s: the longest that a save may take, or wait for a slot or another rank.
        recycle: overwrite files of pruned steps instead of making new ones.
        journal: file for events; True for `journal.jsonl` in the folder (none for an object store), False
            for none.
        run: name of the run, stored in every save.
        coordinator: address of the run's coordinator, or several; the ranks then agree through it, not
            through the folder.
        serve: an address, such as "127.0.0.1:0", at which the vault offers the newest staged state
            (`vault_address`), so that `holdfast.vault.restore` takes it from memory.
        token: the run's token, for the coordinator and for those who restore from the vault.
        store: how to reach an object store; most of it comes from the environment.
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
        mirror: str | os.PathLike[str] | Mirror | None = None,
        threads: int | None = None,
        deadline_s: float = 600.0,
        recycle: bool = True,
        journal: str | os.PathLike[str] | bool = True,
        run: str = "run",
        coordinator: str | Sequence[str] | None = None,
        serve: str | None = None,
        token: bytes | None = None,
        store: StoreOptions | None = None,
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
        self._store = opened(path, store, files=files)
        self._copies = [opened(copy, store, files=files) for copy in copies]
        if writer != "thread" and self._store.root.startswith("memory://"):
            raise UsageError(
                f"{self._store.root} is memory of this process; a vault cannot reach it",
                hint="use writer='thread'",
            )
        self._policy = retention.policy(keep)
        self._identity = None if rank is None or world is None else (rank, world)
        self._journal_path = _journal_path(self._store, journal)
        self._settings: dict[str, Any] = {
            "on_busy": on_busy,
            "on_error": on_error,
            "writer": writer,
            "slots": slots,
            "memory_limit": memory_limit,
            "threads": WRITERS if threads is None else threads,
            "deadline_s": deadline_s,
            "recycle": recycle,
            "run": run,
            "store": store,
            "coordinator": None
            if coordinator is None
            else CoordinatorAt(check_addresses(coordinator), run, token),
            "serve": None if serve is None else ServeAt(serve, run, token),
        }
        self._tier = None if mirror is None else MirrorTier(mirror, self._store, store, self._note)
        self._settings["mirror"] = None if self._tier is None else self._tier.to
        self._num_readers = READERS if threads is None else threads
        self._deadline_s = deadline_s
        self._recycle = recycle
        self._events: Any = None
        self._saver: Saver | None = None
        self._lock = threading.Lock()
        self._upkeep = Crew(1, "holdfast-upkeep")
        self._closed = False
        self._useless: set[int] = set()
        """Steps that a load had to pass over: retention must not count on them."""
        self._last: int | None = None
        """The step that was committed last, which need not be the newest."""
        self.last_load: LoadReport | None = None

    # ---- saving

    def save(
        self,
        step: int,
        tree: Any,
        *,
        meta: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        fenced: bool = False,
    ) -> SaveHandle:
        """Save a tree of arrays and Python scalars as `step`; returns when it is captured.

        Called by: all processes, for the same steps in the same order. Blocks: for one memory copy of what
        this process writes, and for a free slot if all are busy (`on_busy`). A wrong argument raises, and so
        does a folder, vault or rank that is not there at the first save. Any later failure is on the handle,
        in the log and in the journal, and training goes on (`on_error`).

        `fenced` promises that the arrays are left alone until `handle.fence()` returns: those on GPUs are
        then copied while the program goes on, and `save` waits for none of them.

        `meta` is JSON; retention reads "samples" and "metrics" in it. A step that exists and verifies is
        replaced only with `overwrite`.
        """
        if type(step) is not int or step < 0:
            raise UsageError(f"{step!r} is not a step", hint="steps are whole numbers from 0")
        encoded = msgspec.json.encode(check_meta(meta or {}))
        handle = SaveHandle(step)
        if self._tier is not None:
            handle._copied.expect()
        self._opened_saver().save(handle, tree, encoded, overwrite, fenced)
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
                    on_mirrored=self._mirrored,
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

        Called by: each process for itself; several agree on `step` first, or the newest that one of them can
        read may not be that of another. Blocks: while reading; first up to `wait_s` for a save that a vault
        is still finishing. Fails: NoCheckpointError, MismatchError, CorruptError (given `step`), StorageError
        if a place that may have a step does not answer.
        """
        options = LoadOptions(
            parts=(parts,) if isinstance(parts, str) else parts,
            rename=rename,
            strict=strict,
            cast=cast,
            verify=verify,
            threads=self._num_readers,
        )
        search = self._search()
        try:
            if step is not None:
                return search.load(step, into, options)
            search.await_writers(wait_s)
            if init is not None and not search.steps():
                if search.silent is not None:
                    raise search.silent  # it may have steps: a run must not begin again for that
                return init()
            return search.load_newest(into, options)
        finally:
            self.last_load = search.report or self.last_load
            self._useless |= search.skipped

    def _search(self) -> StepSearch:
        rank, world = self._who()
        mirror = None if self._tier is None else (self._tier.glance, self._tier.store)
        return StepSearch(
            (self._store, *self._copies), mirror=mirror, note=self._note, rank=rank, world=world
        )

    # ---- the steps in the folder

    def steps(self) -> list[int]:
        """The committed steps, ascending, in this folder, one of its copies or its mirror."""
        return self._search().steps()

    def latest(self) -> int | None:
        """The newest committed step."""
        return max(self.steps(), default=None)

    def info(self, step: int | None = None) -> StepInfo:
        """What a step is, from its manifest alone: size, time, metadata."""
        chosen = self._existing(step)
        return step_info(self._nearest(chosen), chosen)

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The user's metadata of a step."""
        return dict(self.info(step).meta)

    def verify(
        self, step: int | None = None, *, progress: Callable[[int], None] | None = None
    ) -> list[Problem]:
        """Everything that is wrong with a step; an empty list means whole and verified.

        Looked at is the step in the folder; where that lacks it, in the nearest place that has it.
        """
        chosen = self._existing(step)
        return list(verify_step(self._nearest(chosen), step_folder(chosen), progress=progress))

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

        The newest step and pinned ones always stay, and so does the one saved last. A step whose manifest
        cannot be read, or that a load had to pass over, stays too, and no other goes in its favour. Fails:
        StorageError; LeaseError if another run took the place over.
        """
        if self._saver is not None:
            self._saver.check_lease()
        useless = set(self._useless)
        infos = [info for info in readable_steps(self._store)[0] if info.step not in useless]
        removed = []
        held = self._tier.held(infos) if self._tier is not None else set()
        for step in retention.doomed(infos, self._policy, now=time.time()):
            if step in held or step == self._last:
                continue
            if not dry_run:
                upkeep.remove_step(self._store, step, recycle=self._recycle)
                self._note(journal.StepPruned(step=step))
            removed.append(step)
        return removed

    def _nearest(self, step: int) -> Store:
        """The place to look at a step: the folder, unless only another place has it."""
        places = [self._store, *self._copies]
        for place in places if self._tier is None else [*places, self._tier.glance]:
            try:
                if place.exists(step_folder(step), MANIFEST):
                    return place
            except HoldfastError as error:
                if place is self._store:
                    raise
                log.warning("%s is left out, it does not answer: %s", place.root, error.message)
        return self._store

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
        self._last = step
        self._useless.discard(step)
        self._tidy()

    def _tidy(self) -> None:
        if self._who()[0] != 0:
            return
        if self._saver is not None and self._saver.littered and not self._store.has_locks:
            self._saver.littered = False
            self._upkeep.submit(self._sweep_quietly)
        if not isinstance(self._policy, retention.Everything):
            self._upkeep.submit(self._prune_quietly)

    def _mirrored(self, step: int) -> None:
        """Retention on the mirror, and of what was held here until it got there."""
        if self._tier is not None and self._who()[0] == 0:
            self._tier.mirrored(step)
            self._tidy()

    def _sweep_quietly(self) -> None:
        """Remove what a failed save could not, being cut off from the store."""
        try:
            upkeep.sweep(self._store, lambda path, reason: self._note(journal.Cleaned(path, reason)))
        except HoldfastError as error:
            log.warning("the files of a failed save could not be removed: %s", error)

    def _prune_quietly(self) -> None:
        try:
            self.prune()
        except HoldfastError as error:
            log.warning("old steps could not be removed (they will be next time): %s", error)

    # ---- the end

    def close(self, timeout_s: float = 600.0, *, drain: bool = True) -> None:
        """Wait for the saves under way, then end the vault.

        With a mirror and `drain`, wait for its steps too, for `Mirror.drain_s` at most. What is not there by
        then is announced, and copied by the next run; without `drain` the vault goes on with it alone.

        Fails: DeadlineError if saves are still under way at the end of the time; a vault then finishes them
        alone. With `on_error="raise"` the failure of a save that was not seen yet is raised here.
        """
        atexit.unregister(self._exit)
        with self._lock:
            self._closed = True
            saver, self._saver = self._saver, None
        finished = saver.close(timeout_s, drain=drain) if saver is not None else True
        self._upkeep.close(timeout_s)
        if self._tier is not None:
            self._tier.close(timeout_s)
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
        there = is_url(self._store.root) or os.path.isdir(self._store.root)
        if self._events is None and self._journal_path is not None and there:
            self._events = journal.Journal(self._journal_path, component="trainer")
        found: journal.Journal | None = self._events
        return found

    def _note(self, event: journal.Event) -> None:
        events = self._opened_journal()
        if events is not None:
            events.append(event)


def _journal_path(store: Store, where: str | os.PathLike[str] | bool) -> str | None:
    if isinstance(where, bool):
        # A journal is appended to, which an object store cannot do.
        return os.path.join(store.root, "journal.jsonl") if where and not is_url(store.root) else None
    return os.path.abspath(os.fspath(where))
