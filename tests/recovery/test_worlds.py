"""One world: a replica of several workers loses all of them with any one, and comes back from vaults."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from holdfast.journal import RunRestored
from tests.recovery.mishaps import Mishap
from tests.recovery.stage import SHORT, Digests, Scene

pytestmark = pytest.mark.process
full = pytest.mark.full


CELLS: Final = {
    # Workers of a world are not in step: only when both have staged step 10 is there a whole one.
    "kill in step": (Mishap(at="lane", what="kill", slot=1, step=13, told=("SaveStaged", 10, 2)),),
    "stop in step": (Mishap(at="lane", what="stop", slot=0, step=13),),
    "raise in step": (Mishap(at="lane", what="raise", slot=1, step=13),),
    "exit75 in step": (Mishap(at="lane", what="exit75", slot=0, step=13),),
    "gil in step": (Mishap(at="lane", what="gil", slot=1, step=13),),
    "spin in step": (Mishap(at="lane", what="spin", slot=0, step=13),),
    "segv in step": (Mishap(at="lane", what="segv", slot=1, step=13),),
    "kill in start": (Mishap(at="import", what="kill"),),
    "kill in restore": (Mishap(at="run.joined", what="kill", slot=1),),
    "kill in save": (Mishap(at="trainer.save.begin", what="kill", slot=1, step=9),),
    "kill with one of two staged": (Mishap(at="trainer.stage.done", what="kill", slot=1, step=9),),
    "kill in the last save": (Mishap(at="trainer.save.begin", what="kill", slot=0, step=29),),
    "coordinator": (Mishap(at="lane", what="kill", who="coordinator", slot=0, step=13),),
    "worker and vault": (
        Mishap(at="lane", what="kill", who="vault", slot=0, step=13),
        Mishap(at="lane", what="kill", slot=0, step=13),
    ),
    "agent": (Mishap(at="lane", what="kill", who="agent", slot=0, step=13),),
    "worker and coordinator": (
        Mishap(at="lane", what="kill", who="coordinator", slot=1, step=13),
        Mishap(at="lane", what="kill", slot=1, step=13),
    ),
}
QUICK: Final = {"kill in step"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, id=one, marks=() if one in QUICK else (full,)) for one in CELLS]
)
def test_one_world(name: str, tmp_path: Path, undisturbed_world: Digests) -> None:
    hangs = name.startswith(("gil", "spin"))
    scene = Scene(tmp_path, CELLS[name], replicas=1, workers=2, lane_s=0.02, program=SHORT if hangs else ())
    assert scene.play(60.0) == 0
    scene.check(undisturbed_world)
    if hangs:
        assert {"hung", "fenced"} & set(scene.causes())
    if name == "kill in step":
        # It had staged step 10, and the vault has outlived it; by now that may be on disk as well.
        restored = [one for one in scene.events() if isinstance(one, RunRestored)]
        assert {one.step for one in restored if one.source != "init"} == {10}
