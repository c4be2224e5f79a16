"""`holdfast transfer pull`, without a peer."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cli import movement, terminal
from holdfast.clock import Deadline, ManualClock
from holdfast.errors import DeadlineError
from tests.cli.saved import holdfast


def test_the_timeout_is_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    given: list[object] = []

    class Plan:
        nbytes = 1

        def run(self, version: int | None, *, deadline_s: float) -> Any:
            given.append(deadline_s)
            raise KeyboardInterrupt

        def close(self) -> None:
            given.append("closed")

    class Peer:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Peer:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def prepare(self, addresses: list[str], name: str, *, timeout_s: float, wait_s: float) -> Plan:
            given.append((timeout_s, wait_s))
            clock.advance(4.0)
            return Plan()

    monkeypatch.setattr(movement, "Endpoint", Peer)
    monkeypatch.setattr(movement, "Deadline", lambda timeout_s: Deadline(timeout_s, clock))
    assert holdfast("transfer", "pull", "tcp://127.0.0.1:1", "policy", "--timeout", 10).exit_code != 0
    assert given == [(10.0, 0.0), 6.0, "closed"]
    given.clear()
    words = ("transfer", "pull", "tcp://127.0.0.1:1", "policy", "--version", 3, "--timeout", 10)
    assert holdfast(*words).exit_code != 0
    assert given == [(10.0, 10.0), 6.0, "closed"]  # a version may come yet


def test_whoever_waits_is_told_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coming:
        """A transfer whose version comes after a few looks."""

        def __init__(self) -> None:
            self.looks = 0

        def result(self, timeout_s: float) -> Any:
            self.looks += 1
            if self.looks < 9:
                raise DeadlineError("not yet")
            return "here"

        def done(self) -> bool:
            return False

        def progress(self) -> tuple[int, int]:
            return 0 if self.looks < 6 else 4, 8

    said: list[str] = []
    monkeypatch.setattr(terminal, "note", said.append)
    for looks, told in ((5, ["waiting"]), (6, [])):
        monkeypatch.setattr(movement, "_SILENT_LOOKS", looks)
        future: Any = Coming()
        movement.awaited(future, lambda _: None, "waiting")
        assert said == told
        said.clear()
