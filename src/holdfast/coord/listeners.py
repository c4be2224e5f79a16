"""The sockets a coordinator listens at, and the file that says where they are."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, final

from holdfast.clock import Deadline
from holdfast.coord.address import Address
from holdfast.errors import StorageError, UsageError
from holdfast.storage import LocalStore

_TCP: Final = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/\s]+)):(\d{1,5})")
_BACKLOG: Final = 4096
_HINT: Final = "use tcp://HOST:PORT (port 0: any) or unix:/path"


class Listener(NamedTuple):
    """A bound and listening socket; `address` is where others find it."""

    sock: socket.socket
    address: str
    path: str = ""

    def close(self) -> None:
        """Stop listening; the name of a Unix socket goes too."""
        self.sock.close()
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)


def listen(texts: Sequence[str], *, sealed: bool, timeout_s: float = 2.0) -> list[Listener]:
    """Listen at every address, or at none. Fails: UsageError, StorageError.

    Beyond loopback only if `sealed`, that is with a token. An address that is in use is tried again until
    `timeout_s`: its last owner may be dying just now.
    """
    deadline = Deadline(timeout_s)
    listeners: list[Listener] = []
    try:
        if not texts:
            raise UsageError("no address to listen at was given", hint=_HINT)
        for text in texts:
            listeners += _unix(text, deadline) if text.startswith("unix:") else _tcp(text, sealed, deadline)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _tcp(text: str, sealed: bool, deadline: Deadline) -> list[Listener]:
    found = _TCP.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        raise UsageError(f"{text!r} is no address to listen at", hint=_HINT)
    host, port = found[1] or found[2], int(found[3])
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"cannot listen at {text}: {error.strerror}", hint=_HINT) from error
    # One name may stand for several addresses; with port 0 they would get different ports.
    family, _, _, _, place = places[0]
    where = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if not where.is_loopback and not sealed:
        raise UsageError(
            f"refusing to listen at {text} without a token: whoever reaches it could control the run",
            hint="give a token file, or listen at tcp://127.0.0.1 or a Unix socket",
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if where.is_unspecified else 1)
    _bind(sock, place, text, deadline)
    port = int(sock.getsockname()[1])
    # Everywhere is no place to go to.
    name = socket.gethostname() if where.is_unspecified else str(place[0])
    return [Listener(sock, str(Address(name, port)))]


def _unix(text: str, deadline: Deadline) -> list[Listener]:
    path = text.removeprefix("unix:")
    if not path.startswith("/") or len(os.fsencode(path)) > 107:
        raise UsageError(f"{text!r} has no absolute path of at most 107 bytes", hint=_HINT)
    _remove_stale(path, text)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Whoever can open the socket can talk to us, with or without a token: this user only.
    before = os.umask(0o177)
    try:
        _bind(sock, path, text, deadline)
    finally:
        os.umask(before)
    return [Listener(sock, text, path)]


def _remove_stale(path: str, text: str) -> None:
    """Remove the name that a killed coordinator left; not one behind which somebody listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"cannot listen at {text}: a file that is no socket stands there")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return
    raise UsageError(f"cannot listen at {text}: another process does", hint="stop it, or use another path")


def _bind(sock: socket.socket, place: object, text: str, deadline: Deadline) -> None:
    while True:
        try:
            sock.bind(place)  # type: ignore[arg-type]
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            return
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not deadline.expired():
                time.sleep(0.01)
                continue
            sock.close()
            raise StorageError.from_os(error, doing="listen at", path=text) from error


@final
class Discovery:
    """A file with one address per line, for clients that know only the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._store = LocalStore(self._path.parent)
        self._text = b""

    def publish(self, addresses: Sequence[str]) -> None:
        """Say where we are: readers see the old file or the new one. Fails: StorageError."""
        self._text = "".join(f"{address}\n" for address in addresses).encode()
        self._store.make_root()
        self._store.replace(self._path.name, data=self._text)

    def withdraw(self) -> None:
        """Remove the file, unless a successor has put its own there; never fails."""
        with suppress(StorageError):
            if self._store.read(self._path.name, max_bytes=1 << 16) == self._text:
                self._store.remove(self._path.name)
