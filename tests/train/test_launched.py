"""Replicas under launch: lost, added, taken away, they end in the bits and the ledger of a run of one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.journal import Record, StepDone
from holdfast.launch import leave_wish
from holdfast.supervise.processes import end_marked
from holdfast.testing.launched import LaunchedRun
from holdfast.train import __main__ as program
from holdfast.train.config import TrainConfig
from holdfast.train.metrics import read_metrics
from tests.train.curves import environment
from tests.train.runs import last_state
from tests.train.tiny import tiny

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[2]
PROGRAM = Path(program.__file__)
PACED = Path(__file__).with_name("paced.py")
LANES = 4


def env() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    return {**environment(), "PYTHONPATH": path}


def alone(config: TrainConfig, folder: Path, timeout_s: float = 110.0) -> dict[str, Any]:
    """What comes of a run of one that nobody disturbs."""
    written = folder / "alone.json"
    written.write_text(config.to_json(), encoding="utf-8")
    with open(folder / "alone.log", "wb") as log:
        command = [sys.executable, "-m", "holdfast.train", str(written)]
        subprocess.run(command, cwd=folder, env=env(), stdout=log, stderr=log, timeout=timeout_s, check=True)
    return result(folder / "runs" / config.name)


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text(encoding="utf-8"))
    found["losses"] = [(one["step"], one["loss"]) for one in read_metrics(run / "metrics.jsonl")]
    # What the next start would load: every byte of parameters, optimizer, random key and cursor.
    found["arrays"] = last_state(run, found["steps"])
    return {name: found[name] for name in ("state", "ledger", "samples", "steps", "losses", "arrays")}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Said by name: a difference of all arrays cannot be read."""
    differing = [
        name
        for name in sorted({*found["arrays"], *expected["arrays"]})
        if found["arrays"].get(name) != expected["arrays"].get(name)
    ]
    assert not differing
    assert {**found, "arrays": ()} == {**expected, "arrays": ()}


@contextmanager
def launched(
    config: TrainConfig, folder: Path, *options: str, replicas: int, script: Path = PROGRAM, parked: int = 0
) -> Iterator[LaunchedRun]:
    written = folder / "launched.json"
    written.write_text(config.to_json(), encoding="utf-8")
    try:
        with LaunchedRun(
            script,
            str(written),
            folder=folder,
            replicas=replicas,
            parked=parked,
            options=("--lanes", str(LANES), *options),
            env=env(),
        ) as run:
            yield run
    finally:
        end_marked({"HOLDFAST_FOLDER": str(folder / "run")}, timeout_s=20.0)


def test_a_replica_is_killed_and_nothing_shows(tmp_path: Path) -> None:
    config = tiny("samples=240", "checkpoint.every=10", "check_every=4")
    expected = alone(config, tmp_path)
    hold = tmp_path / "hold"
    hold.touch()
    with launched(config, tmp_path, replicas=2, script=PACED) as run:
        run.await_record(lambda one: _steps_with(one, 2, 0.0), 110.0)
        killed = time.time()
        os.kill(run.pid(replica=1), signal.SIGKILL)
        hold.unlink()
        assert run.wait(110.0) == 0, run.tail()
        assert any(_steps_with(one, 1, killed) for one in run.records()), "it was over before the kill"
    assert_same(result(run.folder), expected)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_four_two_three_one_four_with_kills(tmp_path: Path, seed: int) -> None:
    """The number of replicas changes as it likes, and at random moments one of them is killed."""
    rng = random.Random(seed)
    config = tiny("samples=6400", "checkpoint.every=100", "check_every=50", "log.every=1000")
    expected = alone(config, tmp_path, timeout_s=200.0)
    with launched(config, tmp_path, "--max-replicas", "4", replicas=4, parked=1, script=PACED) as run:
        run.await_step(5)
        for replicas in (4, 2, 3, 1, 4):
            asked = time.time()
            leave_wish(run.folder, replicas)
            met = run.await_record(lambda one, n=replicas, t=asked: _steps_with(one, n, t), 120.0)  # type: ignore[misc]
            victim = rng.randrange(replicas)
            assert isinstance(met.event, StepDone)
            run.await_step(met.event.step + rng.randrange(1, 40))
            if replicas > 1:
                os.kill(run.pid(replica=victim), signal.SIGKILL)
                run.await_step(0, after=time.time())
        assert run.wait(300.0) == 0, run.tail()
    assert_same(result(run.folder), expected)


def _steps_with(record: Record, replicas: int, after: float) -> bool:
    event = record.event
    return isinstance(event, StepDone) and event.replicas == replicas and record.t > after


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_replica_with_a_flipped_bit_is_named_and_starts_again(tmp_path: Path) -> None:
    config = tiny("samples=800", "checkpoint.every=0", "check_every=5")
    expected = alone(config, tmp_path, timeout_s=200.0)
    script = Path(__file__).with_name("flipping.py")
    with launched(config, tmp_path, replicas=3, script=script, parked=1) as run:
        assert run.wait(280.0) == 0, run.tail()
    found = result(run.folder)
    logs = "".join(path.read_text(errors="replace") for path in (run.folder / "logs").glob("*.log"))
    assert "slot 1 differs in params/" in logs
    assert (tmp_path / "flipped").exists()
    # What the damaged replica gave until it was found out is in everybody's sums; nothing differs after it.
    assert found["ledger"] == expected["ledger"]
    assert found["samples"] == expected["samples"]
    assert "the replicas differ after step 10" in logs
    assert "the replicas differ after step 15" not in logs
