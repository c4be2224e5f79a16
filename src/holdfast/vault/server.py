"""The vault process: owns the arena, persists what is staged, outlives the trainer.

One session serves one trainer connection. A spawned vault serves the socket it inherited and ends with it; a
standing vault listens on a Unix socket and serves every worker of its node. It imports no ML framework.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from holdfast import journal
from holdfast.clock import Deadline
from holdfast.coord import Agreement, SharedFolderAgreement, SoloAgreement
from holdfast.errors import DeadlineError, HoldfastError, VaultError
from holdfast.storage import LocalStore
from holdfast.vault.arena import Slot
from holdfast.vault.messages import (
    REQUESTS,
    Abort,
    Accepted,
    AdoptSlot,
    Begin,
    Begun,
    Bye,
    CoordinatorAt,
    Define,
    Done,
    DropSlot,
    Hello,
    MakeSlot,
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
from holdfast.vault.recycling import AGREEMENT, WORK
from holdfast.wire import ConnectionLost, FrameSocket

if TYPE_CHECKING:
    from holdfast.vault.restores import Restores

log = logging.getLogger("holdfast.vault")

_TICK_S: Final = 60.0
_FINISH_S: Final = 3600.0
"""The longest that a vault without its trainer works on staged saves; each has its own deadline below it."""


def make_agreement(
    store: LocalStore, kind: str, rank: int, world: int, coordinator: CoordinatorAt | None = None
) -> Agreement:
    """The agreement that trainer and vault both use, by its name on the wire."""
    if kind == "solo":
        return SoloAgreement()
    if kind == "folder":
        shared = LocalStore(os.path.join(store.root, WORK, AGREEMENT), files=store.files)
        return SharedFolderAgreement(shared, rank=rank, world=world)
    if kind == "coordinator" and coordinator is not None:
        # Two folders of one run are two agreements; all ranks see a folder under the same path.
        from holdfast.coord import CoordAgreement  # its client is paid for by those who use it

        folder = hashlib.sha256(os.path.realpath(store.root).encode()).hexdigest()[:16]
        return CoordAgreement(
            coordinator.addresses,
            rank=rank,
            world=world,
            scope=f"ckpt/{folder}",
            run=coordinator.run,
            token=coordinator.token,
        )
    raise VaultError(f"unknown agreement {kind!r}", hint="use 'solo', 'folder' or 'coordinator'")


@final
class Session:
    """One trainer's connection: its slots, recipes and jobs."""

    def __init__(self, sock: socket.socket) -> None:
        self._frames: FrameSocket[Request] = FrameSocket(sock, REQUESTS)
        self._slots: dict[int, Slot] = {}
        self._recipes: dict[int, Recipe] = {}
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._persister: Persister | None = None
        self._agreement: Agreement | None = None
        self._journal: journal.Journal | None = None
        self._restores: Restores | None = None

    def serve(self) -> None:
        """Serve until the trainer says goodbye or is gone, then finish what is staged.

        After a death, staged state is offered for a while: the next trainer may want it.
        """
        linger_s = 0.0
        try:
            while True:
                try:
                    request, fds = self._frames.receive(timeout_s=_TICK_S)
                except DeadlineError:
                    continue  # an idle trainer is fine; its death ends the connection
                if isinstance(request, Bye):
                    break
                self._handle(request, fds)
        except ConnectionLost as lost:
            log.info("the trainer is gone (%s)", lost.message)
            linger_s = self._restores.linger_s if self._restores is not None else 0.0
        finally:
            self._finish(linger_s)

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
                self._reply(Welcome(os.getpid(), self._restores.address if self._restores else ""))
            case MakeSlot(slot, size):
                made = Slot.make(size)
                made.populate()
                self._slots[slot] = made
                self._reply(SlotReady(slot, made.size), (made.fd,))
            case AdoptSlot(slot, size):
                if not fds:
                    raise VaultError("a slot was announced without its descriptor")
                self._slots[slot] = Slot.adopt(fds.pop(), size)
            case DropSlot(slot):
                if self._restores is not None:
                    self._restores.withdraw(slot)
                self._slots.pop(slot).close()
            case Define(recipe):
                self._recipes[recipe.id] = recipe
            case Begin():
                self._begin(request)
            case Ready(seq, upto):
                self._on_job(seq, lambda job: job.advance(upto))
            case Staged(seq):
                self._on_job(seq, self._stage)
                self._reply(Accepted(seq))
            case Abort(seq, reason):
                self._on_job(seq, lambda job: job.abort(reason))
            case _:
                raise VaultError(f"unexpected request {type(request).__name__}")

    def _open(self, hello: Hello) -> None:
        if self._persister is not None:
            raise VaultError("a session says hello only once")
        store = LocalStore(hello.root)
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
        if hello.serve is not None:
            from holdfast.vault.restores import Restores  # its endpoint is paid for by those who use it

            self._restores = Restores(hello.serve)

    def _stage(self, job: Job) -> None:
        job.stage()
        if self._restores is not None:
            self._restores.offer(job.order, job.recipe, self._slots[job.order.slot])

    def _begin(self, begin: Begin) -> None:
        order = begin.order
        recipe, slot = self._recipes.get(order.recipe), self._slots.get(order.slot)
        if self._persister is None or recipe is None or slot is None or recipe.size > slot.size:
            self._reply(Done(order.seq, Outcome(kind="VaultError", message="no such recipe or slot")))
            return
        if self._restores is not None:
            self._restores.withdraw(order.slot)
            self._reply(Begun(order.seq))
        job = Job(order, recipe, slot.view)
        with self._lock:
            self._jobs[order.seq] = job
        self._persister.submit(job)

    def _on_job(self, seq: int, act: Callable[[Job], None]) -> None:
        with self._lock:
            job = self._jobs.get(seq)
        if job is not None:  # it may have failed already; the trainer is told by Done
            act(job)

    def _done(self, seq: int, outcome: Outcome) -> None:
        with self._lock:
            job = self._jobs.pop(seq)
        if self._journal is not None:
            self._journal.append(
                journal.SaveDurable(step=job.order.save.step, bytes=outcome.nbytes, seconds=outcome.seconds)
                if outcome.committed
                else journal.SaveFailed(step=job.order.save.step, reason=outcome.message)
            )
        self._reply(Done(seq, outcome))

    def _reply(self, reply: Reply, fds: tuple[int, ...] = ()) -> None:
        with suppress(ConnectionLost):  # a dead trainer needs no answer; the receiver notices too
            self._frames.send(reply, fds)

    def _finish(self, linger_s: float = 0.0) -> None:
        ends = Deadline(linger_s)
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.abort("the trainer ended before the save was staged")
        if self._persister is not None and not self._persister.close(_FINISH_S):
            log.error("gave up on a save after %g s", _FINISH_S)
        if self._agreement is not None:
            self._agreement.close()
        self._frames.close()
        if self._restores is not None:
            time.sleep(ends.remaining())
            self._restores.close()
        if self._journal is not None:
            self._journal.close(timeout_s=5.0)
        for slot in self._slots.values():
            slot.close()


def serve_inherited(fd: int) -> None:
    """Serve the one trainer at the other end of an inherited socket, then return."""
    _settle()
    Session(socket.socket(fileno=fd)).serve()


def serve_listening(path: str, *, stop: threading.Event) -> None:
    """Serve every process of this user that connects to a Unix socket, until `stop` is set."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old_mask)
    listener.listen(64)
    listener.settimeout(0.2)
    sessions: list[threading.Thread] = []
    try:
        while not stop.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            if _peer_uid(sock) != os.getuid():
                sock.close()
                continue
            thread = threading.Thread(target=Session(sock).serve, name="holdfast-session")
            thread.start()
            sessions = [alive for alive in sessions if alive.is_alive()] + [thread]
    finally:
        listener.close()
        with suppress(FileNotFoundError):
            os.unlink(path)
        for thread in sessions:
            thread.join(_FINISH_S)


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _settle() -> None:
    # A signal to the whole job must not take the staged state with it: the vault ends when the trainer's
    # connection does, after finishing what is staged.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(10)  # the trainer's own threads go first
