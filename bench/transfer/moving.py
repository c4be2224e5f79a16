"""The two processes of one subject, as the benchmark sees them."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Self, final

from bench.coord.process import ended, free_port, quiet_environment
from bench.transfer.side import has_source
from bench.transfer.sides import DEADLINE_S
from bench.transfer.trees import TreeSpec


@dataclass(frozen=True, slots=True)
class Subject:
    """Who moves the tree, and how."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


@final
class Moving:
    """A source and a target, started, warmed up, and known to move the right bytes; both end with the block.

    Fails: RuntimeError, in whatever way a side fails.
    """

    def __init__(self, subject: Subject, tree: TreeSpec) -> None:
        self._subject, self._tree = subject, tree
        self._number = 0
        self._source: subprocess.Popen[bytes] | None = None
        self._target: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        kind, options, address, expected = self._subject.kind, self._subject.options, None, ""
        if kind == "gloo":
            options = {**options, "port": free_port()}
        about = {"tree": self._tree.encoded(), "options": options}
        if has_source(kind):
            self._source = _started("source", kind, about)
        self._target = _started("target", kind, about)
        if self._source is not None:
            said = _answer(self._source)
            address, expected = said["address"], said["digest"]
        _told(self._target, {"address": address})
        for _ in range(2):  # connections, page faults, second buffers
            self.take()
        found = _told(self._target, {"do": "digest"})
        if expected and found != expected:
            raise RuntimeError(f"{kind} moved the wrong bytes: {found} instead of {expected}")

    def take(self, *, checked: bool = True) -> float:
        """Move the tree once more; the seconds it took at the target."""
        assert self._target is not None
        self._number += 1
        if self._source is not None:
            _told(self._source, {"do": "offer", "number": self._number})
        seconds: float = _told(self._target, {"do": "take", "number": self._number, "checked": checked})
        return seconds

    def again(self, times: int) -> list[float]:
        """The seconds of each of `times` runs of what was moved last, one right after the other."""
        assert self._target is not None
        found: list[float] = _told(self._target, {"do": "again", "times": times})
        return found

    def __exit__(self, *_: object) -> None:
        for process in (self._target, self._source):
            if process is not None:
                try:
                    _told(process, {"do": "close"})
                except (RuntimeError, OSError):
                    process.kill()  # it failed already, and that has been said
                finally:
                    ended(process)


def _started(role: str, kind: str, about: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.transfer.side", role, kind, json.dumps(about)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=quiet_environment(),
        start_new_session=True,
    )


def _told(process: subprocess.Popen[bytes], order: dict[str, Any]) -> Any:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    return _answer(process)


def _answer(process: subprocess.Popen[bytes]) -> Any:
    """What it says next. One line answers one order, so nothing is ever left in the pipe's buffer."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], DEADLINE_S)[0]:
        process.kill()
        raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with exit code {process.wait()}")
    return json.loads(line)
