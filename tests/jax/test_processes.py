"""Several real JAX processes save one tree together, and other numbers of them load it."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.format import read_index, read_manifest, step_folder
from holdfast.storage import LocalStore
from tests.checkpoint.children import Child, Children
from tests.checkpoint.folder import check_clean

pytestmark = pytest.mark.process


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def world(children: Children, size: int, root: Path, *actions: str) -> list[Child]:
    port = free_port()
    return [
        children.python("-m", "tests.jax.worker", port, rank, size, root, *actions) for rank in range(size)
    ]


def finish(workers: list[Child]) -> list[list[dict[str, object]]]:
    """What each worker reported; all must have ended well."""
    lines = [reported(worker) for worker in workers]
    for worker in workers:
        worker.tell("leave")
        assert worker.end() == 0, worker.errors()
    return lines


def reported(worker: Child) -> list[dict[str, object]]:
    """What a worker reports until it has closed its checkpointer."""
    seen: list[dict[str, object]] = []
    while (line := worker.line()) != {"saw": "closed"}:
        assert line is not None, worker.errors()
        seen.append(line)
    return seen


def check_written_once(root: Path, step: int, parts: int) -> None:
    """Every element of every array lies in exactly one part, and all ranks wrote their share."""
    store = LocalStore(root)
    folder = step_folder(step)
    manifest = read_manifest(store, folder)
    indexes = [read_index(store, folder, manifest, part.part) for part in manifest.parts]
    assert len(indexes) == parts
    total = 0
    for entry in manifest.arrays:
        written = np.zeros(entry.shape, np.int32)
        for index in indexes:
            for piece in index.slices:
                if piece.name == entry.name:
                    box = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
                    written[box] += 1
        assert (written == 1).all(), entry.name
        total += entry.nbytes
    assert manifest.nbytes == total == sum(index.nbytes for index in indexes)
    sizes = [index.nbytes for index in indexes]
    assert max(sizes) - min(sizes) < 0.1 * total


def test_any_number_of_processes_to_any_other(children: Children, root: Path) -> None:
    loaded = {"saw": "loaded", "right": True}
    assert finish(world(children, 2, root, "save:1")) == [[{"saw": "saved", "step": 1}]] * 2
    check_written_once(root, 1, parts=2)
    expected = [{**loaded, "step": 1}, {"saw": "saved", "step": 2}]
    assert finish(world(children, 3, root, "load:1", "save:2")) == [expected] * 3
    check_written_once(root, 2, parts=3)
    expected = [{**loaded, "step": 2}, {**loaded, "step": 1}, {"saw": "saved", "step": 3}]
    assert finish(world(children, 1, root, "load:2", "load:1", "save:3")) == [expected]
    children.await_all_ended()
    check_clean(root)
    with Checkpointer(root, journal=False) as ckpt:
        assert [ckpt.verify(step) for step in ckpt] == [[], [], []]


@pytest.mark.parametrize(
    ("site", "committed"),
    [
        # Its vault knows nothing of the save: the deadline names the rank.
        pytest.param("trainer.save.begin", False, marks=pytest.mark.full),
        pytest.param("trainer.stage.block", False, marks=pytest.mark.full),  # its vault withdraws for it
        ("trainer.stage.done", True),  # staged: its vault votes for it
    ],
)
def test_one_rank_killed_in_mid_save(site: str, committed: bool, children: Children, root: Path) -> None:
    started = time.monotonic()
    workers = world(children, 2, root, "save:1", f"arm:1:{site}:kill", "save:2")
    other, killed = workers
    other.until("saved", step=1)
    line = other.until("saved" if committed else "failed", step=2)
    assert killed.end() == -signal.SIGKILL
    other.until("closed")
    other.tell("leave")
    assert other.end() == 0, other.errors()
    assert time.monotonic() - started < 120.0
    if not committed:
        assert "rank 1" in line["message"]
        assert line["error"] == "AgreementError"
    children.await_all_ended()
    with Checkpointer(root, journal=False) as ckpt:
        assert ckpt.steps() == ([1, 2] if committed else [1])
        assert [ckpt.verify(step) for step in ckpt] == [[]] * len(ckpt.steps())
    # A run of another size starts from there and cleans what was left.
    step = 2 if committed else 1
    (seen,) = finish(world(children, 1, root, f"load:{step}", "save:9"))
    assert seen[0]["right"]
    children.await_all_ended()
    check_clean(root)
