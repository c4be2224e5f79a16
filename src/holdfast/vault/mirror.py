"""Copies the committed steps of a folder to a second place, in the background and after every save.

One thread, one step at a time, the newest first; it reads what is on disk, so that it holds no slot, and
makes way for saves that are being written. A failure is told and tried again, ever more seldom; it stops
nothing. A vault that dies is followed by another one, which goes on where this one was: what is whole on the
mirror is recorded in the folder, and what is half there is found by its index.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final, Protocol, final

from holdfast import journal
from holdfast.clock import Deadline
from holdfast.errors import (
    AgreementError,
    CorruptError,
    FormatError,
    HoldfastError,
    StepExistsError,
    StorageError,
)
from holdfast.format import MANIFEST, SaveId, parse_step_folder, step_folder
from holdfast.storage import Hold, Store, opened
from holdfast.vault.crew import Crew
from holdfast.vault.intents import Intent, unfence
from holdfast.vault.messages import Mirrored, MirrorTo
from holdfast.vault.mirror_copy import SourceGoneError, StepCopy, attempt_of
from holdfast.vault.mirror_plan import Agenda, Look, Pace, Rest, Send
from holdfast.vault.mirror_records import Records
from holdfast.vault.mirror_sweep import sweep

log = logging.getLogger("holdfast.vault")

_TICK_S: Final = 60.0
_HELD_S: Final = 1.0
"""How often to ask whether another process has stopped copying this folder."""
_YIELD_S: Final = 0.25
"""The longest that one block waits for a save that is being written."""
_STOP_S: Final = 5.0
"""The longest that ending waits for the block under way; cutting it off leaves nothing but rubbish."""


class _Stopped(HoldfastError):
    """The copy was told to end."""


class Saves(Protocol):
    """The saves under way, to which copying gives way."""

    def drain(self, timeout_s: float) -> bool: ...


@final
class MirrorWorker:
    """Copies one rank's parts of one folder's steps, on threads of its own, until `close`.

    `note` takes events for the journal; `tell` what became of saves that somebody waits for.
    """

    def __init__(
        self,
        store: Store,
        to: MirrorTo,
        *,
        rank: int,
        world: int,
        saves: Saves,
        note: Callable[[journal.Event], None],
        tell: Callable[[Mirrored], None],
        width: int = 4,
    ) -> None:
        self._store = store
        self._target = opened(to.place, to.options)
        self._place = self._target.root
        self._to = to
        self._rank = rank
        self._world = world
        self._saves = saves
        self._note = note
        self._tell = tell
        self._width = width
        self._records = Records(store, to.place)
        self._agenda = Agenda(every=to.every, most=to.most, leads=rank == 0)
        self._attempts: dict[int, str] = {}
        """Of the committed steps here; what is not in it is read from its manifest."""
        self._pace = Pace(to.rate)
        self._changed = threading.Condition()
        self._awaited: dict[str, SaveId] = {}
        self._news = True
        self._ending: Deadline | None = None
        self._stopped = threading.Event()
        self._made = self._ready = self._swept = False
        self._intents: dict[int, tuple[str, Intent]] = {}
        """By step: its attempt, and what tells others on the mirror that this rank is at it."""
        self._fenced: SaveId | None = None
        """The save that this rank committed there last."""
        self._sent: dict[int, tuple[int, float]] = {}
        """By step: the bytes that were sent for it, and since when. Of steps that are not whole yet."""
        self._crew = Crew(width, "holdfast-mirror")
        self._thread = threading.Thread(target=self._run, name="holdfast-mirror", daemon=True)
        self._thread.start()

    # ---- from other threads

    def committed(self, save: SaveId) -> None:
        """A step was committed here. Somebody waits to hear what becomes of it. Returns at once."""
        with self._changed:
            self._attempts[save.step] = save.attempt
            self._awaited[save.attempt] = save
            self._news = True
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Copy what is due, and the newest step in any case; then end. False if time runs out first.

        Blocks: until then, `timeout_s` at most. What is not copied by then is left to the next vault.
        """
        deadline = Deadline(timeout_s)
        steps = self._unfinished()
        if steps:
            log.warning(
                "copying steps %s to %s before the end, %.0f s at most", steps, self._place, timeout_s
            )
            event = journal.MirrorDraining(place=self._place, steps=tuple(steps), timeout_s=timeout_s)
            self._note(event)
        with self._changed:
            self._ending = deadline
            self._news = True
            self._changed.notify_all()
        self._thread.join(deadline.remaining())
        for step in self._unfinished():
            reason = "the run ended before it was copied; the next run goes on with it"
            log.error("step %d is not on %s: %s", step, self._place, reason)
            self._note(journal.MirrorLeft(step=step, place=self._place, reason=reason))
        return not self._thread.is_alive()

    def _unfinished(self) -> list[int]:
        """The steps that this mirror must not end without."""
        agenda = self._agenda.copied()
        with suppress(HoldfastError):  # what is not known now is known to the next one
            agenda.see(*self._listing())
        agenda.end()
        return agenda.open

    def close(self) -> None:
        """Copy nothing more; returns when the block under way is over, or after a while if it is stuck."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_STOP_S)
        self._crew.close(_STOP_S if not self._thread.is_alive() else 0.0)

    # ---- the thread

    def _run(self) -> None:
        held: Hold | None = None
        try:
            while not self._stopped.is_set() and not self._is_late():
                try:
                    held = held or self._take()
                    if not self._turn(copies=held is not None):
                        return
                except _Stopped:
                    return
                # Whatever goes wrong with a mirror, including a bug of ours, must not end it for good.
                except Exception as error:
                    self._stopped.wait(self._failed(error))
        finally:
            self._drop_intents(())
            if held is not None:
                held.close()

    def _take(self) -> Hold | None:
        """The right to copy; None while another vault has it, which then is at it."""
        if not self._made:
            self._records.make()
            self._made = True
        return self._records.hold(self._rank)

    def _turn(self, *, copies: bool) -> bool:
        """Do what is next; False if everything is done that this mirror has to end with."""
        ends = self._ending is not None  # asked once: what the end adds to the agenda must be on it
        self._answer(self._survey(ends=ends))
        self._drop_intents(self._agenda.busy)
        if ends and not self._agenda.open:
            if copies:
                self._sweep()
            return False
        following = self._agenda.next(time.monotonic()) if copies else Rest(_HELD_S)
        match following:
            case Send(step, attempt):
                self._send(step, attempt)
            case Look(step, attempt):
                self._look(step, attempt)
            case Rest(None) if self._sweep():
                pass
            case Rest(seconds):
                self._hear(_TICK_S if seconds is None else seconds)
        return True

    def _is_late(self) -> bool:
        return self._ending is not None and self._ending.expired()

    def _hear(self, seconds: float) -> None:
        """Wait for news, so long at most.

        That of a commit does not bring a mirror back that failed: the agenda has its own time for that.
        """
        deadline = Deadline(seconds if self._ending is None else min(seconds, self._ending.remaining()))
        with self._changed:
            while not self._news and not self._stopped.is_set() and not deadline.expired():
                self._changed.wait(deadline.remaining())
            self._news = False

    # ---- what there is

    def _survey(self, *, ends: bool) -> list[SaveId]:
        """Take a look at the folder and its records; the awaited saves that it can tell about."""
        with self._changed:
            awaited = list(self._awaited.values())
        self._agenda.see(*self._listing())
        if ends:
            self._agenda.end()
        return awaited

    def _listing(self) -> tuple[dict[int, str], dict[int, str]]:
        """The steps that are committed here and those that were copied, each with its attempt."""
        with self._changed:
            attempts = dict(self._attempts)
        folders = [name for name in self._store.names() if parse_step_folder(name) is not None]
        local: dict[int, str] = {}
        for folder in self._store.having(folders, MANIFEST):
            step = parse_step_folder(folder)
            assert step is not None
            attempt = attempts.get(step) or attempt_of(self._store, step)
            if attempt is not None:
                local[step] = attempt
        with self._changed:
            # What was committed since is news of its own, and looked at again.
            self._attempts = local | {s: a for s, a in self._attempts.items() if attempts.get(s) != a}
        return local, self._records.sent()

    def _answer(self, awaited: Iterable[SaveId]) -> None:
        """Tell of saves that are whole, or that are not to be copied at all."""
        sent = self._records.sent()
        for save in awaited:
            if sent.get(save.step) == save.attempt:
                self._settle(Mirrored(save, "whole"))
            elif not self._agenda.has(save.step, save.attempt):
                reason = "it was pruned or replaced before it was copied"
                log.error("step %d is not on %s: %s", save.step, self._place, reason)
                self._note(journal.MirrorLeft(step=save.step, place=self._place, reason=reason))
                self._settle(Mirrored(save, "left", reason))
            elif not self._agenda.wants(save.step, save.attempt):
                asked = f"every={self._to.every}" + (
                    "" if self._to.most is None else f", keep={self._to.most}"
                )
                self._settle(Mirrored(save, "left", f"not asked for ({asked})"))

    def _settle(self, news: Mirrored) -> None:
        with self._changed:
            known = self._awaited.pop(news.save.attempt, None) is not None
        if known:
            self._tell(news)

    # ---- copying

    def _send(self, step: int, attempt: str) -> None:
        began = time.monotonic()

        def send(copy: StepCopy) -> None:
            self._sent[step] = (0, began) if copy.is_whole() else (self._given(copy), began)
            self._agenda.worked()
            self._agenda.given(step, attempt, began)
            self._conclude(copy)

        self._attempt(step, attempt, send)

    def _given(self, copy: StepCopy) -> int:
        """Send this rank's parts. They are announced until the step is whole there, or given up here."""
        save = copy.manifest.save
        if self._intents.get(save.step, ("",))[0] != save.attempt:
            self._drop_intents(self._intents.keys() - {save.step})
            self._intents[save.step] = (save.attempt, copy.announce())
        return copy.give()

    def _drop_intents(self, kept: Collection[int]) -> None:
        for step in [step for step in self._intents if step not in kept]:
            self._intents.pop(step)[1].close()

    def _look(self, step: int, attempt: str) -> None:
        self._attempt(step, attempt, self._conclude)

    def _conclude(self, copy: StepCopy) -> None:
        """This rank's parts are there: see what the others have done; rank 0 commits when all have."""
        save = copy.manifest.save
        if not copy.is_whole():
            if self._rank != 0 or not copy.is_complete():
                self._agenda.looked(save.step, time.monotonic())
                self._check_own(copy)
                return
            copy.commit()
            # Not that of this save: who took it for dead may be about to look. Later ones are swept.
            if self._fenced is not None and self._fenced != save:
                unfence(self._target, self._fenced)
            self._fenced = save
        self._whole(copy)

    def _check_own(self, copy: StepCopy) -> None:
        try:
            copy.check_own()
        except StorageError:
            self._agenda.lost(copy.manifest.save.step)  # so that they are sent again
            raise

    def _attempt(self, step: int, attempt: str, act: Callable[[StepCopy], None]) -> None:
        """Do something for one save; what can go wrong with it ends here."""
        try:
            self._make_ready()
            copy = StepCopy(
                self._store,
                self._target,
                step,
                rank=self._rank,
                world=self._world,
                crew=self._crew,
                width=self._width,
                gate=self._gate,
            )
            if copy.manifest.save.attempt == attempt:
                act(copy)
            else:
                self._forget(step)  # replaced meanwhile
        except SourceGoneError as error:
            if attempt_of(self._store, step) == attempt:
                self._leave(step, attempt, error)
            else:
                self._forget(step)  # pruned or replaced meanwhile
        except FormatError as error:
            if self._store.exists(step_folder(step), MANIFEST):
                self._leave(step, attempt, error)
            else:
                self._forget(step)  # pruned while it was read, and its files overwritten
        except (AgreementError, StepExistsError) as error:
            self._leave(step, attempt, error)
        except StorageError as error:
            self._ready = False
            self._failed(error, step)

    def _make_ready(self) -> None:
        """Once, before anything is written there: a place that cannot keep the promises is refused."""
        if not self._ready:
            # On an object store that is a probe, and one rank's is enough.
            if self._rank == 0 or self._target.has_locks:
                self._target.make_root()
            self._ready = True

    def _forget(self, step: int) -> None:
        with self._changed:
            self._attempts.pop(step, None)
        self._swept = False

    def _gate(self, nbytes: int) -> None:
        """Before each block: make way for saves, keep to the rate, and end when told to."""
        self._saves.drain(_YIELD_S)
        turn = Deadline(self._pace.delay_s(nbytes, time.monotonic()))
        with self._changed:
            while not (turn.expired() or self._stopped.is_set() or self._is_late()):
                left_s = turn.remaining()
                self._changed.wait(left_s if self._ending is None else min(left_s, self._ending.remaining()))
        if self._stopped.is_set() or self._is_late():
            raise _Stopped("the mirror was told to end")

    # ---- what became of it

    def _whole(self, copy: StepCopy) -> None:
        save, now = copy.manifest.save, time.monotonic()
        nbytes, began = self._sent.pop(save.step, (0, now))
        self._records.add(save.step, save.attempt)
        self._agenda.whole(save.step, save.attempt)
        self._records.trim(set(self._attempts))
        if self._rank == 0:
            self._note(
                journal.StepMirrored(
                    step=save.step,
                    place=self._place,
                    bytes=copy.manifest.nbytes,
                    sent=nbytes,
                    seconds=now - began,
                )
            )
        self._settle(Mirrored(save, "whole"))

    def _leave(self, step: int, attempt: str, error: HoldfastError) -> None:
        """This save cannot be copied: it is damaged here, or another one must stay where it would go."""
        self._agenda.leave(step, attempt)
        self._swept = False
        log.error("step %d is not copied to %s: %s", step, self._place, error)
        if isinstance(error, CorruptError) and error.file is not None:
            file = self._store.path(step_folder(step), error.file)
            self._note(
                journal.BlockBad(file=file, block=error.block or 0, arrays=error.arrays, reason=error.message)
            )
        self._note(journal.MirrorLeft(step=step, place=self._place, reason=error.message))
        with self._changed:
            save = self._awaited.get(attempt)
        if save is not None:
            self._settle(Mirrored(save, "left", error.message))

    def _failed(self, error: Exception, step: int | None = None) -> float:
        """Tell of a failure; how long nothing is tried."""
        wait_s = self._agenda.failed(time.monotonic(), spread=random.uniform(0.5, 1.0))
        reason = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        what = "steps" if step is None else f"step {step}"
        defect = None if isinstance(error, HoldfastError) else error
        log.warning(
            "copying %s to %s failed, again in %.1f s: %s", what, self._place, wait_s, reason, exc_info=defect
        )
        self._note(journal.MirrorFailed(step=step, place=self._place, reason=reason, retry_s=wait_s))
        with self._changed:
            awaited = list(self._awaited.values())
        for save in awaited:
            self._tell(Mirrored(save, "failing", reason))
        return wait_s

    def _sweep(self) -> bool:
        """Remove what copies that were given up have left; True if that was due.

        It is once after the first step that was sent, and after every copy that was given up: nothing else
        leaves such things behind.
        """
        if self._rank != 0 or self._swept or not self._ready:
            return False
        self._swept = True
        for path in sweep(self._target, set(self._attempts), self._agenda.busy):
            self._note(journal.Cleaned(path=path, reason="left on the mirror by a copy that never ended"))
        return True
