"""The vault process: beside one trainer that spawned it, or standing for all of a node.

A standing vault outlives trainers and keeps their newest staged states. It ends on SIGTERM, or when the
node's agent is gone for good; in both cases everything staged becomes durable first.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from holdfast.clock import Deadline
from holdfast.errors import VaultError
from holdfast.vault.lease import Orphanhood, lease_held
from holdfast.vault.messages import ServeAt
from holdfast.vault.neighbourhood import named_neighbours
from holdfast.vault.session import FINISH_S, Session, peer_of

log = logging.getLogger("holdfast.vault")

_TICK_S: Final = 0.2
_NICE: Final = 10


def serve_inherited(fd: int) -> None:
    """Serve the one trainer at the other end of an inherited socket, then return."""
    # A signal to the whole job must not take the staged state with it: the vault ends when the trainer's
    # connection does, after finishing what is staged.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _yield_to_trainers()
    Session(socket.socket(fileno=fd)).serve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a standing vault works.

    `keep` states of each rank outlive their trainer, in at most `memory_limit` bytes. `lease` is the file
    that the node's agent holds a lock on; when nobody did for `orphan_s`, the vault ends. With `serve`,
    states are offered from the start; else from the first trainer on that asks for it. `neighbours` are the
    nodes whose states are copied here, and where their vaults are; `neighbourhood` is a file that names them
    instead, and is looked at again and again.
    """

    keep: int = 1
    memory_limit: int | None = None
    lease: str | None = None
    orphan_s: float = 30.0
    serve: ServeAt | None = None
    neighbours: tuple[tuple[str, str], ...] = ()
    neighbourhood: str | None = None


def serve_listening(path: str, settings: Standing, *, stop: threading.Event) -> None:
    """Serve every process of this user that connects to a Unix socket.

    Blocks: until `stop` is set or the lease has lapsed, then until what is staged is durable. Fails:
    VaultError if another vault serves there.
    """
    _yield_to_trainers()
    vault = _Vault(path, settings)
    try:
        vault.serve(stop)
    finally:
        vault.close()


@final
class _Vault:
    """A listening socket, the sessions of those who connected, and what outlives them."""

    def __init__(self, path: str, settings: Standing) -> None:
        from holdfast.vault.copies import Copiers
        from holdfast.vault.holdings import Holdings

        self._path = path
        self._settings = settings
        self._listener, self._inode = _listen(path)
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.address")  # where a killed vault was
        self._sessions: list[tuple[Session, threading.Thread]] = []
        self._holdings = Holdings(keep=settings.keep, limit=settings.memory_limit, on_open=self._opened)
        self._copiers = Copiers(self._holdings, expected=settings.neighbourhood is not None)
        for node, address in settings.neighbours:
            self._copiers.copy_from(node, address)
        if settings.serve is not None:
            self._holdings.open(settings.serve)

    def _opened(self) -> None:
        _write_whole(f"{self._path}.address", self._holdings.address)
        endpoint = self._holdings.endpoint
        if endpoint is not None:
            self._copiers.open(endpoint)

    def serve(self, stop: threading.Event) -> None:
        orphanhood = Orphanhood(self._settings.orphan_s)
        while not stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                pass
            else:
                self._welcome(sock)
            self._look_around()
            if self._settings.lease is not None:
                held = lease_held(self._settings.lease)
                if orphanhood.see(held, time.monotonic()):
                    log.warning("no agent for %g s: ending", self._settings.orphan_s)
                    return

    def _look_around(self) -> None:
        """Keep copies of those whom the agent names by now."""
        if self._settings.neighbourhood is not None:
            with suppress(OSError):  # it is read again soon
                self._copiers.copy_only(named_neighbours(self._settings.neighbourhood))

    def _welcome(self, sock: socket.socket) -> None:
        if peer_of(sock)[1] != os.getuid():
            sock.close()
            return
        session = Session(sock, holdings=self._holdings, warden=self._copiers.copy_from)
        thread = threading.Thread(target=session.serve, name="holdfast-session")
        thread.start()
        self._sessions = [one for one in self._sessions if one[1].is_alive()] + [(session, thread)]

    def close(self) -> None:
        """Take nobody in any more, make what is staged durable, and leave nothing behind."""
        self._copiers.close()
        self._listener.close()
        with suppress(OSError):
            # Not that of a vault that has taken this one's place.
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
                os.unlink(f"{self._path}.address")
        for session, _ in self._sessions:
            session.end()
        deadline = Deadline(FINISH_S)
        for _, thread in self._sessions:
            thread.join(deadline.remaining())
        self._holdings.close()


def _listen(path: str) -> tuple[socket.socket, int]:
    """A private Unix socket; one that a killed vault left behind is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(5.0)
            probe.connect(path)
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                os.unlink(path)
        except OSError:
            pass  # nothing there, or nothing that is ours: bind says which
        else:
            raise VaultError(f"another vault serves at {path}", hint="one vault per socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise VaultError(f"cannot listen at {path}: {error.strerror or error}") from error
    finally:
        os.umask(old_mask)
    listener.listen(64)
    listener.settimeout(_TICK_S)
    return listener, os.stat(path).st_ino


def _write_whole(path: str, text: str) -> None:
    """Make a small file that is never seen half written."""
    temporary = f"{path}.tmp"
    with open(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii"
    ) as file:
        file.write(f"{text}\n")
    os.replace(temporary, path)


def _yield_to_trainers() -> None:
    """Let the trainer's own threads go first."""
    with suppress(OSError):
        os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        # Where Linux shares the processors by session, niceness counts only within one; a whole session may
        # always be made nicer (sched(7), "The autogroup feature"). Ours is not the trainer's.
        with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(_NICE))
