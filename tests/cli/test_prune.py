"""`holdfast ckpt prune`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast import journal
from holdfast.checkpoint import Checkpointer
from holdfast.format import data_name, step_folder
from holdfast.storage import Files, LocalStore
from tests.cli.saved import (
    answer,
    flip,
    holdfast,
    leave_uncommitted,
    manifest_path,
    save,
    steps_on_disk,
    tree,
)

STEPS = (100, 200, 300, 400, 500)
METAS = {step: {"metrics": {"loss": loss}} for step, loss in zip(STEPS, (5, 1, 4, 3, 2), strict=True)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", {step: tree(step) for step in STEPS}, METAS)


def test_a_dry_run_says_what_goes_and_what_stays_and_why(path: Path) -> None:
    with Checkpointer(path, journal=False) as ckpt:
        ckpt.pin(300)
    done = holdfast("ckpt", "prune", path, "--keep", 'latest(1) | best(1, "loss")', "--dry-run")
    assert done.exit_code == 0
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "STEP  CREATED (UTC)        AGE  SIZE  DECISION  WHY",
        " 100  2023-11-14 17:13     5 h  58 B  remove    no rule keeps it",
        " 200  2023-11-14 18:13     4 h  58 B  keep      best(1, 'loss')",
        " 300  2023-11-14 19:13     3 h  58 B  keep      pinned",
        " 400  2023-11-14 20:13     2 h  58 B  remove    no rule keeps it",
        " 500  2023-11-14 21:13  60 min  58 B  keep      latest(1), newest",
        "would remove 2 of 5 steps (116 B)",
    ]
    assert steps_on_disk(path) == list(STEPS)


@pytest.mark.parametrize(
    ("metric", "hint"), [("los", "did you mean 'loss'?"), ("accuracy", "there are: loss")]
)
def test_a_metric_that_no_step_has_removes_nothing(path: Path, metric: str, hint: str) -> None:
    done = holdfast("ckpt", "prune", path, "--keep", f'latest(1) | best(1, "{metric}")')
    assert done.exit_code == 2
    assert done.stderr.splitlines()[0] == f"error: no step here has a metric {metric!r}"
    assert hint in done.stderr
    assert steps_on_disk(path) == list(STEPS)


def test_a_metric_that_some_steps_lack_is_enough(tmp_path: Path) -> None:
    metas = {1: {"metrics": {"loss": 3}}, 2: {}, 3: {}}
    path = save(tmp_path / "ckpt", {step: tree(step) for step in metas}, metas)
    assert holdfast("ckpt", "prune", path, "--keep", 'best(1, "loss")').exit_code == 0
    assert steps_on_disk(path) == [1, 3]


def test_steps_are_removed_and_the_rest_still_verifies(path: Path) -> None:
    done = holdfast("ckpt", "prune", path, "--keep", "every(200)|within(3601)")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "removing 2 of 5 steps (116 B)"
    assert done.stderr.splitlines() == ["removed step 100", "removed step 300"]
    assert steps_on_disk(path) == [200, 400, 500]
    assert holdfast("ckpt", "verify", path, "--all").exit_code == 0


def test_a_run_can_go_on_afterwards(path: Path) -> None:
    holdfast("ckpt", "prune", path, "--keep", "1")
    with Checkpointer(path, writer="thread", journal=False) as ckpt:
        ckpt.save(600, tree()).durable(timeout_s=30)
    assert steps_on_disk(path) == [500, 600]


def test_json_schema(path: Path) -> None:
    found = answer("ckpt", "prune", path, "--keep", "latest(4)")
    assert set(found) == {"path", "policy", "dry_run", "removed", "kept", "steps"}
    assert (found["policy"], found["dry_run"]) == ("latest(4)", False)
    assert (found["removed"], found["kept"]) == ([100], [200, 300, 400, 500])
    assert found["steps"][0] == {
        "step": 100,
        "action": "remove",
        "reasons": ["no rule keeps it"],
        "bytes": 58,
        "created": "2023-11-14T17:13:20.000+00:00",
    }
    assert steps_on_disk(path) == [200, 300, 400, 500]


def test_steps_that_cannot_be_read_stay_and_leftovers_are_not_touched(path: Path) -> None:
    flip(manifest_path(path, 200), 70)
    leave_uncommitted(path, 50)
    found = answer("ckpt", "prune", path, "--keep", "latest(1)")
    assert found["removed"] == [100, 300, 400]
    assert found["steps"][1]["reasons"] == ["its manifest cannot be read"]
    assert steps_on_disk(path) == [50, 200, 500]


def test_refused_while_a_run_writes_there(path: Path) -> None:
    with Checkpointer(path, writer="thread", journal=False, keep=None) as ckpt:
        ckpt.save(600, tree()).durable(timeout_s=30)
        done = holdfast("ckpt", "prune", path, "--keep", "latest(1)")
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"error: {path} is being written by process {os.getpid()} on ")
        assert "hint: a live run removes old steps itself" in done.stderr
        assert steps_on_disk(path) == [*STEPS, 600]
        assert holdfast("ckpt", "prune", path, "--keep", "latest(1)", "--dry-run").exit_code == 0
    assert holdfast("ckpt", "prune", path, "--keep", "latest(1)").exit_code == 0
    assert steps_on_disk(path) == [600]


def test_refused_while_another_rank_is_alive_or_a_vault_finishes_a_save(path: Path) -> None:
    store = LocalStore(path)
    lock = store.write_part(".holdfast", "writer-3.lock", size=0)
    done = holdfast("ckpt", "prune", path, "--keep", "latest(1)")
    assert (done.exit_code, "is being written by another process" in done.stderr) == (2, True)
    lock.close()
    os.mkdir(path / step_folder(600))
    writer = store.write_part(step_folder(600), data_name(0, "live-1"), size=8)
    done = holdfast("ckpt", "prune", path, "--keep", "latest(1)")
    assert (done.exit_code, "step 600 is being written" in done.stderr) == (2, True)
    writer.close()
    assert steps_on_disk(path) == [*STEPS, 600]


def test_a_read_only_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Files, name: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    monkeypatch.setattr(Files, "unlink", refuse)
    done = holdfast("ckpt", "prune", path, "--keep", "latest(1)")
    assert done.exit_code == 2
    assert "Read-only file system; no step was removed" in done.stderr
    assert "hint: the file system is read-only" in done.stderr
    monkeypatch.undo()
    assert holdfast("ckpt", "verify", path, "--all").exit_code == 0


def test_a_failure_half_way_says_which_steps_are_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Files.unlink

    def refuse(self: Files, name: str) -> None:
        if step_folder(300) in name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        unlink(self, name)

    monkeypatch.setattr(Files, "unlink", refuse)
    done = holdfast("ckpt", "prune", path, "--keep", "latest(1)")
    assert done.exit_code == 2
    assert "steps removed before that: 100, 200" in done.stderr
    assert steps_on_disk(path) == [300, 400, 500]


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    done = holdfast("ckpt", "prune", tmp_path / "nowhere", "--keep", "latest(1)")
    assert done.exit_code == 2
    assert not (tmp_path / "nowhere").exists()


def test_a_wrong_policy_touches_nothing(path: Path) -> None:
    done = holdfast("ckpt", "prune", path, "--keep", "newest(3)")
    assert done.exit_code == 2
    assert "error: there is no rule 'newest'" in done.stderr
    assert "hint: " in done.stderr
    assert steps_on_disk(path) == list(STEPS)
    assert holdfast("ckpt", "prune", path).exit_code == 2


def test_an_empty_folder(tmp_path: Path) -> None:
    done = holdfast("ckpt", "prune", tmp_path, "--keep", "latest(1)", "--dry-run")
    assert done.exit_code == 0
    assert "would remove 0 of 0 steps" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_removals_are_in_the_journal_where_there_is_one(path: Path) -> None:
    file = path / "journal.jsonl"
    file.touch()
    holdfast("ckpt", "prune", path, "--keep", "latest(4)")
    (record,) = journal.read(file)
    assert (record.component, record.event) == ("cli", journal.StepPruned(step=100))
