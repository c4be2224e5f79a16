"""A source and a target in processes of their own, before something happens to them."""

from __future__ import annotations

import os
import select
import threading
import time
from typing import Any, final

import pytest

from tests.checkpoint.children import TIMEOUT_S, Children
from tests.transfer.children import NAME, Line, PeerProcess, array, peers
from tests.transfer.proxy import Proxy

CHUNK = 1 << 18
WINDOW = 1 << 20
TREE = [array("w", (512, 1024)), array("u", (1024, 512), cuts=[(), (100,)])]  # 2 MiB each: 16 chunks
NBYTES = 4 << 20
IDLE_S = 1.0
SLACK_S = 8.0
"""How late a deadline may be noticed on a busy machine: less than any other deadline here is."""
OPTIONS: dict[str, Any] = {
    "chunk_bytes": CHUNK, "window_bytes": WINDOW, "idle_s": IDLE_S, "first_byte_s": IDLE_S, "connect_s": 2.0,
}  # fmt: skip
TCP = {**OPTIONS, "transports": ["tcp"]}

SHARED = pytest.mark.parametrize("options", [TCP, OPTIONS], ids=["tcp", "same node"])


@final
class Death:
    """Notes when a process ends."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._watch)
        self._at = 0.0
        self._thread.start()

    def _watch(self) -> None:
        if select.select([self._fd], [], [], TIMEOUT_S)[0]:
            self._at = time.monotonic()
        os.close(self._fd)

    def at(self) -> float:
        self._thread.join()
        assert self._at, "it never died"
        return self._at


@final
class Scene:
    """A source with version 1 and a target that serves it, before anything happens."""

    def __init__(self, children: Children, options: dict[str, Any], *, proxied: bool = False) -> None:
        self.children = children
        self.options = options
        self.source, self.target = peers(children, 2, **options)
        self.proxy = Proxy(self.source.address) if proxied else None
        self.address = self.proxy.address if self.proxy is not None else self.source.address
        self.source.publish(TREE, 1)
        self.target.prepare([self.address], TREE)
        for _ in range(2):  # both buffers have been used, so that nothing grows any more
            self.target.pulled(1)
        self.baseline = self.target.usage()
        self.source_baseline = self.source.usage()
        self.source.publish(TREE, 2)

    def attempt(self, stage: str) -> Line:
        """What reaches a stage: another plan, or a run of version 2."""
        if stage in ("describe", "prepare"):
            more = {"plan": "other", "peers": [self.address], "name": NAME, "arrays": TREE, "rank": 0}
            return self.target.ask("prepare", **more)
        return self.target.pull(2)

    def restart_source(self, version: int) -> None:
        """Another process at the same address."""
        bind = self.source.address.removeprefix("tcp://")
        self.source.child.close()
        self.source = PeerProcess(self.children, **self.options, bind=bind).started()
        self.source.publish(TREE, version)

    def works_again(self, version: int = 2) -> None:
        """The next run of the plan works, and nothing of the failed one is left."""
        self.target.pulled(version)
        self.target.usage()  # collects what an error held on to; the run after that gives it back
        self.target.pulled(version)
        self.target.serves(version)
        self.target.settled(self.baseline)


def ended(line: Line) -> float:
    return float(line["ended"] if "ended" in line else line["at"])


def failed(line: Line, kind: str, *parts: str) -> None:
    assert line["saw"] == "error", line
    assert line["kind"] == kind, line
    for part in parts:
        assert part in line["text"], line["text"]
    assert line.get("outcome", "aborted") == "aborted"
