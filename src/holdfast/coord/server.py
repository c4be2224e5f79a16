"""A coordinator as a process of its own: loop, signals, discovery file."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from holdfast.coord.connections import Limits
from holdfast.coord.listeners import Discovery
from holdfast.coord.log import Log
from holdfast.coord.service import Server
from holdfast.coord.settings import Settings
from holdfast.journal import Journal


def serve(
    settings: Settings,
    folder: str | os.PathLike[str],
    *,
    bind: Sequence[str],
    token: bytes | None = None,
    discovery: str | os.PathLike[str] | None = None,
    journal: Journal | None = None,
    limits: Limits | None = None,
    ready: Callable[[tuple[str, ...]], None] = lambda addresses: None,
) -> None:
    """Serve the folder until SIGTERM or SIGINT. For the main thread of a process of its own.

    The same folder again continues where the last process ended, in whatever way it ended. Calls `ready` with
    the addresses once clients can come. Fails: UsageError, LeaseError, CorruptError, StorageError.
    """
    _allow_many_files()
    # The thread that syncs the log must not wait 5 ms for its turn whenever the loop is busy.
    sys.setswitchinterval(0.0001)
    log = Log(folder, wait_s=1.0)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            server = Server(settings, log, token=token, limits=limits, journal=journal)
            runner.run(_serve(server, bind, Discovery(discovery) if discovery else None, ready))
            server.check()
    finally:
        log.close()


async def _serve(
    server: Server,
    bind: Sequence[str],
    discovery: Discovery | None,
    ready: Callable[[tuple[str, ...]], None],
) -> None:
    loop = asyncio.get_running_loop()
    await server.start(bind)
    reason = "it could not go on"
    try:

        def stop(name: str) -> None:
            nonlocal reason
            reason = name
            server.over.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number.name)
        if discovery is not None:
            discovery.publish(server.addresses)
        # What was brought back lives as long as the process: it need not be looked at for garbage. No call
        # leaves cycles behind, so looking for them often finds nothing.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 50)
        ready(server.addresses)
        await server.over.wait()
    finally:
        if discovery is not None:
            discovery.withdraw()
        await server.stop(reason)


def _allow_many_files() -> None:
    """As many connections as the system lets us have; the usual 1,024 would end at a thousand members."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed: about twice the calls a second."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
    return factory
