"""Where a worker hangs, written down before it is ended.

A worker that runs answers SIGUSR2 with the stacks of all its threads (faulthandler: also while its
interpreter is locked), appended to a file. A stopped one answers nothing: there the system says where each
thread sleeps, and py-spy, where it is installed, reads the stacks out of its memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Final, final

from holdfast.supervise.processes import Process, is_alive, start, wait_all

SIGNAL: Final = signal.SIGUSR2
_MAX_THREADS: Final = 64
_REAP_S: Final = 1.0
"""Only a reader that is stuck in the system, as its victim is, takes so long to end."""
_STATUS: Final = ("Name", "State", "VmRSS", "Threads", "SigBlk", "SigCgt")


def stacks_path(folder: str, pid: int) -> str:
    """The file that process `pid` of the run in `folder` writes its stacks to."""
    return str(Path(folder) / "crash" / f"{pid}.stacks")


@final
class Dump:
    """Stacks that are being written to `path`. Ask `done` now and then; never blocks. For the main thread.

    `stopped`: the process answers no signals. What reads its memory has 2 s, and is ended by `close`.
    """

    def __init__(self, process: Process, path: str, title: str, *, stopped: bool, now: float) -> None:
        self.path = path
        self._ends = now + (2.0 if stopped else 5.0)
        self._spy: Process | None = None
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "a", encoding="utf-8", errors="replace") as file:
                file.write(f"{title}\n{proc_facts(process.pid)}\n")
        self._pid = process.pid
        self._first = _size(path)
        self._deaf = _blocking(self._pid)
        if stopped:
            self._spy = _spy(process.pid, path)
        else:
            process.signal(SIGNAL)
        self._stopped = stopped

    def done(self, now: float) -> bool:
        """Whether all is written that will be."""
        if self._stopped:
            over = self._spy is None or not is_alive(self._spy.fileno())
        else:
            # It came, and the thread that wrote it has left the signal's handler.
            over = self._first < _size(self.path) and _blocking(self._pid) <= self._deaf
        return over or now >= self._ends

    def close(self) -> None:
        """End whatever still reads."""
        spy, self._spy = self._spy, None
        if spy is not None:
            spy.kill_group()  # before it is reaped: until then its number is nobody else's
            wait_all([spy], _REAP_S)
            spy.close()


def proc_facts(pid: int) -> str:
    """What the system says about the process and where its threads sleep."""
    root = Path("/proc") / str(pid)
    lines = [line for line in _read(root / "status").splitlines() if line.partition(":")[0] in _STATUS]
    with contextlib.suppress(OSError):
        for task in sorted((root / "task").iterdir(), key=lambda path: int(path.name))[:_MAX_THREADS]:
            state = _read(task / "stat").rpartition(")")[2].split()[:1]
            where = _read(task / "wchan").strip() or "?"
            lines.append(f"thread {task.name} {_read(task / 'comm').strip()}: {''.join(state)} in {where}")
            lines += [f"    {line}" for line in _read(task / "stack").splitlines()[:12]]
    return "\n".join(lines)


def _blocking(pid: int) -> set[str]:
    """The threads that block the signal: those that never take it, and the one that is in its handler."""
    found = set()
    with contextlib.suppress(OSError):
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            blocked = _read(task / "status").partition("SigBlk:")[2].split()[:1]
            if blocked and int(blocked[0], 16) >> (SIGNAL - 1) & 1:
                found.add(task.name)
    return found


def _spy(pid: int, path: str) -> Process | None:
    program = shutil.which("py-spy")
    if program is None:
        return None
    # It must not stop what is stopped: it would fail.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError), open(path, "ab") as file:
        return start(command, env=os.environ, log=file.fileno(), bound=True)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
