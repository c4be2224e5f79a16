"""Halves of saves: one part is there; the trainer of the other died before its vault knew of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast import journal
from holdfast.checkpoint import Checkpointer, in_flight
from holdfast.storage import LocalStore
from holdfast.vault.commit import ORPHAN_S
from tests.checkpoint.children import Children

pytestmark = pytest.mark.process

SOON_S = 30.0


def trainer(folder: str, rank: str, newest: str) -> None:
    """Rank `rank` of two: saves the steps up to `newest`, says so, and waits to be killed."""
    ckpt = Checkpointer(folder, rank=int(rank), world=2, deadline_s=600.0, journal=f"{folder}.journal")
    for step in range(1, int(newest) + 1):
        handle = ckpt.save(step, {"w": np.full(1 << 16, step, np.float32)})
        handle.staged(60.0)
        if step == 1:
            handle.durable(60.0)
    print(json.dumps({"saw": "staged"}), flush=True)
    sys.stdin.readline()


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    yield started
    started.end_all()


def test_a_half_is_given_up_soon_after_its_trainer_died(children: Children, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    code = "import sys; from tests.vault.test_halves import trainer; trainer(*sys.argv[1:])"
    first, second = (children.python("-c", code, folder, rank, newest) for rank, newest in ((0, 1), (1, 2)))
    first.until("staged")
    second.until("staged")
    assert in_flight(LocalStore(folder)) == [2]
    first.kill()
    second.kill()
    died = time.monotonic()
    while in_flight(LocalStore(folder)):
        assert time.monotonic() - died < ORPHAN_S + SOON_S, "it is waited for until the deadline"
        time.sleep(0.02)
    # Its vault writes that down after it has let go of the save.
    records = (one.event for one in journal.follow(f"{folder}.journal", timeout_s=SOON_S))
    assert next(one.step for one in records if isinstance(one, journal.SaveFailed)) == 2
    with Checkpointer(folder, rank=0, world=1, journal=False) as ckpt:
        assert ckpt.steps() == [1]
