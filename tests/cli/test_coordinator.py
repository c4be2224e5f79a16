"""`holdfast coordinator`: a real process that is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

from holdfast.cli.coord import _settings_options
from holdfast.coord.client import CoordClient
from holdfast.coord.settings import Settings
from tests.cli.saved import holdfast

COMMAND = [sys.executable, "-m", "holdfast.cli", "coordinator"]
DEADLINE_S = 30.0


@contextmanager
def coordinator(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the first line that it says."""
    process = subprocess.Popen(
        [*COMMAND, "--folder", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.process
def test_it_serves_until_sigterm_and_makes_its_own_token(tmp_path: Path) -> None:
    folder = tmp_path / "coord"
    with coordinator(folder, "--run", "demo") as (process, said):
        assert said.startswith("serving run demo at tcp://127.0.0.1:"), process.communicate()
        token = folder / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        where = ("--coordinator", f"file:{folder / 'address'}", "--run", "demo")
        assert holdfast("coord", "set", "k", "v", *where, "--token-file", token).exit_code == 0
        refused = holdfast("coord", "status", *where, "--timeout", "5")
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: ")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out, err) == (0, "", "")
    assert not (folder / "address").exists()


@pytest.mark.process
def test_killed_it_comes_back_with_its_keys_and_its_token(tmp_path: Path) -> None:
    folder = tmp_path / "coord"
    where = f"file:{folder / 'address'}"
    with coordinator(folder, "--json") as (process, said):
        assert json.loads(said) == {"ready": json.loads(said)["ready"], "pid": process.pid}
        token = (folder / "token").read_bytes().strip()
        with CoordClient(where, token=token) as client:
            client.set("k", b"v")
            os.kill(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)
            with coordinator(folder) as (_, again):
                assert again.startswith("serving run run at "), again
                assert client.get("k", timeout_s=DEADLINE_S) == b"v"


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bind", "tcp://0.0.0.0:0", "--no-token"), "without a token"),
        (("--bind", "nowhere"), "'nowhere' is no address to listen at"),
        (("--min-size", "5", "--max-size", "4"), "--min-size 5"),
        (("--token-file", "/nonexistent/token"), "cannot read the token in /nonexistent/token"),
    ],
)
def test_mistakes_are_one_line_and_a_hint(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--folder", str(tmp_path / "coord"), *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "\n\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_every_setting_is_an_option() -> None:
    assert {option.name for option in _settings_options()} == {field.name for field in fields(Settings)}
