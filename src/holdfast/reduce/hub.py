"""All links of a member, and the thread that serves them.

Of two members the one with the higher slot calls. Nobody waits for a link here: `regroup` says who is wanted,
the thread calls, listens, serves what peers ask for, and tells through `changed` that something came. The
caller's own thread may send, too: a notice goes out at once, and what the peer does not take is left to the
thread. And while the caller waits (`attended`), it reads the links itself, and the thread has them not: from
a peer's notice to the caller is then one change of process and none of threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from holdfast.errors import HandshakeError, HoldfastError, UsageError
from holdfast.reduce.links import Identity, Link
from holdfast.reduce.messages import Message
from holdfast.reduce.shelf import Shelf
from holdfast.transfer.links import address_of, listen, listen_locally, node_id, tuned
from holdfast.wire import ConnectionLost

TRANSPORTS: Final = ("memfd", "tcp")
GREETING_S: Final = 30.0
"""Not the way to find a dead peer, which is refused or ends the link: a busy one may take seconds."""
RETRY_S: Final = 0.05
_TRIES: Final = 4
_MAX_STRANGERS: Final = 256
_log: Final = logging.getLogger("holdfast.reduce")


class Member(NamedTuple):
    """A member of the group: its slot, which life of it, and the `address` of its Reducer."""

    slot: int
    incarnation: str
    address: str


@final
class _Call:
    """A member that is to be called, or is being called."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.tries = 0
        self.due = 0.0
        self.link: Link | None = None


def _node() -> str:
    return hashlib.sha256(node_id().encode()).hexdigest()[:16] if node_id() else ""


def _local_name(incarnation: str) -> str:
    return f"\0holdfast-reduce-{incarnation}"


@final
class Hub:
    """Links by incarnation. `changed` is the lock of everything in this room that two threads see."""

    def __init__(self, me: Identity, bind: str, transports: Sequence[str], name: str) -> None:
        if not transports or not set(transports) <= set(TRANSPORTS):
            raise UsageError(f"transports={tuple(transports)!r}", hint=f"choose from {TRANSPORTS}")
        self.changed = threading.Condition(threading.RLock())
        self._me, self._name = me, name
        self._transports = tuple(transports)
        self._shelf: Shelf | None = None
        self._links: dict[str, Link] = {}
        self._opening: set[Link] = set()
        self._ended: list[Link] = []
        self._calls: dict[str, _Call] = {}
        self._lost: dict[str, str] = {}
        self._members: set[str] = set()
        self._epoll = select.epoll()
        self._by_fd: dict[int, Link | socket.socket | None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._attended = False
        self._thread: threading.Thread | None = None
        self._closing = False
        listener, address = listen(bind, sealed=me.token is not None)
        self._listeners = [listener]
        if "memfd" in self._transports and _node():
            self._listeners.append(listen_locally(_local_name(me.incarnation)))
            address = f"{address}/{_node()}"
        self.address = address

    def regroup(self, shelf: Shelf, me: int, members: Iterable[Member]) -> None:
        """Want links to these; links to those who left end. Never waits."""
        with self.changed:
            self._shelf = shelf
            others = {member.incarnation: member for member in members if member.slot != me}
            broken = {one for one, link in self._links.items() if link.broken is not None}
            for gone in (self._members - set(others)) | broken:
                self._forget(gone)
            self._members = set(others)
            self._lost = {}
            self._calls = {
                incarnation: self._calls.get(incarnation) or _Call(member)
                for incarnation, member in others.items()
                if member.slot < me
            }
            for call in self._calls.values():
                call.tries, call.due = 0, 0.0
            for link in self._links.values():
                link.forget_readings()
            if others and self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name=f"holdfast-reduce-{self._name}", daemon=True
                )
                self._thread.start()
            self._wake_up()

    def _forget(self, incarnation: str) -> None:
        link = self._links.pop(incarnation, None)
        call = self._calls.pop(incarnation, None)
        for one in (link, None if call is None else call.link):
            if one is not None:
                one.fail("it left the group")
                one.forget()
                self._ended.append(one)

    def link(self, incarnation: str) -> Link | None:
        """The link to a member, also one that has broken since; None while there is none."""
        return self._links.get(incarnation)

    def lost(self, incarnation: str) -> str | None:
        """Why there is no link to a member, and will be none in this generation."""
        link = self._links.get(incarnation)
        return link.broken if link is not None and link.broken else self._lost.get(incarnation)

    def remote(self) -> bool:
        """Whether there is a link whose peer cannot read our memory."""
        return any(not link.lent for link in self._links.values())

    def tell(self, message: Message, fd: int | None) -> None:
        """Say it to every member that is linked; with a descriptor, to those that can take one."""
        with self.changed:
            for link in self._links.values():
                if link.up and (fd is None or link.lent):
                    link.post(message, fd)
            self.nudge()

    def nudge(self) -> None:
        """Have the thread send what could not be sent at once."""
        if any(link.wants_write for link in self._links.values()):
            self._wake_up()

    def _wake_up(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake, 1)

    def _every(self) -> list[Link]:
        return [*self._links.values(), *self._opening, *self._ended]

    def close(self) -> None:
        """End the thread and all links."""
        with self.changed:
            self._closing = True
            self._wake_up()
        if self._thread is not None:
            self._thread.join(10.0)
        with self.changed:  # the caller's thread may be at an exchange
            for link in self._every():
                link.close()
                link.forget()
            for listener in self._listeners:
                listener.close()
            self._epoll.close()
            os.close(self._wake)
            os.close(self._news)

    # ---- the caller's thread, in the place of ours

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """Within this, `wait` reads the links. Whatever else happens is left to the thread."""
        self._attend(True)
        try:
            yield
        finally:
            self._attend(False)

    def _attend(self, attended: bool) -> None:
        with self.changed:
            self._attended = attended
            for link in self._links.values():
                if link.broken is None and not self._closing:
                    self._arm(link)

    def wait(self, timeout_s: float) -> None:
        """Let go of the lock until something came, `timeout_s` at most; the lock is held before and after.

        Fails: UsageError if another thread has closed the hub.
        """
        self._check_open()
        links = {link.sock.fileno(): link for link in self._links.values() if link.broken is None}
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        for fd, link in links.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        self.changed.release()
        try:
            events = poll.poll(1e3 * timeout_s)
        finally:
            self.changed.acquire()
        self._check_open()  # else these numbers may be somebody else's by now
        for fd, mask in events:
            if fd == self._news:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news)
            elif links[fd].broken is None:
                self._drive(links[fd], mask)
                if links[fd].broken is not None:
                    self._retire(links[fd])

    def _check_open(self) -> None:
        if self._closing:
            raise UsageError("the reducer was closed while it was used", hint="close it from the same thread")

    # ---- the thread

    def _loop(self) -> None:
        self._epoll.register(self._wake, select.EPOLLIN)
        for listener in self._listeners:
            listener.setblocking(False)
            self._by_fd[listener.fileno()] = listener
            self._epoll.register(listener, select.EPOLLIN)
        while True:
            with self.changed:
                if self._closing:
                    return
                now = time.monotonic()
                self._call_due(now)
                self._tend(now)
                timeout = self._pause(now)
            events = self._epoll.poll(timeout)
            with self.changed:
                for fd, mask in events:
                    self._handle(fd, mask)
                self._notify()

    def _notify(self) -> None:
        self.changed.notify_all()
        if self._attended:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._news, 1)

    def _handle(self, fd: int, mask: int) -> None:
        found = self._by_fd.get(fd)
        if fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif isinstance(found, Link):
            # Of one that the caller attends to, only its end is reported here.
            if found.broken is None:
                self._drive(found, mask)
        elif found is not None:
            self._accept(found)

    def _arm(self, link: Link) -> None:
        """Watch a link for what it needs now; one that the caller attends to is not watched here."""
        wanted = select.EPOLLIN | (select.EPOLLOUT if link.wants_write else 0)
        if self._attended and link.up:
            wanted = 0
        if link.watched is None:
            self._by_fd[link.sock.fileno()] = link
            self._epoll.register(link.sock, wanted)
        elif link.watched != wanted:
            self._epoll.modify(link.sock, wanted)
        link.watched = wanted

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        tuned(sock)
        assert self._shelf is not None
        link = Link(sock, self._me, self._shelf, expects=None, now=time.monotonic())
        if len(self._opening) + len(self._links) >= _MAX_STRANGERS + 4 * len(self._members):
            link.close()
            return
        self._opening.add(link)
        self._arm(link)

    def _drive(self, link: Link, mask: int) -> None:
        """Let a link do what it can; whatever goes wrong is the end of this link and of nothing else."""
        try:
            if not link.connected:
                self._connected(link)
            if mask & ~select.EPOLLOUT and link.receive():
                self._established(link)
            link.flush()
            link.serve()
        except HandshakeError as error:
            link.turn_away(error)
            link.fail(error.message)
        except ConnectionLost as error:
            link.fail(error.message)
        except (HoldfastError, ArithmeticError, LookupError, TypeError, ValueError, OSError) as error:
            _log.warning("%s: a link ended: %s: %s", self._name, type(error).__name__, error)
            link.fail(f"{type(error).__name__}: {error}")

    def _connected(self, link: Link) -> None:
        number = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise ConnectionLost(f"cannot connect: {os.strerror(number)}")
        link.start()

    def _established(self, link: Link) -> None:
        self._opening.discard(link)
        old = self._links.get(link.incarnation)
        if old is not None:
            old.fail("it has called again")
            self._retire(old)
        self._links[link.incarnation] = link

    def _tend(self, now: float) -> None:
        """End what is over or late, and watch what has something to send."""
        for link in self._every():
            if not link.up and link.broken is None and now - link.since > GREETING_S:
                link.fail(f"no greeting within {GREETING_S:g} s")
            if link.broken is not None:
                self._retire(link)
                continue
            self._arm(link)
        self._ended.clear()
        strangers = [one for one, link in self._links.items() if link.broken and one not in self._members]
        for incarnation in strangers:
            del self._links[incarnation]

    def _retire(self, link: Link) -> None:
        """Close what is broken; a member's link stays known, with what it had said."""
        self._opening.discard(link)
        if link.sock.fileno() < 0:
            return
        if self._by_fd.pop(link.sock.fileno(), None) is not None:
            self._epoll.unregister(link.sock)
        link.close()
        call = self._calls.get(link.incarnation)
        if call is not None and call.link is link:
            call.link = None
            if not link.up:
                self._failed(call, link.broken or "")

    # ---- calling

    def _failed(self, call: _Call, reason: str) -> None:
        call.tries += 1
        call.due = time.monotonic() + RETRY_S
        if call.tries >= _TRIES:
            self._lost[call.member.incarnation] = reason
        self._notify()

    def _call_due(self, now: float) -> None:
        for incarnation, call in self._calls.items():
            # A link that broke in this generation stays known as lost; only the next generation calls again.
            if (
                incarnation not in self._links
                and call.link is None
                and call.tries < _TRIES
                and now >= call.due
            ):
                self._call(call, now)

    def _call(self, call: _Call, now: float) -> None:
        assert self._shelf is not None
        member = call.member
        try:
            sock, place = self._way(member, call.tries)
            sock.setblocking(False)
            tuned(sock)
            number = sock.connect_ex(place)
        except (OSError, UsageError) as error:
            self._failed(call, f"cannot connect: {error}")
            return
        if number not in (0, errno.EINPROGRESS):
            sock.close()
            self._failed(call, f"cannot connect: {os.strerror(number)}")
            return
        link = call.link = Link(sock, self._me, self._shelf, expects=member.incarnation, now=now)
        self._opening.add(link)
        self._arm(link)

    def _way(self, member: Member, tries: int) -> tuple[socket.socket, Any]:
        """A socket and where to connect it: this node's own way first, TCP if that fails."""
        text, _, node = member.address.rpartition("/")
        if not text.startswith("tcp://"):
            text, node = member.address, ""
        local = "memfd" in self._transports and node != "" and node == _node()
        if local and (tries % 2 == 0 or "tcp" not in self._transports):
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), _local_name(member.incarnation)
        if "tcp" not in self._transports:
            raise UsageError(f"{text} is on another node, and transports={self._transports}")
        address = address_of(text)
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        return socket.socket(family, socket.SOCK_STREAM), place

    def _pause(self, now: float) -> float:
        """Until something is due by the clock."""
        due = [link.since + GREETING_S - now for link in self._opening]
        due += [
            call.due - now for call in self._calls.values() if call.link is None and 0 < call.tries < _TRIES
        ]
        return max(0.001, min(due, default=60.0))
