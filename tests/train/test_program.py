"""What a run leaves behind: its config, its metrics, its result, a profile; and what it shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError, DataError
from holdfast.train.config import TrainConfig
from holdfast.train.metrics import read_metrics
from holdfast.train.program import run_training
from holdfast.train.state import RunOptions
from tests.train.recipes import recipe
from tests.train.runs import quick_programs, train
from tests.train.tiny import tiny

pytestmark = pytest.mark.process


def test_everything_of_a_run_is_in_its_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = recipe("tiny", "log.profile_start=2", "log.profile_steps=2", "log.every=2")
    outcome = train(config, tmp_path)
    folder = tmp_path / config.name
    assert outcome.folder == folder
    assert TrainConfig.from_json((folder / "config.json").read_bytes()) == config
    result = json.loads((folder / "result.json").read_text())
    assert result["state"] == outcome.state
    assert result["config"] == config.digest
    records = read_metrics(folder / "metrics.jsonl")
    assert [one["samples"] for one in records] == [8, 16, 24, 32, 40, 48]
    assert [one["rate"] for one in records] == pytest.approx(
        [config.learning_rate(at) for at in range(0, 48, 8)]
    )
    assert all(one["tokens_per_s"] > 0 and one["tflops"] > 0 and one["grad_norm"] > 0 for one in records)
    assert [one["step"] for one in records if "eval_loss" in one] == [3, 5]
    assert list((folder / "profile").rglob("*.xplane.pb"))
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[0] for line in lines] == ["step 1/6", "step 2/6", "step 4/6", "step 6/6"]


def test_a_run_says_where_it_begins_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def said(config: TrainConfig, **options: Any) -> str:
        train(config, tmp_path, **options)
        first, *lines = capfd.readouterr().out.splitlines()
        assert not [line for line in lines if not line.startswith("step ")]
        return first

    cut, whole = tiny("samples=32", "rate.decay=64"), tiny("rate.decay=64")
    folder = tmp_path / "tiny"
    assert said(cut) == "begins at step 0 (0 samples) with a new state"
    assert said(whole) == f"goes on from step 4 (32 samples) in {folder / 'ckpt'}"
    assert said(whole) == f"is at its end, step 8 (64 samples) in {folder / 'ckpt'}"
    parts = "params, opt, rng, data"
    forked = said(whole, name="fork", source=str(folder), step=6)
    assert forked == f"begins at step 6 (48 samples) with {parts} of step 6 in {folder}"
    tuned = said(cut, name="tuned", source=str(folder), finetune=True)
    assert tuned == f"begins at step 0 (0 samples) with params of step 8 in {folder}"
    # With steps of its own it takes over nothing.
    assert said(cut, name="tuned", source=str(folder), finetune=True) == (
        f"is at its end, step 4 (32 samples) in {tmp_path / 'tuned' / 'ckpt'}"
    )


def test_a_bar_on_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with quick_programs():
        run_training(recipe("tiny"), RunOptions(folder=str(tmp_path), progress=True))
    shown = capfd.readouterr()
    assert "begins at step 0 (0 samples)" in shown.out
    assert "step 6/6" in shown.err
    assert "step 6/6" not in shown.out


def test_mistakes_come_before_anything_starts(tmp_path: Path) -> None:
    config = tiny("batch.micro=3", "optimizer.b1=2")
    with pytest.raises(ConfigError) as caught:
        train(config, tmp_path)
    assert len(caught.value.problems) == 2
    # The model has no embedding for some token ids.
    with pytest.raises(ConfigError, match=r"model.vocab_size is 200, and the train data has (\d+) token ids"):
        train(tiny("model.vocab_size=200"), tmp_path)
    # There is nothing to evaluate with.
    with pytest.raises(DataError, match="valid"):
        train(tiny("evaluation.every=2", "data.split=1,0,0"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_finished_run_again_changes_no_result(tmp_path: Path) -> None:
    config = recipe("tiny")
    first = train(config, tmp_path)
    path = first.folder / "result.json"
    told, file = path.read_bytes(), path.stat().st_ino
    again = train(config, tmp_path)
    assert again == first
    assert first.loss is not None
    assert path.read_bytes() == told
    assert path.stat().st_ino != file  # written aside: there is no moment without a whole one
    path.write_text("{")
    assert train(config, tmp_path).loss is None


@pytest.mark.full
def test_the_recipe_for_a_laptop_learns_within_two_minutes(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # as a user's
    command = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "train",
        "recipes.tiny",
        "--plain",
        "--folder",
        str(tmp_path),
    ]
    subprocess.run(command, env=env, capture_output=True, timeout=115, check=True)
    losses = [one["loss"] for one in read_metrics(tmp_path / "tiny" / "metrics.jsonl")]
    assert losses[0] > 5.5
    assert losses[-1] < 2.5
