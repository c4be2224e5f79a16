"""Runs whose newest steps are no good: what they save instead must outlive retention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint import Checkpointer
from tests.checkpoint.folder import damage, part_file


def tree(step: int) -> dict[str, Any]:
    return {"x": np.full(1000, step, np.int32)}


def saved(root: Path, *steps: int, keep: int | None = None) -> None:
    with Checkpointer(root, writer="thread", keep=keep) as ckpt:
        for step in steps:
            ckpt.save(step, tree(step)).durable(60.0)


def test_steps_that_cannot_be_loaded_do_not_push_out_those_that_can(root: Path) -> None:
    saved(root, 10, 20, 30)
    for step in (20, 30):
        damage(part_file(root, step))
    with Checkpointer(root, writer="thread", keep=2) as ckpt:
        assert ckpt.load()["x"][0] == 10
        ckpt.save(15, tree(15)).durable(60.0)
        ckpt.wait(60.0)
        assert ckpt.steps() == [10, 15, 20, 30]
        ckpt.save(20, tree(20)).durable(60.0)  # replaced, and good again
        ckpt.wait(60.0)
        assert ckpt.steps() == [15, 20, 30]
    with Checkpointer(root, journal=False) as ckpt:
        assert ckpt.load()["x"][0] == 20


def test_the_step_saved_last_stays_whatever_is_newer(root: Path) -> None:
    saved(root, 20, 30)
    with Checkpointer(root, writer="thread", keep=2) as ckpt:
        assert ckpt.load(step=20)["x"][0] == 20
        ckpt.save(10, tree(10)).durable(60.0)
        ckpt.wait(60.0)
        assert ckpt.steps() == [10, 20, 30]
        ckpt.save(15, tree(15)).durable(60.0)
        ckpt.wait(60.0)
        assert ckpt.steps() == [15, 20, 30]


def test_a_copy_that_does_not_answer_is_passed_over(root: Path, tmp_path: Path) -> None:
    saved(tmp_path / "third", 1)
    away = "s3://nowhere/run"
    with Checkpointer(root, journal=False, copies=[away, tmp_path / "third"]) as ckpt:
        away_store = ckpt._copies[0]
        for name in ("exists", "names"):
            setattr(away_store, name, _fails)
        assert ckpt.steps() == [1]
        assert ckpt.info(1).step == 1


def _fails(*_: object) -> object:
    from holdfast.errors import StorageError

    raise StorageError("it is away", path="s3://nowhere/run")
