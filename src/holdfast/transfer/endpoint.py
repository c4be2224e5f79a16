"""An endpoint: publishes trees for others to take, and takes those of others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any, Final, Self, final
from weakref import WeakValueDictionary

import msgspec

from holdfast.arrays import Rename, Selection
from holdfast.errors import HandshakeError, TransferError, UsageError
from holdfast.transfer.dialling import Dialling
from holdfast.transfer.links import (
    Address,
    Identity,
    address_of,
    answer,
    hear,
    listen,
    listen_locally,
    local_name,
    node_id,
    tuned,
    turn_away,
)
from holdfast.transfer.manifest import PublishedTree, published
from holdfast.transfer.messages import LIMIT, STALE, Greeted, Greeting, Refused
from holdfast.transfer.patience import Patience
from holdfast.transfer.plan import TransferPlan
from holdfast.transfer.publication import Publication, Shelf
from holdfast.transfer.pulling import PeerLink, Settings
from holdfast.transfer.route import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from holdfast.transfer.serving import TargetLink
from holdfast.transfer.timers import Timers
from holdfast.transfer.workers import Workers
from holdfast.wire import ConnectionLost

TRANSPORTS: Final = ("process", "memfd", "tcp")
MAX_CONNECTIONS: Final = 1024
_MAX_STREAMS: Final = 64
_GREET_S: Final = 5.0

_LIVE: WeakValueDictionary[str, Endpoint] = WeakValueDictionary()


@final
class Endpoint:
    """One process's place for transfers. Close it, or use it as a context.

    It listens at `bind`, beyond loopback only with a `token` that all endpoints of the `run` share. `streams`
    is how many connections carry the bytes of a peer, `window_bytes` how many bytes of a run may be under
    way, and `chunk_bytes` how many are sent and verified at once. A peer that does not answer within
    `connect_s`, sends no first byte within `first_byte_s`, or falls silent for `idle_s` fails the run that
    waits for it. `transports` limits the ways bytes may take; the fastest possible is chosen.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        run: str = "run",
        token: bytes | None = None,
        streams: int = 2,
        window_bytes: int = 128 << 20,
        chunk_bytes: int = 16 << 20,
        connect_s: float = 5.0,
        first_byte_s: float = 30.0,
        idle_s: float = 10.0,
        name: str = "",
        transports: Sequence[str] = TRANSPORTS,
    ) -> None:
        _check(streams, window_bytes, chunk_bytes, (connect_s, first_byte_s, idle_s), transports)
        self.settings = Settings(
            streams=streams,
            window_bytes=window_bytes,
            chunk_bytes=chunk_bytes,
            connect_s=connect_s,
            first_byte_s=first_byte_s,
            idle_s=idle_s,
            transports=tuple(transports),
        )
        self.streams = streams
        incarnation = secrets.token_hex(16)
        name = name or f"{socket.gethostname()}-{os.getpid()}-{incarnation[:6]}"
        self.identity = Identity(run, token, incarnation, name, node_id())
        self._listeners: list[socket.socket] = []
        sock, self.address = listen(bind, sealed=token is not None)
        self._listeners.append(sock)
        self._local = ""
        if "memfd" in transports and self.identity.node:
            with contextlib.suppress(OSError):  # a node without abstract sockets does without memfd
                self._listeners.append(listen_locally(f"\0{local_name(incarnation)}"))
                self._local = local_name(incarnation)
        self.timers = Timers(f"holdfast-timers {name}")
        self.workers = Workers(f"holdfast-transfer {name}")
        self.shelf = Shelf(self.timers, self.workers)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._links: dict[int, TargetLink] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._peers: dict[Address, PeerLink] = {}
        self._dialling: dict[Address, Dialling] = {}
        self._plans: set[TransferPlan] = set()
        self._closed = False
        _LIVE[incarnation] = self
        self._accepting = [
            threading.Thread(target=self._accept, args=(one,), name=f"holdfast-accept {name}", daemon=True)
            for one in self._listeners
        ]
        for thread in self._accepting:
            thread.start()

    @property
    def incarnation(self) -> str:
        """The id of this life of the endpoint."""
        return self.identity.incarnation

    @property
    def name(self) -> str:
        return self.identity.name

    # ---- publishing

    def publish(
        self,
        name: str,
        tree: Any,
        version: int,
        lease_s: float = 600.0,
        *,
        keep: int = 2,
        rank: int = 0,
        world: int = 1,
    ) -> Publication:
        """Offer a tree to all peers; returns at once, without copying it.

        The arrays are held by reference: numpy arrays must not be changed until it is released; JAX arrays
        may be donated. It is offered until it is released, `keep` newer versions are there, or `lease_s` have
        passed; its memory is let go when then no run reads it, at the end of the lease in any case.
        Fails: UsageError if the version is not newer than the last; TreeError.
        """
        self._check_open()
        return self.shelf.publish(
            name, lambda: published(tree, rank=rank, world=world), version, lease_s=lease_s, keep=keep
        )

    def publish_slices(
        self, name: str, slices: PublishedTree, version: int, lease_s: float = 600.0, *, keep: int = 2
    ) -> Publication:
        """`publish`, for memory of no framework's arrays. It must not change while it is offered."""
        self._check_open()
        return self.shelf.publish(name, lambda: slices, version, lease_s=lease_s, keep=keep)

    # ---- taking

    def prepare(
        self,
        peers: str | Sequence[str],
        name: str,
        into: Any = None,
        *,
        parts: Sequence[str] | None = None,
        rename: Rename | None = None,
        cast: bool = False,
        strict: bool = True,
        rank: int = 0,
        world: int = 1,
        timeout_s: float = 30.0,
        wait_s: float = inf,
    ) -> TransferPlan:
        """A plan to take `name` from peers, in the layout of the template `into`, or all of it in numpy.

        Blocks: until every peer has published it, `wait_s` and in all `timeout_s` at most. No array byte
        moves. Several peers must together hold every array; each byte is taken from one of them. Fails:
        MismatchError listing all that does not fit, VersionGoneError, PeerLostError, StalledError,
        HandshakeError.
        """
        self._check_open()
        addresses = [address_of(text) for text in ([peers] if isinstance(peers, str) else peers)]
        if not addresses or len(set(addresses)) != len(addresses):
            raise UsageError(f"peers={peers!r}: at least one, and each once")
        selection = Selection(parts=parts, rename=rename, strict=strict, cast=cast)
        plan = TransferPlan(
            self,
            addresses,
            name,
            into,
            selection,
            rank=rank,
            world=world,
            timeout_s=timeout_s,
            wait_s=wait_s,
        )
        with self._lock:
            self._plans.add(plan)
        return plan

    async def prepare_async(
        self, peers: str | Sequence[str], name: str, into: Any = None, **options: Any
    ) -> TransferPlan:
        """`prepare`, without blocking the loop."""
        return await asyncio.to_thread(self.prepare, peers, name, into, **options)

    def link(self, address: Address, patience: Patience) -> tuple[PeerLink, bool]:
        """A link to a peer that works, and whether it was made now. Whoever comes while another dials shares
        what comes of that.
        """
        with self._lock:
            self._check_open()
            dialling = self._dialling.setdefault(address, Dialling())
        with dialling.turn(address, patience):
            old = self._peers.get(address)
            if old is not None and not old.lost:
                return old, False
            if old is not None:
                old.close()
            fresh = PeerLink(self, address, patience)
            with self._lock:
                self._peers[address] = fresh
                closed = self._closed
            if closed:
                fresh.close()
                self._check_open()
            return fresh, True

    def next_run(self) -> int:
        return next(self._numbers)

    def forget_plan(self, plan: TransferPlan) -> None:
        with self._lock:
            self._plans.discard(plan)

    def served_here(self, incarnation: str, link: int) -> TargetLink | None:
        other = _LIVE.get(incarnation)
        if other is None or other._closed or "process" not in other.settings.transports:
            return None
        return other._links.get(link)

    # ---- being dialled

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._is_closed():
                    return
                time.sleep(0.05)  # out of descriptors: they come back
                continue
            thread = threading.Thread(
                target=self._welcome, args=(sock,), name=f"holdfast-serve {self.name}", daemon=True
            )
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS or self._closed
                if not full:
                    self._connections[sock] = thread
            if full:
                turn_away(sock, "too many connections")
                sock.close()
            else:
                thread.start()

    def _welcome(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        try:
            tuned(sock)
            greeting = hear(sock, self.identity, _GREET_S)
            refusal = self._refusal(greeting)
            if refusal is not None:
                answer(sock, refusal)
            elif greeting.link:
                answer(sock, Greeted(self.incarnation, self.identity.node, greeting.link))
                self._links[greeting.link].send_chunks(sock)
            else:
                self._serve(sock, greeting)
        except HandshakeError as error:
            turn_away(sock, error.message)
        except (OSError, ConnectionLost, msgspec.MsgspecError, UnicodeDecodeError, KeyError):
            pass  # whoever it was costs itself the connection, and nobody else anything
        finally:
            sock.close()
            with self._lock:
                self._connections.pop(sock, None)

    def _refusal(self, greeting: Greeting) -> Refused | None:
        if greeting.expects and greeting.expects != self.incarnation:
            seen = f"here is incarnation {self.incarnation[:8]}, not {greeting.expects[:8]}"
            hint = "the peer was restarted: connect to it anew"
            return Refused(0, STALE, f"the peer that is meant is gone; {seen}", hint)
        if greeting.link:
            link = self._links.get(greeting.link)
            if link is None or link.incarnation != greeting.incarnation:
                return Refused(0, STALE, "the link this connection belongs to is over")
            if link.num_streams >= _MAX_STREAMS:
                return Refused(0, LIMIT, f"{_MAX_STREAMS} data connections are enough")
        return None

    def _serve(self, sock: socket.socket, greeting: Greeting) -> None:
        number = secrets.randbits(62) | 1
        link = TargetLink(self, number, greeting.name or greeting.incarnation, greeting.incarnation, sock)
        with self._lock:
            self._links[number] = link
        try:
            answer(sock, Greeted(self.incarnation, self.identity.node, number, self._local))
            link.serve()
        finally:
            with self._lock:
                self._links.pop(number, None)
            link.release()

    # ---- the end

    def _is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the endpoint is closed")

    def close(self) -> None:
        """End everything: plans, publications, connections and threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            plans, peers, links = list(self._plans), list(self._peers.values()), list(self._links.values())
            connections = dict(self._connections)
        for plan in plans:
            plan.close()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for peer in peers:
            peer.close()
        for link in links:
            link.close("the endpoint closed")
        self.shelf.close()
        for sock in connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (*self._accepting, *connections.values()):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(5.0)
        for listener in self._listeners:
            listener.close()
        self.workers.close(5.0)
        self.timers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(streams: int, window: int, chunk: int, times: Sequence[float], transports: Sequence[str]) -> None:
    if not 1 <= streams <= _MAX_STREAMS:
        raise UsageError(f"streams={streams}; 1 to {_MAX_STREAMS} are possible")
    if not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES:
        allowed = f"{MIN_CHUNK_BYTES:,} to {MAX_CHUNK_BYTES:,}"
        raise UsageError(f"chunk_bytes={chunk:,}; {allowed} are possible")
    if window < 1 or min(times) <= 0:
        raise UsageError("window_bytes and all times are positive")
    unknown = set(transports) - set(TRANSPORTS)
    if unknown or not transports:
        raise UsageError(f"transports={tuple(transports)!r}; known are {', '.join(TRANSPORTS)}")
