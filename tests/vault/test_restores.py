"""Staged state from the memory of a vault: also after the trainer's death, and never half of two saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import Checkpointer, faults
from holdfast.errors import HandshakeError, HoldfastError, TransferError, UsageError
from holdfast.transfer import Endpoint
from holdfast.transfer.borrowing import Intake
from holdfast.vault import restore
from holdfast.vault.catalogue import CATALOGUE, ENTRIES, decode_catalogue
from holdfast.vault.offers import state_name
from tests.transfer.pools import Pool
from tests.vault.nodes import await_offered

pytestmark = pytest.mark.process

TOKEN = b"a token of the run, for tests"


def state(step: int, size: int = 1 << 20) -> dict[str, Any]:
    return {
        "w": np.full(size, step, np.uint32),
        "b": np.arange(5, dtype=np.float32) * step,
        "empty": np.zeros((0, 3), np.int8),
        "step": step,
    }


def is_step(tree: dict[str, Any], step: int) -> bool:
    wanted = state(step, tree["w"].size)
    return tree["step"] == step and all(np.array_equal(tree[key], wanted[key]) for key in ("w", "b", "empty"))


def save(ckpt: Checkpointer, step: int) -> None:
    """Save a step; it is durable and offered when this returns."""
    ckpt.save(step, state(step)).durable()
    await_offered(ckpt.vault_address, step, "run")


def test_the_newest_staged_state_comes_from_the_vault(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, serve="127.0.0.1:0", token=TOKEN, slots=2) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            found = restore([ckpt.vault_address], token=TOKEN)
            assert found.step == step
            assert is_step(found.tree, step)
        found = restore([ckpt.vault_address], state(0), step=2, token=TOKEN)  # it is in the other slot
        assert is_step(found.tree, 2)


def test_parts_of_several_ranks_make_one_state(tmp_path: Path) -> None:
    """Two ranks, two vaults: the restore takes from each what it holds."""
    shared = {"w": np.arange(8 << 20, dtype=np.uint8), "b": np.arange(5.0)}
    members = [
        Checkpointer(tmp_path, rank=rank, world=2, serve="127.0.0.1:0", token=TOKEN) for rank in (0, 1)
    ]
    try:
        saves = [threading.Thread(target=lambda c=c: c.save(7, shared).durable()) for c in members]
        for one in saves:
            one.start()
        for one in saves:
            one.join(60)
        for member in members:
            await_offered(member.vault_address, 7, "run")
        found = restore([member.vault_address for member in members], shared, token=TOKEN)
        assert found.step == 7
        assert all(np.array_equal(found.tree[key], shared[key]) for key in shared)
        with pytest.raises(HoldfastError):  # one of them has not all of it
            restore([members[0].vault_address], shared, token=TOKEN)
    finally:
        ends = [threading.Thread(target=member.close) for member in members]
        for end in ends:
            end.start()
        for end in ends:
            end.join(60)


_TRAINER = """
import sys, numpy as np
from holdfast import Checkpointer, faults
from tests.vault.test_restores import TOKEN, state
ckpt = Checkpointer(sys.argv[1], serve="127.0.0.1:0", token=TOKEN)
ckpt.save(41, state(41)).staged(60)
print(ckpt.vault_address, ckpt.vault_pid, flush=True)
sys.stdin.read()
"""


def test_a_dead_trainers_state_is_there_for_the_next_one(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        address, pid = trainer.stdout.readline().split()
        trainer.send_signal(signal.SIGKILL)
    try:
        await_offered(address, 41, "run")
        found = restore([address], state(0), token=TOKEN)
        assert found.step == 41
        assert is_step(found.tree, 41)
    finally:
        os.kill(int(pid), signal.SIGKILL)  # it would go on offering for half a minute


def test_nobody_takes_half_of_two_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot: a save begins in it while somebody reads from it, who gets nothing rather than a mixture."""
    monkeypatch.setenv(faults.ENV, "transfer.chunk.sent:delay=0.01")  # for the vault: reading takes a while
    with (
        Checkpointer(tmp_path, serve="127.0.0.1:0", token=TOKEN) as ckpt,
        Endpoint(token=TOKEN, transports=["tcp"], chunk_bytes=64 << 10, streams=1) as endpoint,
    ):
        save(ckpt, 1)
        listed = endpoint.prepare(ckpt.vault_address, CATALOGUE).run(deadline_s=30).result().tree[ENTRIES]
        (held,) = decode_catalogue(listed)
        plan = endpoint.prepare(held.address, state_name(held.attempt))  # saves are its versions, from 1
        for step in range(2, 6):
            running = plan.run(version=step - 1, deadline_s=30)
            ends = time.monotonic() + 30
            while not running.progress()[0]:
                assert time.monotonic() < ends
                time.sleep(0.001)
            save(ckpt, step)
            try:
                found = running.result(30)
            except TransferError:
                pass  # cut off: its memory is needed
            else:
                assert is_step(found.tree, step - 1)
                del found
        assert is_step(plan.run(deadline_s=30).result().tree, 5)


def test_what_goes_to_a_device_is_read_out_of_the_vaults_own_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(monkeypatch)
    with Checkpointer(tmp_path, serve="127.0.0.1:0", token=TOKEN, slots=2) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            found = restore([ckpt.vault_address], state(0), token=TOKEN)
            assert found.step == step
            assert is_step(found.tree, step)
            assert (pool.placed, pool.closed) == (3 * step, step)


def test_a_save_into_memory_that_is_being_read_does_not_wait_and_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot, which is lent to a reader when the next save begins in it."""
    Pool(monkeypatch)
    reading, saved = threading.Event(), threading.Event()
    run = Intake.run

    def held(self: Intake, *args: Any) -> None:
        run(self, *args)
        reading.set()
        assert saved.wait(30)

    monkeypatch.setattr(Intake, "run", held)
    failed: list[BaseException] = []

    def restoring() -> None:
        try:
            restore([ckpt.vault_address], state(0), token=TOKEN)
        except HoldfastError as error:
            failed.append(error)

    with Checkpointer(tmp_path, serve="127.0.0.1:0", token=TOKEN) as ckpt:
        save(ckpt, 1)
        reader = threading.Thread(target=restoring)
        reader.start()
        assert reading.wait(30)
        ckpt.save(2, state(2)).durable(30)
        saved.set()
        reader.join(30)
        (error,) = failed
        assert "revoked while it was read" in str(error)
        await_offered(ckpt.vault_address, 2, "run")
        found = restore([ckpt.vault_address], state(0), token=TOKEN)
        assert is_step(found.tree, 2)


def test_a_vault_asks_for_the_token(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, serve="127.0.0.1:0", token=TOKEN) as ckpt:
        ckpt.save(1, state(1)).staged()
        with pytest.raises(HandshakeError):
            restore([ckpt.vault_address], token=b"the token of another run")


def test_a_replaced_vault_offers_too(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, serve="127.0.0.1:0", token=TOKEN) as ckpt:
        save(ckpt, 1)
        first = ckpt.vault_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        save(ckpt, 2)
        assert ckpt.vault_pid != first
        assert is_step(restore([ckpt.vault_address], token=TOKEN).tree, 2)


def test_serving_needs_a_vault(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a vault"):
        Checkpointer(tmp_path, serve="127.0.0.1:0", writer="thread")
