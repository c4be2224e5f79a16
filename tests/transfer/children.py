"""Endpoints in processes of their own, driven from a test."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

from tests.checkpoint.children import Child, Children, TimedOut
from tests.transfer.slices import grid

Line = dict[str, Any]
Arrays = list[dict[str, Any]]

PROMPT_S: Final = 0.5
"""How soon the death of a peer must surface."""
NAME: Final = "policy"


def array(
    name: str,
    shape: Sequence[int],
    *,
    dtype: str = "float32",
    cuts: Sequence[Sequence[int]] | None = None,
    holders: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """An array for `publish` and `prepare`, in a grid of boxes; by default one box, with rank 0."""
    boxes = grid(shape, cuts if cuts is not None else [()] * len(shape))
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(shape),
        "boxes": boxes,
        "holders": holders if holders is not None else [[0]] * len(boxes),
    }


@final
class Refused(AssertionError):
    """A command was answered by an error that the test did not expect."""


@final
class PeerProcess:
    """A process with an endpoint."""

    def __init__(self, children: Children, **options: Any) -> None:
        self.child: Child = children.python("-m", "tests.transfer.child")
        self.options = options
        self.pid = self.child.pid
        self.address = ""
        self._orders = 0

    def started(self) -> PeerProcess:
        """Wait for it to be up; processes start side by side if this comes after all of them."""
        self.child.until("up")
        self.address = self.do("open", **self.options)["address"]
        return self

    def send(self, do: str, **fields: Any) -> None:
        """Give a command without waiting for its answer."""
        self._orders += 1
        self.child.tell(json.dumps({"do": do, "order": self._orders, **fields}))

    def answer(self, timeout_s: float = 40.0) -> Line:
        """The answer to the last command; announcements, and answers that nobody took, are passed over."""
        while (line := self.child.line(timeout_s)) is not None:
            if line["order"] == self._orders:
                return line
        raise TimedOut(f"{self.pid} ended without an answer\n{self.child.errors()}")

    def ask(self, do: str, **fields: Any) -> Line:
        """A command and its answer, an error too."""
        self.send(do, **fields)
        return self.answer()

    def do(self, do: str, **fields: Any) -> Line:
        """A command that must succeed."""
        line = self.ask(do, **fields)
        if line["saw"] == "error":
            raise Refused(f"{do}: {line['kind']}: {line['text']}")
        return line

    def publish(self, arrays: Arrays, version: int, *, rank: int = 0, name: str = NAME, **more: Any) -> None:
        self.do("publish", name=name, arrays=arrays, rank=rank, version=version, **more)

    def prepare(
        self,
        peers: Sequence[str],
        arrays: Arrays,
        *,
        rank: int = 0,
        name: str = NAME,
        plan: str = "plan",
        **more: Any,
    ) -> Line:
        return self.do("prepare", plan=plan, peers=list(peers), name=name, arrays=arrays, rank=rank, **more)

    def pull(self, version: int | None = None, *, plan: str = "plan", **options: Any) -> Line:
        """A run from start to end, an error too."""
        keep = options.pop("keep", False)
        self.do("run", plan=plan, version=version, **options)
        return self.ask("wait", keep=keep)

    def pulled(self, version: int | None = None, **options: Any) -> Line:
        """A run that must succeed, with the right bits."""
        line = self.pull(version, **options)
        assert line["saw"] == "committed", line
        assert line["wrong"] == [], line
        assert version is None or line["version"] == version, line
        return line

    def serves(self, version: int | None, plan: str = "plan") -> None:
        """Check that this version, whole, is the one in service."""
        line = self.do("current", plan=plan)
        assert (line["version"], line["wrong"]) == (version, []), line

    def usage(self) -> Line:
        return self.do("usage")

    def settled(self, baseline: Line, *, slack_bytes: int = 8 << 20, timeout_s: float = 5.0) -> None:
        """Wait until threads, descriptors and memory are back where they were."""
        ends = time.monotonic() + timeout_s
        while True:
            now = self.usage()
            over = {key: now[key] for key in ("memfds", "mapped", "threads") if now[key] > baseline[key]}
            extra = list(now["fds"])
            for name in baseline["fds"]:
                with suppress(ValueError):
                    extra.remove(name)
            if len(now["fds"]) > len(baseline["fds"]):
                over["fds"] = extra
            if now["resident"] > baseline["resident"] + slack_bytes:
                over["resident"] = now["resident"] - baseline["resident"]
            if not over:
                return
            assert time.monotonic() < ends, f"not given back: {over}"

    def kill(self, number: int) -> None:
        self.child.kill(number)


def peers(children: Children, number: int, **options: Any) -> list[PeerProcess]:
    """Several processes, started side by side."""
    found = [PeerProcess(children, **options) for _ in range(number)]
    return [one.started() for one in found]
