"""The saving half of a checkpointer: lease, plan, slots, writer, and the saves under way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, final

from holdfast import faults, journal
from holdfast.arrays import FlatTree, flatten_tree
from holdfast.checkpoint import saving, upkeep
from holdfast.checkpoint.captures import Captures
from holdfast.checkpoint.handle import SaveHandle, SaveState
from holdfast.checkpoint.lease import Lease
from holdfast.checkpoint.slots import OnBusy, SlotPool
from holdfast.errors import HoldfastError, SaveError, StagingError, UsageError
from holdfast.format import SaveId
from holdfast.storage import Store, StoreOptions
from holdfast.vault import (
    CoordinatorAt,
    Copy,
    Hello,
    MirrorTo,
    Order,
    Outcome,
    Recipe,
    ServeAt,
    Slot,
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
WRITERS: Final = 4
"""Threads that write."""
_CANCEL_S: Final = 15.0
"""How long copies from devices may take to end once they are told to."""


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
    threads: int = WRITERS
    deadline_s: float = 600.0
    recycle: bool = True
    journal_path: str | None = None
    run: str = "run"
    coordinator: CoordinatorAt | None = None
    serve: ServeAt | None = None
    store: StoreOptions | None = None
    mirror: MirrorTo | None = None


@dataclass(slots=True)
class _Save:
    """A save that the writer is not done with. `over` is set when it is: copies for it are in vain then."""

    handle: SaveHandle
    slot: int
    nbytes: int
    over: threading.Event
    claimed: bool = False
    """Whether somebody is ending it."""


@final
class Saver:
    """Saves trees to one folder, one writer per process.

    Called by: all processes of the run, in the same order. Making one blocks until all of them are there.
    Fails: LeaseError, MissingRanksError, VaultError, StorageError.
    """

    def __init__(
        self,
        store: Store,
        config: SaverConfig,
        *,
        events: journal.Journal | None,
        on_commit: Callable[[int], None],
        on_mirrored: Callable[[int], None],
    ) -> None:
        self._store = store
        self._config = config
        self._events = events
        self._on_commit = on_commit
        self._on_mirrored = on_mirrored
        self._uncopied: dict[str, SaveHandle] = {}
        """By attempt: committed saves of which nothing was heard from the mirror."""
        self._planner = saving.SavePlanner(config.rank, config.world)
        self._recipe: tuple[saving.SavePlan, Recipe] | None = None
        self._seq = 0
        self._under_way: dict[int, _Save] = {}
        # Memory bandwidth, not cores, is what copying can use up.
        copiers = min(4, max(1, len(os.sched_getaffinity(0))))
        self._captures = Captures(copiers, config.deadline_s, self._note)
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()
        self._failure: HoldfastError | None = None
        self.littered = False
        """Whether a save failed since this was last set: it may have been unable to remove its files."""
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
            store=config.store,
            rank=config.rank,
            world=config.world,
            agreement=agreement,
            threads=config.threads,
            journal=config.journal_path,
            recycle=config.recycle,
            coordinator=config.coordinator if agreement == "coordinator" else None,
            serve=config.serve,
            mirror=config.mirror,
            session=self._session,
        )
        if config.writer == "thread":
            return ThreadWriter(hello, self, store=self._store, note=self._note)
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
        """Make plan and memory for trees like this one: all slots that are not busy and within the budget."""
        flat = flatten_tree(tree)
        plan = self._planner.plan(flat)
        numbers: list[int] = []
        try:
            # All of them, before one is given back; of those that are busy, the first is waited for.
            for _ in range(self._config.slots):
                taken = self._slots.take(plan.size, self._config.deadline_s, wait=not numbers)
                if taken is None:
                    break
                numbers.append(taken[0])
                self._prepare_slot(plan, flat, *taken)
        finally:
            for number in numbers:
                self._slots.let_go(number)
                self._slots.give_back(number)

    def _prepare_slot(self, plan: saving.SavePlan, flat: FlatTree, number: int, slot: Slot) -> None:
        try:
            self._captures.prepare(plan, flat, slot)
        except HoldfastError as error:
            self._lose_if_stuck(number, error)
            raise

    def save(self, handle: SaveHandle, tree: Any, meta: bytes, overwrite: bool, fenced: bool = False) -> None:
        """Capture a tree; what becomes of it afterwards is on the handle."""
        with self._one_at_a_time:
            self._save(handle, tree, meta, overwrite, fenced)

    def _save(self, handle: SaveHandle, tree: Any, meta: bytes, overwrite: bool, fenced: bool) -> None:
        self._raise_failure()
        self._note(journal.SaveStarted(step=handle.step))
        faults.site("trainer.save.begin")
        # The attempt is counted by every rank at every call, also when it skips or fails: that keeps the
        # ranks of a run talking about the same save.
        self._seq += 1
        save = SaveId(self._config.run, handle.step, f"{self._session}-{self._seq}")
        try:
            if not self._begin(handle, save, tree, meta, overwrite, fenced):
                self._skip(handle, save)
        except HoldfastError as error:
            self._withdraw(save, error.message)
            if isinstance(error, UsageError):
                raise
            self._fail(handle, error)

    def _begin(
        self, handle: SaveHandle, save: SaveId, tree: Any, meta: bytes, overwrite: bool, fenced: bool
    ) -> bool:
        """Capture the tree and hand it to the writer; False if there was no slot for it."""
        self.check_lease()
        flat = flatten_tree(tree)
        plan = self._planner.plan(flat)
        scalars = saving.scalar_entries(plan, flat.leaves)
        taken = self._slots.take(plan.size, self._config.deadline_s)
        if taken is None:
            return False
        number, slot = taken
        seq, stop = self._seq, threading.Event()
        # From here on the writer may end the save at any moment; the slot stays ours until `let_go`.
        with self._changed:
            self._under_way[seq] = _Save(handle, number, plan.size, stop)
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
            if self._claim(seq) is not None:
                self._slots.give_back(number)
                self._forget(seq)
            self._slots.let_go(number)
            raise
        try:
            deferred = self._captures.begin(
                plan, flat, slot, lambda upto: self._writer.advance(seq, upto), stop=stop, fenced=fenced
            )
        except BaseException as error:
            if not self._lose_if_stuck(number, error):
                self._slots.let_go(number)
            self._writer.abort(seq, f"capturing failed: {type(error).__name__}: {error}")
            raise
        blocked_s = time.monotonic() - handle.started
        if deferred is None or deferred.captured:
            self._captured(handle, plan.size, blocked_s)
        if deferred is None:
            self._slots.let_go(number)
            self._staged(seq)
            return True
        over = partial(self._copied, handle, save, seq, number, plan.size, blocked_s)
        self._captures.go_on(deferred, stop, over)
        return True

    def _captured(self, handle: SaveHandle, nbytes: int, blocked_s: float) -> None:
        handle._advance(SaveState.CAPTURED)
        self._note(journal.SaveCaptured(step=handle.step, bytes=nbytes, blocked_s=blocked_s))

    def _staged(self, seq: int) -> None:
        self._writer.staged(seq)
        faults.site("trainer.stage.done")

    def _copied(
        self,
        handle: SaveHandle,
        save: SaveId,
        seq: int,
        number: int,
        nbytes: int,
        blocked_s: float,
        error: HoldfastError | None,
    ) -> None:
        """A capture that went on after `save` returned is over; called on its thread."""
        if error is None:
            self._slots.let_go(number)
            if handle.state is SaveState.CAPTURING:  # else a snapshot was, and that was told
                self._captured(handle, nbytes, blocked_s)
            self._staged(seq)
            return
        if not self._lose_if_stuck(number, error):
            self._slots.let_go(number)
        self._fail(handle, error)  # before the writer does, who knows less of it
        self._writer.abort(seq, f"capturing failed: {type(error).__name__}: {error.message}")
        self._withdraw(save, error.message)

    def _lose_if_stuck(self, number: int, error: BaseException) -> bool:
        """Give up a slot that a device may still write to."""
        stuck = isinstance(error, StagingError) and error.stuck
        if stuck:
            self._slots.lose(number)
        return stuck

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
        if found is not None:
            self._accepted(found)

    def _accepted(self, found: _Save) -> None:
        if found.handle._advance(SaveState.STAGED):
            elapsed = time.monotonic() - found.handle.started
            self._note(journal.SaveStaged(step=found.handle.step, bytes=found.nbytes, seconds=elapsed))

    def done(self, seq: int, outcome: Outcome) -> None:
        found = self._claim(seq)
        if found is None:
            return
        if outcome.committed and self._config.mirror is not None:
            self._uncopied[f"{self._session}-{seq}"] = found.handle
        self._slots.give_back(found.slot)
        try:
            self._ended(found, outcome)
        finally:
            # After the handle knows why: copies that are cancelled know less of it.
            found.over.set()
            # Last, so that whoever waits for the end of all saves finds their handles settled.
            self._forget(seq)

    def _claim(self, seq: int) -> _Save | None:
        """A save under way, for the first who ends it: a writer that breaks may both refuse and report it."""
        with self._changed:
            found = self._under_way.get(seq)
            if found is None or found.claimed:
                return None
            found.claimed = True
            return found

    def _forget(self, seq: int) -> None:
        with self._changed:
            del self._under_way[seq]
            self._changed.notify_all()

    def mirrored(self, save: SaveId, state: Copy, reason: str) -> None:
        if state == "whole":
            # First, so that whoever waits for the copy, and then for old steps to be removed, finds it done.
            self._on_mirrored(save.step)
        handle = self._uncopied.get(save.attempt)
        if handle is not None:
            handle._copied.tell(state, reason)
        if state != "failing":
            self._uncopied.pop(save.attempt, None)

    def _ended(self, found: _Save, outcome: Outcome) -> None:
        handle = found.handle
        if not outcome.committed:
            self._fail(handle, outcome_error(outcome))
            return
        self._accepted(found)  # a small state is sometimes committed before the word that it is staged
        # A vault writes this event itself, since it may be the only one left to do so.
        if not self._writer.survives_trainer:
            elapsed = time.monotonic() - handle.started
            self._note(journal.SaveDurable(step=handle.step, bytes=outcome.nbytes, seconds=elapsed))
        handle._advance(SaveState.DURABLE)
        faults.site("trainer.durable.seen")
        self._on_commit(handle.step)

    def _fail(self, handle: SaveHandle, error: HoldfastError) -> None:
        if not handle._advance(SaveState.FAILED, error):
            return  # told already, by whoever noticed first
        self.littered = True
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

    def close(self, timeout_s: float, *, drain: bool = True) -> bool:
        """Finish the saves under way and end the writer; False if some go on without this process.

        With `drain`, wait for the mirror as well: its being late is told, and no failure.
        """
        finished = self.wait(timeout_s)
        # Before the slots go: what does not end in time may write to its slot later.
        self._captures.close(_CANCEL_S)
        self._slots.keep_mapped()
        closed = self._writer.close(timeout_s if finished else 0.0, drain=drain)
        for handle in self._uncopied.values():
            handle._copied.tell(
                "left", "this run ended before it was; its vault or the next run goes on with it"
            )
        self._agreement.close()
        self._lease.close()
        return finished and closed

    def check_lease(self) -> None:
        """Fails: LeaseError if another run writes there by now."""
        self._lease.check()

    def check(self) -> None:
        """Raise the failure of an earlier save, if `on_error` is "raise"."""
        self._raise_failure()

    def _note(self, event: journal.Event) -> None:
        if self._events is not None:
            self._events.append(event)

    def _note_cleaned(self, path: str, reason: str) -> None:
        self._note(journal.Cleaned(path=path, reason=reason))
