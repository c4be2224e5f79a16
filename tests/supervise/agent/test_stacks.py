"""The stacks of a worker that hangs: it is not ended before all of them are written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import Deadline
from holdfast.supervise.processes import Process
from holdfast.supervise.stacks import SIGNAL, Dump

# Agents have no JAX; this process may have it, from tests before, and JAX warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

TIMEOUT_S = 60.0
DEEP = "deep" * 50
"""A name so long that the stacks are more than a page."""
HANGING = f"""
import faulthandler, sys, time
faulthandler.register({int(SIGNAL)}, file=int(sys.argv[1]), all_threads=True)

def {DEEP}(calls):
    if calls:
        {DEEP}(calls - 1)
    print("hangs", flush=True)
    time.sleep(600)

{DEEP}(50)
"""


@pytest.mark.process
def test_stacks_that_are_long_in_coming_are_waited_for(tmp_path: Path) -> None:
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, 4096)  # whoever writes more waits until that is read
    command = [sys.executable, "-c", HANGING, str(sink)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(sink,)) as child,
        contextlib.ExitStack() as over,
    ):
        over.callback(child.kill)
        assert child.stdout is not None
        assert child.stdout.readline() == b"hangs\n"
        process, path = Process(child.pid), tmp_path / "stacks"
        over.callback(process.close)
        dump = Dump(process, str(path), "a title", stopped=False, now=0.0)
        written = os.read(source, 1)
        with open(path, "ab") as file:
            file.write(written)
        assert not any(dump.done(now) for now in (0.1, 1.0, 4.9))
        os.set_blocking(source, False)
        deadline = Deadline(TIMEOUT_S)
        while not dump.done(4.9):
            deadline.check("the stacks")
            with contextlib.suppress(BlockingIOError):
                written += os.read(source, 4096)
        with contextlib.suppress(BlockingIOError):
            written += os.read(source, 4096)
        assert written.endswith(b" in <module>\n")
    os.close(source)
    os.close(sink)


# ---- py-spy, which reads the stacks of a process that answers no signals


def put_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """Have a py-spy on PATH that writes down how it is called and then does this; where it writes it."""
    called = folder / "called"
    program = folder / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text("\n".join(("#!/bin/sh", f'echo "$$ $*" >> {called}', *lines, "")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return called


@contextlib.contextmanager
def stopped_process() -> Iterator[Process]:
    """A process that is stopped (SIGSTOP)."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = Process(child.pid)
        try:
            child.send_signal(signal.SIGSTOP)
            deadline = Deadline(TIMEOUT_S)
            while (facts := process.facts()) is None or facts.state != "T":
                deadline.check("the stop")
            yield process
        finally:
            child.kill()
            process.close()


def await_done(dump: Dump, now: float) -> None:
    deadline = Deadline(TIMEOUT_S)
    while not dump.done(now):
        deadline.check("py-spy")


@pytest.mark.process
@pytest.mark.parametrize("code", [0, 1])
def test_what_py_spy_says_of_a_stopped_process_is_written_down(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ("echo 'Permission denied' >&2", f"exit {code}")
    called = put_spy(tmp_path, monkeypatch, "echo 'Thread 1 (idle): MainThread'", *end)
    path = tmp_path / "stacks"
    with stopped_process() as process:
        dump = Dump(process, str(path), "a title", stopped=True, now=100.0)
        await_done(dump, 101.9)  # it is over, not out of time
        dump.close()
        (_, *arguments), *others = [line.split() for line in called.read_text().splitlines()]
        assert (arguments, others) == (["dump", "--nonblocking", "--pid", str(process.pid)], [])
    text = path.read_text()
    assert text.startswith("a title\nName:\tpython")
    assert "State:\tT" in text
    assert text.endswith("\nThread 1 (idle): MainThread\nPermission denied\n")


@pytest.mark.process
def test_a_py_spy_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It says where it is, and never comes back; nor does what it started.
    called = put_spy(tmp_path, monkeypatch, "sleep 600 &", "echo $! >> $0.child", "echo half", "wait")
    path, started = tmp_path / "stacks", tmp_path / "bin" / "py-spy.child"
    with stopped_process() as process:
        dump = Dump(process, str(path), "a title", stopped=True, now=100.0)
        deadline = Deadline(TIMEOUT_S)
        while not path.read_text().endswith("\nhalf\n"):
            deadline.check("py-spy")
        assert not dump.done(101.9)
        assert dump.done(102.0)
        spies = [int(called.read_text().split()[0]), int(started.read_text())]
        fds = [os.pidfd_open(pid) for pid in spies]
        dump.close()
        for fd in fds:
            assert select.select([fd], [], [], TIMEOUT_S)[0]
            os.close(fd)
        assert dump.done(100.0)
        dump.close()  # again, as when its worker is let go of


@pytest.mark.process
def test_a_py_spy_that_cannot_be_started_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = put_spy(tmp_path, monkeypatch)
    program = tmp_path / "bin" / "py-spy"
    program.write_bytes(b"\x7fELF of another machine")
    with stopped_process() as process:
        dump = Dump(process, str(tmp_path / "stacks"), "a title", stopped=True, now=100.0)
        assert dump.done(100.0)
        dump.close()
    assert "State:\tT" in (tmp_path / "stacks").read_text()
    assert not called.exists()
