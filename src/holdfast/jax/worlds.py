"""`python -m holdfast.jax.worlds`: hosts JAX's coordination services for the replicas of one node.

JAX aborts every worker when the process that hosts its service dies, and usually that is worker 0. Here the
services live in a process of their own, started by the agent when a replica has several workers: a worker's
death is then nobody else's, and a new attempt finds its service up and needs no reconnect pause. The host
is a client of Holdfast's coordinator and keeps on through its restarts; `holdfast.jax.hosting` decides.

Environment: HOLDFAST_COORD, HOLDFAST_RUN, HOLDFAST_NODE, HOLDFAST_FOLDER, and HOLDFAST_TOKEN_FD, a descriptor
with the run's token. Once it watches, one line of JSON says so: {"ready": true, "pid": 4242}. SIGTERM ends
it. When it dies, the workers of its worlds die with it.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias, final

from holdfast.coord import Changed, CoordClient
from holdfast.errors import CoordError, HoldfastError, UnreachableError, UsageError
from holdfast.jax.hosting import PREFIX, Hosting, Start, World
from holdfast.jax.internals import Service, make_service

log = logging.getLogger("holdfast.jax.worlds")

HEARTBEAT_S: Final = 100
"""After so long without a sign of life a worker aborts itself. A machine under load is slow; deaths and
hangs are the agent's business, which knows of them in milliseconds."""
REGISTER_S: Final = 300
_LINGER_S: Final = 2.0
_CALL_S: Final = 5.0
_ALIVE_S: Final = 2.0
_AGAIN_S: Final = 0.2
_END_S: Final = 8.0
_MAX_TOKEN: Final = 4096
_MAX_PATH: Final = 100
"""A socket's path may have 107 bytes."""

_News: TypeAlias = "Changed | None"


@final
class Services:
    """The services of this process, each at a Unix socket that only this user can reach.

    Where the run's folder lies too deep for a socket's path they have abstract names, which leave no file and
    which nobody can guess without the token. Either way a world's address is the same after a restart of the
    host: workers that were about to connect to the old one find the new one.
    """

    def __init__(self, folder: Path, node: int, token: bytes | None) -> None:
        self._folder = folder
        self._node = node
        self._token = token or b""
        self._running: dict[World, tuple[Service, str]] = {}
        self._closing: list[threading.Thread] = []
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"world-{node}-*.sock"):
            left.unlink(missing_ok=True)  # of a host that was killed; the agent runs one at a time

    @property
    def worlds(self) -> tuple[World, ...]:
        return tuple(self._running)

    def address(self, world: World) -> str | None:
        found = self._running.get(world)
        return None if found is None else found[1]

    def start(self, world: World, workers: int) -> str:
        """Start a service; gives its address. Fails: WorldError, and what jaxlib raises."""
        path = self._folder / f"world-{self._node}-{world.replica}-{world.attempt}.sock"
        if len(os.fsencode(path)) <= _MAX_PATH:
            address = f"unix:{path}"
        else:
            name = hmac.new(self._token, os.fsencode(path), hashlib.sha256).hexdigest()[:32]
            address = f"unix-abstract:holdfast-{name}"
        service = make_service(address, workers, heartbeat_s=HEARTBEAT_S, register_s=REGISTER_S)
        self._running[world] = (service, address)
        return address

    def stop(self, world: World) -> None:
        """Stop a service. Does not wait: with clients left in it, it takes seconds."""
        found = self._running.pop(world, None)
        if found is not None:
            thread = threading.Thread(target=_shut_down, args=found, name="holdfast-world-stop", daemon=True)
            thread.start()
            self._closing = [old for old in self._closing if old.is_alive()] + [thread]

    def close(self) -> None:
        """Stop all, and wait for that, `_END_S` at most."""
        for world in tuple(self._running):
            self.stop(world)
        ends = time.monotonic() + _END_S
        for thread in self._closing:
            thread.join(max(0.0, ends - time.monotonic()))


def _shut_down(service: Service, address: str) -> None:
    try:
        service.shutdown()
    except Exception as error:
        log.warning("a coordination service did not end well: %s", error)
    kind, _, path = address.partition(":")
    if kind == "unix":
        Path(path).unlink(missing_ok=True)


@final
class Host:
    """Does what `Hosting` decides, until `end` is called."""

    def __init__(self, addresses: str, *, run: str, token: bytes | None, node: int, folder: Path) -> None:
        self._addresses = addresses
        self._run = run
        self._token = token
        self._node = node
        self._hosting = Hosting(node, _LINGER_S)
        self._services = Services(folder, node, token)
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._ending = False

    def end(self) -> None:
        """Let `serve` return. May be called from a signal handler."""
        self._ending = True
        self._news.put(None)

    def serve(self) -> None:
        """Host worlds until `end`. A coordinator that is away is waited for: closing would abort workers."""
        told = False
        try:
            while not self._ending:
                try:
                    with self._connect() as client:
                        if not told:
                            print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
                            told = True
                        self._attend(client)
                except CoordError as error:
                    if not told and not isinstance(error, UnreachableError):
                        raise
                    log.warning("no session with the coordinator, trying again: %s", error.message)
                    with suppress(queue.Empty):
                        self._news.get(timeout=_AGAIN_S)
        finally:
            self._services.close()

    def _connect(self) -> CoordClient:
        name = f"worlds of {self._node}"
        client = CoordClient(self._addresses, run=self._run, token=self._token, name=name)
        try:
            self._settle(client)
            client.watch(PREFIX, self._news.put, timeout_s=_CALL_S)
        except BaseException:
            client.close()
            raise
        return client

    def _settle(self, client: CoordClient) -> None:
        """After a session that was forgotten its keys are gone, the services are not; and what it was about
        to start or stop when it failed is still to do."""
        wanted = self._hosting.running
        for world in set(self._services.worlds) - set(wanted):
            self._services.stop(world)
        for world in wanted:
            if self._services.address(world) is None:
                self._hosting.failed(world)
            else:
                self._tell(client, world)

    def _attend(self, client: CoordClient) -> None:
        """Follow the keys. Returns at the end; fails with what the coordinator's session fails with."""
        asked = time.monotonic()
        while not self._ending:
            due = self._hosting.next_due()
            now = time.monotonic()
            wait_s = _ALIVE_S if due is None else min(_ALIVE_S, max(0.0, due - now))
            try:
                news = self._news.get(timeout=max(0.001, wait_s))
            except queue.Empty:
                self._do(client, None)
            else:
                if news is not None:
                    self._do(client, news)
            if time.monotonic() - asked > _ALIVE_S:
                # A session that is over says so only to who calls.
                with suppress(UnreachableError):
                    client.get(f"{PREFIX}host", timeout_s=_CALL_S)
                asked = time.monotonic()

    def _do(self, client: CoordClient, news: Changed | None) -> None:
        now = time.monotonic()
        if news is None:
            effects = self._hosting.due(now)
        else:
            effects = self._hosting.changed([(i.key, i.value) for i in news.items], news.reset, now)
        for effect in effects:
            if isinstance(effect, Start):
                self._start(client, effect)
            else:
                self._services.stop(effect.world)
                for key in (effect.world.want(self._node), effect.world.at):
                    client.delete(key, timeout_s=_CALL_S)

    def _start(self, client: CoordClient, effect: Start) -> None:
        try:
            self._services.start(effect.world, effect.workers)
        except HoldfastError:
            raise
        except Exception as error:  # jaxlib's own; the next look tries again
            log.error("no coordination service for %s: %s", effect.world, error)
            self._hosting.failed(effect.world)
            return
        self._tell(client, effect.world)

    def _tell(self, client: CoordClient, world: World) -> None:
        address = self._services.address(world)
        assert address is not None
        client.set(world.at, address.encode(), owned=True, timeout_s=_CALL_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="holdfast.jax.worlds", description=__doc__)
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    options = parser.parse_args()
    logging.basicConfig(format="holdfast worlds: %(message)s", level=options.log_level.upper())
    os.umask(0o077)
    try:
        host = Host(
            _setting("HOLDFAST_COORD"),
            run=_setting("HOLDFAST_RUN"),
            token=_token(),
            node=int(_setting("HOLDFAST_NODE")),
            folder=Path(_setting("HOLDFAST_FOLDER")) / "coord",
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: host.end())
        host.serve()
    except (HoldfastError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 78 if isinstance(error, ValueError) else 1
    return 0


def _setting(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise UsageError(f"{name} is not set", hint="the agent starts this program and sets it")
    return value


def _token() -> bytes | None:
    text = os.environ.pop("HOLDFAST_TOKEN_FD", None)
    if text is None:
        return None
    try:
        with os.fdopen(int(text), "rb") as file:
            return file.read(_MAX_TOKEN).rstrip(b"\r\n")
    except OSError as error:
        raise UsageError(f"cannot read the token from descriptor {text}: {error.strerror}") from error


if __name__ == "__main__":
    code = main()
    # Past the destructors of services whose clients may still be there.
    sys.stdout.flush()
    os._exit(code)
