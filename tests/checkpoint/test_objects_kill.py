"""Real kills amid an upload to an object store: nothing half-visible, nothing left, the next save works."""

from __future__ import annotations

import os
import signal

import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer, in_flight
from holdfast.storage import opened
from tests.checkpoint import trainer
from tests.checkpoint.children import Child, Children, await_end
from tests.checkpoint.test_objects import check_whole, checkpointer
from tests.storage.objects import FaultyStore, Stall

pytestmark = pytest.mark.process

SIZE = 9 << 20
"""Two pieces of an upload."""


def started(children: Children, url: str, *arguments: object, **environment: str) -> Child:
    return children.python("-m", "tests.checkpoint.trainer", url, "--size", SIZE, *arguments, **environment)


def check_loads(url: str, step: int) -> None:
    with Checkpointer(url, writer="thread", rank=0, world=1) as ckpt:
        tree = ckpt.load()
        assert ckpt.last_load is not None
        assert ckpt.last_load.step == step
        assert trainer.same(tree, step, SIZE)


def test_both_killed_amid_an_upload(children: Children, faulty: FaultyStore) -> None:
    url, stall = faulty.url("run"), Stall()
    store = opened(url)
    faulty.fail("PUT", "partNumber=2", stall, skip=1, times=100)
    child = started(children, url, "--steps", 2)
    vault = child.until("ready")["vault"]
    child.until("durable", step=1)
    assert stall.reached.wait(60.0)
    child.kill()
    child.end()
    os.kill(vault, signal.SIGKILL)
    await_end(vault)
    faulty.proxy.heal()
    stall.release()
    # Before anybody cleans: the step is not there, only the pieces that nobody can see.
    assert len(store.uploads()) == 1
    assert in_flight(store) == []
    check_loads(url, 1)
    with checkpointer(url) as ckpt:
        ckpt.save(2, trainer.state(2, SIZE)).durable(60.0)
        assert store.uploads() == []
    check_loads(url, 2)
    check_whole(url, [1, 2])


def test_the_vault_finishes_the_upload_of_a_killed_trainer(children: Children, faulty: FaultyStore) -> None:
    url, stall = faulty.url("run"), Stall()
    faulty.fail("PUT", "partNumber=1", stall)
    child = started(children, url, "--steps", 1)
    vault = child.until("ready")["vault"]
    child.until("staged", step=1)
    assert stall.reached.wait(60.0)
    child.kill()
    child.end()
    assert in_flight(opened(url)) == [1]
    stall.release()
    await_end(vault)
    check_loads(url, 1)
    with checkpointer(url) as ckpt:  # takes the dead trainer's lease, and gives it back
        ckpt.save(2, trainer.state(2, 1000)).durable(60.0)
    check_whole(url, [1, 2])


@pytest.mark.parametrize(
    "site",
    [
        "vault.block.written",
        pytest.param("vault.part.synced", marks=pytest.mark.full),
        pytest.param("vault.index.written", marks=pytest.mark.full),
        pytest.param("vault.decided", marks=pytest.mark.full),
        pytest.param("vault.manifest.created", marks=pytest.mark.full),
    ],
)
def test_a_killed_vault_is_replaced_and_its_save_finished(
    site: str, children: Children, faulty: FaultyStore
) -> None:
    url = faulty.url("run")
    child = started(children, url, "--steps", 1, "--arm-vaults", 1, **{faults.ENV: f"{site}:kill"})
    child.until("ready")
    seen = child.rest()
    assert child.end() == 0, child.errors()
    assert [line["step"] for line in seen if line["saw"] == "durable"] == [1]
    children.await_all_ended()
    with checkpointer(url) as ckpt:  # the dead vault's upload is given up at the next start
        ckpt.save(2, trainer.state(2, 1000)).durable(60.0)
    check_whole(url, [1, 2])
