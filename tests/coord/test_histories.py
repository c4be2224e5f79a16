"""Real processes under real signals: histories are linearizable, barriers pass for all or for none."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from holdfast.coord import messages as m
from holdfast.coord.client import CoordClient
from holdfast.testing.linearizability import Operation, check, meeting_problems
from tests.checkpoint.children import Child, Children
from tests.coord.coordinator_process import CoordinatorProcess
from tests.coord.histories import read
from tests.coord.proxy import Proxy

pytestmark = pytest.mark.process

CHILD = Path(__file__).with_name("history_child.py")
MEMBERS = 3
OBSERVERS = 2
SETTINGS = ("--min-size", str(MEMBERS), "--max-size", str(MEMBERS), "--rejoin", "--session-s", "2")


NEVER = threading.Event()
"""Never set: its wait passes a given time."""


class Run:
    """A coordinator, its clients, and what happens to them."""

    def __init__(
        self, folder: Path, children: Children, proxy: Proxy, coordinator: CoordinatorProcess
    ) -> None:
        self.folder = folder
        self.children = children
        self.proxy = proxy
        self.coordinator = coordinator
        self.over = folder / "over"
        """Once it is there, all go home."""
        self.logs: dict[Path, float] = {}
        """Each process's log, and when it was killed."""
        self.members: list[tuple[Child, Path]] = []
        self.processes: list[Child] = []

    def start(self, seed: int, slot: int) -> tuple[Child, Path]:
        log = self.folder / f"history-{len(self.logs)}"
        address = self.proxy.address if seed % 2 else self.coordinator.address
        child = self.children.python(CHILD, address, log, seed, self.over, slot)
        self.logs[log] = math.inf
        self.processes.append(child)
        return child, log

    def history(self, over_by: float) -> list[Operation]:
        return [done for log, killed_at in self.logs.items() for done in read(log, killed_at, over_by)]

    def await_meetings(self, count: int) -> None:
        """Until every member has passed `count` more barriers."""
        ends = time.monotonic() + 60.0
        for _, log in self.members:
            enough = num_met(log) + count
            while num_met(log) < enough:
                assert time.monotonic() < ends, f"{log.name}: {num_met(log)} barriers passed, not {enough}"
                NEVER.wait(0.05)


def num_met(log: Path) -> int:
    return sum(isinstance(one.result, m.Met) for one in read(log, math.inf, math.inf))


def disturbed(run: Run, rng: random.Random, seconds: float) -> list[str]:
    """Let signals and broken connections rain down for `seconds`; gives what happened."""
    ends = time.monotonic() + seconds
    told: list[str] = []
    causes = [coordinator_killed, coordinator_stopped, connections_dropped, client_stopped, member_killed]
    while True:
        rng.shuffle(causes)  # each kind once before any comes again
        for cause in causes:
            left = ends - time.monotonic()
            if left <= 0:
                return told
            NEVER.wait(min(left, rng.uniform(0.1, 0.6)))
            cause(run, rng)
            told.append(cause.__name__)


def coordinator_killed(run: Run, rng: random.Random) -> None:
    run.coordinator.kill()
    run.coordinator.start()


def coordinator_stopped(run: Run, rng: random.Random) -> None:
    run.coordinator.process.send_signal(signal.SIGSTOP)
    NEVER.wait(rng.uniform(0.05, 0.5))
    run.coordinator.process.send_signal(signal.SIGCONT)


def connections_dropped(run: Run, rng: random.Random) -> None:
    run.proxy.drop()


def client_stopped(run: Run, rng: random.Random) -> None:
    child = rng.choice(run.processes)
    if child.process.poll() is None:
        child.kill(signal.SIGSTOP)
        NEVER.wait(rng.uniform(0.05, 0.5))
        child.kill(signal.SIGCONT)


def member_killed(run: Run, rng: random.Random) -> None:
    """SIGKILL, and a new process for the same slot."""
    slot = rng.randrange(MEMBERS)
    child, log = run.members[slot]
    run.logs[log] = time.monotonic()
    child.kill()
    child.end()
    run.members[slot] = run.start(rng.randrange(1 << 20), slot)


def check_history(folder: Path, children: Children, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    with (
        CoordinatorProcess(folder / "coord", *SETTINGS) as coordinator,
        Proxy(folder / "coord/address") as proxy,
    ):
        run = Run(folder, children, proxy, coordinator)
        run.members = [run.start(seed * 100 + slot, slot) for slot in range(MEMBERS)]
        for number in range(OBSERVERS):
            run.start(seed * 100 + 50 + number, -1)
        # How long a process takes to start, and to come back, is up to the machine.
        run.await_meetings(1)
        told = disturbed(run, rng, seconds)
        run.await_meetings(40)
        run.over.touch()
        for child in run.processes:
            assert child.end(60.0) in (0, -signal.SIGKILL), child.errors()
        with CoordClient(coordinator.address) as auditor:
            await_alone(auditor)
            over_by = time.monotonic()
            history = run.history(over_by) + [
                audit(auditor, op) for op in (m.Get("a"), m.Get("n"), m.Scan("g/"))
            ]
            assert auditor.status().waiting == ()
    done = [one for one in history if one.result is not None]
    met = [one for one in done if isinstance(one.result, m.Met)]
    assert len(done) > 50 * seconds, f"only {len(done)} calls came back; {told}"
    assert len(met) > 5 * seconds, f"only {len(met)} barriers passed; {told}"
    verdict = check(history)
    assert verdict, f"seed {seed}, {told}\n{verdict.problem}"
    assert not meeting_problems(history), f"seed {seed}, {told}"


def await_alone(auditor: CoordClient) -> None:
    """Wait until no other session is left."""
    ends = time.monotonic() + 60.0
    while auditor.status().sessions > 1:
        assert time.monotonic() < ends, f"sessions are still there: {auditor.status()}"
        NEVER.wait(0.05)


def audit(auditor: CoordClient, op: m.Op) -> Operation:
    before = time.monotonic()
    result = auditor._engine.call(op, 10.0)
    return Operation("audit", op, result, before, time.monotonic())


def test_histories_are_linearizable(tmp_path: Path, children: Children) -> None:
    check_history(tmp_path, children, seed=1, seconds=2.0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 8))
def test_longer_histories_are_linearizable(tmp_path: Path, children: Children, seed: int) -> None:
    check_history(tmp_path, children, seed=seed, seconds=30.0)
