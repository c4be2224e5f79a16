"""A run under random faults: who is hurt when comes from a seed, what becomes of it is measured.

    python -m tests.recovery_campaign.campaign --seconds 120 --seed 3 --folder /tmp/campaign

Whatever is stopped is never continued: whoever watches it has to find it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.journal import RunEnded, StepDone
from holdfast.supervise.processes import end_marked, marked
from holdfast.testing.launched import LaunchedRun

TRAINER: Final = Path(__file__).parents[1] / "launch" / "trainer.py"
REPLICAS: Final = 3
MEAN_S: Final = 5.0
_LANE_S: Final = 0.04
_STEPS_PER_S: Final = 8
"""Fewer than an undisturbed run makes: the faults end first, or nearly so."""
_LAST_STEPS: Final = 30
"""So many steps are left alone: then everybody can come to the end."""
_LOOK_S: Final = 1.0
_END_S: Final = 240.0
_WARM_LOOKS: Final = 8
"""Looks at a process before what it holds is compared with what it holds later."""

FAULTS: Final = {
    ("worker", signal.SIGKILL): 5,
    ("worker", signal.SIGSTOP): 3,
    ("parked", signal.SIGKILL): 1,
    ("parked", signal.SIGSTOP): 1,
    ("coordinator", signal.SIGKILL): 2,
    ("coordinator", signal.SIGSTOP): 1,
    ("vault", signal.SIGKILL): 2,
    ("vault", signal.SIGSTOP): 1,
    ("agent", signal.SIGKILL): 1,
    ("agent", signal.SIGSTOP): 1,
}


class Held(NamedTuple):
    """What a process holds of the system."""

    descriptors: int
    threads: int
    megabytes: float


@dataclass
class Outcome:
    """What became of a run."""

    seed: int
    seconds: float
    code: int = -1
    reason: str = ""
    digest: str = ""
    expected: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    wall_s: float = 0.0
    longest_gap_s: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """The longest gaps between two steps, each with the step after it."""
    left: list[str] = field(default_factory=list)
    """Processes and sockets that are there after the end."""
    growth: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """The most that one process of a kind has grown: descriptors, threads, megabytes."""


def campaign(folder: Path, *, seconds: float, seed: int, mean_s: float = MEAN_S) -> Outcome:
    """Hurt a run for `seconds`, let it end, and say how it was."""
    rng = random.Random(seed)
    until = int(seconds * _STEPS_PER_S) + 2 * _LAST_STEPS
    outcome = Outcome(seed, seconds, expected=_undisturbed(folder, until))
    began = time.time()
    with LaunchedRun(
        TRAINER, str(until), str(_LANE_S), folder=folder, run="campaign", replicas=REPLICAS, parked=1
    ) as run:
        try:
            run.await_step(3)
            looks: dict[tuple[str, int], list[Held]] = defaultdict(list)
            count = _hurt(run, rng, until, seconds, mean_s, looks)
            outcome.code = run.wait(_END_S)
            outcome.faults = dict(sorted(count.items()))
            outcome.growth = _growth(looks)
        finally:
            outcome.wall_s = time.time() - began
            _tell(run, outcome)
            outcome.left = _left(run.folder)
            if outcome.code < 0:
                run.close()
            end_marked({"HOLDFAST_FOLDER": str(run.folder)}, timeout_s=10.0)
    return outcome


def _undisturbed(folder: Path, until: int) -> str:
    found = subprocess.run(
        [sys.executable, str(TRAINER), str(until)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_END_S,
        check=True,
    )
    digest: str = re.findall(r"final ([0-9a-f]+)", found.stdout)[0]
    return digest


# ---- faults


def _hurt(
    run: LaunchedRun,
    rng: random.Random,
    until: int,
    seconds: float,
    mean_s: float,
    looks: dict[tuple[str, int], list[Held]],
) -> Counter[str]:
    count: Counter[str] = Counter()
    now = time.monotonic()
    ends, due, look = now + seconds, now + rng.expovariate(1 / mean_s), now
    while (now := time.monotonic()) < ends and run.process.poll() is None:
        status = run.status()
        if status is not None and status.step >= until - _LAST_STEPS:
            break
        if now >= look:
            look = now + _LOOK_S
            _look(run, looks)
        if now >= due:
            due = now + rng.expovariate(1 / mean_s)
            kind, number = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
            victims = sorted(processes(run)[kind])
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims[rng.randrange(len(victims))], number)
                    count[f"{kind} {number.name}"] += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(max(0.0, min(due, look, ends) - time.monotonic()))
    return count


def processes(run: LaunchedRun) -> dict[str, list[int]]:
    """The processes of the run that run, by kind."""
    found: dict[str, list[int]] = defaultdict(list)
    status = run.status()
    pids = run.pids()
    parked = {pids.get(one.worker) for one in status.parked} if status is not None else set()
    for pid, environment in marked({"HOLDFAST_FOLDER": str(run.folder)}):
        part = environment.get("HOLDFAST_PART", "")
        if part and _state(pid) not in "ZXT":
            found["parked" if part == "worker" and pid in parked else part].append(pid)
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
        found["agent"] = [int(pid) for pid in children.split() if _state(int(pid)) not in "ZXT"]
    return found


def _state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


# ---- what processes hold


def _look(run: LaunchedRun, looks: dict[tuple[str, int], list[Held]]) -> None:
    found = processes(run)
    for kind in ("agent", "coordinator", "vault"):
        for pid in found[kind]:
            _look_at(kind, pid, looks)
    _look_at("launch", run.process.pid, looks)


def _look_at(kind: str, pid: int, looks: dict[tuple[str, int], list[Held]]) -> None:
    with contextlib.suppress(OSError, KeyError):
        looks[kind, pid].append(held(pid))


def held(pid: int) -> Held:
    """What a process holds now. Fails: OSError, KeyError if it is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    numbers = {words[0]: words[1] for words in map(str.split, lines) if len(words) > 1}
    return Held(len(os.listdir(f"/proc/{pid}/fd")), int(numbers["Threads:"]), int(numbers["VmRSS:"]) / 1024)


def _growth(looks: dict[tuple[str, int], list[Held]]) -> dict[str, tuple[float, float, float]]:
    """The most that one process of each kind holds more in the end than when it was warm."""
    found: dict[str, tuple[float, float, float]] = {}
    for (kind, _), seen in looks.items():
        if len(seen) < 3 * _WARM_LOOKS:
            continue
        warm, late = seen[_WARM_LOOKS : 2 * _WARM_LOOKS], seen[-_WARM_LOOKS:]
        grown = [min(float(one[at]) for one in late) - max(float(one[at]) for one in warm) for at in range(3)]
        before = found.get(kind, (0.0, 0.0, 0.0))
        found[kind] = (max(before[0], grown[0]), max(before[1], grown[1]), max(before[2], grown[2]))
    return found


# ---- what became of it


def _tell(run: LaunchedRun, outcome: Outcome) -> None:
    text = "".join(path.read_text(errors="replace") for path in sorted((run.folder / "logs").glob("*.log")))
    outcome.digest = " ".join(sorted(set(re.findall(r"^final ([0-9a-f]+)$", text, re.M))))
    done: list[tuple[float, int]] = []
    for record in run.records():
        if isinstance(record.event, StepDone):
            done.append((record.t, record.event.step))
        elif isinstance(record.event, RunEnded):
            outcome.reason = record.event.reason
    done.sort()
    outcome.steps = len({step for _, step in done})
    gaps = [(after[0] - before[0], after[1]) for before, after in itertools.pairwise(done)]
    outcome.gaps = [(round(gap, 2), step) for gap, step in sorted(gaps, reverse=True)[:5]]
    outcome.longest_gap_s = max((gap for gap, _ in gaps), default=0.0)


def _left(folder: Path) -> list[str]:
    return [*_marked_processes(folder), *_named_sockets(folder)]


def _marked_processes(folder: Path) -> Iterator[str]:
    for pid, environment in marked({"HOLDFAST_FOLDER": str(folder)}):
        if _state(pid) not in "ZX":
            yield f"process {pid}: {environment.get('HOLDFAST_PART')}"


def _named_sockets(folder: Path) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines():
        if str(folder) in line:
            yield f"socket {line.split()[-1]}"
    for path in folder.rglob("*"):
        if path.is_socket():
            yield f"socket file {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-s", type=float, default=MEAN_S)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = campaign(folder, seconds=options.seconds, seed=options.seed, mean_s=options.mean_s)
    print(json.dumps(asdict(found), indent=1))


if __name__ == "__main__":
    main()
