"""A hundred recoveries in one run, one after the other, and what its lasting processes hold after each.

    python -m tests.recovery_campaign.endurance --recoveries 100 --json samples.json

Launch, agent, coordinator and vault live through all of it; workers are killed, every tenth is stopped
instead. The next one is hurt when the last is replaced, the run has gone on, and a process is parked again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from holdfast.reduce import Reducer
from holdfast.supervise.processes import end_marked, marked
from holdfast.supervise.roster import ACTIVE, READY
from holdfast.supervise.status import RunStatus, SeatStatus
from holdfast.testing.launched import LaunchedRun
from tests.recovery import trainer
from tests.recovery.stage import LANES, Scene
from tests.recovery_campaign.campaign import Held, held, processes

KINDS: Final = ("launch", "agent", "coordinator", "vault")
_REPLICAS: Final = 2
_STEPS: Final = 4
"""So many steps after each recovery: three of them give the budgets back."""
_RECOVERY_S: Final = 60.0
_END_S: Final = 120.0
_ENDLESS: Final = 10_000_000
_LANE_S: Final = 0.03
_WARM: Final = 0.2
"""Of the samples: caches and buffers have their size by then."""


@dataclass
class Sample:
    """After a recovery: how long it took, how many processes there are, and what the lasting ones hold."""

    recovery_s: float
    step: int
    processes: int
    held: dict[str, Held]


@dataclass
class Endurance:
    """What became of the run."""

    code: int = -1
    wall_s: float = 0.0
    steps: int = 0
    wrong_steps: list[int] = field(default_factory=list)
    """Steps after which some worker had another state than the undisturbed run."""
    left: list[int] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    """Kinds of lasting processes that did not last."""
    samples: list[Sample] = field(default_factory=list)

    def growth(self, kind: str) -> dict[str, float]:
        """Medians of the last fifth of the samples less those of a fifth at the beginning, once warm."""
        size = max(1, int(len(self.samples) * _WARM))
        early, late = self.samples[size : 2 * size], self.samples[-size:]
        return {
            name: statistics.median(one.held[kind][at] for one in late)
            - statistics.median(one.held[kind][at] for one in early)
            for at, name in enumerate(Held._fields)
        }


def endurance(folder: Path, *, recoveries: int, seed: int = 0) -> Endurance:
    """Hurt workers of one run so often, stop it, and say how it was. Blocks: about a second for each."""
    rng = random.Random(seed)
    found = Endurance()
    began = time.monotonic()
    scene = Scene(folder, replicas=_REPLICAS, parked=1, until=_ENDLESS, lane_s=_LANE_S)
    with scene.launched() as run:
        lasting = _lasting(run, _settled(run, 3))
        for number in range(recoveries):
            found.samples.append(_recovered(run, rng, number, lasting))
        found.restarted = [kind for kind, pid in _pids(run).items() if pid != lasting[kind]]
        run.process.send_signal(signal.SIGINT)
        found.code = run.wait(_END_S)
        found.left = [pid for pid, _ in marked({"HOLDFAST_FOLDER": str(run.folder)})]
        end_marked({"HOLDFAST_FOLDER": str(run.folder)}, timeout_s=10.0)
    applied = scene.applied()
    found.steps = 1 + max(one.step for one in applied)
    right = _undisturbed(found.steps)
    found.wrong_steps = sorted({one.step for one in applied if one.digest != right[one.step]})
    found.wall_s = time.monotonic() - began
    return found


def _undisturbed(steps: int) -> list[str]:
    """The state after each step, as the trainer's digests, without any process but this one."""
    state, digests = trainer.init(), []
    sums = Reducer(num_lanes=LANES)
    for step in range(steps):
        sums.begin(step, {0: range(LANES)})
        for lane in range(LANES):
            sums.add(lane, trainer.lane_grads(state, step, lane))
        sums.exchange(_RECOVERY_S, lambda: None)
        state = trainer.apply(state, sums.total())
        digests.append(trainer.digest(state))
    sums.close()
    return digests


def _settled(run: LaunchedRun, step: int) -> RunStatus:
    """The status once all replicas train beyond a step and a process is parked. Fails: AssertionError."""
    ends = time.monotonic() + _RECOVERY_S
    while time.monotonic() < ends and run.process.poll() is None:
        status = run.status()
        if status is not None and status.step >= step and _is_whole(status):
            return status
        run.await_step(0, _RECOVERY_S, after=time.time())
    raise AssertionError(f"it did not settle in {_RECOVERY_S:g} s; {run.tail()}")


def _is_whole(status: RunStatus) -> bool:
    return len(_active(status)) == _REPLICAS and any(one.state == READY for one in status.parked)


def _active(status: RunStatus) -> list[SeatStatus]:
    return [seat for seat in status.seats if seat.state == ACTIVE and seat.pid]


def _recovered(run: LaunchedRun, rng: random.Random, number: int, lasting: dict[str, int]) -> Sample:
    status = run.status()
    assert status is not None
    victim = rng.choice(_active(status))
    os.kill(victim.pid, signal.SIGSTOP if number % 10 == 9 else signal.SIGKILL)
    began = time.monotonic()
    while not any(
        seat.replica == victim.replica and seat.worker != victim.worker for seat in _active(status)
    ):
        assert time.monotonic() - began < _RECOVERY_S, f"recovery {number}: {run.tail()}"
        time.sleep(0.01)
        status = run.status() or status
    took = time.monotonic() - began
    status = _settled(run, status.step + _STEPS)
    return Sample(
        recovery_s=took,
        step=status.step,
        processes=1 + sum(len(pids) for pids in processes(run).values()),
        held={kind: held(pid) for kind, pid in lasting.items()},
    )


def _lasting(run: LaunchedRun, status: RunStatus) -> dict[str, int]:
    pids = _pids(run)
    assert set(pids) == set(KINDS), (pids, status)
    return pids


def _pids(run: LaunchedRun) -> dict[str, int]:
    found = processes(run)
    return {"launch": run.process.pid, **{kind: pids[0] for kind, pids in found.items() if kind in KINDS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recoveries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path, help="where the samples go")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="endurance-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = endurance(folder, recoveries=options.recoveries, seed=options.seed)
    if options.json is not None:
        options.json.write_text(as_json(found), encoding="utf-8")
    took = [one.recovery_s for one in found.samples]
    print(f"code {found.code}, {len(took)} recoveries in {found.wall_s:.0f} s, {found.steps} steps")
    print(f"wrong states {found.wrong_steps}, left {found.left}, restarted {found.restarted}")
    print(f"recovery: median {statistics.median(took):.2f} s, longest {max(took):.2f} s")
    for kind in KINDS:
        first, last = found.samples[0].held[kind], found.samples[-1].held[kind]
        print(f"{kind}: {first} -> {last}, growth {found.growth(kind)}")
    print(f"processes: {sorted({one.processes for one in found.samples})}")


def as_json(found: Endurance) -> str:
    """Everything, for machines."""
    samples = [
        {**asdict(one), "held": {kind: held._asdict() for kind, held in one.held.items()}}
        for one in found.samples
    ]
    growth = {kind: found.growth(kind) for kind in KINDS}
    return json.dumps({**asdict(found), "growth": growth, "samples": samples}, indent=1)


if __name__ == "__main__":
    main()
