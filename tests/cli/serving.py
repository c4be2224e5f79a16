"""A coordinator for the tests of the commands: a real one, on a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.coord.log import Log
from holdfast.coord.service import Server
from holdfast.coord.settings import Settings

TOKEN = b"a token for the tests of the commands"
_DEADLINE_S = 30.0


@contextmanager
def served(folder: Path, settings: Settings, *, token: bytes | None = TOKEN) -> Iterator[str]:
    """Serve in `folder`; gives the address."""
    started, over = threading.Event(), threading.Event()
    found: list[str] = []
    running: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        server = Server(settings, Log(folder), token=token)
        await server.start(["tcp://127.0.0.1:0"])
        ended = asyncio.Event()
        running.append(asyncio.get_running_loop())
        running[0].call_soon(started.set)
        found.extend(server.addresses)
        stopping.append(ended)
        await ended.wait()
        await server.stop()
        over.set()

    stopping: list[asyncio.Event] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="coordinator")
    thread.start()
    try:
        assert started.wait(_DEADLINE_S)
        yield found[0]
    finally:
        if running:
            running[0].call_soon_threadsafe(stopping[0].set)
        thread.join(_DEADLINE_S)
        assert over.is_set()
