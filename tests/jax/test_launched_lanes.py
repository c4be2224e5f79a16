"""Replicas of two workers each, JAX worlds inside and lanes between: one loses a worker, the bits stay."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.journal import LaneDigests, WorkerExited, read
from tests.checkpoint.children import Children
from tests.jax.lanes_script import STEPS

pytestmark = pytest.mark.process


def launch(children: Children, folder: Path, replicas: int, *args: object) -> list[bytes]:
    """Run the script to its end; the state of each worker of the first replica."""
    folder.mkdir()
    script = Path(__file__).with_name("lanes_script.py")
    options = ["--replicas", replicas, "--workers-per-replica", 2, "--lanes", 4, "--parked", 2, "--nproc", 1]
    child = children.python(
        "-m", "holdfast.cli", "launch", *options, "--plain", "--folder", folder, script, folder, *args
    )
    assert child.end() == 0, child.errors()
    return [(folder / f"bits-{index}").read_bytes() for index in (0, 1)]


def test_a_worker_of_one_of_two_worlds_is_killed(children: Children, tmp_path: Path) -> None:
    alone = launch(children, tmp_path / "alone", 1)
    assert alone[0] != alone[1]  # each has a half
    folder = tmp_path / "two"
    assert launch(children, folder, 2, 7) == alone
    assert (folder / "failed").exists()
    records = list(read(folder / "run" / "journal.jsonl"))
    causes = [one.event.cause for one in records if isinstance(one.event, WorkerExited)]
    assert "crashed" in causes
    # The whole replica came back, and worked.
    for slot in (2, 3):
        steps = [
            one.event.step for one in records if isinstance(one.event, LaneDigests) and one.event.slot == slot
        ]
        assert steps[-1] == STEPS - 1
        assert any(after - before > 1 for before, after in pairwise(steps))
    children.await_all_ended()
