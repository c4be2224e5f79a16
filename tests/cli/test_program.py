"""The program around the commands: help, errors, exit codes, signals, pipes, terminals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import numpy as np
import pytest

import holdfast as package
from holdfast.checkpoint import steps
from holdfast.cli import main, treefile
from holdfast.errors import FormatError, HoldfastError, TransferError, UsageError
from holdfast.storage import Files, LocalStore
from tests.cli.saved import holdfast, manifest_path, save, tree

COMMAND = [sys.executable, "-c", "from holdfast.cli import main; main()"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("ckpt",),
        *(("ckpt", name) for name in ("ls", "show", "verify", "diff", "prune")),
        ("coordinator",),
        ("coord",),
        *(("coord", name) for name in ("status", "barriers", "get", "set")),
        ("sums",),
        ("data",),
        *(("data", name) for name in ("build", "show")),
        ("plan",),
        ("train",),
        ("hub",),
        *(("hub", name) for name in ("show", "check", "export")),
    ],
)
def test_help_fits_80_columns(words: tuple[str, ...]) -> None:
    done = holdfast(*words, "--help")
    assert (done.exit_code, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "..." not in done.stdout.partition("Commands:")[2]  # no summary is cut off


def test_version() -> None:
    assert holdfast("--version").stdout == f"holdfast {package.__version__}\n"


def test_no_command_shows_help_as_a_mistake() -> None:
    for words in ((), ("ckpt",), ("coord",)):
        done = holdfast(*words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Usage: holdfast" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ckptt",), "no such command 'ckptt'"),
        (("ckpt", "ls"), "missing argument 'PATH'"),
        (("ckpt", "ls", "x", "--jsn"), "no such option"),
        (("ckpt", "show", "x", "-5"), "no such option"),
        (("ckpt", "show", "x", "five"), "invalid value for '[STEP]'"),
        (("ckpt", "prune", "x"), "missing option '--keep'"),
        (("coord", "get"), "missing argument 'KEY'"),
        (("coord", "status", "--timeout", "0"), "invalid value for '--timeout'"),
        (("coordinator",), "missing option '--folder'"),
        (("coordinator", "--folder", "x", "--min-size", "two"), "invalid value for '--min-size'"),
        (("coordinator", "--folder", "x", "--no-token", "--token-file", "y"), "exclude each other"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    done = holdfast(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*\n\nhint: see 'holdfast[ a-z]* --help'\n", done.stderr)
    assert message in done.stderr


def test_a_bug_is_one_line_and_the_traceback_is_for_those_who_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(store: object) -> list[int]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(steps, "committed_steps", broken)
    monkeypatch.setattr("holdfast.cli.folder.committed_steps", broken)
    monkeypatch.delenv("HOLDFAST_DEBUG", raising=False)
    done = holdfast("ckpt", "show", tmp_path)
    assert done.exit_code == 2
    assert done.stderr == (
        "error: unexpected ZeroDivisionError: oops\n\n"
        "hint: this is a bug in holdfast; set HOLDFAST_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    assert "Traceback (most recent call last)" in holdfast("ckpt", "show", tmp_path).stderr


def test_an_operating_system_error_names_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})

    def refused(self: Files, name: str) -> bool:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(Files, "is_file", refused)
    done = holdfast("ckpt", "show", path)
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: {manifest_path(path, 1)}: Permission denied\n\nhint: check the owner and mode of the path\n"
    )


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (UsageError("a mistake"), "see 'holdfast ckpt show --help'"),
        (
            FormatError("odd bytes"),
            "the file is damaged, cut off or of another kind; copy it or make it again",
        ),
        (TransferError("no luck"), "set HOLDFAST_DEBUG=1 to see where it comes from"),
        (TransferError("no luck", hint="try again"), "try again"),
    ],
)
def test_no_error_is_without_a_hint(
    error: HoldfastError, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(store: object) -> list[int]:
        raise error

    monkeypatch.setattr("holdfast.cli.folder.committed_steps", failing)
    done = holdfast("ckpt", "show", tmp_path)
    assert (done.exit_code, done.stderr) == (2, f"error: {error.message}\n\nhint: {hint}\n")


def test_a_file_that_is_cut_off_has_a_hint(tmp_path: Path) -> None:
    whole = tmp_path / "model.safetensors"
    treefile.write(str(whole), {"w": np.ones(64)})
    whole.write_bytes(whole.read_bytes()[:-9])
    for words in (("transfer", "serve", whole), ("hub", "show", whole), ("hub", "show", tmp_path)):
        done = holdfast(*words)
        assert done.exit_code == 2
        assert re.search(r"\n\nhint: .*(cut off|truncated|download|copy)", done.stderr), done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})
    path.chmod(0)
    try:
        done = holdfast("ckpt", "ls", path)
    finally:
        path.chmod(0o755)
    assert done.exit_code == 2
    assert "Permission denied" in done.stderr


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: LocalStore, *names: str) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "names", interrupt)
    done = holdfast("ckpt", "ls", tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")


def test_the_entry_point_is_main() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'holdfast = "holdfast.cli:main"' in text
    assert callable(main)


# ---- real processes


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.process
def test_help_imports_neither_numpy_nor_rich() -> None:
    code = (
        "import sys\nfrom holdfast.cli import main\n"
        "for name in ('ckpt', 'coord'):\n"
        "    try: main([name, '--help'])\n    except SystemExit: pass\n"
        "sys.exit(', '.join({'numpy', 'rich', 'jax', 'msgspec'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_real_process(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {100: tree()})
    done = run("ckpt", "verify", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "step 100: ok (58 B, 3 arrays, 1 part)\n", "")
    done = run("ckpt", "ls", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_an_encoding_without_the_characters_escapes_them(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: {"snow ☃": tree()["params"]["w"]}})
    done = run("ckpt", "show", str(path), PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stderr
    assert "snow \\u2603" in done.stdout


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*COMMAND, "ckpt", "show", str(path)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.process
def test_ctrl_c_ends_it_with_130(tmp_path: Path) -> None:
    """The command is held at a named pipe: opening one for reading waits for a writer.

    Nothing of an interpreter's usual end happens: under a thread that compiles, that is a segmentation fault.
    """
    path = save(tmp_path / "ckpt", {1: tree()})
    pipe = tmp_path / "gate"
    os.mkfifo(pipe)
    code = (
        "import atexit, os\natexit.register(os.abort)\n"
        "from holdfast.storage import LocalStore\n"
        f"LocalStore.names = lambda self, *names: open({str(pipe)!r}).read()\n"
        "from holdfast.cli import main\nmain()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "ckpt", "ls", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # Returns when the process has opened the other end: it is inside the command now.
        gate = os.open(pipe, os.O_WRONLY)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        os.close(gate)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err


def on_a_terminal(*words: str, columns: int = 80, **environment: str) -> str:
    """What the command writes to a terminal of that width."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    wanted = {"TERM": "xterm-256color"} | environment
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen(
        [*COMMAND, *words], stdin=slave, stdout=slave, stderr=slave, env=kept | wanted
    ) as process:
        os.close(slave)
        seen = bytearray()
        with contextlib.suppress(OSError):  # EIO: the process closed its end
            while data := os.read(master, 65_536):
                seen += data
        process.wait(timeout=60)
    os.close(master)
    return seen.decode().replace("\r\n", "\n")


@pytest.mark.process
def test_on_a_terminal_the_listing_fits_and_colour_can_be_turned_off(tmp_path: Path) -> None:
    meta = {"metrics": {"loss": 2.345678}, "samples": 800_000}
    path = save(tmp_path / "ckpt", {100_000: tree(), 200_000: tree()}, {100_000: meta})
    assert "\x1b[" in on_a_terminal("ckpt", "ls", str(path))
    plain = on_a_terminal("ckpt", "ls", str(path), NO_COLOR="1")
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 80
    assert re.search(r"^100000  .*  committed  loss=2.346 samples=800000 *$", plain, re.MULTILINE)


@pytest.mark.process
def test_on_a_terminal_progress_is_a_bar_that_goes_away(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})
    seen = on_a_terminal("ckpt", "verify", str(path))
    assert "verifying step 1" in seen
    assert seen.splitlines()[-1].endswith("step 1: ok (58 B, 3 arrays, 1 part)")
