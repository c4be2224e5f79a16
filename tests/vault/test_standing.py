"""Vaults that outlive their trainers: what they keep, who may take it, and how they end."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.errors import HandshakeError, VaultError
from holdfast.journal import BlockBad, Journal, SaveDurable, SaveFailed, StepSkipped, follow, read
from holdfast.vault import Hello, ServeAt, VaultWriter, restore, restore_newest
from holdfast.vault.messages import REPLIES, MakeSlot, Welcome
from holdfast.wire import ConnectionLost, FrameSocket
from tests.checkpoint.children import TIMEOUT_S, Children, await_end, open_files
from tests.checkpoint.folder import check_clean
from tests.vault.nodes import Agent, Node, await_offered, await_that, newest
from tests.vault.trainer import RUN, SIZE, TOKEN, is_step, state

pytestmark = pytest.mark.process


@pytest.fixture
def node(children: Children, tmp_path: Path) -> Node:
    return Node(children, tmp_path, "node0")


def checkpointer(node: Node, root: Path, **options: Any) -> Checkpointer:
    settings = {"slots": 2, "serve": "127.0.0.1:0", "run": RUN, "token": TOKEN, "rank": 0, "world": 1}
    return Checkpointer(root, writer=node.path, **{**settings, **options})


def await_event(root: Path, *kinds: type, step: int | None = None) -> Any:
    """The first event of these kinds in the journal, of a step if one is given; awaited."""
    seen = (record.event for record in follow(root / "journal.jsonl", timeout_s=TIMEOUT_S))
    return next(one for one in seen if isinstance(one, kinds) and step in (None, getattr(one, "step", None)))


def took(node: Node, step: int, *more: Node, **options: Any) -> bool:
    """Whether a restore finds just this step, to the bit."""
    found = newest(node.address, *(one.address for one in more), into=state(0), **options)
    return found is not None and found[0] == step and is_step(found[1], step)


# ---- the trainer dies


def test_the_newest_staged_state_outlives_its_trainer(node: Node, root: Path) -> None:
    node.start()
    trainer = node.train(root)
    trainer.until("waiting")
    trainer.kill()
    trainer.end()
    node.await_steps(3)
    assert took(node, 3)
    assert restore([node.address], token=TOKEN, run=RUN).step == 3
    assert newest(node.address, min_step=4) is None
    assert len(node.slots()) == 2  # the state, and memory for the next trainer
    with pytest.raises(HandshakeError):
        restore([node.address], token=b"the token of another run", run=RUN)
    assert restore_newest([node.address], token=b"the token of another run", run=RUN) is None


def test_a_trainer_killed_while_it_captures_leaves_the_state_before(node: Node, root: Path) -> None:
    node.start()
    trainer = node.train(root, **{faults.ENV: "trainer.stage.block:kill@8"})
    assert trainer.end() == -signal.SIGKILL
    steps = [line["step"] for line in trainer.rest() if line["saw"] == "staged"]
    node.await_steps(steps[-1])
    assert took(node, steps[-1])
    await_event(root, SaveFailed, SaveDurable, step=steps[-1] + 1)  # what there was of it is gone
    check_clean(root)


@pytest.mark.parametrize("hit", [1, 2])
def test_a_trainer_killed_once_it_is_staged_has_saved(node: Node, root: Path, hit: int) -> None:
    node.start()
    trainer = node.train(root, **{faults.ENV: f"trainer.stage.done:kill@{hit}"})
    assert trainer.end() == -signal.SIGKILL
    node.await_steps(hit)
    assert took(node, hit)
    with Checkpointer(root) as disk:  # committed, too
        assert is_step(disk.load(), hit)


def test_a_state_is_taken_while_it_is_still_written_to_disk(node: Node, root: Path) -> None:
    node.start(**{faults.ENV: "vault.block.written:delay=60"})
    trainer = node.train(root, "--steps", 1, "--until", "staged")
    trainer.until("staged")
    trainer.kill()
    assert took(node, 1)
    assert Checkpointer(root).steps() == []
    trainer.end()


def test_a_save_that_is_committed_before_it_is_said_to_be_staged(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small state may be on disk before the trainer's last word arrives; it is offered all the same."""
    staged = VaultWriter.staged

    def late(self: VaultWriter, seq: int) -> None:
        await_that(lambda: seq not in self._pending)
        staged(self, seq)

    monkeypatch.setattr(VaultWriter, "staged", late)
    node.start()
    with checkpointer(node, root) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).durable(60)
        await_that(lambda: [one.step for one in node.entries()] == [1, 2])
    node.await_steps(2)
    assert took(node, 2)


def test_the_next_trainer_gets_the_same_memory(node: Node, root: Path) -> None:
    node.start()
    first = node.train(root)
    first.until("waiting")
    memory = node.slots()
    assert len(memory) == 2
    first.kill()
    first.end()
    node.await_steps(3)
    for begin in (4, 6):
        following = node.train(root, "--first", begin, "--steps", 2)
        following.until("waiting")
        assert node.slots() == memory
        following.kill()
        following.end()
        node.await_steps(begin + 1)
        assert took(node, begin + 1)
    assert node.slots() == memory


def test_a_trainer_that_left_in_good_order_leaves_its_state_too(node: Node, root: Path) -> None:
    node.start()
    with checkpointer(node, root) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    node.await_steps(2)
    assert took(node, 2)
    # A run that was set back saves an earlier step: then that is the newest state.
    with checkpointer(node, root) as ckpt:
        ckpt.save(1, state(1), overwrite=True).durable(60)
        await_offered(node.address, 1)
        assert took(node, 1)
    node.await_steps(1)


def test_k_states_are_kept_within_the_memory_limit(node: Node, root: Path) -> None:
    node.start("--keep-staged", 2, "--memory-limit", 80 << 20)
    with checkpointer(node, root, slots=3) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, state(step)).durable(60)
    node.await_steps(3, 4)
    assert len(node.slots()) == 3
    assert restore([node.address], token=TOKEN, run=RUN, step=3).step == 3
    with checkpointer(node, root, deadline_s=5.0) as ckpt:
        handle = ckpt.save(5, {"w": np.zeros(100 << 20, np.uint8)})
        with pytest.raises(VaultError, match="memory limit of 83,886,080"):
            handle.durable(5)
    assert node.entries() == ()  # they made room before that was given up


def test_a_trainer_that_lives_on_without_its_connection_cannot_spoil_what_is_kept(
    node: Node, tmp_path: Path
) -> None:
    """Its memory is neither kept nor lent: it could still write to it."""
    import socket

    from holdfast.vault.messages import MakeSlot

    node.start()
    hello = Hello(
        root=str(tmp_path / "r"),
        rank=0,
        world=1,
        agreement="solo",
        threads=1,
        journal=None,
        recycle=True,
        serve=ServeAt("127.0.0.1:0", RUN, TOKEN),
    )
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(node.path)
    frames: FrameSocket[Any] = FrameSocket(sock, REPLIES)
    frames.send(hello)
    welcome, _ = frames.receive(timeout_s=10)
    assert welcome == Welcome(node.pid, node.address, 2, 0)
    frames.send(MakeSlot(0, 1 << 20))
    for fd in frames.receive(timeout_s=10)[1]:
        os.close(fd)
    assert len(node.slots()) == 1
    frames.close()
    await_that(lambda: not node.slots())


def test_another_run_is_refused(node: Node, root: Path) -> None:
    node.start()
    with (
        checkpointer(node, root, run="other") as ckpt,
        pytest.raises(VaultError, match="offers the states of run 'demo', not of 'other'"),
    ):
        ckpt.save(1, state(1))


def await_quiet(node: Node) -> None:
    """Wait until the vault has no more descriptors and threads than one that just started, and its slots."""
    task = f"/proc/{node.pid}/task"
    await_that(lambda: len(open_files(node.pid)) <= 12 and len(os.listdir(task)) <= 6)


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.full)])
def test_nothing_piles_up_over_many_trainers(node: Node, root: Path, count: int) -> None:
    node.start()
    seen = []
    for number in range(1, count + 1):
        trainer = node.train(root, "--first", 2 * number, "--steps", 2, "--size", 1 << 20)
        trainer.until("waiting")
        trainer.kill()
        trainer.end()
        node.await_steps(2 * number + 1)
        seen.append(len(node.slots()))
    assert max(seen) <= 2, seen
    await_quiet(node)


def test_fifty_trainers_that_leave_in_good_order(node: Node, tmp_path: Path) -> None:
    node.start()
    seen = []
    for number in range(50):
        with checkpointer(node, tmp_path / "ckpt", keep=2) as ckpt:
            ckpt.save(number, {"x": np.full(1 << 16, number, np.uint8)}).durable(60)
        node.await_steps(number)
        seen.append(len(node.slots()))
    assert max(seen) <= 2, seen
    await_quiet(node)


# ---- several ranks


def test_the_parts_of_several_ranks_in_one_vault_and_in_two(
    children: Children, tmp_path: Path, node: Node, root: Path
) -> None:
    other = Node(children, tmp_path, "node1")
    node.start()
    other.start()
    whole = {"w": np.arange(8 << 20, dtype=np.uint8), "v": np.arange(6.0)}
    for step, second in ((1, node), (2, other)):
        places = [checkpointer(one, root, rank=at, world=2) for at, one in enumerate((node, second))]
        steps = [threading.Thread(target=lambda c=c, s=step: c.save(s, whole).durable(60)) for c in places]
        for thread in steps:
            thread.start()
        for thread in steps:
            thread.join(60)
        ends = [threading.Thread(target=one.close) for one in places]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join(60)
        found = newest(node.address, other.address, into=whole)
        assert found is not None
        assert found[0] == step
        assert all(np.array_equal(found[1][key], whole[key]) for key in whole)
    # Without the other vault, step 2 is not whole; rank 0's part of step 1 has made room for that of step 2.
    assert newest(node.address, into=whole) is None


# ---- the vault dies


def test_a_killed_vault_is_replaced_under_a_live_trainer(node: Node, root: Path) -> None:
    node.start()
    trainer = node.train(root, "--ask", "--steps", 3)
    for step in (1, 2):
        trainer.tell()
        trainer.until("durable", step=step)
    assert node.vault is not None
    node.vault.kill()
    node.vault.end()
    node.start()
    # What its slots hold is offered again, though nothing was saved since.
    await_that(lambda: [one.step for one in node.entries()] == [1, 2])
    trainer.tell()
    trainer.until("durable", step=3)
    trainer.kill()
    trainer.end()
    node.await_steps(3)
    assert took(node, 3)
    check_clean(root)


def test_a_vault_killed_in_the_middle_of_a_save_is_replaced(node: Node, root: Path) -> None:
    node.start(**{faults.ENV: "vault.block.written:kill@4"})
    trainer = node.train(root, "--steps", 2, "--until", "staged")
    assert node.vault is not None
    assert node.vault.end() == -signal.SIGKILL
    node.start()
    trainer.until("waiting")
    await_that(lambda: 2 in [one.step for one in node.entries()])  # handed over
    trainer.kill()
    trainer.end()
    node.await_steps(2)
    assert took(node, 2)
    with Checkpointer(root) as disk:
        assert is_step(disk.load(), 2)


def test_a_vault_that_dies_while_it_is_asked_for_memory_is_asked_again(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, send = threading.Event(), VaultWriter._send

    def watched(self: VaultWriter, message: object, fds: tuple[int, ...] = ()) -> None:
        send(self, message, fds)
        if isinstance(message, MakeSlot):
            asked.set()

    monkeypatch.setattr(VaultWriter, "_send", watched)
    monkeypatch.setattr("holdfast.vault.client.REATTACH_S", 60.0)
    node.start()
    with checkpointer(node, root) as ckpt, ThreadPoolExecutor(1) as trainer:
        ckpt.save(1, state(1)).durable(60)  # the next one needs the second slot
        os.kill(node.pid, signal.SIGSTOP)
        asked.clear()
        saving = trainer.submit(ckpt.save, 2, state(2))
        assert asked.wait(60)
        assert node.vault is not None
        node.vault.kill()
        node.vault.end()
        node.start()
        saving.result(60).durable(60)
        await_offered(node.address, 2)
        assert took(node, 2)
    assert Checkpointer(root).steps() == [1, 2]


def test_a_trainer_that_comes_while_its_vault_starts_waits_for_it(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.client.REATTACH_S", 60.0)
    with checkpointer(node, root) as ckpt, ThreadPoolExecutor(1) as trainer:
        saving = trainer.submit(ckpt.save, 1, state(1))
        node.start()
        saving.result(60).durable(60)


def test_a_trainer_goes_back_to_a_vault_that_was_gone_for_long(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.client.REATTACH_S", 1.0)
    node.start()
    with checkpointer(node, root) as ckpt:
        ckpt.save(1, state(1)).durable(60)
        assert node.vault is not None
        node.vault.kill()
        node.vault.end()
        with pytest.raises(VaultError):  # nobody started another
            ckpt.save(2, state(2)).durable(30)
        node.start()
        ckpt.save(3, state(3)).durable(60)
        await_offered(node.address, 3)
        assert took(node, 3)


def test_a_save_that_goes_back_to_a_vault_does_not_end_with_those_before_it(
    node: Node, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault is back as soon as it is given up, and before whoever gave it up has said so."""
    given_up, saved, replace = threading.Event(), threading.Event(), VaultWriter._replace

    def watched(self: VaultWriter, lost: ConnectionLost) -> bool:
        replaced = replace(self, lost)
        given_up.set()
        assert saved.wait(60)
        return replaced

    monkeypatch.setattr(VaultWriter, "_replace", watched)
    monkeypatch.setattr("holdfast.vault.client.REATTACH_S", 0.1)
    node.start()
    with checkpointer(node, root) as ckpt:
        ckpt.save(1, state(1)).durable(60)
        assert node.vault is not None
        node.vault.kill()
        node.vault.end()
        assert given_up.wait(60)
        node.start(**{faults.ENV: "vault.part.synced:delay=1"})
        handle = ckpt.save(2, state(2))
        saved.set()
        handle.durable(60)


def test_two_vaults_do_not_share_a_socket(node: Node, children: Children) -> None:
    node.start()
    second = children.python("-m", "holdfast.vault", "--listen", node.path)
    assert second.end() == 1
    assert "another vault serves at" in second.errors()
    assert node.entries() == ()


# ---- how it ends


def test_sigterm_makes_everything_staged_durable(node: Node, root: Path) -> None:
    vault = node.start(**{faults.ENV: "vault.block.written:delay=0.3"})
    trainer = node.train(root, "--steps", 2, "--until", "staged")
    trainer.until("staged", step=2)
    vault.kill(signal.SIGTERM)  # the trainer is still connected
    assert vault.end() == 0, vault.errors()
    assert node.gone()
    trainer.kill()
    trainer.end()
    with Checkpointer(root) as disk:
        assert disk.steps() == [1, 2]
        assert is_step(disk.load(), 2)
    check_clean(root)


def test_a_vault_waits_for_the_next_agent_and_ends_without_one(node: Node, root: Path) -> None:
    first = Agent(node)
    vault = node.start("--lease", node.lease, "--orphan-s", 1.0)
    trainer = node.train(root, "--steps", 1)
    trainer.until("waiting")
    trainer.kill()
    trainer.end()
    node.await_steps(1)
    first.die()
    second = Agent(node)  # at once: nothing that the vault does keeps it out
    with pytest.raises(AssertionError):
        await_end(vault.pid, 1.5)
    assert took(node, 1)
    second.die()
    await_end(vault.pid, 20.0)
    assert vault.end() == 0
    assert "no agent for 1 s" in vault.errors()
    assert node.gone()


def test_an_orphan_finishes_before_it_ends(node: Node, root: Path) -> None:
    agent = Agent(node)
    vault = node.start(
        "--lease", node.lease, "--orphan-s", 0.3, **{faults.ENV: "vault.block.written:delay=0.5"}
    )
    trainer = node.train(root, "--steps", 1, "--until", "staged")
    trainer.until("staged")
    trainer.kill()
    trainer.end()
    agent.die()
    assert vault.end() == 0
    assert node.gone()
    with Checkpointer(root) as disk:
        assert is_step(disk.load(), 1)


# ---- neighbours


def two_nodes(children: Children, tmp_path: Path) -> tuple[Node, Node]:
    return Node(children, tmp_path, "a"), Node(children, tmp_path, "b")


def test_a_lost_nodes_state_is_at_its_neighbour(children: Children, tmp_path: Path, root: Path) -> None:
    a, b = two_nodes(children, tmp_path)
    a.start()
    b.start("--neighbour", f"a=file:{a.path}.address")
    trainer = a.train(root)
    trainer.until("waiting")
    b.await_steps(3, origin="a")
    assert a.vault is not None
    for lost in (trainer, a.vault):
        lost.kill()
        lost.end()
    b.await_steps(3, origin="a")
    assert took(a, 3, b)
    assert took(b, 3)
    # The node comes back, with nothing: the copy stays until there is something newer.
    a.start()
    trainer = a.train(root, "--first", 4, "--steps", 1)
    trainer.until("waiting")
    b.await_steps(4, origin="a")


def test_a_neighbour_can_be_told_later(children: Children, tmp_path: Path, root: Path) -> None:
    from holdfast.vault import copy_from

    a, b = two_nodes(children, tmp_path)
    a.start()
    b.start()
    with checkpointer(a, root) as ckpt:
        ckpt.save(1, state(1)).staged(60)
        copy_from(b.path, "a", a.address)
        b.await_steps(1, origin="a")
        copy_from(b.path, "a", "")
        ckpt.save(2, state(2)).durable(60)
    assert took(a, 2, b)
    assert took(b, 1)
    with pytest.raises(VaultError, match="a neighbour has a name"):
        copy_from(b.path, "", "x")


def test_a_neighbour_killed_in_the_middle_of_a_copy(children: Children, tmp_path: Path, root: Path) -> None:
    a, b = two_nodes(children, tmp_path)
    a.start()
    neighbour = ("--neighbour", f"a=file:{a.path}.address")
    first = b.start(*neighbour, **{faults.ENV: "transfer.chunk.received:kill@2"})
    trainer = a.train(root, "--steps", 2)
    trainer.until("waiting")  # saves go on as if nothing were
    assert first.end() == -signal.SIGKILL
    b.start(*neighbour)
    b.await_steps(2, origin="a")
    assert a.vault is not None
    a.vault.kill()
    assert took(b, 2)


def test_the_staging_vault_killed_in_the_middle_of_a_copy(
    children: Children, tmp_path: Path, root: Path
) -> None:
    a, b = two_nodes(children, tmp_path)
    source = a.start(**{faults.ENV: "transfer.chunk.sent:kill@3"})
    b.start("--neighbour", f"a=file:{a.path}.address")
    trainer = a.train(root, "--ask", "--steps", 3)
    trainer.until("ready")
    trainer.tell()
    trainer.tell()
    assert source.end() == -signal.SIGKILL
    a.start()
    trainer.tell()
    trainer.until("waiting")
    b.await_steps(3, origin="a")
    assert took(b, 3)


# ---- damage


def test_a_damaged_state_is_found_and_an_older_one_taken(node: Node, root: Path) -> None:
    node.start("--keep-staged", 2)
    trainer = node.train(root, "--slots", 3, "--steps", 3)
    trainer.until("waiting")
    node.damage(3, SIZE)
    trainer.kill()
    trainer.end()
    node.await_steps(2)
    assert took(node, 2)
    bad = await_event(root, BlockBad)
    assert bad.arrays == ("w",)
    assert "step 3" in bad.file


def test_a_damaged_state_is_taken_from_the_neighbour(children: Children, tmp_path: Path, root: Path) -> None:
    a, b = two_nodes(children, tmp_path)
    a.start()
    b.start("--neighbour", f"a=file:{a.path}.address")
    trainer = a.train(root, "--steps", 2)
    trainer.until("waiting")
    b.await_steps(2, origin="a")
    a.damage(2, SIZE)
    trainer.kill()
    trainer.end()
    a.await_steps()
    assert took(a, 2, b)


def test_what_cannot_be_had_is_passed_over_in_writing(node: Node, root: Path, tmp_path: Path) -> None:
    """The vault dies in the middle of a restore: nothing else is there, and the journal says so."""
    node.start(**{faults.ENV: "transfer.chunk.sent:kill@1"})
    trainer = node.train(root, "--steps", 1)
    trainer.until("waiting")
    await_offered(node.address, 1)
    events = Journal(tmp_path / "events", component="test")
    assert newest(node.address, into=state(0), timeout_s=20.0, events=events) is None
    events.close(timeout_s=5.0)
    (skipped,) = [one.event for one in read(tmp_path / "events") if isinstance(one.event, StepSkipped)]
    assert skipped.step == 1
    assert "memory of vaults" in skipped.reason
