"""Several ranks save one step: all of them or none, and whoever is missing is named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer, SaveHandle
from holdfast.clock import Deadline
from holdfast.errors import AgreementError, HoldfastError, MissingRanksError
from tests.checkpoint.children import within
from tests.checkpoint.disks import Failing
from tests.checkpoint.folder import check_clean


def together(world: int, act: Callable[[int], Any]) -> list[Any]:
    """What `act(rank)` returned or raised on each rank, one thread each."""
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except HoldfastError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90.0)
        assert not thread.is_alive()
    return results


class Ranks:
    """The checkpointers of a run, in threads of one process."""

    def __init__(self, root: Path, world: int, **settings: Any) -> None:
        own = settings.pop("per_rank", [{}] * world)
        shared = {"writer": "thread", "journal": False, "deadline_s": 20.0, **settings}
        self.all = [
            Checkpointer(root, rank=rank, world=world, **{**shared, **own[rank]}) for rank in range(world)
        ]

    def save(self, step: int, trees: Callable[[int], Any], **options: Any) -> list[Any]:
        def act(rank: int) -> SaveHandle:
            handle = self.all[rank].save(step, trees(rank), **options)
            handle.durable(60.0)
            return handle

        return together(len(self.all), act)

    def close(self) -> None:
        together(len(self.all), lambda rank: self.all[rank].close(30.0))


def tree(value: int) -> dict[str, Any]:
    return {"x": np.full((60, 50_000), value, np.float32), "y": np.full(7, value), "step": value}


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_save_together(world: int, root: Path) -> None:
    ranks = Ranks(root, world)
    for step in (1, 2):
        handles = ranks.save(step, lambda rank, step=step: tree(step))  # type: ignore[misc]
        assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    for rank in range(world):
        found = ranks.all[rank].load(into=tree(0))
        assert (found["x"] == 2).all()
        assert found["step"] == 2
    ranks.close()
    with Checkpointer(root, journal=False) as ckpt:
        info = ckpt.info(2)
        assert info.num_parts == world
        assert info.nbytes == 60 * 50_000 * 4 + 7 * 8
        assert ckpt.verify(2) == []
        assert (ckpt.load()["x"] == 2).all()
    check_clean(root)


def test_a_rank_that_never_comes_is_named(root: Path) -> None:
    with Checkpointer(root, rank=0, world=3, writer="thread", deadline_s=0.3) as ckpt:
        with within(10.0), pytest.raises(MissingRanksError, match="ranks 1, 2 did not join") as caught:
            ckpt.save(1, tree(1))
        assert caught.value.ranks == (1, 2)
    late = Checkpointer(root, rank=1, world=3, writer="thread", deadline_s=0.3)
    with within(10.0), pytest.raises(MissingRanksError, match="rank 0 did not open"):
        late.save(1, tree(1))
    late.close()


@contextmanager
def impatient() -> Iterator[None]:
    """Have ballots waited for a second at most; a disk has all the time that it had."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.vault.commit.Deadline", lambda timeout_s: Deadline(min(timeout_s, 1.0)))
        yield


def test_a_rank_that_does_not_save_is_named(root: Path) -> None:
    ranks = Ranks(root, 2)
    handles = ranks.save(1, lambda rank: tree(1))
    assert all(isinstance(handle, SaveHandle) for handle in handles), handles
    with within(20.0), impatient():
        handle = ranks.all[0].save(2, tree(2))
        with pytest.raises(AgreementError, match="rank 1 did not vote"):
            handle.durable(20.0)
    assert ranks.all[0].steps() == [1]
    assert (ranks.all[0].load()["x"] == 1).all()
    ranks.close()


def test_a_rank_that_fails_aborts_the_step_for_all(root: Path) -> None:
    disk = Failing()
    ranks = Ranks(root, 2, per_rank=[{}, {"files": disk}])
    ranks.save(1, lambda rank: tree(1))
    disk.arm("reserve", 28)
    with within(15.0):
        first, second = ranks.save(2, lambda rank: tree(2))
    assert isinstance(first, AgreementError)
    assert "rank 1" in first.message
    assert "No space left" in first.message
    assert "No space left" in second.message
    assert ranks.all[0].steps() == [1]
    disk.disarm()
    results = ranks.save(3, lambda rank: tree(3))
    assert all(isinstance(handle, SaveHandle) for handle in results), results
    ranks.close()
    check_clean(root)


@pytest.mark.parametrize(
    "odd",
    [
        {"x": np.zeros((60, 50_000), np.float32), "y": np.zeros(8), "step": 1},
        {"x": np.zeros((60, 50_000), np.float32), "y": np.zeros(7), "step": 2},
        {"x": np.zeros((60, 50_000), np.float32), "z": np.zeros(7), "step": 1},
    ],
    ids=["shape", "scalar", "name"],
)
def test_ranks_with_different_trees_commit_nothing(odd: Any, root: Path) -> None:
    ranks = Ranks(root, 2)
    even = {"x": np.zeros((60, 50_000), np.float32), "y": np.zeros(7), "step": 1}
    results = ranks.save(1, lambda rank: odd if rank else even)
    assert all(isinstance(error, AgreementError) for error in results), results
    assert "ranks [1] saved a different tree" in results[0].message
    assert ranks.all[0].steps() == []
    ranks.close()


def test_a_wrong_tree_on_one_rank_does_not_hang_the_other(root: Path) -> None:
    ranks = Ranks(root, 2)
    ranks.save(1, lambda rank: tree(1))
    with within(15.0):
        first, second = ranks.save(2, lambda rank: {"x": object()} if rank else tree(2))
    assert isinstance(first, AgreementError)
    assert "rank 1" in first.message
    assert "cannot be stored" in second.message
    results = ranks.save(3, lambda rank: tree(3))
    assert all(isinstance(handle, SaveHandle) for handle in results), results
    ranks.close()


def test_ranks_replace_a_step_together(root: Path) -> None:
    ranks = Ranks(root, 2)
    ranks.save(1, lambda rank: tree(1))
    refused = ranks.save(1, lambda rank: tree(2))
    assert all(isinstance(error, HoldfastError) for error in refused)
    assert "already saved" in refused[0].message
    assert (ranks.all[0].load()["x"] == 1).all()
    ranks.save(1, lambda rank: tree(3), overwrite=True)
    assert (ranks.all[1].load()["x"] == 3).all()
    ranks.close()
    check_clean(root)


def test_a_new_launch_is_not_deceived_by_an_old_one(root: Path) -> None:
    for value in (1, 2, 3):
        ranks = Ranks(root, 2)
        results = ranks.save(value, lambda rank, value=value: tree(value))  # type: ignore[misc]
        assert all(isinstance(handle, SaveHandle) for handle in results), results
        ranks.close()
    assert Checkpointer(root, journal=False).steps() == [1, 2, 3]
    check_clean(root)
