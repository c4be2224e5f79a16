"""Ctrl-C before the program has begun, and when it is over."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.saved import save, tree

pytestmark = pytest.mark.process

ENTERED = "entered\n"
SECONDS = 60


def started(code: str, *words: str) -> subprocess.Popen[str]:
    """A process with the code, once it says that it was entered."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == ENTERED
    return child


def ended(child: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = child.communicate(timeout=SECONDS)
    return child.returncode, said


def held(importing: str) -> str:
    """Code whose program waits, in the middle of the import of a module, to be interrupted."""
    return (
        "import os, sys, threading\n"
        "from holdfast.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {importing!r}:\n"
        f"            os.write(1, {ENTERED.encode()!r})\n"
        f"            threading.Event().wait({SECONDS})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()"
    )


@pytest.mark.parametrize("importing", ["holdfast.cli.program", "click", "holdfast.cli.train", "numpy"])
def test_while_its_parts_are_imported(importing: str, tmp_path: Path) -> None:
    child = started(held(importing), "ckpt", "ls", str(tmp_path))
    child.send_signal(signal.SIGINT)
    assert ended(child) == (130, "\ninterrupted\n")


def test_when_the_answer_is_given() -> None:
    code = (
        "import atexit, os, threading\n"
        "from holdfast.cli import main\n"
        f"atexit.register(lambda: (os.write(1, {ENTERED.encode()!r}), threading.Event().wait({SECONDS})))\n"
        "main(['nonsense'])"
    )
    child = started(code)
    child.send_signal(signal.SIGINT)
    code_, said = ended(child)
    assert code_ == 2
    assert said == "error: no such command 'nonsense'\n\nhint: see 'holdfast --help'\n"


def test_who_ignores_it_goes_on_ignoring_it() -> None:
    code = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"os.write(1, {ENTERED.encode()!r})\n"
        "from holdfast.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: os._exit(7 if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else 8)"
    )
    assert ended(started(code)) == (7, "")


def test_at_any_moment(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})
    code = held("holdfast.cli.program").replace(f".wait({SECONDS})", ".is_set()")
    codes = set()
    for number in range(16):
        child = started(code, "ckpt", "ls", str(path))
        with suppress(subprocess.TimeoutExpired):
            child.wait(number * 0.025)
        child.send_signal(signal.SIGINT)
        end, said = ended(child)
        # An interpreter at its very end has no handlers any more, and is killed: as quietly.
        quiet = {(130, "\ninterrupted\n"), (130, ""), (0, ""), (-signal.SIGINT, "")}
        assert (end, said) in quiet, f"{number}: {said}"
        codes.add(end)
    assert 130 in codes
