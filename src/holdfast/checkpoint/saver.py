"""The saving half of a checkpointer: lease, plan, slots, writer, and the saves under way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from holdfast import faults, journal
from holdfast.arrays import flatten_tree
from holdfast.checkpoint import saving, upkeep
from holdfast.checkpoint.handle import SaveHandle, SaveState
from holdfast.checkpoint.lease import Lease
from holdfast.checkpoint.slots import OnBusy, SlotPool
from holdfast.errors import HoldfastError, SaveError, UsageError
from holdfast.format import SaveId
from holdfast.storage import LocalStore
from holdfast.vault import (
    CoordinatorAt,
    Crew,
    Hello,
    Order,
    Outcome,
    Recipe,
    ServeAt,
    ThreadWriter,
    VaultWriter,
    Writer,
    make_agreement,
    outcome_error,
    withdraw,
)

log = logging.getLogger("holdfast.checkpoint")

OnError = Literal["warn", "raise"]
Note = Callable[[journal.Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverConfig:
    """How to save. `Checkpointer` documents each of these."""

    rank: int
    world: int
    on_busy: OnBusy = "wait"
    on_error: OnError = "warn"
    writer: str = "vault"
    slots: int = 1
    memory_limit: int | None = None
    threads: int = 4
    deadline_s: float = 600.0
    recycle: bool = True
    journal_path: str | None = None
    run: str = "run"
    coordinator: CoordinatorAt | None = None
    serve: ServeAt | None = None


@final
class Saver:
    """Saves trees to one folder, one writer per process.

    Called by: all processes of the run, in the same order. Making one blocks until all of them are there.
    Fails: LeaseError, MissingRanksError, VaultError, StorageError.
    """

    def __init__(
        self,
        store: LocalStore,
        config: SaverConfig,
        *,
        events: journal.Journal | None,
        on_commit: Callable[[int], None],
    ) -> None:
        self._store = store
        self._config = config
        self._events = events
        self._on_commit = on_commit
        self._planner = saving.SavePlanner(config.rank, config.world)
        self._recipe: tuple[saving.SavePlan, Recipe] | None = None
        self._seq = 0
        self._under_way: dict[int, tuple[SaveHandle, int, int]] = {}
        # Memory bandwidth, not cores, is what copying can use up.
        self._copiers = min(4, max(1, len(os.sched_getaffinity(0))))
        self._crew = Crew(self._copiers - 1, "holdfast-copy")
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._failure: HoldfastError | None = None
        self._lease = Lease(store, config.rank)
        try:
            if config.rank == 0:
                upkeep.clean(store, self._note_cleaned)
            where = config.coordinator
            kind = "solo" if config.world == 1 else "folder" if where is None else "coordinator"
            self._agreement = make_agreement(store, kind, config.rank, config.world, where)
        except BaseException:
            self._lease.close()
            raise
        try:
            if config.rank == 0:
                upkeep.clean_topics(store, self._agreement)
            self._session = self._agreement.session(config.deadline_s)
            self._writer = self._make_writer(kind)
        except BaseException:
            self._agreement.close()
            self._lease.close()
            raise
        self._slots = SlotPool(
            self._writer,
            count=config.slots,
            limit=config.memory_limit,
            on_busy=config.on_busy,
            rotate=config.serve is not None,
        )

    def _make_writer(self, agreement: str) -> Writer:
        config = self._config
        hello = Hello(
            root=self._store.root,
            rank=config.rank,
            world=config.world,
            agreement=agreement,
            threads=config.threads,
            journal=config.journal_path,
            recycle=config.recycle,
            coordinator=config.coordinator if agreement == "coordinator" else None,
            serve=config.serve,
        )
        if config.writer == "thread":
            return ThreadWriter(hello, self, store=self._store)
        attach = None if config.writer == "vault" else config.writer
        return VaultWriter(hello, self, attach=attach, events_journal=self._events)

    @property
    def vault_pid(self) -> int | None:
        """The process id of the vault that this process spawned."""
        return self._writer.pid if isinstance(self._writer, VaultWriter) else None

    @property
    def vault_address(self) -> str:
        """Where the vault offers staged state; empty if it does not."""
        return self._writer.address if isinstance(self._writer, VaultWriter) else ""

    @property
    def survives_trainer(self) -> bool:
        """Whether staged saves are finished without this process."""
        return self._writer.survives_trainer

    @property
    def host_bytes(self) -> int:
        """Host memory taken for slots."""
        return self._slots.nbytes

    def prepare(self, tree: Any) -> None:
        """Make plan and memory for trees like this one."""
        plan = self._planner.plan(flatten_tree(tree))
        taken = self._slots.take(plan.size, self._config.deadline_s)
        if taken is not None:
            self._slots.give_back(taken[0])

    def save(self, handle: SaveHandle, tree: Any, meta: bytes, overwrite: bool) -> None:
        """Capture a tree; what becomes of it afterwards is on the handle."""
        with self._one_at_a_time:
            self._save(handle, tree, meta, overwrite)

    def _save(self, handle: SaveHandle, tree: Any, meta: bytes, overwrite: bool) -> None:
        self._raise_failure()
        self._note(journal.SaveStarted(step=handle.step))
        faults.site("trainer.save.begin")
        # The attempt is counted by every rank at every call, also when it skips or fails: that keeps the
        # ranks of a run talking about the same save.
        self._seq += 1
        save = SaveId(self._config.run, handle.step, f"{self._session}-{self._seq}")
        try:
            if not self._begin(handle, save, tree, meta, overwrite):
                self._skip(handle, save)
        except HoldfastError as error:
            self._withdraw(save, error.message)
            if isinstance(error, UsageError):
                raise
            self._fail(handle, error)

    def _begin(self, handle: SaveHandle, save: SaveId, tree: Any, meta: bytes, overwrite: bool) -> bool:
        """Capture the tree and hand it to the writer; False if there was no slot for it."""
        flat = flatten_tree(tree)
        plan = self._planner.plan(flat)
        scalars = saving.scalar_entries(plan, flat.leaves)
        taken = self._slots.take(plan.size, self._config.deadline_s)
        if taken is None:
            return False
        number, slot = taken
        seq = self._seq
        with self._changed:
            self._under_way[seq] = (handle, number, plan.size)
        try:
            order = Order(
                seq=seq,
                recipe=self._defined(plan).id,
                slot=number,
                save=save,
                created=time.time(),
                scalars=scalars,
                meta=meta,
                overwrite=overwrite,
                deadline_s=self._config.deadline_s,
            )
            self._writer.begin(order)
        except BaseException:
            with self._changed:
                del self._under_way[seq]
            self._slots.give_back(number)
            raise
        try:
            saving.ready(plan, flat)
            capture = saving.Capture(
                plan, flat.leaves, slot.address, lambda upto: self._writer.advance(seq, upto)
            )
            capture.run(self._crew, self._copiers - 1)
        except BaseException as error:
            self._writer.abort(seq, f"capturing failed: {type(error).__name__}: {error}")
            raise
        handle._advance(SaveState.CAPTURED)
        self._note(
            journal.SaveCaptured(
                step=handle.step,
                bytes=plan.size,
                blocked_s=time.monotonic() - handle.started,
            )
        )
        self._writer.staged(seq)
        faults.site("trainer.stage.done")
        return True

    def _defined(self, plan: saving.SavePlan) -> Recipe:
        if self._recipe is None or self._recipe[0] is not plan:
            number = 0 if self._recipe is None else self._recipe[1].id + 1
            recipe = Recipe(number, self._config.rank, plan.size, plan.slices, plan.arrays)
            self._writer.define(recipe)
            self._recipe = (plan, recipe)
        return self._recipe[1]

    def _skip(self, handle: SaveHandle, save: SaveId) -> None:
        reason = "all save slots are busy"
        handle._advance(SaveState.SKIPPED)
        self._note(journal.SaveSkipped(step=handle.step, reason=reason))
        self._withdraw(save, reason)

    def _withdraw(self, save: SaveId, reason: str) -> None:
        """Tell the other ranks, if any, that this one takes no part in a save."""
        if self._config.world > 1:
            try:
                withdraw(self._agreement, save, reason)
            except HoldfastError as error:
                log.warning("could not tell the other ranks: %s", error.message)

    # ---- what the writer reports, on its own threads

    def accepted(self, seq: int) -> None:
        with self._changed:
            found = self._under_way.get(seq)
        if found is not None and found[0]._advance(SaveState.STAGED):
            elapsed = time.monotonic() - found[0].started
            self._note(journal.SaveStaged(step=found[0].step, bytes=found[2], seconds=elapsed))

    def done(self, seq: int, outcome: Outcome) -> None:
        with self._changed:
            found = self._under_way.get(seq)
        if found is None:
            return
        handle, number, _ = found
        self._slots.give_back(number)
        try:
            self._ended(handle, outcome)
        finally:
            # Last, so that whoever waits for the end of all saves finds their handles settled.
            with self._changed:
                self._under_way.pop(seq, None)
                self._changed.notify_all()

    def _ended(self, handle: SaveHandle, outcome: Outcome) -> None:
        if not outcome.committed:
            self._fail(handle, outcome_error(outcome))
            return
        # A vault writes this event itself, since it may be the only one left to do so.
        if not self._writer.survives_trainer:
            elapsed = time.monotonic() - handle.started
            self._note(journal.SaveDurable(step=handle.step, bytes=outcome.nbytes, seconds=elapsed))
        handle._advance(SaveState.DURABLE)
        faults.site("trainer.durable.seen")
        self._on_commit(handle.step)

    def _fail(self, handle: SaveHandle, error: HoldfastError) -> None:
        handle._advance(SaveState.FAILED, error)
        self._note(journal.SaveFailed(step=handle.step, reason=error.message))
        log.warning("the save of step %d failed: %s", handle.step, error)
        if self._config.on_error == "raise":
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SaveError(f"an earlier save failed: {failure.message}", hint=failure.hint) from failure

    # ---- the end

    def wait(self, timeout_s: float) -> bool:
        """Wait until no save is under way; False if time runs out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the saves under way and end the writer; False if some go on without this process."""
        finished = self.wait(timeout_s)
        closed = self._writer.close(timeout_s if finished else 0.0)
        self._crew.close(timeout_s)
        self._agreement.close()
        self._lease.close()
        return finished and closed

    def check(self) -> None:
        """Raise the failure of an earlier save, if `on_error` is "raise"."""
        self._raise_failure()

    def _note(self, event: journal.Event) -> None:
        if self._events is not None:
            self._events.append(event)

    def _note_cleaned(self, path: str, reason: str) -> None:
        self._note(journal.Cleaned(path=path, reason=reason))
