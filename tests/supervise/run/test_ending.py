"""The end of a run: it has finished once its last state is on disk, and not before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from holdfast.checkpoint import SaveHandle, SaveState
from holdfast.errors import DeadlineError, HoldfastError, SaveError
from holdfast.journal import Journal
from holdfast.reduce import Reducer
from holdfast.supervise.members import Place
from holdfast.supervise.messages import Finished, Order, Remark, Seat
from holdfast.supervise.run import Parts, Run, RunInfo
from holdfast.supervise.saving import RunSaver
from holdfast.supervise.solo import Solo
from holdfast.supervise.stream import Stream


class FakeDisk:
    """In the place of a Checkpointer: each save ends as it is told to."""

    def __init__(self, *ends: HoldfastError | None) -> None:
        self.ends = list(ends)
        self.saved: list[int] = []
        self.slow = False

    def save(self, step: int, state: Any, **_: object) -> SaveHandle:
        handle = SaveHandle(step)
        end = self.ends.pop(0) if self.ends else None
        if end is not None:
            handle._advance(SaveState.FAILED, end)
        else:
            handle._advance(SaveState.STAGED if self.slow else SaveState.DURABLE)
        self.saved.append(step)
        return handle

    def wait(self, timeout_s: float) -> None:
        if self.slow:
            raise DeadlineError(f"saves were still under way after {timeout_s:g} s", hint="a slow disk?")

    def close(self, timeout_s: float, *, drain: bool) -> None:
        pass


class FakeAgent:
    """In the place of the stream to the agent: gives orders, keeps words."""

    def __init__(self, *orders: Order) -> None:
        self.orders = orders
        self.words: list[object] = []

    def take(self) -> tuple[Order, ...]:
        orders, self.orders = self.orders, ()
        return orders

    def send(self, word: object) -> bool:
        self.words.append(word)
        return True


class Phases:
    """A board whose phases are kept."""

    def __init__(self) -> None:
        self.now, self.seen = "start", ["start"]

    def phase(self, name: str) -> str:
        before, self.now = self.now, name
        self.seen.append(name)
        return before

    def progress(self, step: int) -> None: ...
    def compiling(self, now: bool) -> None: ...
    def waiting(self, name: str | None) -> None: ...


class Scene(NamedTuple):
    run: Run
    saver: RunSaver
    disk: FakeDisk
    agent: FakeAgent
    board: Phases

    def train(self, until: int = 3, save_every: int | None = None) -> None:
        for step in self.run.steps(until, save_every=save_every):
            step.done({"w": np.zeros(3)})


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A run of one that has restored its first state, on a disk of our own."""
    events = Journal(tmp_path / "journal", component="test")
    saver = RunSaver(tmp_path / "ckpt", run="demo", events=events)
    disk, agent, board = FakeDisk(), FakeAgent(), Phases()
    monkeypatch.setattr(saver, "_checkpointer", lambda: disk)
    saver._open = disk  # type: ignore[assignment]
    parts = Parts(
        board=board,
        events=events,
        saver=saver,
        solo=Solo(Reducer(run="demo", num_lanes=1), 1),
        orders=cast(Stream[Order], agent),
    )
    run = Run(RunInfo(name="demo", folder=tmp_path, place=Place(Seat(0, 0, 0), 1, 1, 1)), parts)
    run._steps, run._state = 0, {"w": np.zeros(3)}
    yield Scene(run, saver, disk, agent, board)
    run.close()


def test_the_last_state_is_saved_once(scene: Scene) -> None:
    scene.train(3)
    assert scene.disk.saved == [3]
    assert scene.agent.words == [Finished()]


def test_the_last_state_is_not_saved_again_where_the_interval_saved_it(scene: Scene) -> None:
    scene.train(4, save_every=2)
    assert scene.disk.saved == [2, 4]
    assert scene.agent.words == [Finished()]


def test_a_last_save_that_failed_is_made_once_more(scene: Scene) -> None:
    scene.disk.ends = [None, SaveError("no space left on device")]
    scene.train(4, save_every=2)
    assert scene.disk.saved == [2, 4, 4]
    assert scene.agent.words == [Finished()]


def test_a_last_state_that_cannot_be_saved_is_no_good_end(scene: Scene) -> None:
    scene.disk.ends = [SaveError("no space left on device")] * 9
    with pytest.raises(SaveError, match="step 3, the last one, is not saved: no space left on device"):
        scene.train(3)
    assert scene.disk.saved == [3, 3]
    assert scene.agent.words == []
    assert scene.board.now == "save", "its step is not to blame"


def test_a_save_that_is_refused_is_no_good_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> SaveHandle:
        raise SaveError("all save slots were busy")

    monkeypatch.setattr(scene.disk, "save", refuse)
    with pytest.raises(SaveError, match="is not saved: all save slots were busy"):
        scene.train(3)
    assert scene.agent.words == []


def test_a_last_save_that_takes_too_long_is_no_good_end(scene: Scene) -> None:
    scene.disk.slow = True
    with pytest.raises(DeadlineError, match="still under way after 570 s"):
        scene.train(3)
    assert scene.agent.words == []
    assert scene.board.now == "save"


def test_a_state_that_was_found_in_memory_is_not_taken_for_saved(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held(NamedTuple):
        step: int
        tree: Mapping[str, Any]

    monkeypatch.setattr("holdfast.vault.restore_newest", lambda *_, **__: Held(3, {}), raising=False)
    monkeypatch.setattr(scene.saver, "_saved", lambda _: [3])
    found = scene.saver.load({"w": np.zeros(3)}, vaults=["vault:1"])
    assert found is not None
    assert not scene.saver.saved(3)
    scene.run._steps = 3
    scene.train(3)
    assert scene.disk.saved == [3]
    done = Remark("nothing is left to do: 3 steps are done, until=3")
    assert scene.agent.words == [done, Finished()]


def test_waiting_for_the_disk_is_a_phase_of_its_own(scene: Scene) -> None:
    scene.train(4, save_every=2)
    begun = scene.board.seen.index("step")
    # At steps 2 and 4 a save; then the wait until it is durable.
    assert scene.board.seen[begun:] == ["step", *["save", "step"] * 3, "start"]
    scene.saver.save(5, {"w": np.zeros(3)}, {})
    scene.board.seen.clear()
    scene.run.fence()  # for a state that may still be being copied
    scene.run.fence()
    assert scene.board.seen == ["save", "start"]
