"""What a run goes on from when the save that was under way will never be whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.format import SaveId
from holdfast.journal import Journal
from holdfast.storage import LocalStore
from holdfast.supervise.saving import RunSaver
from holdfast.vault.intents import announce
from tests.checkpoint.children import Children
from tests.vault.nodes import Node
from tests.vault.trainer import RUN, TOKEN

pytestmark = pytest.mark.process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    children = Children(tmp_path)
    node = Node(children, tmp_path, "n")
    node.start()
    yield node
    children.end_all()


def test_nobody_waits_for_a_save_that_lacks_the_part_of_a_dead_worker(node: Node, tmp_path: Path) -> None:
    """Rank 1 has staged step 2 and its vault waits for rank 0, which died before its vault knew of it."""
    folder = tmp_path / "ckpt"
    state = {"w": np.arange(8.0)}
    with Checkpointer(folder, writer="thread", rank=0, world=1, journal=False) as ckpt:
        ckpt.save(1, state).durable(60.0)
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
