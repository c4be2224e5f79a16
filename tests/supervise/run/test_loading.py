"""What a run goes on from: the newest state there is, and of two that are as new the nearer one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.errors import MismatchError, NoCheckpointError
from holdfast.format import SaveId
from holdfast.journal import Journal
from holdfast.storage import LocalStore
from holdfast.supervise.saving import RunSaver
from holdfast.vault.intents import announce
from tests.checkpoint.children import Children
from tests.vault.nodes import Node, await_that
from tests.vault.trainer import RUN, TOKEN, is_step, state

pytestmark = pytest.mark.process


@pytest.fixture
def vaultless(tmp_path: Path) -> Iterator[Node]:
    children = Children(tmp_path)
    yield Node(children, tmp_path, "n")
    children.end_all()


@pytest.fixture
def node(vaultless: Node) -> Node:
    vaultless.start()
    return vaultless


def test_nobody_waits_for_a_save_that_lacks_the_part_of_a_dead_worker(node: Node, tmp_path: Path) -> None:
    """Rank 1 has staged step 2 and its vault waits for rank 0, which died before its vault knew of it."""
    folder = tmp_path / "ckpt"
    with Checkpointer(folder, writer="thread", rank=0, world=1, journal=False) as ckpt:
        ckpt.save(1, {"w": np.arange(8.0)}).durable(60.0)
    intent = announce(LocalStore(folder), SaveId(RUN, 2, "a1"))
    with Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(folder, run=RUN, writer=node.path, token=TOKEN, events=events)
        began = time.monotonic()
        found = saver.load({"w": np.zeros(8)})
        saver.hand_over()
    intent.close()
    assert found is not None
    assert (found.steps, found.source) == (1, "disk")
    assert time.monotonic() - began < 15.0, "it waited for what will never come"


def test_the_newest_state_wins_and_of_two_as_new_the_one_in_memory(node: Node, tmp_path: Path) -> None:
    size, folder = 1 << 20, tmp_path / "ckpt"
    trainer = node.train(folder, "--steps", 3, "--size", size)
    trainer.until("waiting")
    assert Checkpointer(folder).steps() == [1, 2, 3]
    trainer.kill()
    trainer.end()
    with Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(folder, run=RUN, writer=node.path, token=TOKEN, events=events)
        for asked, step, source in ((None, 3, "vault"), (3, 3, "vault"), (1, 1, "disk")):
            found = saver.load(state(0, size), step=asked)
            assert found is not None
            assert (found.steps, found.source) == (step, source)
            assert is_step(found.state, step, size)
        with Checkpointer(folder, writer="thread", rank=0, world=1, journal=False) as ckpt:
            ckpt.save(4, state(4, size)).durable(60.0)
        found = saver.load(state(0, size))
        saver.hand_over()
    assert found is not None
    assert (found.steps, found.source) == (4, "disk")


def test_a_lost_folder_is_made_up_for_by_its_mirror(tmp_path: Path, children: Children) -> None:
    folder, size = tmp_path / "ckpt", 1 << 20
    with Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(folder, run=RUN, events=events, mirror=tmp_path / "mirror")
        saver.save(7, state(7, size), {})
        saver.hand_over(ends=True)
        for source in ("disk", "mirror"):
            found = saver.load(state(0, size))
            assert found is not None
            assert (found.steps, found.source) == (7, source)
            assert is_step(found.state, 7, size)
            saver.hand_over()
            shutil.rmtree(folder, ignore_errors=True)  # the mirror does not bring it back
    children.await_all_ended()


def test_who_hands_over_does_not_wait_for_the_disk(vaultless: Node, tmp_path: Path) -> None:
    """A worker that fails, or whose replica saves no more, leaves a staged save to the vault."""
    folder = tmp_path / "ckpt"
    vaultless.start(**{faults.ENV: "vault.block.written:delay=12"})
    with Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(folder, run=RUN, writer=vaultless.path, token=TOKEN, events=events)
        saver.save(1, {"w": np.arange(8.0)}, {})
        saver.hand_over()
        assert Checkpointer(folder).steps() == []
        await_that(lambda: Checkpointer(folder).steps() == [1])


def test_a_state_that_does_not_do_is_named_and_what_to_do_about_it(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    with Checkpointer(folder, writer="thread", rank=0, world=1, journal=False) as ckpt:
        ckpt.save(1, {"w": np.arange(8.0)}).durable(60.0)
    with Journal(tmp_path / "journal", component="test") as events:
        saver = RunSaver(folder, run=RUN, events=events)
        with pytest.raises(MismatchError, match=r"saved in .*/ckpt disagree in 2 places") as other:
            saver.load({"v": np.zeros(8)})
        for file in folder.glob("step-*/*.safetensors"):
            file.write_bytes(b"x" * file.stat().st_size)
        with pytest.raises(NoCheckpointError, match="can be loaded") as damaged:
            saver.load({"w": np.zeros(8)})
        saver.hand_over()
    assert "a name of its own: launch --run NAME" in str(other.value.hint)
    assert f"holdfast ckpt verify --all {folder}" in str(damaged.value.hint)
    # One error is enough: what it was made of says nothing more.
    assert other.value.__suppress_context__
    assert damaged.value.__suppress_context__
