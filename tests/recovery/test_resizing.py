"""A run that grows and shrinks while it trains has the bits of one that did not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.journal import Record, StepDone
from holdfast.launch import leave_wish
from tests.recovery.stage import Scene, alone

pytestmark = [pytest.mark.process, pytest.mark.full]
UNTIL = 900


def test_one_three_two_four_one(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    undisturbed = alone(tmp_path_factory.mktemp("alone"), until=UNTIL)
    scene = Scene(tmp_path, replicas=1, options=("--max-replicas", "4"), until=UNTIL, lane_s=0.005)
    with scene.launched() as run:
        for replicas in (1, 3, 2, 4, 1):
            asked = time.time()
            if replicas > 1 or scene.events():
                leave_wish(run.folder, replicas)
            run.await_record(lambda one, n=replicas, t=asked: _steps_with(one, n, t), 60.0)  # type: ignore[misc]
        assert run.wait(90.0) == 0
        scene.check_nothing_left()
    scene.check(undisturbed)
    sizes = {one.replicas for one in scene.events() if isinstance(one, StepDone)}
    assert sizes == {1, 2, 3, 4}


def _steps_with(record: Record, replicas: int, after: float) -> bool:
    event = record.event
    return isinstance(event, StepDone) and event.replicas == replicas and record.t > after
