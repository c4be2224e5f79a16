"""Supervised runs under faults, from integers."""

from __future__ import annotations

import os

import pytest

from holdfast.supervise import messages as m
from holdfast.supervise.budgets import Allowance
from holdfast.supervise.rules import PolicySettings
from holdfast.testing.supervision import Failure, simulate
from holdfast.testing.supervision.__main__ import main
from holdfast.testing.supervision.simulation import PLAIN, Simulation

SEEDS = 300
CHUNK = 50
LONG = 6000


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_seeds(first: int) -> None:
    failed = []
    for seed in range(first, first + CHUNK):
        try:
            simulate(seed)
        except Failure as failure:
            failed.append(str(failure))
    assert not failed, "\n".join(failed) + "\nreplay: python -m holdfast.testing.supervision --seed N"


@pytest.mark.parametrize(
    "seed",
    [
        4932,  # one worker's wait for the end ran out, the other's did not
    ],
)
def test_seeds_that_failed_once(seed: int) -> None:
    simulate(seed)


def test_a_seed_decides_everything() -> None:
    first = simulate(17, tracing=True, keep_trace=True)
    assert first == simulate(17, tracing=True, keep_trace=True)
    assert first.trace
    assert first.trace != simulate(18, tracing=True, keep_trace=True).trace


def test_the_seeds_see_what_they_are_for() -> None:
    """Every kind of end, many recoveries, several generations: none of it is rare."""
    outcomes = [simulate(seed) for seed in range(SEEDS)]
    assert {outcome.code for outcome in outcomes} == {0, 75, 78, 79, 80}
    assert sum(outcome.recoveries for outcome in outcomes) > 2 * SEEDS
    assert sum(outcome.generations > 2 for outcome in outcomes) > 0.3875 * SEEDS
    assert sum(outcome.code == 0 for outcome in outcomes) > SEEDS / 2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:3"]) == 0
    assert "3 seeds in" in capsys.readouterr().out
    assert main(["--seed", "5", "-v"]) == 0
    out = capsys.readouterr().out
    assert "seed 5 held" in out
    assert "StartAgent(node=0)" in out


def test_a_thousand_recoveries_in_one_run_grow_nothing() -> None:
    settings = PolicySettings(
        replicas=3,
        nodes=2,
        parked=1,
        poison_failures=1000,
        allowances={m.CRASHED: Allowance(limit=1000, first_s=0.1, longest_s=0.5)},
    )
    simulation = Simulation(4, kind=PLAIN, settings=settings)
    simulation.job.until = 10**9
    world, edge, oracle = simulation.world, simulation.edge, simulation.oracle
    simulation.service.start()
    edge.begin()
    marks = {}
    while oracle.recoveries < 1000:
        world.run(world.now + 1.5)
        simulation.machine.record.calls.clear()
        simulation.machine.record.history.clear()
        simulation.faults._fail(m.CRASHED)
        assert edge.end is None, edge.end
        assert world.now < 20_000.0, "recoveries do not come"
        if oracle.recoveries // 100 not in marks:
            roster = simulation.policy._roster
            marks[oracle.recoveries // 100] = (
                len(roster.workers) + len(roster.alarms),
                len(roster.alarms._heap),
                len(roster.said) + len(roster.failures),
                len(simulation.policy._verdicts._poison),
                len(simulation.machine.processes),
            )
    early, late = marks[1], marks[max(marks)]
    assert all(after <= before + 20 for before, after in zip(early, late, strict=True)), marks
    assert simulation.job.furthest > 500


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(890)
def test_very_many_seeds() -> None:
    """A tenth of the long target; `HOLDFAST_SEEDS` says which."""
    tenth = int(os.environ.get("HOLDFAST_SEEDS", "0")) % 10
    first = SEEDS + tenth * LONG
    assert main(["--seeds", f"{first}:{first + LONG}", "--jobs", str(os.cpu_count() or 2)]) == 0
