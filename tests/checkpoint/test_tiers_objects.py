"""A folder with a mirror in an object store: outages, lost answers, a kill in the middle of an upload."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer, Mirror, SaveHandle
from holdfast.errors import DeadlineError, StorageError
from holdfast.format import MANIFEST
from holdfast.journal import MirrorFailed, StepMirrored
from holdfast.storage import opened
from tests.checkpoint import trainer
from tests.checkpoint.children import Children, await_end, await_state
from tests.checkpoint.folder import damage, events, part_file
from tests.storage.objects import FaultyStore, status
from tests.vault.nodes import await_that

WAIT_S = 30.0
SIZE = 9 << 20  # two pieces of an upload


def check_whole(root: Path, url: str, step: int) -> None:
    """Fail unless the step lies there byte for byte."""
    store = opened(url)
    folder = f"step-{step:08d}"
    for path in (root / folder).iterdir():
        assert store.read(folder, path.name, max_bytes=1 << 30) == path.read_bytes()
    assert len(store.names(folder)) == len(list((root / folder).iterdir()))


def says_why(handle: SaveHandle) -> bool:
    """Whether a save that is not on the mirror says that copying fails."""
    with pytest.raises(DeadlineError) as caught:
        handle.mirrored(0.1)
    return "copying fails" in caught.value.message


def test_a_store_that_fails_comes_back_and_restores_a_lost_folder(
    root: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.mirror_plan.RETRY_S", 0.05)
    url = faulty.url("run")
    # Gives up an outage soon, and has all the time for a request that is only slow.
    mirror = Mirror(url, keep=2, options=faulty.options(timeout_s=WAIT_S, retry_s=0.5))
    # Passing trouble, which the store's own retries cover; then an answer that is lost after the commit.
    faulty.fail("PUT", "safetensors", status(500), times=1)
    faulty.fail("PUT", MANIFEST, status(500, after=True), times=1)
    with Checkpointer(root, mirror=mirror, writer="thread") as ckpt:
        ckpt.save(1, trainer.state(1, SIZE)).mirrored(WAIT_S)
        check_whole(root, url, 1)
        # An outage longer than that.
        faulty.fail("PUT", "step-00000002", status(503, "SlowDown"), times=10_000)
        handle = ckpt.save(2, trainer.state(2, SIZE))
        handle.durable(WAIT_S)
        await_that(lambda: says_why(handle))
        assert ckpt.steps() == [1, 2]
        assert not opened(url).exists("step-00000002", MANIFEST)
        faulty.proxy.heal()
        for step in (2, 3):
            (handle if step == 2 else ckpt.save(step, trainer.state(step, SIZE))).mirrored(WAIT_S)
    check_whole(root, url, 3)
    assert events(root, MirrorFailed)
    assert [event.step for event in events(root, StepMirrored)] == [1, 2, 3]
    damage(part_file(root, 3), 5)
    with Checkpointer(root, mirror=mirror) as ckpt:
        assert trainer.same(ckpt.load(), 3, SIZE)
        assert ckpt.last_load is not None
        assert ckpt.last_load.repaired == 1
    shutil.rmtree(root)
    with Checkpointer(root, mirror=mirror) as ckpt:
        assert ckpt.steps() == [2, 3]  # the mirror keeps two
        assert trainer.same(ckpt.load(init=lambda: pytest.fail("it began again")), 3, SIZE)
        faulty.fail("GET", "list-type", status(503, "SlowDown"), times=10_000)
        with pytest.raises(StorageError):
            ckpt.load(init=lambda: pytest.fail("it began again"))


@pytest.mark.process
@pytest.mark.full
def test_a_vault_killed_in_an_upload_leaves_nothing_behind(
    root: Path, faulty: FaultyStore, children: Children
) -> None:
    url = faulty.url("run")
    # Large enough for an upload of several requests.
    options = ["--size", 64 << 20]
    env = {faults.ENV: "mirror.block:stop@6"}
    child = children.python("-m", "tests.vault.mirroring", root, url, *options, **env)
    vault = child.until("ready")["vault"]
    await_state(vault, "T")
    child.kill()
    child.end()
    os.kill(vault, signal.SIGKILL)
    await_end(vault)
    assert not opened(url).exists("step-00000001", MANIFEST)
    again = children.python("-m", "tests.vault.mirroring", root, url, *options, "--first", 2, "--steps", 1)
    assert again.end() == 0, again.errors()
    children.await_all_ended()
    for step in (1, 2):
        check_whole(root, url, step)
    assert opened(url).uploads() == []
    with Checkpointer(url, journal=False, writer="thread") as ckpt:
        assert [ckpt.verify(step) for step in ckpt] == [[], []]
