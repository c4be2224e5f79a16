"""Which checkpoints of a run stay, and that it goes on from those."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import Checkpointer, best, every, latest
from holdfast.journal import RunRestored, StepPruned, read
from holdfast.train.loop import Loop
from holdfast.train.metrics import read_metrics
from holdfast.train.program import Outcome
from tests.train.recipes import recipe
from tests.train.runs import last_state, train
from tests.train.tiny import tiny

pytestmark = pytest.mark.process
STEPS = 8


def steps(folder: Path) -> list[int]:
    """The steps in a run's folder, by the names of what lies there."""
    there = sorted(path.name for path in (folder / "ckpt").iterdir() if path.name != ".holdfast")
    found = [int(name.removeprefix("step-")) for name in there]
    with Checkpointer(folder / "ckpt", journal=False) as kept:
        assert kept.steps() == found, "something else than whole steps is there"
        assert [kept.verify(step) for step in found] == [[]] * len(found)
    return found


def restored(folder: Path) -> list[int]:
    """The step that each start of a run began with."""
    events = [one.event for one in read(folder / "journal.jsonl")]
    return [one.step for one in events if isinstance(one, RunRestored)]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(one["step"], one["loss"]) for one in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nobody interrupts and that keeps all."""
    outcome = train(tiny("checkpoint.every=1", "checkpoint.keep=0"), tmp_path_factory.mktemp("whole"))
    assert steps(outcome.folder) == list(range(1, STEPS + 1))
    return outcome


def assert_same(again: Outcome, whole: Outcome) -> None:
    assert (again.state, again.ledger, again.samples) == (whole.state, whole.ledger, whole.samples)
    assert last_state(again.folder, STEPS) == last_state(whole.folder, STEPS)
    assert losses(again.folder) == losses(whole.folder)


def stopped(folder: Path, at: int, *settings: str) -> Outcome:
    """A run that is told to stop after so many steps."""
    step = Loop._step

    def stopping(self: Loop, one: Any, state: Any) -> Any:
        if one.index == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, one, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", stopping)
        outcome = train(tiny(*settings), folder, name="cut")
    assert (outcome.stopped, outcome.steps) == (True, at)
    return outcome


def test_the_latest_stay_and_the_run_goes_on_from_them(tmp_path: Path, whole: Outcome) -> None:
    settings = ("checkpoint.every=1", "checkpoint.keep=2")
    folder = stopped(tmp_path, 5, *settings).folder
    assert steps(folder) == [4, 5]
    again = train(tiny(*settings), tmp_path, name="cut")
    assert restored(folder) == [0, 5]
    assert steps(folder) == [7, 8]
    assert_same(again, whole)
    pruned = [one.event.step for one in read(folder / "journal.jsonl") if isinstance(one.event, StepPruned)]
    assert pruned == [1, 2, 3, 4, 5, 6]


def test_the_last_but_one_serves_where_the_last_is_damaged(tmp_path: Path, whole: Outcome) -> None:
    settings = ("checkpoint.every=1", "checkpoint.keep=2")
    folder = stopped(tmp_path, 5, *settings).folder
    (data,) = (folder / "ckpt" / "step-00000005").glob("*.safetensors")
    with open(data, "r+b") as file:
        file.truncate(data.stat().st_size // 2)
    again = train(tiny(*settings), tmp_path, name="cut")
    assert restored(folder) == [0, 4]
    assert steps(folder) == [7, 8]  # the damaged one was saved anew, and has had its time
    assert_same(again, whole)


def test_saves_further_apart_than_steps(tmp_path: Path, whole: Outcome) -> None:
    settings = ("checkpoint.every=3", "checkpoint.keep=2")
    folder = stopped(tmp_path, 7, *settings).folder
    assert steps(folder) == [6, 7]  # the stop saves too, and counts
    assert_same(train(tiny(*settings), tmp_path, name="cut"), whole)
    assert steps(folder) == [7, 8]


def test_another_number_from_the_next_start_on(tmp_path: Path, whole: Outcome) -> None:
    """It changes no bit, so nobody has to accept it."""
    folder = stopped(tmp_path, 4, "checkpoint.every=1", "checkpoint.keep=0").folder
    assert steps(folder) == [1, 2, 3, 4]
    assert_same(train(tiny("checkpoint.every=1", "checkpoint.keep=3"), tmp_path, name="cut"), whole)
    assert steps(folder) == [6, 7, 8]


def test_a_pinned_step_stays_until_it_is_not(tmp_path: Path, whole: Outcome) -> None:
    settings = ("checkpoint.every=1", "checkpoint.keep=1")
    folder = stopped(tmp_path, 3, *settings).folder
    assert steps(folder) == [3]
    with Checkpointer(folder / "ckpt", journal=False) as kept:
        kept.pin(3)
    assert_same(train(tiny(*settings), tmp_path, name="cut"), whole)
    assert steps(folder) == [3, 8]
    # It is as good as new: a run can begin from it.
    fork = train(tiny(*settings), tmp_path, name="fork", source=str(folder), step=3)
    assert (fork.state, fork.ledger) == (whole.state, whole.ledger)
    assert steps(fork.folder) == [8]
    with Checkpointer(folder / "ckpt", journal=False, keep=1) as kept:
        kept.unpin(3)
        assert kept.prune() == [3]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_before_another_batch_size_stays_as_any_other(
    pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide has it: `keep` counts it, and a pin keeps it, also while the run is live."""
    config = recipe("small", "checkpoint.every=1", "checkpoint.keep=2")
    folder, change, total = tmp_path / config.name, config.batches.changes()[0].step, config.total_steps
    assert change + 2 < total
    step = Loop._step

    def pinning(self: Loop, one: Any, state: Any) -> Any:
        if pinned and one.index == change:
            self._run._settle(60.0)
            with Checkpointer(folder / "ckpt", journal=False) as kept:
                kept.pin(change)
        return step(self, one, state)

    monkeypatch.setattr(Loop, "_step", pinning)
    train(config, tmp_path)
    assert steps(folder) == [*([change] if pinned else []), total - 1, total]


def test_the_rules_of_prune_find_what_they_go_by(tmp_path: Path) -> None:
    """A run itself knows only the latest. What it notes in each step serves the other rules."""
    config = tiny("checkpoint.every=1", "checkpoint.keep=0", "evaluation.every=2", "evaluation.samples=8")
    folder = train(config, tmp_path, name="measured").folder
    records = read_metrics(folder / "metrics.jsonl")
    measured = {one["step"] + 1: one["eval_loss"] for one in records if "eval_loss" in one}
    assert list(measured) == [2, 4, 6, 8]
    ranked = sorted(measured, key=lambda step: measured[step])
    assert ranked[-1] != STEPS, "it has learned nothing"
    for policy, stay in (
        (latest(1) | every(3), {3, 6, 8}),
        (latest(1) | every(40, unit="samples"), {5, 8}),
        (latest(1) | best(2, "eval_loss"), {8, *ranked[:2]}),
        (latest(1) | best(1, "eval_loss", highest=True), {8, ranked[-1]}),
    ):
        other = tmp_path / f"pruned-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, other)
        with Checkpointer(other / "ckpt", journal=False, keep=policy) as kept:
            kept.prune()
        assert steps(other) == sorted(stay), policy
