"""The fault matrix is complete: every fault, part and phase has a cell or a reason. And its times count."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from holdfast.journal import StepDone
from holdfast.journal.record import encode
from tests.recovery import test_matrix as matrix
from tests.recovery import test_worlds as worlds
from tests.recovery.mishaps import Mishap
from tests.recovery.stage import Scene

FAULTS: Final = (*matrix.CAUSES, "exit78", "collective")
PARTS: Final = ("worker", "parked", *matrix.BESIDE)
Reasons = tuple[tuple[str, str, str, str], ...]


@pytest.mark.parametrize(
    ("cells", "reasons"),
    [
        pytest.param(matrix.table(), matrix.NO_CELL, id="replicas"),
        pytest.param(worlds.table(), worlds.NO_CELL, id="one world"),
    ],
)
def test_what_has_no_cell_has_a_reason(cells: set[tuple[str, str, str]], reasons: Reasons) -> None:
    used = set()
    for cell in product(FAULTS, PARTS, matrix.PHASES_OF_A_RUN):
        if cell not in cells:
            found = [one for one in reasons if _is_meant(one, cell)]
            assert found, f"{cell} has neither a cell nor a reason"
            used.add(found[0])
    assert used == set(reasons), "a reason for nothing"


def _is_meant(reason: tuple[str, str, str, str], cell: tuple[str, str, str]) -> bool:
    return all(words == "*" or name in words.split() for words, name in zip(reason[:3], cell, strict=True))


@pytest.mark.parametrize(
    ("what", "who", "seconds"),
    [("kill", "self", 4.0), ("stop", "self", 5.5), ("gil", "self", 6.5), ("kill", "agent", 14.0)],
)
def test_half_a_minute_is_too_long_for_a_recovery(
    what: str, who: str, seconds: float, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, (Mishap(at="lane", what=what, who=who),))
    (scene.out / "mishap-0").touch()
    os.utime(scene.out / "mishap-0", (100.0, 100.0))
    _write_steps(scene, 99.0, 100.0 + seconds)
    scene.check_times()
    # Whether it is the first step after it, or a later one.
    for times in ((99.0, 130.0), (99.0, 100.1, 130.1)):
        _write_steps(scene, *times)
        with pytest.raises(AssertionError, match="s without a step"):
            scene.check_times()


def _write_steps(scene: Scene, *times: float) -> None:
    scene.folder.mkdir(exist_ok=True)
    steps = [StepDone(step=number, seconds=1.0, replicas=2, lanes=8) for number in range(len(times))]
    lines = [encode(t, t, 1, "worker", step) for t, step in zip(times, steps, strict=True)]
    (scene.folder / "journal.jsonl").write_bytes(b"".join(lines))
