"""The stacks of a worker that hangs: it is not ended before all of them are written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.clock import Deadline
from holdfast.supervise.processes import Process
from holdfast.supervise.stacks import SIGNAL, Dump

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
