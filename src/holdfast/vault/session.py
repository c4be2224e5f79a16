"""One trainer's connection to a vault: its slots, recipes and saves, and what it leaves behind."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, final

from holdfast import journal
from holdfast.clock import Deadline
from holdfast.coord import Agreement
from holdfast.errors import DeadlineError, HoldfastError, VaultError
from holdfast.storage import opened
from holdfast.vault.agreements import make_agreement
from holdfast.vault.arena import Slot
from holdfast.vault.commit import part
from holdfast.vault.messages import (
    REQUESTS,
    Abort,
    Accepted,
    AdoptSlot,
    Awaits,
    Begin,
    Begun,
    Bye,
    CopyFrom,
    Define,
    Done,
    DropSlot,
    Hello,
    Holds,
    MakeSlot,
    Noted,
    Order,
    Outcome,
    Ready,
    Recipe,
    Refused,
    Reply,
    Request,
    SlotReady,
    Staged,
    Welcome,
)
from holdfast.vault.persist import Job, Persister
from holdfast.wire import ConnectionLost, FrameSocket

if TYPE_CHECKING:
    from holdfast.vault.holdings import Holdings, State
    from holdfast.vault.mirror import MirrorWorker
    from holdfast.vault.offers import Owner

log = logging.getLogger("holdfast.vault")

FINISH_S: Final = 3600.0
"""The longest that a vault without its trainer works on staged saves; each has its own deadline below it."""
_TICK_S: Final = 60.0
_DEATH_S: Final = 1.0
"""A process whose sockets are closed by the kernel is gone after much less."""

_PART_S: Final = 5.0
"""How long the other ranks' not having to wait is worth waiting for."""

Warden = Callable[[str, str], None]
"""Takes (node, address): whose states to copy from where."""


@final
class Session:
    """One trainer's connection. `serve` on a thread of its own; `end` from any.

    `holdings` are those of a standing vault; without them the session makes its own when it is to offer
    anything, and ends them too.
    """

    def __init__(
        self, sock: socket.socket, *, holdings: Holdings | None = None, warden: Warden | None = None
    ) -> None:
        self._sock = sock
        self._peer = _peer_pidfd(sock)
        self._frames: FrameSocket[Request] = FrameSocket(sock, REQUESTS)
        self._holdings = holdings
        self._standing = holdings is not None
        self._warden = warden
        self._owner: Owner | None = None
        self._hello: Hello | None = None
        self._slots: dict[int, Slot] = {}
        self._recipes: dict[int, Recipe] = {}
        self._jobs: dict[int, Job] = {}
        self._staged: dict[int, State] = {}
        self._early: dict[int, Job] = {}
        """Saves that were committed before the trainer's word came that they are staged."""
        self._lock = threading.Lock()
        self._persister: Persister | None = None
        self._agreement: Agreement | None = None
        self._mirror: MirrorWorker | None = None
        self._journal: journal.Journal | None = None
        self._ending = False

    def serve(self) -> None:
        """Serve until the trainer says goodbye or is gone, then finish what is staged.

        After a death, the staged state of a vault that is not standing is offered for a while: the next
        trainer may want it.
        """
        # Whatever ends this but a goodbye, the trainer may be alive, and writing to its slots.
        linger_s, died, drain = 0.0, True, False
        try:
            while True:
                try:
                    request, fds = self._frames.receive(timeout_s=_TICK_S)
                except DeadlineError:
                    continue  # an idle trainer is fine; its death ends the connection
                if isinstance(request, Bye):
                    died, drain = False, request.drain
                    break
                self._handle(request, fds)
        except ConnectionLost as lost:
            log.info("the trainer is gone (%s)", lost.message)
            serve = self._hello.serve if self._hello is not None else None
            if serve is not None and self._holdings is not None and not self._holdings.empty:
                linger_s = serve.linger_s
        finally:
            self._finish(died, linger_s, drain)

    def end(self) -> None:
        """Have the session finish what is staged, as if the trainer had ended; it is still told of that."""
        self._ending = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _handle(self, request: Request, fds: list[int]) -> None:
        try:
            self._dispatch(request, fds)
        except HoldfastError as error:
            self._reply(Refused(type(error).__name__, error.message, error.hint))
        finally:
            for fd in fds:
                os.close(fd)

    def _dispatch(self, request: Request, fds: list[int]) -> None:
        match request:
            case Hello():
                self._open(request)
                self._reply(self._welcome())
            case MakeSlot(slot, size):
                made = self._make(slot, size)
                self._reply(SlotReady(slot, made.size), (made.fd,))
            case AdoptSlot(slot, size):
                if not fds:
                    raise VaultError("a slot was announced without its descriptor")
                self._take(slot, Slot.adopt(fds.pop(), size))
            case DropSlot(slot):
                self._drop(slot)
            case Define(recipe):
                self._recipes[recipe.id] = recipe
            case Begin(order):
                self._begin(order)
            case Ready(seq, upto):
                self._on_job(seq, lambda job: job.advance(upto))
            case Staged(seq):
                self._stage(seq)
                self._reply(Accepted(seq))
            case Abort(seq, reason):
                self._on_job(seq, lambda job: job.abort(reason))
            case Holds(order):
                self._hold(order)
            case Awaits(save):
                if self._mirror is not None:
                    self._mirror.committed(save)
            case CopyFrom(node, address):
                if self._warden is None:
                    raise VaultError("only a standing vault keeps copies", hint="start it with --listen")
                self._warden(node, address)
                self._reply(Noted())
            case _:
                raise VaultError(f"unexpected request {type(request).__name__}")

    # ---- the beginning

    def _open(self, hello: Hello) -> None:
        if self._persister is not None:
            raise VaultError("a session says hello only once")
        store = opened(hello.root, hello.store)
        if hello.serve is not None:
            self._offer(hello)
        if self._holdings is not None and self._holdings.address:
            from holdfast.vault.offers import Owner

            self._owner = Owner("", store.root, hello.rank)
        self._hello = hello
        if hello.journal is not None:
            self._journal = journal.Journal(hello.journal, component=f"vault-{hello.rank}")
            self._journal.append(journal.VaultStarted(pid=os.getpid()))
        agreement = make_agreement(store, hello.agreement, hello.rank, hello.world, hello.coordinator)
        self._agreement = agreement
        self._persister = Persister(
            store,
            agreement,
            on_done=self._done,
            threads=hello.threads,
            recycle=hello.recycle,
        )
        if hello.mirror is not None:
            from holdfast.vault.mirror import MirrorWorker  # paid for by those who use it

            self._mirror = MirrorWorker(
                store,
                hello.mirror,
                rank=hello.rank,
                world=hello.world,
                saves=self._persister,
                note=self._note,
                tell=self._reply,
            )

    def _offer(self, hello: Hello) -> None:
        if self._holdings is None:
            from holdfast.vault.holdings import Holdings  # its endpoint is paid for by those who use it

            self._holdings = Holdings()
        assert hello.serve is not None
        self._holdings.open(hello.serve)

    def _welcome(self) -> Welcome:
        holdings = self._holdings
        if holdings is None or self._owner is None:
            return Welcome(os.getpid())
        own = holdings.keep + 1
        return Welcome(os.getpid(), holdings.address, own, own if holdings.copies else 0)

    # ---- memory

    def _make(self, number: int, size: int) -> Slot:
        if self._holdings is not None and self._owner is not None:
            made = self._holdings.lend(self._owner, size)
        else:
            made = Slot.make(size)
            made.populate()
        self._slots[number] = made
        return made

    def _take(self, number: int, slot: Slot) -> None:
        self._slots[number] = slot
        if self._holdings is not None and self._owner is not None:
            self._holdings.adopt(self._owner, slot)

    def _drop(self, number: int) -> None:
        slot = self._slots.pop(number)
        if self._holdings is not None and self._owner is not None:
            self._holdings.give_back(self._owner, slot)
        else:
            slot.close()

    # ---- saves

    def _begin(self, order: Order) -> None:
        recipe, slot = self._recipes.get(order.recipe), self._slots.get(order.slot)
        if self._persister is None or recipe is None or slot is None or recipe.size > slot.size:
            self._reply(Done(order.seq, Outcome(kind="VaultError", message="no such recipe or slot")))
            return
        if self._holdings is not None and self._owner is not None:
            self._holdings.withdraw(slot)
            self._reply(Begun(order.seq))
        job = Job(order, recipe, slot.view)
        with self._lock:
            self._jobs[order.seq] = job
        self._persister.submit(job)

    def _stage(self, seq: int) -> None:
        with self._lock:
            job = self._jobs.get(seq)
            early = self._early.pop(seq, None)
        found = job or early
        if found is None:  # it may have failed already; the trainer is told by Done
            return
        found.stage()
        state = self._offered(found.order, found.recipe)
        if state is None:
            return
        with self._lock:
            if seq in self._jobs:
                self._staged[seq] = state
            else:  # it is over, perhaps just now: what was hashed is known
                state.digests = found.digests

    def _hold(self, order: Order) -> None:
        """A state that was staged with an earlier vault, and is over there."""
        recipe, slot = self._recipes.get(order.recipe), self._slots.get(order.slot)
        if recipe is not None and slot is not None and recipe.size <= slot.size:
            self._offered(order, recipe)

    def _offered(self, order: Order, recipe: Recipe) -> State | None:
        if self._holdings is None or self._owner is None or self._hello is None:
            return None
        from holdfast.vault.offers import About

        hello = self._hello
        about = About(hello.rank, hello.world, self._owner.folder, order, recipe)
        return self._holdings.stage(self._owner, about, self._slots[order.slot])

    def _on_job(self, seq: int, act: Callable[[Job], None]) -> None:
        with self._lock:
            job = self._jobs.get(seq)
        if job is not None:  # it may have failed already; the trainer is told by Done
            act(job)

    def _done(self, seq: int, outcome: Outcome) -> None:
        with self._lock:
            job = self._jobs.pop(seq)
            state = self._staged.pop(seq, None)
            if outcome.committed and not job.staged:
                self._early = {seq: job}
        if state is not None:
            state.digests = job.digests
        self._note(
            journal.SaveDurable(step=job.order.save.step, bytes=outcome.nbytes, seconds=outcome.seconds)
            if outcome.committed
            else journal.SaveFailed(step=job.order.save.step, reason=outcome.message)
        )
        self._reply(Done(seq, outcome))
        if outcome.committed and self._mirror is not None:
            self._mirror.committed(job.order.save)

    def _note(self, event: journal.Event) -> None:
        if self._journal is not None:
            self._journal.append(event)

    def _reply(self, reply: Reply, fds: tuple[int, ...] = ()) -> None:
        with suppress(ConnectionLost):  # a dead trainer needs no answer; the receiver notices too
            self._frames.send(reply, fds)

    # ---- the end

    def _finish(self, died: bool, linger_s: float, drain: bool) -> None:
        ends = Deadline(linger_s)
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.orphaned = True
            job.abort("the trainer ended before the save was staged")
        gone = died and self._is_gone()
        trusted = not died or gone
        busy = {job.order.slot for job in jobs}
        self._part([number for number in self._slots if number not in busy], trusted)
        finished = self._persister is None or self._persister.close(FINISH_S)
        if not finished:
            log.error("gave up on a save after %g s", FINISH_S)
        if not drain or self._mirror is None:
            self._frames.close()
        if self._agreement is not None:
            self._depart(self._agreement, tells=finished and (gone or not (died or drain)))
        if self._standing:
            self._part(list(self._slots), trusted)
            if died and not self._ending:
                self._verify()
        if self._owner is None:
            for slot in self._slots.values():
                slot.close()
        if self._mirror is not None and self._hello is not None and self._hello.mirror is not None:
            # Memory is given back by now, and a trainer that waits for this waits no longer.
            self._mirror.drain(self._hello.mirror.drain_s)
        self._frames.close()
        if self._mirror is not None:
            self._mirror.close()
        if not self._standing and self._holdings is not None:
            time.sleep(ends.remaining())
            self._holdings.close()
        if self._journal is not None:
            self._journal.close(timeout_s=5.0)
        if self._peer is not None:
            os.close(self._peer)

    def _depart(self, agreement: Agreement, tells: bool) -> None:
        """Leave the agreement; if this `tells`, the other ranks do not wait for this one any more.

        It does where the trainer left before the others may have been done. One that is alive and only lost
        its connection hands its saves to another vault.
        """
        hello = self._hello
        if not tells or hello is None or hello.world == 1 or not hello.session:
            agreement.close()
            return

        def tell() -> None:
            with closing(agreement), suppress(HoldfastError):  # else they find out for themselves, later
                part(agreement, hello.session)

        # A coordinator may be gone with its trainers, and keeps nothing here from its end.
        telling = threading.Thread(target=tell, name="holdfast-part", daemon=True)
        telling.start()
        telling.join(_PART_S)

    def _part(self, numbers: list[int], trusted: bool) -> None:
        """Leave slots to a standing vault."""
        if self._standing and self._holdings is not None and self._owner is not None:
            self._holdings.part(self._owner, [self._slots.pop(number) for number in numbers], trusted=trusted)

    def _is_gone(self) -> bool:
        """Whether the trainer cannot write to its slots any more: its process has ended.

        A connection can also end because its trainer was stopped for so long that it read nothing.
        """
        return self._peer is not None and bool(select.select([self._peer], [], [], _DEATH_S)[0])

    def _verify(self) -> None:
        if self._holdings is not None and self._owner is not None:
            mine = self._owner
            self._holdings.verify(lambda owner: owner == mine, self._bad)

    def _bad(self, state: State, block: int) -> None:
        reason = "the memory of the vault is not what was staged"
        log.error("step %d, block %d: %s", state.step, block, reason)
        file = f"vault memory of step {state.step}"
        self._note(journal.BlockBad(file=file, block=block, arrays=state.arrays_in(block), reason=reason))


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return int(pid), int(uid)


def _peer_pidfd(sock: socket.socket) -> int | None:
    try:
        return os.pidfd_open(peer_of(sock)[0])
    except OSError:  # gone already, or in another container: then it is never known to be gone
        return None
