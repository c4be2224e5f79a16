"""Processes of an agent: started, watched, ended, and found again by its successor.

A *bound* child dies with the thread that started it and leads a group of its own, so that whatever it starts
can be ended with it. A *free* child has its own session and outlives its parent, whose successor finds it by
the marks in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

from holdfast.supervise.watch import Facts

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CAP_SYS_ADMIN: Final = 21
_CAP_SYS_NICE: Final = 23
_NOT_STARTED: Final = 127
MAX_ENVIRON: Final = 1 << 20


class Exit(NamedTuple):
    """How a process ended: an exit code, or minus a signal. None: it was no child of ours, nobody knows."""

    code: int | None

    def __str__(self) -> str:
        if self.code is None:
            return "ended"
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


@final
class Process:
    """A process that runs or has run. `fileno` becomes readable when it ends."""

    def __init__(self, pid: int, *, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._child = child
        self._fd = os.pidfd_open(pid)
        self._stat: int | None = None
        with contextlib.suppress(OSError):
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def facts(self) -> Facts | None:
        """State and CPU time; None once it is gone."""
        if self._stat is None:
            return None
        try:
            text = os.pread(self._stat, 1024, 0).decode(errors="replace")
        except OSError:
            return None
        # The name in parentheses may hold anything, also spaces and parentheses.
        fields = text.rpartition(")")[2].split()
        return Facts(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS) if len(fields) > 12 else None

    def ended(self) -> Exit | None:
        """How it ended, if it has. A child of ours is reaped by it. Never blocks."""
        if self._child is not None:
            code = self._child.poll()
            return None if code is None else Exit(code)
        return None if is_alive(self._fd) else Exit(None)

    def signal(self, number: int) -> None:
        """Send a signal to the process; one that is gone gets none."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._fd, number)

    def kill_group(self) -> None:
        """End the process and all of the group that it leads, at once."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget the process; if it still runs, so it does."""
        os.close(self._fd)
        if self._stat is not None:
            os.close(self._stat)
            self._stat = None


def is_alive(pidfd: int) -> bool:
    """Whether the process has not ended. One that nobody has reaped has."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return not poller.poll(0)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: int,
    stdin: bytes | None = None,
    fds: Sequence[int] = (),
    bound: bool,
    nice: int = 0,
    cwd: str | None = None,
) -> Process:
    """Start a process whose output goes to the descriptor `log`. For the main thread, if `bound`.

    `stdin` is what it reads there, a few KB at most. Fails: OSError.
    """
    source, sink = os.pipe() if stdin is not None else (None, None)
    if sink is not None and stdin is not None:
        os.write(sink, stdin)
        os.close(sink)
    try:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL if source is None else source,
            stdout=log,
            stderr=log,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=_before_exec(os.getpid(), bound=bound, nice=nice),
            cwd=cwd,
        )
    finally:
        if source is not None:
            os.close(source)
    return Process(child.pid, child=child)


def _before_exec(parent: int, *, bound: bool, nice: int) -> Callable[[], None] | None:
    """What the child does between fork and exec: system calls only, for other threads may have held locks."""
    if not bound and not nice:
        return None
    prctl = _LIBC.prctl

    def prepare() -> None:
        if bound:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            # If the parent died before that, nobody would ever end this process.
            if os.getppid() != parent:
                os._exit(_NOT_STARTED)
        if nice:
            os.nice(nice)

    return prepare


def may_renice() -> bool:
    """Whether this process may raise the priority of another one back to its own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return _may(_CAP_SYS_NICE) or soft == resource.RLIM_INFINITY or soft >= 20


def _may(capability: int) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> capability & 1)
    return False


def renice_group(pid: int) -> None:
    """Give the group that `pid` leads the priority of this process, where that is permitted."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, os.getpriority(os.PRIO_PROCESS, 0))


def renice_session(pid: int, nice: int) -> None:
    """Give the session that `pid` leads a niceness among all sessions, where Linux shares by session.

    Among them the niceness of a process means nothing: each session gets the same (sched(7), "The autogroup
    feature"). Without CAP_SYS_ADMIN nothing is done: Linux then takes ten changes a second of all that are
    made on the machine, and one that could not be taken back would be worse than none.
    """
    if _may(_CAP_SYS_ADMIN):
        with contextlib.suppress(OSError):  # no such file: it does not share by session
            fd = os.open(f"/proc/{pid}/autogroup", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"%d" % nice)
            finally:
                os.close(fd)


# ---- processes that others started


def marked(marks: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """The processes, and their environments, that were started with all these variables; not this one."""
    wanted = {f"{name}={value}" for name, value in marks.items()}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                text = file.read(MAX_ENVIRON).decode(errors="replace")
        except OSError:
            continue
        lines = text.split("\0")
        if wanted <= set(lines):
            yield int(entry), dict(line.partition("=")[::2] for line in lines if "=" in line)


def adopted(marks: Mapping[str, str]) -> Process | None:
    """A living process with these marks, if there is one. Never fails."""
    for pid, _ in marked(marks):
        with contextlib.suppress(OSError):
            process = Process(pid)
            # The number may have gone to another process between the two looks.
            if is_alive(process.fileno()) and any(pid == again for again, _ in marked(marks)):
                return process
            process.close()
    return None


def end_marked(marks: Mapping[str, str], *, timeout_s: float = 5.0) -> int:
    """Kill all processes with these marks, and those they start meanwhile; gives how many there were.

    Blocks: until they are gone, `timeout_s` at most.
    """
    ends = time.monotonic() + timeout_s
    killed: set[int] = set()
    while True:
        left = [process for pid, _ in marked(marks) if (process := _opened(pid)) is not None]
        if not left:
            return len(killed)
        for process in left:
            killed.add(process.pid)
            process.signal(signal.SIGKILL)
        gone = wait_all(left, max(0.0, ends - time.monotonic()))
        for process in left:
            process.close()
        if not gone:
            return len(killed)


def _opened(pid: int) -> Process | None:
    try:
        process = Process(pid)
    except OSError:
        return None
    if is_alive(process.fileno()):
        return process
    process.close()
    return None


def wait_all(processes: Iterable[Process], timeout_s: float) -> bool:
    """Whether all have ended. Blocks: until they have, `timeout_s` at most."""
    ends = time.monotonic() + timeout_s
    for process in processes:
        poller = select.poll()
        poller.register(process.fileno(), select.POLLIN)
        if not poller.poll(max(0.0, ends - time.monotonic()) * 1000):
            return False
        process.ended()
    return True


# ---- memory


def oom_kills() -> int | None:
    """How often the kernel killed for want of memory in this control group; None where it does not say."""
    for path, key in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition(" ")
                if name == key:
                    return int(value)
    return None


def _oom_counters() -> Iterator[tuple[Path, str]]:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            inside = place.lstrip("/")
            if not controllers:
                yield root / inside / "memory.events", "oom_kill"
                yield root / "memory.events", "oom_kill"
            elif "memory" in controllers.split(","):
                yield root / "memory" / inside / "memory.oom_control", "oom_kill"
                yield root / "memory" / "memory.oom_control", "oom_kill"
