"""What takes staged saves to disk, as the checkpointer sees it; and the writer that needs no vault.

`ThreadWriter` works on threads of the trainer: the same guarantees as with a vault, except for the trainer's
own death.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, final

from holdfast import errors, journal
from holdfast.errors import HoldfastError
from holdfast.format import SaveId
from holdfast.storage import Store, opened
from holdfast.vault.agreements import make_agreement
from holdfast.vault.arena import Slot
from holdfast.vault.messages import Hello, Order, Outcome, Recipe
from holdfast.vault.mirror import MirrorWorker
from holdfast.vault.persist import Job, Persister

Copy = Literal["whole", "left", "failing"]
"""What became of a save on the mirror."""


class Events(Protocol):
    """Whom a writer tells what became of a save; called from its threads."""

    def accepted(self, seq: int) -> None: ...
    def done(self, seq: int, outcome: Outcome) -> None: ...

    def mirrored(self, save: SaveId, state: Copy, reason: str) -> None:
        """What became of a committed save on the mirror."""
        ...


class Writer(Protocol):
    """Takes staged saves to disk."""

    survives_trainer: bool

    def make_slot(self, size: int) -> tuple[int, Slot]:
        """A new slot of at least `size` bytes, faulted in, and its number."""
        ...

    def drop_slot(self, number: int) -> None: ...
    def define(self, recipe: Recipe) -> None: ...
    def begin(self, order: Order) -> None: ...
    def advance(self, seq: int, upto: int) -> None: ...
    def staged(self, seq: int) -> None: ...
    def abort(self, seq: int, reason: str) -> None: ...

    def close(self, timeout_s: float, *, drain: bool = True) -> bool:
        """Finish what is staged and end; False if that did not happen in time.

        With `drain`, wait for the mirror as well, as far as the time allows; its being late is no failure.
        """
        ...


def outcome_error(outcome: Outcome) -> HoldfastError:
    """The error that a failed outcome stands for."""
    kind = getattr(errors, outcome.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.StorageError):
        return kind(outcome.message, path=outcome.path, errno_=outcome.errno, hint=outcome.hint)
    if isinstance(kind, type) and issubclass(kind, errors.MissingRanksError):
        return errors.AgreementError(outcome.message, hint=outcome.hint)
    if isinstance(kind, type) and issubclass(kind, HoldfastError):
        return kind(outcome.message, hint=outcome.hint)
    return errors.SaveError(outcome.message, hint=outcome.hint)


@final
class ThreadWriter:
    """Writes from threads of this process."""

    survives_trainer = False

    def __init__(
        self,
        hello: Hello,
        events: Events,
        *,
        store: Store | None = None,
        note: Callable[[journal.Event], None] = lambda event: None,
    ) -> None:
        store = store or opened(hello.root, hello.store)
        self._events = events
        self._slots: dict[int, Slot] = {}
        self._recipes: dict[int, Recipe] = {}
        self._jobs: dict[int, Job] = {}
        self._agreement = make_agreement(store, hello.agreement, hello.rank, hello.world, hello.coordinator)
        self._persister = Persister(
            store,
            self._agreement,
            on_done=self._done,
            threads=hello.threads,
            recycle=hello.recycle,
        )
        self._to = hello.mirror
        self._mirror: MirrorWorker | None = None
        if hello.mirror is not None:
            self._mirror = MirrorWorker(
                store,
                hello.mirror,
                rank=hello.rank,
                world=hello.world,
                saves=self._persister,
                note=note,
                tell=lambda news: events.mirrored(news.save, news.state, news.reason),
            )

    def make_slot(self, size: int) -> tuple[int, Slot]:
        slot = Slot.make(size)
        slot.populate()
        number = max(self._slots, default=-1) + 1
        self._slots[number] = slot
        return number, slot

    def drop_slot(self, number: int) -> None:
        self._slots.pop(number).close()

    def define(self, recipe: Recipe) -> None:
        self._recipes[recipe.id] = recipe

    def begin(self, order: Order) -> None:
        job = Job(order, self._recipes[order.recipe], self._slots[order.slot].view)
        self._jobs[order.seq] = job
        self._persister.submit(job)

    def advance(self, seq: int, upto: int) -> None:
        if (job := self._jobs.get(seq)) is not None:
            job.advance(upto)

    def staged(self, seq: int) -> None:
        if (job := self._jobs.get(seq)) is not None:
            job.stage()
        self._events.accepted(seq)

    def abort(self, seq: int, reason: str) -> None:
        if (job := self._jobs.get(seq)) is not None:
            job.abort(reason)

    def _done(self, seq: int, outcome: Outcome) -> None:
        job = self._jobs.pop(seq, None)
        self._events.done(seq, outcome)
        if job is not None and outcome.committed and self._mirror is not None:
            self._mirror.committed(job.order.save)

    def close(self, timeout_s: float, *, drain: bool = True) -> bool:
        closed = self._persister.close(timeout_s)
        if self._mirror is not None and self._to is not None:
            self._mirror.drain(min(timeout_s, self._to.drain_s) if drain else 0.0)
            self._mirror.close()
        self._agreement.close()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        return closed
