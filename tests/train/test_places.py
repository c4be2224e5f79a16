"""Runs whose checkpoints lie in an object store: what is said of them, and what is taken from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import NoCheckpointError
from holdfast.train.state import checkpoint_folder, has_steps
from tests.storage.objects import FaultyStore
from tests.train.runs import train
from tests.train.tiny import tiny


def place(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}-{id(tmp_path)}"


def save(where: str, step: int) -> None:
    with Checkpointer(where, writer="thread", journal=False) as ckpt:
        ckpt.save(step, {"x": np.arange(3)}).durable(60.0)


def test_what_a_run_has_saved_is_looked_for_where_it_saves(tmp_path: Path) -> None:
    config = tiny(f"checkpoint.folder={place(tmp_path)}")
    assert not has_steps(tmp_path, config)
    save(place(tmp_path), 4)
    assert has_steps(tmp_path, config)
    assert not list(tmp_path.iterdir())  # and no folder by the name of a URL


def test_another_run_may_have_saved_in_an_object_store(tmp_path: Path) -> None:
    where = place(tmp_path)
    with pytest.raises(NoCheckpointError, match="there is no such folder"):
        checkpoint_folder(where)
    save(where, 1)
    assert checkpoint_folder(where) == where
    (tmp_path / "ckpt").mkdir()
    assert checkpoint_folder(str(tmp_path)) == str((tmp_path / "ckpt").resolve())


@pytest.mark.full
def test_a_run_saves_into_an_object_store_goes_on_from_there_and_is_taken_over(
    tmp_path: Path, faulty: FaultyStore
) -> None:
    where = faulty.url("run")
    half = train(tiny("samples=32", "rate.decay=64", f"checkpoint.folder={where}"), tmp_path, name="a")
    rest = train(tiny("rate.decay=64", f"checkpoint.folder={where}"), tmp_path, name="a")
    whole = train(tiny("rate.decay=64"), tmp_path, name="b")
    assert (half.steps, rest.state) == (whole.steps // 2, whole.state)
    fork = train(tiny("rate.decay=64"), tmp_path, name="c", source=where, step=half.steps)
    assert fork.state == whole.state
