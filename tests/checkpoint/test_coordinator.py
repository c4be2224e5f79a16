"""Several ranks agree on their saves through a real coordinator, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import Checkpointer, SaveHandle
from holdfast.coord.client import CoordClient
from holdfast.errors import AgreementError, MissingRanksError, UnreachableError, UsageError
from tests.checkpoint.children import within
from tests.checkpoint.folder import check_clean
from tests.checkpoint.test_ranks import Ranks, impatient, together, tree
from tests.coord.coordinator_process import CoordinatorProcess
from tests.vault.nodes import await_that

TOKEN = b"a token of a test run"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path / "coord", token=TOKEN) as coordinator:
        yield coordinator


def ranks_of(root: Path, coordinator: CoordinatorProcess, **settings: Any) -> Ranks:
    return Ranks(root, 2, coordinator=coordinator.address, token=TOKEN, **settings)


def keys(coordinator: CoordinatorProcess) -> set[str]:
    """The topics and sessions of checkpoints that the coordinator holds records of."""
    with CoordClient(coordinator.address, token=TOKEN) as client:
        return {key.split("/", 2)[2] for key in client.scan("ckpt/")}


@pytest.mark.process
@pytest.mark.parametrize("writer", ["thread", "vault"])
def test_ranks_save_together(writer: str, root: Path, coordinator: CoordinatorProcess) -> None:
    ranks = ranks_of(root, coordinator, writer=writer)
    for step in (1, 2, 3):
        handles = ranks.save(step, lambda rank, step=step: tree(step))  # type: ignore[misc]
        assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    left = {key.split("/")[1] for key in keys(coordinator) if key.startswith("topic/")}
    assert all(topic.startswith("3.") for topic in left), "the ballots of earlier steps are freed"
    ranks.close()
    with Checkpointer(root, journal=False) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        assert ckpt.verify(3) == []
        assert (ckpt.load()["x"] == 3).all()
    assert not (root / ".holdfast" / "agreement").exists()
    check_clean(root)
    with CoordClient(coordinator.address, token=TOKEN) as client:
        # Nobody waits long for its goodbye to be heard.
        await_that(lambda: client.status().sessions == 1, "a connection of a checkpointer or vault is left")


@pytest.mark.process
def test_the_coordinator_is_killed_during_the_saves(root: Path, coordinator: CoordinatorProcess) -> None:
    ranks = ranks_of(root, coordinator, writer="vault", deadline_s=60.0)
    ranks.save(0, lambda rank: tree(0))

    def trouble() -> None:
        coordinator.kill()
        coordinator.start()

    for step in range(1, 9):
        killer = threading.Timer(0.03 * step, trouble)  # once in each save, at another moment of it
        killer.start()
        handles = ranks.save(step, lambda rank, step=step: tree(step))  # type: ignore[misc]
        killer.join(60.0)
        assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    ranks.close()
    with Checkpointer(root, journal=False) as ckpt:
        assert ckpt.steps()[-1] == 8
        assert ckpt.verify(8) == []
    check_clean(root)


@pytest.mark.process
def test_a_vault_is_killed_and_its_successor_agrees(root: Path, coordinator: CoordinatorProcess) -> None:
    ranks = ranks_of(root, coordinator, writer="vault", deadline_s=60.0)
    ranks.save(1, lambda rank: tree(1))
    pid = ranks.all[1].vault_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    handles = ranks.save(2, lambda rank: tree(2))
    assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    ranks.close()
    assert Checkpointer(root, journal=False).steps() == [1, 2]
    check_clean(root)


@pytest.mark.process
def test_a_rank_that_does_not_save_is_named(root: Path, coordinator: CoordinatorProcess) -> None:
    ranks = ranks_of(root, coordinator)
    handles = ranks.save(1, lambda rank: tree(1))
    assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    with within(20.0), impatient():
        handle = ranks.all[0].save(2, tree(2))
        with pytest.raises(AgreementError, match="rank 1 did not vote"):
            handle.durable(20.0)
    assert ranks.all[0].steps() == [1]
    ranks.close()
    again = ranks_of(root, coordinator)
    again.save(3, lambda rank: tree(3))
    assert not any(key.startswith("topic/2.") for key in keys(coordinator)), (
        "the next launch frees what is left"
    )
    again.close()


@pytest.mark.process
def test_a_rank_that_never_comes_is_named(root: Path, coordinator: CoordinatorProcess) -> None:
    options: dict[str, Any] = {"writer": "thread", "deadline_s": 1.0, "journal": False}
    ckpt = Checkpointer(root, rank=0, world=3, coordinator=coordinator.address, token=TOKEN, **options)
    with within(10.0), pytest.raises(MissingRanksError, match="ranks 1, 2 did not join"):
        ckpt.save(1, tree(1))
    ckpt.close()


@pytest.mark.process
def test_two_folders_of_a_run_are_kept_apart(
    root: Path, tmp_path: Path, coordinator: CoordinatorProcess
) -> None:
    first, second = ranks_of(root, coordinator), ranks_of(tmp_path / "other", coordinator)
    both = together(2, lambda i: (first, second)[i].save(1, lambda rank: tree(i)))
    assert all(isinstance(handle, SaveHandle) for handles in both for handle in handles), both
    assert [(ranks.all[0].load()["x"] == i).all() for i, ranks in enumerate((first, second))] == [True, True]
    first.close()
    second.close()


@pytest.mark.process
def test_the_token_is_in_no_command_line_or_environment(root: Path, coordinator: CoordinatorProcess) -> None:
    ranks = ranks_of(root, coordinator, writer="vault")
    ranks.save(1, lambda rank: tree(1))
    for ckpt in ranks.all:
        for file in ("cmdline", "environ"):
            assert TOKEN not in Path(f"/proc/{ckpt.vault_pid}/{file}").read_bytes()
    ranks.close()


def test_a_coordinator_that_is_not_there_is_said_at_the_first_save(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.coord.coord_agreement._CALL_S", 1.0)  # a restart is waited for longer
    with pytest.raises(UsageError, match="is no address"):
        Checkpointer(root, coordinator="somewhere")
    ckpt = Checkpointer(
        root, rank=0, world=2, coordinator=f"unix:{tmp_path}/none", writer="thread", deadline_s=0.2
    )
    with pytest.raises(UnreachableError, match="no coordinator at"):
        ckpt.save(1, tree(1))
    ckpt.close()
