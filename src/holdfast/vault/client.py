"""The trainer's side of the vault: a writer that has a vault process do the work.

It repairs the loss of that process: the trainer still holds the slots, so a new vault is spawned (or, where a
standing one was killed, waited for), handed the same memory, and given every save that is not over again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, final

from holdfast import journal
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, HoldfastError, VaultDiedError, VaultError
from holdfast.format import SaveId
from holdfast.vault.arena import Slot
from holdfast.vault.attachment import REATTACH_S, attached
from holdfast.vault.messages import (
    REPLIES,
    Abort,
    Accepted,
    AdoptSlot,
    Awaits,
    Begin,
    Begun,
    Bye,
    Define,
    Done,
    DropSlot,
    Hello,
    Holds,
    MakeSlot,
    Mirrored,
    Order,
    Outcome,
    Ready,
    Recipe,
    Refused,
    Reply,
    SlotReady,
    Staged,
    Welcome,
)
from holdfast.vault.writer import Events
from holdfast.wire import ConnectionLost, FrameSocket

log = logging.getLogger("holdfast.vault")

_START_S: Final = 30.0
_SLOT_S: Final = 600.0
_REAP_S: Final = 5.0
_DIED: Final = VaultDiedError.__name__
_MAX_LIVES: Final = 3
"""How many vaults one save may wear out before it is given up."""


def _unstarted(error: OSError) -> VaultDiedError:
    return VaultDiedError(
        f"the vault could not be started: {error.strerror or error}",
        hint="is the host short of memory, processes or descriptors? writer='thread' does without a vault",
    )


class _Pending:
    """A save as the trainer remembers it, so that any vault can be given it again."""

    __slots__ = ("aborted", "lives", "order", "staged", "upto")

    def __init__(self, order: Order) -> None:
        self.order = order
        self.upto = 0
        self.staged = False
        self.aborted: str | None = None
        self.lives = 0


@final
class VaultWriter:
    """Has a vault process write, and replaces that process if it dies."""

    survives_trainer = True

    def __init__(
        self,
        hello: Hello,
        events: Events,
        *,
        attach: str | None = None,
        events_journal: journal.Journal | None = None,
    ) -> None:
        self._hello = hello
        self._events = events
        self._attach = attach
        self._journal = events_journal
        self._lock = threading.RLock()
        self._slots: dict[int, Slot] = {}
        self._recipes: dict[int, Recipe] = {}
        self._pending: dict[int, _Pending] = {}
        self._closing = False
        self._drain = True
        self._abandoned = False
        self._broken: HoldfastError | None = None
        self._begun: set[int] = set()
        self._holding: dict[int, Order] = {}
        """By slot: the last save that was staged in it and is over."""
        self._unmirrored: dict[str, SaveId] = {}
        """By attempt: committed saves of which nothing was heard from the mirror."""
        self.welcome = Welcome(0)
        self._answers: dict[str, tuple[Reply, list[int]]] = {}
        self._answered = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = self._reconnect()
        self._receiver = self._receiving()

    def _receiving(self) -> threading.Thread:
        thread = threading.Thread(target=self._receive, name="holdfast-vault-receiver", daemon=True)
        thread.start()
        return thread

    @property
    def pid(self) -> int | None:
        """The process id of a spawned vault."""
        return self._process.pid if self._process is not None else None

    @property
    def address(self) -> str:
        """Where the vault offers staged state; empty if it does not."""
        return self.welcome.address

    # ---- connection

    def _connect(self, wait_s: float = 0.0) -> FrameSocket[Reply]:
        sock = self._spawn() if self._attach is None else attached(self._attach, wait_s=wait_s)
        frames: FrameSocket[Reply] = FrameSocket(sock, REPLIES)
        try:
            frames.send(self._hello)
            reply, _ = frames.receive(timeout_s=_START_S)
        except (ConnectionLost, DeadlineError) as error:
            frames.close()
            self._reap(0.0)
            raise VaultDiedError(
                f"the vault did not start: {error.message}",
                hint="its own error output is above; writer='thread' does without a vault",
            ) from error
        if not isinstance(reply, Welcome):
            frames.close()
            self._reap(0.0)
            message = reply.message if isinstance(reply, Refused) else repr(reply)
            raise VaultError(f"the vault refused this trainer: {message}")
        self.welcome = reply
        return frames

    def _spawn(self) -> socket.socket:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise _unstarted(error) from error
        environment = dict(os.environ)
        # The vault must find the same package even if it is not installed but on sys.path.
        package_root = str(Path(__file__).parents[2])
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = (
            package_root if not inherited else f"{package_root}{os.pathsep}{inherited}"
        )
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.vault", "--fd", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    # Its own session: a Ctrl-C or a signal to the job's group is not meant for it.
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise _unstarted(error) from error
        return ours

    def _receive(self) -> None:
        while True:
            try:
                reply, fds = self._frames.receive(timeout_s=60.0)
            except DeadlineError:
                continue
            except ConnectionLost as lost:
                if self._abandoned or (self._closing and not self._pending):
                    return
                if not self._replace(lost):
                    return
                continue
            match reply:
                case Accepted(seq):
                    self._events.accepted(seq)
                case Begun(seq):
                    with self._answered:
                        self._begun.add(seq)
                        self._answered.notify_all()
                case Done(seq, outcome):
                    with self._lock:
                        over = self._pending.pop(seq, None)
                        if over is not None and (over.staged or outcome.committed):
                            self._holding[over.order.slot] = over.order
                        if over is not None and outcome.committed and self._hello.mirror is not None:
                            self._unmirrored[over.order.save.attempt] = over.order.save
                    self._events.done(seq, outcome)
                    self._close_all(fds)
                case Mirrored(save, state, reason):
                    if state != "failing":
                        with self._lock:
                            self._unmirrored.pop(save.attempt, None)
                    self._events.mirrored(save, state, reason)
                case _:
                    self._answer(type(reply).__name__, reply, fds)

    @staticmethod
    def _close_all(fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)

    def _answer(self, kind: str, reply: Reply, fds: list[int]) -> None:
        with self._answered:
            self._answers[kind] = (reply, fds)
            self._answered.notify_all()

    def _replace(self, lost: ConnectionLost) -> bool:
        """Start another vault and give it everything that is not over; False if that failed."""
        replaced, over = self._replaced(lost)
        # Not under the lock: a trainer that drops a slot has locked the slots, and waits for this lock.
        for seq, outcome in over.items():
            self._events.done(seq, outcome)
        return replaced

    def _replaced(self, lost: ConnectionLost) -> tuple[bool, dict[int, Outcome]]:
        """As `_replace`, and the saves that end with this vault, of which nobody has been told."""
        pid = self.pid
        with self._lock:
            self._frames.close()
            reason = self._reap(1.0) or lost.message
            log.warning("the vault (pid %s) is gone: %s; starting another", pid, reason)
            self._note(journal.VaultDied(pid=pid or 0, reason=reason))
            try:
                self._frames = self._reconnect()
            except VaultError as error:
                log.error("no vault could be reached: %s", error.message)
                return False, self._give_up(error)
            over = self._worn_out()
            # One that dies while it is handed the work is found dead at the next receive.
            with contextlib.suppress(ConnectionLost):
                self._hand_over()
            self._note(journal.VaultReplaced(old_pid=pid or 0, pid=self.pid or 0))
            # Under the lock: whoever asks the new vault is not to take this for its answer.
            self._answer("Refused", Refused(_DIED, "the vault died meanwhile", None), [])
        return True, over

    def _reconnect(self) -> FrameSocket[Reply]:
        """A vault's connection. A standing one may be about to start, or dying: it lets in and breaks off."""
        deadline = Deadline(0.0 if self._attach is None else REATTACH_S)
        while True:
            try:
                return self._connect(deadline.remaining())
            except VaultDiedError:
                if deadline.expired():
                    raise

    def _hand_over(self) -> None:
        """Give a new vault the slots, the recipes and every save that is not over."""
        for number, slot in self._slots.items():
            self._frames.send(AdoptSlot(number, slot.size), (slot.fd,))
        for recipe in self._recipes.values():
            self._frames.send(Define(recipe))
        # In the order they were saved, which is the order of versions.
        for order in sorted(self._holding.values(), key=lambda order: order.seq):
            self._frames.send(Holds(order))
        for pending in list(self._pending.values()):
            self._give_again(pending)
        for save in self._unmirrored.values():
            self._frames.send(Awaits(save))
        if self._closing:
            self._frames.send(Bye(self._drain))

    def _worn_out(self) -> dict[int, Outcome]:
        """Take out the saves that no further vault is to die of."""
        over = {}
        for seq, pending in list(self._pending.items()):
            pending.lives += 1
            if pending.lives >= _MAX_LIVES:
                del self._pending[seq]
                message = f"{pending.lives} vaults died while saving step {pending.order.save.step}"
                hint = "is the host short of memory? the journal says how each of them ended"
                over[seq] = Outcome(kind=_DIED, message=message, hint=hint)
        return over

    def _give_again(self, pending: _Pending) -> None:
        seq = pending.order.seq
        self._frames.send(Begin(pending.order))
        self._frames.send(Ready(seq, pending.upto))
        if pending.staged:
            self._frames.send(Staged(seq))
        if pending.aborted is not None:
            self._frames.send(Abort(seq, pending.aborted))

    def _give_up(self, error: VaultError) -> dict[int, Outcome]:
        """Take out all saves, under the lock: what begins after this goes to a vault that is back."""
        self._broken = error
        self._answer("Refused", Refused(type(error).__name__, error.message, error.hint), [])
        pending, self._pending = self._pending, {}
        outcome = Outcome(kind=type(error).__name__, message=error.message, hint=error.hint)
        return dict.fromkeys(pending, outcome)

    def _reap(self, timeout_s: float) -> str | None:
        """How the vault process ended, after making sure that it did."""
        process = self._process
        if process is None:
            return None
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(_REAP_S)
            except subprocess.TimeoutExpired:  # in a system call that nothing interrupts: it ends after that
                return f"no end {_REAP_S:g} s after it was killed"
        code = process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _note(self, event: journal.Event) -> None:
        if self._journal is not None:
            self._journal.append(event)

    # ---- requests

    def _send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Send to the current vault; one that is gone or stuck is replaced by the receiver."""
        try:
            self._frames.send(message, fds)
        except ConnectionLost:
            # Stuck rather than dead: make it dead, so that the receiver sees it.
            if self._process is not None and self._process.poll() is None:
                self._process.kill()

    def _check(self) -> None:
        """Raise if there is no vault; a standing one may be back by now."""
        if self._broken is not None and self._attach is not None and not self._closing:
            self._return()
        if self._broken is not None:
            raise self._broken

    def _return(self) -> None:
        """Go back to a standing vault that was given up, if it is there."""
        with self._lock, contextlib.suppress(VaultError, ConnectionLost):
            self._frames = self._connect()
            self._broken = None
            self._receiver = self._receiving()
            self._hand_over()

    def make_slot(self, size: int) -> tuple[int, Slot]:
        deadline = Deadline(_SLOT_S)
        number, reply, fds = self._ask_for_slot(size, deadline)
        lives = 1
        # A vault that died over it has a successor by now, or none at all, which the next try says.
        while isinstance(reply, Refused) and reply.kind == _DIED and lives < _MAX_LIVES:
            lives += 1
            log.info("asking the next vault for a slot of %s bytes: %s", f"{size:,}", reply.message)
            number, reply, fds = self._ask_for_slot(size, deadline)
        if isinstance(reply, SlotReady) and fds:
            slot = Slot.adopt(fds.pop(), reply.size)
            slot.populate()  # map the pages here too: they exist, so this is quick
            with self._lock:
                self._slots[number] = slot
            return number, slot
        self._close_all(fds)
        message = reply.message if isinstance(reply, Refused) else f"unexpected {type(reply).__name__}"
        raise VaultError(f"the vault made no slot of {size:,} bytes: {message}")

    def _ask_for_slot(self, size: int, deadline: Deadline) -> tuple[int, Reply, list[int]]:
        """The number that a slot is to have, and what the vault answers. Fails: VaultError, DeadlineError."""
        with self._lock:
            # Under the lock: a vault that is given up while this waits for it would never answer.
            self._check()
            number = max(self._slots, default=-1) + 1
            with self._answered:
                self._answers.clear()
            self._send(MakeSlot(number, size))
        with self._answered:
            while not self._answers:
                if not self._answered.wait(deadline.remaining()):
                    raise DeadlineError(
                        f"the vault did not make a slot of {size:,} bytes in {_SLOT_S:g} s",
                        hint="is the host short of memory, or the vault stopped?",
                    )
            _, (reply, fds) = self._answers.popitem()
        return number, reply, fds

    def drop_slot(self, number: int) -> None:
        with self._lock:
            self._slots.pop(number).close()
            self._holding.pop(number, None)
            self._send(DropSlot(number))

    def define(self, recipe: Recipe) -> None:
        with self._lock:
            self._check()
            self._recipes[recipe.id] = recipe
            self._send(Define(recipe))

    def begin(self, order: Order) -> None:
        with self._lock:
            # Under the lock: a save taken in after the last vault was given up would never end.
            self._check()
            self._pending[order.seq] = _Pending(order)
            self._holding.pop(order.slot, None)
            self._send(Begin(order))
        if self.address:
            self._await_begun(order)

    def _await_begun(self, order: Order) -> None:
        """Return once nobody reads from the slot; a replaced vault has no readers and says so as well."""
        deadline = Deadline(_START_S)
        late = False
        with self._answered:
            while self.address and order.seq not in self._begun and self._broken is None and not late:
                late = not self._answered.wait(min(1.0, deadline.remaining())) and deadline.expired()
            self._begun.discard(order.seq)
        if late:  # not under the condition: whoever has the other lock may be about to notify it
            self._forget(order.seq)
            raise DeadlineError(
                f"the vault did not take step {order.save.step} in {_START_S:g} s",
                hint="is the vault stopped, or the host short of CPU time?",
            )
        self._check()

    def _forget(self, seq: int) -> None:
        """Drop a save that never got under way."""
        with self._lock:
            self._pending.pop(seq, None)
            self._send(Abort(seq, "the trainer gave up waiting for the slot"))

    def advance(self, seq: int, upto: int) -> None:
        with self._lock:
            pending = self._pending.get(seq)
            if pending is not None:
                pending.upto = upto
                self._send(Ready(seq, upto))

    def staged(self, seq: int) -> None:
        with self._lock:
            pending = self._pending.get(seq)
            if pending is not None:
                pending.staged = True
            # Also of a save that was committed before this: only now is its state offered to others.
            self._send(Staged(seq))

    def abort(self, seq: int, reason: str) -> None:
        with self._lock:
            pending = self._pending.get(seq)
            if pending is not None:
                pending.aborted = reason
                self._send(Abort(seq, reason))

    def close(self, timeout_s: float, *, drain: bool = True) -> bool:
        with self._lock:
            self._closing = True
            self._drain = drain
            self._send(Bye(drain))
        # The vault closes the connection once everything staged is on disk and, with `drain`, on the mirror.
        self._receiver.join(timeout_s)
        finished = not self._receiver.is_alive()
        with self._lock:
            saved = not self._pending
        mirrors = self._hello.mirror is not None
        self._abandoned = not finished
        if self._process is not None:
            try:
                self._process.wait(5.0 if finished and (drain or not mirrors) else 0.0)
            except subprocess.TimeoutExpired:
                # With a mirror it says itself what is left to copy, if anything is.
                if not (saved and mirrors):
                    log.warning("the vault (pid %s) is still saving and goes on alone", self.pid)
                self._process.returncode = 0  # it outlives this process by design; do not wait
        self._frames.close()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        return finished or (saved and mirrors)
