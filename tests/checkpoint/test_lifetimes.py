"""However a run ends, the staged save is finished and no process, memory or temporary file remains."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.errors import DeadlineError
from holdfast.journal import SaveDurable, VaultDied
from tests.checkpoint.children import Child, Children, await_end, await_state, memfds, state_of, within
from tests.checkpoint.folder import check_clean, check_loads, check_next_start, events

pytestmark = pytest.mark.process
full = pytest.mark.full

# Makes the second save take a second and a half, so that the trainer ends before it does.
SLOW = {faults.ENV: "vault.block.written:delay=0.5@4+"}


def trainer(children: Children, root: Path, *options: object, **env: str) -> Child:
    return children.python("-m", "tests.checkpoint.trainer", root, *options, **env)


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("close", 0),
        pytest.param("exit", 0, marks=full),
        ("raise", 1),
        pytest.param("terminate", -signal.SIGTERM, marks=full),
    ],
)
def test_ways_to_end(then: str, status: int, children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 2, "--then", then)
    vault = child.until("ready")["vault"]
    assert child.end() == status, child.errors()
    await_end(vault)
    assert children.alive() == []
    assert ("the training failed" in child.errors()) == (then == "raise")
    check_loads(root, 2)
    check_clean(root)
    assert events(root, VaultDied) == []
    check_next_start(root, 10)


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("exit", 0),
        pytest.param("raise", 1, marks=full),
        pytest.param("terminate", -signal.SIGTERM, marks=full),
    ],
)
def test_ends_while_a_staged_save_is_written(then: str, status: int, children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 2, "--slots", 2, "--loose", "--then", then, **SLOW)
    vault = child.until("ready")["vault"]
    assert child.end() == status, child.errors()
    check_loads(root, 2)
    await_end(vault)
    assert children.alive() == []
    check_clean(root)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=full)])
def test_signal_while_a_staged_save_is_written(number: int, children: Children, root: Path) -> None:
    spec = {faults.ENV: "vault.part.synced:stop@2;vault.index.written:delay=0.5@2"}
    child = trainer(children, root, "--steps", 2, "--loose", "--then", "wait", **spec)
    vault = child.until("ready")["vault"]
    child.until("captured", step=2)  # by then the vault has been sent word that it is staged
    await_state(vault, "T")
    child.kill(number)
    child.end()
    assert state_of(vault) == "T"  # nobody ended it
    os.kill(vault, signal.SIGCONT)
    # A load at once waits for the orphan and finds what it was finishing.
    check_loads(root, 2)
    await_end(vault)
    assert children.alive() == []
    check_clean(root)


def test_load_waits_for_all_that_an_orphan_has_staged(children: Children, root: Path) -> None:
    """Two saves are staged and the first is being written: the second counts too."""
    spec = {faults.ENV: "vault.block.written:delay=0.5;vault.begin:delay=0.5@2"}
    child = trainer(children, root, "--steps", 2, "--slots", 2, "--loose", "--then", "wait", **spec)
    child.until("staged", step=2)
    child.kill()
    child.end()
    check_loads(root, 2)
    children.await_all_ended()


def test_ctrl_c_to_the_group_leaves_the_vault_alone(children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 2, "--loose", "--then", "wait", **SLOW)
    vault = child.until("ready")["vault"]
    child.until("staged", step=2)
    os.killpg(child.pid, signal.SIGINT)
    child.end()
    assert "KeyboardInterrupt" in child.errors()
    await_end(vault)
    assert [event.step for event in events(root, SaveDurable)] == [1, 2]
    check_loads(root, 2)
    check_clean(root)


def test_group_signals_straight_to_the_vault_do_not_end_it(children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 1, "--then", "wait")
    vault = child.until("ready")["vault"]
    child.until("waiting")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(vault, number)
    child.tell()
    child.until("closed")
    assert child.end() == 0
    await_end(vault)
    assert events(root, VaultDied) == []


def test_unstaged_save_is_dropped_with_its_trainer(children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 2, **{faults.ENV: "trainer.stage.block:stop@4"})
    vault = child.until("ready")["vault"]
    child.until("durable", step=1)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.kill()
    child.end()
    await_end(vault)
    check_loads(root, 1)
    check_clean(root)  # the vault itself removed what it had written


def test_stopped_vault_times_out_by_name_and_goes_on(children: Children, root: Path) -> None:
    tree = {"x": np.arange(1 << 20)}
    with Checkpointer(root) as ckpt:
        ckpt.save(1, tree).durable(60.0)
        vault = ckpt.vault_pid
        assert vault is not None
        os.kill(vault, signal.SIGSTOP)
        handle = ckpt.save(2, tree)
        with within(10.0), pytest.raises(DeadlineError, match=r"the save of step 2 is captured after 0\.2 s"):
            handle.durable(0.2)
        with pytest.raises(DeadlineError):
            ckpt.wait(0.1)
        os.kill(vault, signal.SIGCONT)
        handle.durable(60.0)
        assert ckpt.vault_pid == vault
    await_end(vault)
    assert children.alive() == []


def test_close_with_a_stuck_vault_ends_in_time(children: Children, root: Path) -> None:
    held = memfds()
    ckpt = Checkpointer(root)
    ckpt.save(1, {"x": np.arange(9)}).durable(60.0)
    vault = ckpt.vault_pid
    assert vault is not None
    os.kill(vault, signal.SIGSTOP)
    try:
        handle = ckpt.save(2, {"x": np.arange(9) + 1})
        with within(15.0), pytest.raises(DeadlineError, match="a vault finishes them alone"):
            ckpt.close(0.3)
    finally:
        os.kill(vault, signal.SIGCONT)
    assert handle.step == 2
    await_end(vault)
    # Staged was sent before the stop was lifted: the vault finished the save by itself.
    with Checkpointer(root, journal=False) as again:
        assert np.array_equal(again.load()["x"], np.arange(9) + 1)
    assert memfds() == held
    check_clean(root)


def test_killed_idle_vault_is_replaced(children: Children, root: Path) -> None:
    held = memfds()
    tree = {"x": np.arange(1 << 20)}
    with Checkpointer(root) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, tree).durable(60.0)
            vault = ckpt.vault_pid
            assert vault is not None
            os.kill(vault, signal.SIGKILL)
            ends = time.monotonic() + 30.0
            while ckpt.vault_pid == vault and time.monotonic() < ends:
                time.sleep(0.005)
            assert ckpt.vault_pid != vault
        ckpt.save(4, tree).durable(60.0)
    assert children.alive() == []
    assert memfds() == held
    with Checkpointer(root, journal=False) as again:
        assert again.steps() == [2, 3, 4]
        assert np.array_equal(again.load()["x"], tree["x"])


def test_unused_checkpointer_starts_and_leaves_nothing(children: Children, root: Path) -> None:
    with Checkpointer(root) as ckpt:
        assert ckpt.steps() == []
        assert ckpt.vault_pid is None
        assert ckpt.host_bytes == 0
    assert children.alive() == []
    assert not root.exists()


def test_thread_writer_starts_no_process_and_leaves_no_memory(children: Children, root: Path) -> None:
    held = memfds()
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, {"x": np.arange(100)}).durable(60.0)
        assert ckpt.vault_pid is None
        assert children.alive() == []
    assert memfds() == held


@pytest.mark.parametrize(
    "then", ["terminate", *(pytest.param(one, marks=full) for one in ("close", "exit", "raise"))]
)
def test_thread_writer_ends(then: str, children: Children, root: Path) -> None:
    child = trainer(children, root, "--writer", "thread", "--steps", 2, "--then", then)
    child.end()
    assert children.alive() == []
    check_loads(root, 2)
    check_next_start(root, 10)


def test_thread_writer_killed_in_mid_write(children: Children, root: Path) -> None:
    spec = "vault.block.written:kill@4"
    child = trainer(children, root, "--writer", "thread", "--steps", 2, **{faults.ENV: spec})
    assert child.end() == -signal.SIGKILL
    check_loads(root, 1)
    check_next_start(root, 10)


def test_vault_imports_no_framework(children: Children, root: Path) -> None:
    child = trainer(children, root, "--steps", 1, "--then", "wait")
    vault = child.until("ready")["vault"]
    child.until("waiting")
    mapped = Path(f"/proc/{vault}/maps").read_text()
    assert "jaxlib" not in mapped
    assert "libtorch" not in mapped
    child.tell()
    assert child.end() == 0
