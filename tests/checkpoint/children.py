"""Child processes of a test: watched through pipes and pidfds, with deadlines, and never left behind."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

TIMEOUT_S = 60.0
"""Far beyond what anything here takes; only a hang comes near it."""


class TimedOut(AssertionError):
    """Something that had to happen did not."""


def await_end(pid: int, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a process, child or not, has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([fd], [], [], timeout_s)[0]:
            raise TimedOut(f"process {pid} still runs after {timeout_s:g} s")
    finally:
        os.close(fd)


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat: R, S, D, T, Z; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def await_state(pid: int, state: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a process is in a state; the kernel has no event for a stop of another's child."""
    ends = time.monotonic() + timeout_s
    while state_of(pid) != state:
        if time.monotonic() > ends:
            raise TimedOut(f"process {pid} is {state_of(pid)!r}, not {state!r}")
        time.sleep(0.005)


def open_files(pid: int | str = "self") -> list[str]:
    """What the descriptors of a process refer to."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def memfds(pid: int | str = "self") -> list[str]:
    """The arena slots a process holds open or mapped."""
    gc.collect()  # garbage of earlier tests may still map some, and go at any time
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [name for name in [*open_files(pid), *mapped] if "memfd:holdfast" in name]


@final
class Child:
    """A Python process that reports in JSON lines."""

    def __init__(self, command: list[str], env: dict[str, str], errors: Path) -> None:
        # Errors go to a file: a vault that outlives its trainer holds them open, and no read may wait.
        self._errors = errors
        with open(errors, "wb") as file:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self._pending = b""

    def tell(self, text: str = "") -> None:
        """Send a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def line(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any] | None:
        """The next line it reports; None at the end."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        ends = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if not select.select([fd], [], [], max(0.0, ends - time.monotonic()))[0]:
                raise TimedOut(f"no line from {self.pid} in {timeout_s:g} s\n{self.errors()}")
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def until(self, saw: str, timeout_s: float = TIMEOUT_S, **fields: object) -> dict[str, Any]:
        """The first line that reports `saw` with these fields."""
        while (line := self.line(timeout_s)) is not None:
            if line["saw"] == saw and all(line.get(key) == value for key, value in fields.items()):
                return line
        raise TimedOut(f"{self.pid} ended and never saw {saw} {fields}\n{self.errors()}")

    def rest(self, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
        """All further lines, to the end."""
        lines = []
        while (line := self.line(timeout_s)) is not None:
            lines.append(line)
        return lines

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for its end; the exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"{self.pid} still runs after {timeout_s:g} s\n{self.errors()}") from None

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


@final
class Children:
    """The children of one test. All carry its mark, and so does everything that they start."""

    def __init__(self, folder: Path) -> None:
        self.mark = ("HOLDFAST_TEST", uuid.uuid4().hex)
        self._folder = folder
        self._started: list[Child] = []

    def python(self, *command: object, **env: str) -> Child:
        """Start `python COMMAND...` with further environment variables."""
        environment = {**os.environ, **dict([self.mark]), **env}
        root = str(Path(__file__).parents[2])
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not inherited else f"{root}{os.pathsep}{inherited}"
        child = Child(
            [sys.executable, *map(str, command)],
            environment,
            self._folder / f"child-{len(self._started)}.err",
        )
        self._started.append(child)
        return child

    def alive(self) -> list[int]:
        """The processes of this test that run now."""
        wanted = "=".join(self.mark).encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if int(name) == os.getpid() or state_of(int(name)) in ("Z", ""):
                    continue
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def await_all_ended(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until no process of this test runs."""
        ends = time.monotonic() + timeout_s
        while pids := self.alive():  # again: one of them may have started another before it ended
            for pid in pids:
                await_end(pid, max(0.0, ends - time.monotonic()))

    def end_all(self) -> None:
        """Kill whatever still runs."""
        for child in self._started:
            child.close()
        while pids := self.alive():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                await_end(pid)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    started = time.monotonic()
    yield
    spent = time.monotonic() - started
    assert spent < seconds, f"took {spent:.1f} s, more than {seconds:g} s"
