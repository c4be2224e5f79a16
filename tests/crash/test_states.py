"""No crash at any operation of a save may lose, tear or mix a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.testing import (
    MOUNT,
    SCENARIOS,
    DiskModel,
    Image,
    MemoryFiles,
    Promise,
    RecordingFiles,
    Script,
    Tally,
    check_crashes,
    decode_log,
    encode_log,
    record,
    second_save,
)

# Distinct states that the long run checks in each scenario.
FULL = {
    "first_save": 4_000,
    "second_save": 8_000,
    "pruning": 9_000,
    "recycling": 16_000,
    "overwriting": 10_000,
    "replacing_damaged": 9_000,
    "restarting": 9_000,
    "two_ranks": 16_000,
    "three_ranks": 24_000,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_crash_leaves_the_old_or_the_new_step(name: str, tmp_path: Path) -> None:
    """A fixed sample: every operation, some thirty states after each."""
    log = record(SCENARIOS[name], RecordingFiles(tmp_path))
    tally = check_crashes(log, limit=30)
    print(f"{name}: {len(log)} operations, {tally}")
    assert not tally.bad, str(tally)
    assert tally.points == len(log) + 1
    assert tally.loads
    assert tally.restarts


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_crashes_leave_the_old_or_the_new_step(name: str, tmp_path: Path) -> None:
    """At least 10⁵ distinct states over all scenarios."""
    assert sum(FULL.values()) >= 100_000
    total = Tally()
    seed = 0
    while total.states < FULL[name]:
        seed += 1
        folder = tmp_path / str(seed)
        folder.mkdir()
        log = record(SCENARIOS[name], RecordingFiles(folder), seed=seed)
        total.add(check_crashes(log, limit=2500, seed=seed, load_every=20, restart_every=100))
        assert not total.bad, str(total)
    print(f"{name}: {seed} recordings, {total}")


def resumed(step: int) -> Callable[[Script], None]:
    def scenario(script: Script) -> None:
        with script.ranks(keep=1) as run:
            run.save(step, 7, prunes=range(step))

    return scenario


def crashed_again(tmp_path: Path, limit: int, take: int) -> Tally:
    log = record(second_save, RecordingFiles(tmp_path))
    total = Tally()
    for point in range(0, len(log), 3):
        model = DiskModel(log)
        model.seek(point)
        promise = Promise.at(log, point)
        for number, state in enumerate(model.states(take, seed=1)):
            files = RecordingFiles(MOUNT, inner=MemoryFiles(state, writable=True), image=state)
            again = record(resumed(3), files, seed=number)
            total.add(
                check_crashes(
                    again, limit=limit, image=state, promise=promise, load_every=20, restart_every=100
                )
            )
    return total


def test_a_crash_during_the_recovery_from_a_crash(tmp_path: Path) -> None:
    total = crashed_again(tmp_path, limit=6, take=2)
    print(f"second crashes: {total}")
    assert not total.bad, str(total)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_many_crashes_during_the_recovery_from_a_crash(tmp_path: Path) -> None:
    total = crashed_again(tmp_path, limit=60, take=8)
    print(f"second crashes: {total}")
    assert not total.bad, str(total)


def test_the_same_seed_gives_the_same_states(tmp_path: Path) -> None:
    def states(name: str) -> list[Image]:
        folder = tmp_path / name
        folder.mkdir()
        log = record(second_save, RecordingFiles(folder), seed=3)
        log = decode_log(encode_log(log))
        model = DiskModel(log)
        found = []
        for point in range(len(log) + 1):
            model.seek(point)
            found += list(model.states(20, seed=5))
        return found

    assert states("one") == states("two")
