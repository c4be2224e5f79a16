"""A real agent, and a test that plays the conductor."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, final

from holdfast.supervise.agent_config import AgentConfig, write_config
from holdfast.supervise.messages import Report, WorkerActive
from holdfast.supervise.processes import end_marked, marked
from holdfast.supervise.stream import reports_of
from holdfast.supervise.watch import Deadlines

TIMEOUT_S = 60.0
TOKEN = "a token of more than sixteen bytes"
STUB = Path(__file__).with_name("stub_worker.py")
REPO = Path(__file__).resolve().parents[3]

Kind = TypeVar("Kind")


def config_of(folder: Path, mode: str = "steps", **changes: Any) -> AgentConfig:
    """An agent of one node whose workers run the stub."""
    base: dict[str, Any] = {
        "run": "demo",
        "node": 0,
        "folder": str(folder),
        "root": str(folder / "nodes" / "0"),
        "script": (mode,),
        "program": (sys.executable, str(STUB)),
        "token": TOKEN,
        "cwd": str(REPO),
        "env": {**os.environ, "PYTHONPATH": str(REPO)},
        "journal": str(folder / "journal.jsonl"),
        "nproc": 2,
        "hosts_coordinator": True,
        "coordinator": {"min_size": 1, "last_call_s": 0.05},
        "vault": False,
        "orphan_s": 2.0,
        "lease_s": 1.0,
        "grace_s": 5.0,
        "flush_s": 10.0,
        "notice_s": 5.0,
        "log_slots": None,
        "deadlines": Deadlines(step_s=60.0, first_step_s=60.0, stall_s=60.0),
    }
    return AgentConfig(**{**base, **changes})


@final
class AgentProcess:
    """An agent that a test commands. Whatever it started is ended afterwards."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        ours, theirs = socket.socketpair()
        fd = write_config(config)
        Path(config.folder).mkdir(parents=True, exist_ok=True)
        self.output = Path(config.folder) / "agent.out"
        command = [sys.executable, "-m", "holdfast.supervise.agent"]
        command += ["--config-fd", str(fd), "--stream-fd", str(theirs.fileno())]
        with open(self.output, "ab") as file:
            self.process = subprocess.Popen(
                command,
                pass_fds=(fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        os.close(fd)
        theirs.close()
        self.stream = reports_of(ours)
        self.seen: list[Report] = []

    def expect(
        self, kind: type[Kind], which: Callable[[Kind], bool] = lambda one: True, timeout_s: float = TIMEOUT_S
    ) -> Kind:
        """The next report of a kind; those before it are kept in `seen`."""
        ends = time.monotonic() + timeout_s
        while True:
            report = self.stream.receive(max(0.0, ends - time.monotonic()))
            self.seen.append(report)
            if isinstance(report, kind) and which(report):
                return report

    def tell(self, command: object) -> None:
        assert self.stream.send(command)

    def active(self, worker: int) -> WorkerActive:
        """Wait until a worker is a member."""
        return self.expect(WorkerActive, lambda one: one.worker == worker)

    def ended(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the agent's end; its exit code."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_S)

    def said(self) -> str:
        return self.output.read_text()

    def log(self, name: str | int) -> str:
        return (Path(self.config.folder) / "logs" / f"{self.config.node}-{name}.log").read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        self.stream.close()
        end_marked({"HOLDFAST_FOLDER": self.config.folder}, timeout_s=TIMEOUT_S)
        if kind is not None:
            print(self.said()[-4000:])
            for path in sorted(Path(self.config.folder).glob("logs/*"))[:3]:
                print(f"--- {path.name}\n{path.read_text()[-1500:]}")


def living(folder: str | Path, **marks: str) -> list[int]:
    """The processes of a run that have not ended."""
    return [
        pid for pid, _ in marked({"HOLDFAST_FOLDER": str(folder), **marks}) if state_of(pid) not in ("", "Z")
    ]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def await_end(pid: int, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a process, child or not, has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], timeout_s)[0], f"process {pid} still runs"
    finally:
        os.close(fd)
