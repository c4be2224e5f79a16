"""A real `holdfast launch` that a test can hurt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, final

from holdfast.cli.status import read_status
from holdfast.journal import Event, read
from holdfast.supervise.processes import end_marked, marked
from holdfast.supervise.status import RunStatus, SeatStatus

TIMEOUT_S = 90.0
TRAINER = Path(__file__).with_name("trainer.py")


@final
class LaunchProcess:
    """`holdfast launch` of the numpy trainer, in the folder `runs` below `root`."""

    def __init__(
        self,
        root: Path,
        *options: str,
        until: int = 60,
        lane_s: float = 0.0,
        fault: str = "",
        script: Path = TRAINER,
        to: int | None = None,
        brake: int | None = None,
    ) -> None:
        """Start it. Its output goes to the file `output`, or to the descriptor `to`.

        From step `brake` on it is slow, until `release`.
        """
        self.root = root
        self.folder = root / "runs" / "demo"
        self.output = root / "launch.out"
        command = [sys.executable, "-m", "holdfast.cli", "launch", "--run", "demo", "--log-ranks", "all"]
        command += [*options, str(script), str(until), str(lane_s), *([fault] if fault else [])]
        with open(self.output, "ab") as file:
            self.process = subprocess.Popen(
                command,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=to or file,
                stderr=to or file,
                start_new_session=True,
                env={**os.environ, **({} if brake is None else {"TRAINER_BRAKE": str(brake)})},
            )

    def release(self) -> None:
        """Let a run that was slowed down go on; it has not come to its end meanwhile."""
        assert self.process.poll() is None, f"the launch has ended:\n{self.said()[-3000:]}"
        (self.folder / "go").touch()

    def ended(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end of the launch; its exit code."""
        return self.process.wait(timeout_s)

    def said(self) -> str:
        return self.output.read_text()

    def finals(self) -> set[str]:
        """The digests that workers printed at the end."""
        return set(re.findall(r"final ([0-9a-f]+)", self.said()))

    def status(self, which: Callable[[RunStatus], bool]) -> RunStatus:
        """A status for which something holds. Blocks: until there is one."""
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends:
            found, _ = read_status(self.folder)
            if found is not None and which(found):
                return found
            assert self.process.poll() is None, f"the launch has ended:\n{self.said()[-3000:]}"
            time.sleep(0.02)
        raise AssertionError(f"it never came to that:\n{self.said()[-3000:]}")

    def training(self, replicas: int, step: int) -> RunStatus:
        """Wait until so many replicas train and the run is at `step`."""
        return self.status(lambda one: one.step >= step and len(active(one)) == replicas)

    def pids(self, part: str) -> list[int]:
        """The living processes of a kind: worker, coordinator, vault."""
        found = marked({"HOLDFAST_FOLDER": str(self.folder), "HOLDFAST_PART": part})
        return [pid for pid, _ in found if _alive(pid)]

    def on_node(self, node: int) -> list[int]:
        """All processes of a node but its agent."""
        return [pid for pid, _ in marked({"HOLDFAST_FOLDER": str(self.folder), "HOLDFAST_NODE": str(node)})]

    def living(self) -> list[int]:
        return [pid for pid, _ in marked({"HOLDFAST_FOLDER": str(self.folder)}) if _alive(pid)]

    def agent(self, node: int) -> int:
        """The process of the agent of a node."""
        (pid,) = [pid for pid, _ in marked({"HOLDFAST_AGENT": f"{self.folder}:{node}"}) if _is_child(pid)]
        return pid

    def agents(self) -> list[int]:
        """The processes of the agents: children of the launch."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(path).read_text().split()]

    def events(self) -> list[Event]:
        return [record.event for record in read(self.folder / "journal.jsonl")]  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            for pid in self.agents():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        end_marked({"HOLDFAST_FOLDER": str(self.folder)}, timeout_s=TIMEOUT_S)
        if kind is not None:
            print(self.said()[-6000:])


def active(status: RunStatus) -> list[SeatStatus]:
    """The seats whose workers are members of the run."""
    return [seat for seat in status.seats if seat.slot >= 0 and seat.worker >= 0]


def _is_child(pid: int) -> bool:
    """Whether it is the agent itself: whatever it started has the mark of a part as well."""
    return b"\0HOLDFAST_PART=" not in Path(f"/proc/{pid}/environ").read_bytes()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def alone(root: Path, until: int) -> str:
    """The digest of a run of one process that nobody disturbs."""
    done = subprocess.run(
        [sys.executable, str(TRAINER), str(until)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    found = re.search(r"final ([0-9a-f]+)", done.stdout)
    assert found is not None, done.stdout
    return found[1]
