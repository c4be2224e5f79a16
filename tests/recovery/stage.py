"""One cell of the fault matrix: a launch with mishaps, and everything that must hold afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from holdfast.journal import Event, LaneDigests, Record, StepDone, WorkerExited, WorkerHung, read
from holdfast.supervise.agent_config import vault_socket
from holdfast.supervise.processes import end_marked, marked
from holdfast.supervise.watch import Deadlines
from holdfast.testing.launched import LaunchedRun
from tests.recovery.mishaps import ENV, Mishap, encoded, happened, moment
from tests.recovery.short_launch import IMPORT_S, PHASE_S

UNTIL: Final = 30
LANES: Final = 8
BUDGET_S: Final = 40.0
"""How long a cell may take on a machine that does other things as well."""
RECOVERY_S: Final = 5.0
"""How long after a mishap that everybody sees the next step may be; after a hang, once that is found."""
AGENT_S: Final = 15.0
"""So long where an agent is lost, and all its workers with it."""
STEP_S: Final = 2.0
"""How long a step may take where one is to hang."""
TRAINER: Final = Path(__file__).with_name("trainer.py")
LAUNCH: Final = ("-m", "holdfast.cli", "launch")
SHORT: Final = ("-m", "tests.recovery.short_launch")
"""The launch that does not wait long for a worker that hangs, in whatever phase."""
_REPOSITORY: Final = Path(__file__).parents[2]
_KEPT: Final = {"ckpt", "coord", "crash", "cache", "journal.jsonl", "logs", "status.json"}
_RUN: Final = "run"
Digests = dict[int, str]


@dataclass(frozen=True, slots=True)
class Applied:
    """A step that a worker has applied, and its state then."""

    pid: int
    step: int
    digest: str


@dataclass(slots=True)
class Scene:
    """A run that mishaps befall, in a folder of its own."""

    root: Path
    mishaps: tuple[Mishap, ...] = ()
    replicas: int = 2
    workers: int = 1
    parked: int = 0
    options: Sequence[str] = ()
    program: Sequence[str] = ()
    until: int = UNTIL
    lane_s: float = 0.004
    faults: str = ""
    arguments: Sequence[str] = ()
    """More of them, for the trainer."""
    env: Mapping[str, str] = field(default_factory=dict)
    out: Path = field(init=False)
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.out, self.folder = self.root / "out", self.root / _RUN
        self.out.mkdir(exist_ok=True)

    @contextmanager
    def launched(self) -> Iterator[LaunchedRun]:
        """The run while it runs; whatever is left of it is ended."""
        env = {
            "PYTHONPATH": _python_path(),
            ENV: encoded(self.mishaps),
            "HOLDFAST_FAULTS": self.faults,
            **self.env,
        }
        try:
            with LaunchedRun(
                TRAINER,
                *self._arguments(),
                folder=self.root,
                run=_RUN,
                replicas=self.replicas,
                workers_per_replica=self.workers,
                parked=self.parked,
                # That program knows no options, and has short deadlines as it is.
                options=() if self.program == SHORT else ("--step-s", self._step_s(), *self.options),
                program=self.program or LAUNCH,
                env=env,
            ) as run:
                yield run
        finally:
            end_marked({"HOLDFAST_FOLDER": str(self.folder)}, timeout_s=20.0)

    def _step_s(self) -> str:
        """How long a step may take: little where one is to hang, else more than a machine is ever slow."""
        return f"{STEP_S:g}" if any(one.what in ("gil", "spin") for one in self.mishaps) else "30"

    def _arguments(self) -> list[str]:
        lanes = ["--no-lanes"] if self.workers > 1 else []
        told = [str(self.out), "--until", str(self.until), "--lane-s", str(self.lane_s)]
        return [*told, *lanes, *self.arguments]

    def play(self, budget_s: float = BUDGET_S) -> int:
        """Run it to its end; the exit code. Fails: DeadlineError."""
        with self.launched() as run:
            code = run.wait(budget_s)
            self.check_nothing_left()
            return code

    # ---- what is known afterwards

    def applied(self) -> list[Applied]:
        """All steps that any worker applied, those of each worker in order."""
        found = []
        for path in sorted(self.out.glob("steps-*")):
            for line in path.read_text().splitlines():
                step, _, _, digest = line.split()
                found.append(Applied(int(path.name.removeprefix("steps-")), int(step), digest))
        return found

    def records(self) -> list[Record]:
        """The journal of the run; empty before there is one."""
        path = self.folder / "journal.jsonl"
        return list(read(path)) if path.exists() else []

    def events(self) -> list[Event]:
        return [record.event for record in self.records()]  # type: ignore[misc]

    def causes(self) -> list[str]:
        """Why workers ended, but for those that were done or had to go with others."""
        ends = [one for one in self.events() if isinstance(one, WorkerExited)]
        return [one.cause for one in ends if one.cause not in ("done", "killed")]

    def fallen(self) -> list[str]:
        """How those ended that were done and did not end well."""
        ends = [one for one in self.events() if isinstance(one, WorkerExited)]
        return [one.reason for one in ends if one.cause == "done" and one.code]

    def hung(self) -> list[str]:
        return [one.phase for one in self.events() if isinstance(one, WorkerHung)]

    def finals(self) -> list[str]:
        """The digests of those who came to the end."""
        return [path.read_text() for path in self.out.glob("final-*")]

    # ---- what must hold

    def check(self, undisturbed: Digests) -> None:
        """It ended well: the same bits, every step once, everything that was planned happened."""
        assert set(self.finals()) == {undisturbed[self.until - 1]}
        self.check_so_far(undisturbed)
        assert {one.step for one in self.applied()} == set(range(self.until))
        self.check_times()

    def check_times(self) -> None:
        """From the first mishap on nobody waited longer for the next step than the slowest of them allows."""
        if not self.mishaps:
            return
        begin = min(moment(self.out, number) for number in range(len(self.mishaps)))
        steps = [one.t for one in self.records() if isinstance(one.event, StepDone) and one.t > begin]
        longest = max((after - before for before, after in pairwise([begin, *steps])), default=0.0)
        allowed = max(map(self._allowed_s, self.mishaps))
        assert longest <= allowed, f"{longest:.1f} s without a step, {allowed:g} s are allowed"

    def _allowed_s(self, mishap: Mishap) -> float:
        if mishap.who == "agent":
            return AGENT_S
        found_s = 0.0
        if mishap.what == "stop":
            found_s = Deadlines().stopped_s
        elif mishap.what in ("gil", "spin"):
            short = IMPORT_S if mishap.at == "import" else PHASE_S
            found_s = short if self.program == SHORT else STEP_S
        return found_s + RECOVERY_S

    def check_so_far(self, undisturbed: Digests) -> None:
        """Whatever its end, nobody had a wrong state, skipped a step, or applied one twice."""
        for number, mishap in enumerate(self.mishaps):
            assert happened(self.out, number), f"{mishap} never happened"
        before: dict[int, int] = {}
        for one in self.applied():
            assert one.digest == undisturbed[one.step], f"the state after step {one.step} is another"
            if one.pid in before:
                assert one.step == before[one.pid] + 1, f"process {one.pid} applied {one.step} out of turn"
            before[one.pid] = one.step
        check_lanes(self.events())

    def check_nothing_left(self) -> None:
        """No process, no socket, no file that is not to stay."""
        left = [pid for pid, _ in marked({"HOLDFAST_FOLDER": str(self.folder)})]
        assert not left, f"processes {left} are left"
        names = {path.name for path in self.folder.iterdir()}
        assert names <= _KEPT, f"left behind: {names - _KEPT}"
        assert not [path for path in self.folder.rglob("*") if path.is_socket()]
        for node in range(4):
            assert not os.path.exists(vault_socket(str(self.folder / "nodes" / str(node))))


def check_lanes(events: Sequence[Event]) -> int:
    """A lane that was computed more than once gave the same bits each time; how many there were."""
    seen: dict[tuple[int, int], str] = {}
    again = 0
    for one in events:
        if isinstance(one, LaneDigests):
            for lane, digest in zip(one.lanes, one.digests, strict=True):
                again += (one.step, lane) in seen
                assert seen.setdefault((one.step, lane), digest) == digest, f"step {one.step} lane {lane}"
    return again


def _python_path() -> str:
    """So that the trainer finds what lies beside it as the tests do."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(_REPOSITORY)]))


def alone(root: Path, *arguments: str, until: int = UNTIL) -> Digests:
    """The state after each step of a run of one that nobody disturbs."""
    out = root / "out"
    out.mkdir()
    command = [sys.executable, str(TRAINER), str(out), "--until", str(until), *arguments]
    env = {**os.environ, "PYTHONPATH": _python_path()}
    subprocess.run(command, cwd=root, check=True, timeout=60, env=env)
    scene = Scene(root, until=until)
    digests = {one.step: one.digest for one in scene.applied()}
    assert len(digests) == until
    return digests
