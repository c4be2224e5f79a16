"""Holdfast under measurement: runs that lose workers, and when the next step was done."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.recovery import LANES, SAVE_EVERY
from holdfast.journal import LaneDigests, PartStarted, Record, RunRestored, StepDone
from holdfast.testing.launched import LaunchedRun

TRAINER = Path(__file__).with_name("trainer.py")
GROUP_TRAINER = Path(__file__).with_name("group_trainer.py")
SNAPSHOT_TRAINER = Path(__file__).with_name("snapshot_trainer.py")
_FIRST_SAVES = 2
"""The vault keeps two states, and takes memory for each when it first comes."""
WAIT_S = 180.0
_ENDLESS = "1000000"


@contextmanager
def launched(
    folder: Path,
    name: str,
    *,
    replicas: int,
    workers: int = 1,
    parked: int = 1,
    steps: str = _ENDLESS,
    save_every: int = SAVE_EVERY,
) -> Iterator[LaunchedRun]:
    """A run of the benchmark's model; one of several workers per replica is one JAX world."""
    with LaunchedRun(
        TRAINER if workers == 1 else GROUP_TRAINER,
        steps,
        str(save_every),
        folder=folder,
        run=name,
        replicas=replicas,
        workers_per_replica=workers,
        parked=parked,
        options=("--lanes", str(LANES), "--nproc", "1"),
    ) as run:
        yield run


def settled(run: LaunchedRun, replicas: int, parked: int) -> float:
    """Wait until all replicas take part and the parked processes are ready; the wall time then."""
    record = run.await_record(lambda one: _full(one, replicas), WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while True:
        status = run.status()
        ready = [one for one in status.parked if one.state == "parked"] if status is not None else []
        if len(ready) >= parked:
            break
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {parked} parked processes within {WAIT_S:g} s; {run.tail()}")
        run.await_step(0, WAIT_S, after=time.time())
    newest = run.records()[-1]
    return run.await_record(lambda one: _full(one, replicas) and one.t > max(record.t, newest.t), WAIT_S).t


def _full(record: Record, replicas: int) -> bool:
    return isinstance(record.event, StepDone) and record.event.replicas == replicas


def killed(run: LaunchedRun, pids: list[int], number: int) -> float:
    """Signal the processes at a random moment within a step; the wall time of it."""
    time.sleep(random.uniform(0.0, 0.1))  # so that every part of a step is hit
    at = time.time()
    for pid in pids:
        os.kill(pid, number)
    return at


def replica_lost(run: LaunchedRun, replicas: int) -> tuple[float, float]:
    """SIGKILL a worker of a random replica: seconds until the next step, and until its successor did one."""
    settled(run, replicas, 1)
    lost = random.randrange(replicas)
    at = killed(run, [run.pid(replica=lost)], signal.SIGKILL)
    first = run.await_step(0, WAIT_S, after=at).t
    return first - at, worked_again(run, lost, at) - at


def worked_again(run: LaunchedRun, slot: int, after: float) -> float:
    """When the worker in `slot` had done a step with lanes of its own again.

    Not the first step that counts it: a newcomer computes no lane of the step that it comes into.
    """
    found = run.await_record(
        lambda one: isinstance(one.event, LaneDigests) and one.event.slot == slot and one.t > after, WAIT_S
    )
    return found.t


def hung(run: LaunchedRun, replicas: int) -> tuple[float, float]:
    """SIGSTOP a worker: seconds until the next step, and the median step before."""
    settled(run, replicas, 1)
    done = [one.event.seconds for one in run.records() if isinstance(one.event, StepDone)][-50:]
    at = killed(run, [run.pid(replica=random.randrange(replicas))], signal.SIGSTOP)
    return run.await_step(0, WAIT_S, after=at + 0.05).t - at, sorted(done)[len(done) // 2]


def group_replaced(run: LaunchedRun, workers: int) -> float:
    """SIGKILL one worker of a run that is one replica of several: seconds until its successors' next step.

    The other workers may still finish the step that they were in; that is no recovery.
    """
    settled(run, 1, workers)
    at = killed(run, [run.pid(replica=0, index=random.randrange(workers))], signal.SIGKILL)
    back = run.await_record(lambda one: isinstance(one.event, RunRestored) and one.t > at, WAIT_S)
    return run.await_step(0, WAIT_S, after=back.t).t - at


def all_lost(run: LaunchedRun, replicas: int, *, vault_too: bool, saves: int) -> tuple[float, str]:
    """SIGKILL workers, parked processes and the agent, the vault if asked: seconds until the next step, and
    where the state was found.

    Before that the run goes on for two saves beyond what it had ever reached: there is a state to find, and
    the loss before is forgiven. After two in a row without progress an agent comes back only after a pause.
    """
    settled(run, replicas, 1)
    reached = max(one.event.step for one in run.records() if isinstance(one.event, StepDone))
    run.await_step(reached + 2 * saves, WAIT_S)
    alive = [pid for pid in run.pids().values() if _lives(pid)]
    agents = {_parent(pid) for pid in alive}
    vaults = [
        one.event.pid
        for one in run.records()
        if isinstance(one.event, PartStarted) and one.event.part == "vault" and _lives(one.event.pid)
    ]
    at = killed(run, [*agents, *alive, *(vaults if vault_too else [])], signal.SIGKILL)
    first = run.await_step(0, WAIT_S, after=at).t
    sources = [one.event.source for one in run.records() if isinstance(one.event, RunRestored) and one.t > at]
    return first - at, sources[0] if sources else "nowhere"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def undisturbed(folder: Path, name: str, steps: int, *, replicas: int) -> tuple[float, str]:
    """Seconds from the first step at the full size to the last one, and the digest of the final state."""
    with launched(folder, name, replicas=replicas, steps=str(steps)) as run:
        return finished(run)


def disturbed(
    folder: Path, name: str, steps: int, *, replicas: int, mtbf_s: float, seed: int, signals: tuple[int, ...]
) -> tuple[float, str, int]:
    """The same with a random worker signalled every `mtbf_s` on average; also how often."""
    chance = random.Random(seed)
    losses = 0
    with launched(folder, name, replicas=replicas, steps=str(steps)) as run:
        began = run.await_record(lambda one: _full(one, replicas), WAIT_S).t
        next_at = began + chance.expovariate(1 / mtbf_s)
        while run.process.poll() is None:
            try:
                run.process.wait(max(0.0, next_at - time.time()))
                break
            except subprocess.TimeoutExpired:
                pass
            status = run.status()
            alive = [seat.pid for seat in status.seats if seat.slot >= 0 and seat.pid] if status else []
            if len(alive) > 1:
                victim = chance.choice(alive)
                with suppress(ProcessLookupError):
                    os.kill(victim, chance.choice(signals))
                    losses += 1
            next_at = time.time() + chance.expovariate(1 / mtbf_s)
        return (*finished(run), losses)


def finished(run: LaunchedRun) -> tuple[float, str]:
    code = run.wait(3600.0)
    if code:
        raise RuntimeError(f"the run ended with code {code}; {run.tail()}")
    done = [one for one in run.records() if isinstance(one.event, StepDone)]
    return done[-1].t - done[0].t, (run.folder / "digest").read_text()


def cpu_per_step(run: LaunchedRun, replicas: int, steps: int) -> tuple[float, float]:
    """CPU seconds per step of agent, coordinator, vault and launch, and of Holdfast's threads in workers."""
    settled(run, replicas, 1)
    spawned = set(run.pids().values())
    first = next(pid for pid in spawned if _lives(pid))
    parts = [one.event.pid for one in run.records() if isinstance(one.event, PartStarted)]
    watched = [Path(f"/proc/{pid}") for pid in {run.process.pid, _parent(first), *parts} if _lives(pid)]
    threads = [
        Path(f"/proc/{pid}/task/{thread}")
        for pid in spawned
        if _lives(pid) and (noted := run.folder / f"threads-{pid}").exists()
        for thread in json.loads(noted.read_text())
    ]
    start = run.await_step(0, WAIT_S, after=time.time())
    assert isinstance(start.event, StepDone)
    before = _cpu_s(watched), _cpu_s(threads)
    end = run.await_step(start.event.step + steps, WAIT_S)
    assert isinstance(end.event, StepDone)
    done = end.event.step - start.event.step
    return (_cpu_s(watched) - before[0]) / done, (_cpu_s(threads) - before[1]) / done


def _cpu_s(tasks: list[Path]) -> float:
    """What threads, or all threads of processes, have used of the processors."""
    found = 0.0
    for task in tasks:
        for one in (task / "task").iterdir() if (task / "task").exists() else (task,):
            with suppress(OSError):  # it has ended
                found += int((one / "schedstat").read_text().split()[0]) / 1e9
    return found


def snapshots(folder: Path, *, saves: int, megabytes: int) -> list[tuple[float, float]]:
    """Seconds of saves of a run's state into the vault, and of one copy of it beside each."""
    steps = 2 * (saves + _FIRST_SAVES)
    with LaunchedRun(
        *(SNAPSHOT_TRAINER, str(steps), str(megabytes)),
        folder=folder,
        run="snapshot",
        options=("--nproc", "1"),
    ) as run:
        code = run.wait(WAIT_S + steps)
        if code:
            raise RuntimeError(f"the run ended with code {code}; {run.tail()}")
        (log,) = (run.folder / "logs").glob("0-[0-9]*.log")
        said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [(one["snapshot_s"], one["memcpy_s"]) for one in said[_FIRST_SAVES:]]
