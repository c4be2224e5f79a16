"""A save that fails, slows down or is done twice hurts no other step, nor the one it was replacing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.testing import (
    DiskModel,
    FailingFiles,
    Promise,
    RecordingFiles,
    Script,
    SlowFiles,
    check_crashes,
    quiet,
    record,
    restart_problem,
    state_problem,
    two_ranks,
)
from holdfast.vault import Outcome
from holdfast.vault.persist import Job, Persister


def saved_with_a_failure(
    files: FailingFiles, at: int, number: int, *, world: int, replace: bool, lasting: bool
) -> str | None:
    """A good save, one with a failing operation, a good one; what was wrong in between or afterwards."""
    with quiet(), Script(files).ranks(world, deadline_s=10.0) as run:
        assert run.save(1)
        files.arm(at, number, lasting=lasting)
        if replace:
            run.save(1, 1, overwrite=True)
        else:
            run.save(2)
        files.disarm()
        model = DiskModel(files.log)
        model.seek(len(files.log))
        state, promise = model.settled(), Promise.at(files.log, len(files.log))
        if problem := state_problem(state, promise) or restart_problem(state, promise):
            return problem
        if not run.save(3):
            return "the next save fails"
    tally = check_crashes(files.log, limit=2, load_every=50, restart_every=500)
    return str(tally) if tally.bad else None


FAILURES = pytest.mark.parametrize(
    ("number", "lasting"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO once", "ENOSPC for good"]
)
REPLACE = pytest.mark.parametrize("replace", [False, True], ids=["new step", "replaced step"])


def check_failures(
    tmp_path: Path, world: int, replace: bool, number: int, lasting: bool, stride: int
) -> None:
    problems = []
    at = num_failed = 0
    while True:
        folder = tmp_path / str(at)
        folder.mkdir()
        files = FailingFiles(folder)
        problem = saved_with_a_failure(files, at, number, world=world, replace=replace, lasting=lasting)
        if files.failed is None:
            break
        num_failed += 1
        if problem is not None:
            problems.append(f"{files.failed} (operation {at}): {problem}")
        at += stride
    print(f"{num_failed} operations failed in turn, {len(problems)} of them badly")
    assert num_failed > 5
    assert not problems, "\n" + "\n".join(problems)


@REPLACE
@FAILURES
def test_a_failure_at_any_operation(replace: bool, number: int, lasting: bool, tmp_path: Path) -> None:
    check_failures(tmp_path, 1, replace, number, lasting, stride=1)


@REPLACE
@FAILURES
def test_a_failure_of_one_rank(replace: bool, number: int, lasting: bool, tmp_path: Path) -> None:
    check_failures(tmp_path, 2, replace, number, lasting, stride=7)


@pytest.mark.full
@pytest.mark.timeout(600)
@REPLACE
@FAILURES
def test_a_failure_of_one_rank_at_any_operation(
    replace: bool, number: int, lasting: bool, tmp_path: Path
) -> None:
    check_failures(tmp_path, 2, replace, number, lasting, stride=1)


def test_no_rank_calls_a_step_durable_before_it_is(tmp_path: Path) -> None:
    """Rank 0 is slow to sync the folder after the manifest has its name; rank 1 sees that name."""

    def slow(kind: str, path: str) -> bool:
        return kind == "sync_folder" and os.path.basename(path).startswith("step-")

    log = record(two_ranks, SlowFiles(tmp_path, slow, 0.05))
    tally = check_crashes(log, limit=40, load_every=100, restart_every=1000)
    assert not tally.bad, str(tally)


def test_a_save_given_to_a_second_vault_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vault dies between commit and report; its successor gets the save again, and a file to recycle."""
    persist = Persister._persist
    again = []

    def twice(persister: Persister, job: Job) -> Outcome:
        first = persist(persister, job)
        if job.order.save.step == 3:
            monkeypatch.setattr(persister, "_recycle", True)
            again.append(persist(persister, job))
        return first

    def scenario(script: Script) -> None:
        with script.ranks(keep=1) as run:
            run.save(1)
            run.save(2, prunes=[1])
        with script.ranks(recycle=False) as run:
            run.save(3)

    files = RecordingFiles(tmp_path)
    monkeypatch.setattr(Persister, "_persist", twice)
    log = record(scenario, files)
    assert again[0].committed, again
    # The promise of the first pass is noted when `durable` returns; here that is after the second.
    commit = max(at for at, op in enumerate(log) if op.to_name == "manifest.json")
    promise = Promise()
    promise.take("began", 3, 0)
    promise.take("durable", 3, 0)
    tally = check_crashes(
        log, limit=40, points=range(commit + 4, len(log) + 1), promise=promise, restart_every=1000
    )
    assert not tally.bad, str(tally)
