"""A run that was interrupted ends in the bits of one that was not, whatever the step it goes on from."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import DataError
from holdfast.train import program
from holdfast.train.data import Stream
from holdfast.train.data.packing import Batch
from holdfast.train.metrics import MetricsFile, read_metrics
from holdfast.train.program import Outcome, state_digest
from tests.train.recipes import SETTINGS, recipe
from tests.train.runs import last_state, train
from tests.train.tiny import tiny

pytestmark = pytest.mark.process
_KEPT = ("config.json", "coord/token")


def bits(outcome: Outcome) -> tuple[str, str, int]:
    return outcome.state, outcome.ledger, outcome.samples


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(one["step"], one["loss"]) for one in read_metrics(folder / "metrics.jsonl")]


def resumed(whole: Path, folder: Path, step: int) -> None:
    """A run's folder as it is with nothing after `step` in it."""
    (folder / "coord").mkdir(parents=True)
    for name in _KEPT:
        shutil.copy(whole / name, folder / name)
    for path in (whole / "ckpt").glob("step-*"):
        if int(path.name.removeprefix("step-")) <= step:
            shutil.copytree(path, folder / "ckpt" / path.name)
    for line in (whole / "metrics.jsonl").read_text().splitlines(keepends=True):
        with (folder / "metrics.jsonl").open("a") as file:  # also of steps that are to be done again
            file.write(line)


@pytest.mark.parametrize("name", ["tiny", "one_world"])
def test_from_any_step_on(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    check(tmp_path, name, steps=(1, 4))


def test_from_a_step_on_in_one_world_of_four_devices(tmp_path: Path) -> None:
    check(tmp_path, "one_world", (3,), "mesh.data=2", "mesh.fsdp=2")


@pytest.mark.full
@pytest.mark.parametrize("name", list(SETTINGS))
def test_from_every_step_on(tmp_path: Path, name: str) -> None:
    config = recipe(name)
    check(tmp_path, name, steps=tuple(range(config.total_steps)))


def check(tmp_path: Path, name: str, steps: tuple[int, ...], *more: str) -> None:
    config = recipe(name, "checkpoint.every=1", "checkpoint.keep=0", *more)
    whole = train(config, tmp_path, name="whole")
    expected = losses(tmp_path / "whole")
    end = last_state(whole.folder, config.total_steps)
    assert [step for step, _ in expected] == list(range(config.total_steps))
    assert expected[-1][1] < expected[0][1]
    for step in steps:
        resumed(tmp_path / "whole", tmp_path / f"from-{step}", step)
        again = train(config, tmp_path, name=f"from-{step}")
        assert bits(again) == bits(whole), step
        assert last_state(again.folder, config.total_steps) == end, step
        assert losses(tmp_path / f"from-{step}") == expected, step


def test_a_run_that_is_told_to_stop_saves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tiny(), tmp_path, name="whole")
    add = MetricsFile.add

    def stopping(self: MetricsFile, values: Mapping[str, Any], *, leads: bool) -> None:
        add(self, values, leads=leads)
        if values["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    saved: list[int | None] = []

    def noted(state: Any) -> str:
        with Checkpointer(tmp_path / "cut" / "ckpt", journal=False) as kept:
            saved.append(kept.latest())
        return state_digest(state)

    monkeypatch.setattr(MetricsFile, "add", stopping)
    monkeypatch.setattr(program, "state_digest", noted)
    first = train(tiny("checkpoint.every=0"), tmp_path, name="cut")
    assert first.stopped
    assert first.steps == 4  # reported a step behind
    assert saved == [4]  # before anything else is done: it may be given little time
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.undo()
    second = train(tiny("checkpoint.every=0"), tmp_path, name="cut")
    assert bits(second) == bits(whole)
    assert last_state(second.folder, 8) == last_state(whole.folder, 8)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_crash_loses_the_steps_since_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tiny(), tmp_path, name="whole")
    read = Stream.batch

    def failing(self: Stream, start: int, stop: int) -> Batch:
        if start >= 40:
            raise DataError("the disk is gone", file="tiny.bin", offset=0)
        return read(self, start, stop)

    monkeypatch.setattr(Stream, "batch", failing)
    with pytest.raises(DataError, match="the disk is gone"):
        train(tiny(), tmp_path, name="cut")
    monkeypatch.undo()
    cut = Checkpointer(tmp_path / "cut" / "ckpt", journal=False)
    cut.load(wait_s=60.0)  # its vault may still be writing
    assert cut.latest() == 3
    meta = cut.metadata(3)
    assert (meta["samples"], meta["tokens"]) == (24, 384)
    assert meta["config"] == tiny().digest
    assert {"schedule", "ledger", "data"} <= set(meta)
    cut.close()
    again = train(tiny(), tmp_path, name="cut")
    assert bits(again) == bits(whole)
    assert last_state(again.folder, 8) == last_state(whole.folder, 8)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_batch_that_grows_is_saved_before_it_does(tmp_path: Path) -> None:
    config = recipe("small", "checkpoint.every=0", "checkpoint.keep=0")
    train(config, tmp_path)
    change = config.batches.changes()[0].step
    with Checkpointer(tmp_path / config.name / "ckpt", journal=False) as kept:
        assert kept.steps() == [change, config.total_steps]
