"""A run whose checkpoints lie in an object store, or are copied there, and that loses everything else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.journal import Record, SaveDurable, StepMirrored, read
from holdfast.supervise.processes import end_marked
from holdfast.testing.launched import LaunchedRun
from tests.recovery.stage import Digests, Scene
from tests.storage.objects import FaultyStore

pytestmark = [pytest.mark.process, pytest.mark.full]
SAVED = 14


def is_saved(record: Record) -> bool:
    return isinstance(record.event, SaveDurable) and record.event.step >= SAVED


def is_mirrored(record: Record) -> bool:
    return isinstance(record.event, StepMirrored) and record.event.step >= SAVED


def scene(root: Path, *arguments: str) -> Scene:
    return Scene(root, replicas=2, parked=1, until=30, lane_s=0.02, arguments=arguments)


def lose_everything(one: Scene, run: LaunchedRun) -> list[int]:
    """Every process of the run dies, also the launch and its vaults. The workers there were."""
    run.process.kill()
    run.wait(20.0)
    end_marked({"HOLDFAST_FOLDER": str(one.folder)}, timeout_s=20.0)
    assert not one.finals(), "it was over before"
    return [applied.pid for applied in one.applied()]


def first_steps(one: Scene, known: Sequence[int]) -> list[int]:
    """The first step that each process has applied, of those that were not known before."""
    first: dict[int, int] = {}
    for applied in one.applied():
        first.setdefault(applied.pid, applied.step)
    return [step for pid, step in first.items() if pid not in known]


def test_a_run_that_saves_into_a_store_goes_on_from_there(
    tmp_path: Path, undisturbed: Digests, faulty: FaultyStore
) -> None:
    one = scene(tmp_path, "--checkpoints", f"s3://{faulty.bucket}/run")
    with one.launched() as run:
        run.await_record(is_saved, 60.0)
        dead = lose_everything(one, run)
    assert one.play() == 0
    one.check(undisturbed)
    assert min(first_steps(one, dead)) > SAVED
    assert not (one.folder / "ckpt").exists()


def test_a_run_that_lost_its_folder_too_goes_on_from_its_mirror(
    tmp_path: Path, undisturbed: Digests, faulty: FaultyStore
) -> None:
    one = scene(tmp_path, "--mirror", f"s3://{faulty.bucket}/run")
    with one.launched() as run:
        run.await_record(is_mirrored, 60.0)
        dead = lose_everything(one, run)
    shutil.rmtree(one.folder)
    assert one.play() == 0
    one.check(undisturbed)
    assert min(first_steps(one, dead)) > SAVED
    steps = [each.event for each in read(one.folder / "journal.jsonl") if is_mirrored(each)]
    assert steps, "the new run copies its steps there as well"
