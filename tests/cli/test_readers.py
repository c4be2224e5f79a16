"""A reader that goes away ends no training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import holdfast.train
from holdfast.cli import readers
from holdfast.cli.train import _alone
from holdfast.recipes import tiny
from holdfast.train.program import Outcome


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nobody reads what is written to stdout and stderr."""
    for name in ("stdout", "stderr"):
        end, ours = os.pipe()
        os.close(end)
        monkeypatch.setattr(sys, name, os.fdopen(ours, "w", buffering=1))


def test_what_nobody_reads_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    unread(monkeypatch)
    before = sys.stdout
    with readers.not_needed():
        for _ in range(3):
            print("a line", flush=True)
        print("to the other", file=sys.stderr)
        sys.stdout.write("the rest of a line")
    assert sys.stdout is before
    for stream in (sys.stdout, sys.stderr):
        stream.close()  # nothing is left in it that cannot be written


def test_what_is_read_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    with readers.not_needed():
        print("a line")
        print("another", file=sys.stderr)
        assert sys.stdout.encoding
    assert capfd.readouterr() == ("a line\n", "another\n")


@pytest.mark.parametrize("stopped", [False, True])
def test_training_goes_on_and_says_so_with_its_exit_code(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def run(*_: object) -> Outcome:
        for step in range(3):
            print(f"step {step}", flush=True)
            done.append(step)
        return Outcome(
            name="tiny", folder=tmp_path, steps=3, samples=24, loss=1.0, state="", ledger="", stopped=stopped
        )

    monkeypatch.setattr(holdfast.train, "run_training", run)
    options: dict[str, Any] = {
        "name": "", "folder": str(tmp_path), "source": "", "weights": "", "step": None,
        "load": "params,opt,rng,data", "finetune": False, "no_strict": False, "accept": "", "plain": True,
    }  # fmt: skip
    unread(monkeypatch)
    if stopped:
        with pytest.raises(click.exceptions.Exit) as end:
            _alone(tiny(), options)
        assert end.value.exit_code == 75
    else:
        _alone(tiny(), options)
    assert done == [0, 1, 2]
    sys.stdout.close()
    sys.stderr.close()
