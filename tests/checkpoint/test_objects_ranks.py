"""Several ranks, each with its vault, save one step to an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import SaveHandle
from tests.checkpoint.test_objects import check_whole, checkpointer
from tests.checkpoint.test_ranks import Ranks, tree
from tests.coord.coordinator_process import CoordinatorProcess
from tests.storage.objects import FaultyStore, reset, status

pytestmark = [pytest.mark.process, pytest.mark.full]
TOKEN = b"a token of a test run"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path / "coord", token=TOKEN) as coordinator:
        yield coordinator


@pytest.mark.parametrize("through", ["coordinator", "store"])
def test_ranks_with_vaults(through: str, faulty: FaultyStore, coordinator: CoordinatorProcess) -> None:
    url = faulty.url("run")
    settings = {"coordinator": coordinator.address, "token": TOKEN} if through == "coordinator" else {}
    ranks = Ranks(url, 2, writer="vault", deadline_s=60.0, keep=2, **settings)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        for fault in (status(500), reset()):
            faulty.fail("PUT", "safetensors", fault)
            faulty.fail("PUT", "manifest", fault)
        handles = ranks.save(step, lambda rank, step=step: tree(step))  # type: ignore[misc]
        assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    ranks.all[0].wait(60.0)
    ranks.close()
    with checkpointer(url) as ckpt:
        assert ckpt.info(3).num_parts == 2
        assert (ckpt.load(into=tree(0))["x"] == 3).all()
        ckpt.save(4, tree(4)).durable(60.0)  # cleans what the ranks left to agree with
    check_whole(url, [2, 3, 4])
