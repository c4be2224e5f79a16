"""Whoever types a command reads of its options, not of arguments in Python."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pytest

from holdfast.cli.option_names import in_options
from holdfast.cli.program import main
from holdfast.transfer import Endpoint
from tests.cli.saved import holdfast


def command(*words: str) -> click.Command:
    found: click.Command = main
    for word in words:
        assert isinstance(found, click.Group)
        found = found.commands[word]
    return found


@pytest.mark.parametrize(
    ("words", "text", "read"),
    [
        (
            ("transfer", "pull"),
            "not done within deadline_s=5 (1 of 2)",
            "not done within --timeout 5 (1 of 2)",
        ),
        (("transfer", "pull"), "a longer deadline_s, or not", "a longer --timeout, or not"),
        (("transfer", "pull"), "a longer deadline_s.", "a longer --timeout."),
        (("transfer", "serve"), "give token=, the same", "give --token-file, the same"),
        (("transfer", "serve"), "give a token to all", "give a token to all"),
        (("transfer", "serve"), "a longer deadline_s", "a longer deadline_s"),  # it has none
        (("coord", "get"), "give a finite timeout_s >= 0", "give a finite --timeout >= 0"),
        (("coordinator",), "1 <= min_size=5 <= max_size=2", "1 <= --min-size 5 <= --max-size 2"),
        (("hub", "export"), "part= names the branch", "--part names the branch"),
        (("ckpt", "import"), "overwrite=True replaces it", "--overwrite replaces it"),
        (("ckpt", "import"), "overwrite=True (--overwrite) does", "overwrite=True (--overwrite) does"),
        (("ckpt", "import"), "give one: step=1 (--step 1)", "give one: step=1 (--step 1)"),
        (("launch",), "batch.lanes=8 and lanes=0", "batch.lanes=8 and --lanes 0"),
        (("launch",), "a/min_replicas/b min_replicas-x", "a/min_replicas/b min_replicas-x"),
        (("train",), "a setting: name=VALUE", "a setting: name=VALUE"),
    ],
)
def test_arguments_become_options(words: tuple[str, ...], text: str, read: str) -> None:
    assert in_options(text, command(*words)) == read


def test_settings_of_a_coordinator(tmp_path: Path) -> None:
    done = holdfast("coordinator", "--folder", tmp_path, "--min-size", 5, "--max-size", 2)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 1 <= --min-size 5 <= --max-size 2 does not hold\n\nhint: ")


def test_a_transfer_that_takes_too_long() -> None:
    with Endpoint("127.0.0.1:0") as source, source.publish("w", {"w": np.ones(3)}, 1):
        done = holdfast("transfer", "pull", source.address, "w", "--version", 2, "--timeout", "0.2")
    assert done.exit_code == 2
    assert "deadline_s" not in done.stderr
    assert "hint: publish it, or give the run a longer --timeout\n" in done.stderr


def test_a_version_that_is_gone() -> None:
    with Endpoint("127.0.0.1:0") as source, source.publish("w", {"w": np.ones(3)}, 5):
        done = holdfast("transfer", "pull", source.address, "w", "--version", 2, "--timeout", 5)
    assert done.exit_code == 2
    assert "there are: 5" in done.stderr
    assert "=" not in done.stderr


def test_listening_without_a_token(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    done = holdfast("transfer", "serve", tmp_path / "a.npz", "--bind", "0.0.0.0:0")
    assert "hint: give a token (--token-file)" in done.stderr
