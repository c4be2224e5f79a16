"""Places that must be on a file system: a URL is refused before it becomes a folder of that name."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.saved import holdfast


@pytest.mark.parametrize(
    "words",
    [
        ("train", "recipes.tiny", "--folder"),
        ("launch", "--folder"),
        ("status", "run", "--folder"),
        ("resize", "run", "2", "--folder"),
        ("coordinator", "--folder"),
        ("data", "build", "corpus.txt", "--out"),
    ],
)
def test_a_url_is_refused_and_nothing_is_made(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = ["train.py"] if words[0] == "launch" else []
    done = holdfast(*words, "s3://bucket/runs", *script)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {words[-1]} s3://bucket/runs is not on a file system")
    assert "hint: " in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_url_is_the_path_that_it_names(tmp_path: Path) -> None:
    done = holdfast("status", "nope", "--folder", f"file://{tmp_path}")
    assert f"there is no run 'nope' in {tmp_path}" in done.stderr


@pytest.mark.parametrize("option", ["--from", "--init-from"])
def test_a_run_begins_from_what_a_file_url_names(option: str, tmp_path: Path) -> None:
    done = holdfast("train", "recipes.tiny", "--folder", str(tmp_path), option, f"file://{tmp_path}/no%20run")
    assert done.exit_code == 2
    assert f"{tmp_path}/no run" in done.stderr
    assert "file:" not in done.stderr


@pytest.mark.process
def test_the_other_process_of_a_transfer_bench_ends_quietly_by_ctrl_c() -> None:
    words = [sys.executable, "-m", "holdfast.cli.selftest", "4096", "1"]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline(), "its address: it waits for the end of its input"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert said == b""
    assert child.returncode == 0
