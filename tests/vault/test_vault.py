"""The vault process itself: slots, the protocol, and vaults that stand beside several trainers."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.saver import Saver
from holdfast.errors import HoldfastError, VaultDiedError, VaultError
from holdfast.vault import Hello, Outcome, Slot, VaultWriter, outcome_error
from holdfast.vault.messages import (
    REPLIES,
    Bye,
    Define,
    DropSlot,
    MakeSlot,
    Ready,
    Reply,
    SlotReady,
    Staged,
    Welcome,
)
from holdfast.wire import ConnectionLost, FrameSocket
from tests.checkpoint.children import Child, Children, await_end, memfds, open_files, within
from tests.checkpoint.folder import check_clean


def tree(value: int, size: int = 1 << 20) -> dict[str, Any]:
    return {"x": np.full(size, value, np.uint8)}


def loaded(ckpt: Checkpointer, step: int | None = None) -> int:
    (value,) = np.unique(ckpt.load(step=step)["x"])
    return int(value)


# ---- slots


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 1 << 20])
def test_slots(size: int) -> None:
    held = memfds()
    slot = Slot.make(size)
    assert slot.size >= max(size, 1)
    assert slot.size % 4096 == 0
    slot.populate()
    other = Slot.adopt(os.dup(slot.fd), slot.size)
    slot.view[0] = 7
    assert other.view[0] == 7
    slot.close()
    assert other.view[0] == 7  # the memory lives as long as anyone holds it
    other.close()
    assert memfds() == held


def test_a_slot_smaller_than_announced_is_refused() -> None:
    held = memfds()
    slot = Slot.make(4096)
    with pytest.raises(VaultError, match=r"has 4,096 bytes, 8,192 were announced"):
        Slot.adopt(os.dup(slot.fd), 8192)
    slot.close()
    assert memfds() == held


def test_slot_memory_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(VaultError, match="cannot make an arena slot"):
        Slot.make(1 << 62)


@final
class Stuck:
    """A process in a system call that not even SIGKILL interrupts."""

    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout_s: float) -> int:
        raise subprocess.TimeoutExpired("vault", timeout_s)


def test_a_vault_that_cannot_be_ended_is_given_up() -> None:
    writer = object.__new__(VaultWriter)
    writer._process = stuck = Stuck()  # type: ignore[assignment]
    assert writer._reap(0.0) == "no end 5 s after it was killed"
    assert stuck.killed


@pytest.mark.parametrize("call", ["socket.socketpair", "subprocess.Popen"])
def test_a_vault_that_cannot_be_started_is_a_clear_error(
    call: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets: list[socket.socket] = []
    pair = socket.socketpair

    def noted(*args: Any) -> tuple[socket.socket, socket.socket]:
        sockets.extend(made := pair(*args))
        return made

    def refuse(*args: object, **settings: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("holdfast.vault.client.socket.socketpair", noted)
    monkeypatch.setattr(f"holdfast.vault.client.{call}", refuse)
    ckpt = Checkpointer(root, rank=0, world=1)
    with pytest.raises(VaultDiedError, match="could not be started: Cannot allocate memory"):
        ckpt.save(1, tree(1))
    ckpt.close()
    assert [one.fileno() for one in sockets] == ([] if call == "socket.socketpair" else [-1, -1])
    assert not [name for name in open_files() if name.startswith(str(root))]


@pytest.mark.process
def test_saves_end_where_no_other_vault_can_be_started(
    root: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(root, rank=0, world=1) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        vault = ckpt.vault_pid
        assert vault is not None

        def refuse(*args: object, **settings: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr("holdfast.vault.client.subprocess.Popen", refuse)
        os.kill(vault, signal.SIGKILL)
        handle = ckpt.save(2, tree(2))
        with within(30.0), pytest.raises(VaultDiedError, match="could not be started"):
            handle.durable(60.0)
        with within(30.0):
            assert isinstance(ckpt.save(3, tree(3)).error, VaultDiedError)
    assert children.alive() == []


@pytest.mark.process
def test_a_save_that_is_given_up_is_told_while_nobody_has_to_wait_for_that(
    root: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that drops a slot has locked the slots, which whoever is told locks too, and then asks."""
    monkeypatch.setattr("holdfast.vault.client._MAX_LIVES", 1)
    done = Saver.done
    asked: list[bool] = []

    def ask(lock: threading.RLock) -> bool:
        free = lock.acquire(timeout=5.0)
        if free:
            lock.release()
        return free

    def told(self: Saver, seq: int, outcome: Outcome) -> None:
        assert isinstance(self._writer, VaultWriter)
        with ThreadPoolExecutor(1) as trainer:
            asked.append(trainer.submit(ask, self._writer._lock).result(60))
        done(self, seq, outcome)

    with Checkpointer(root, rank=0, world=1) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        vault = ckpt.vault_pid
        assert vault is not None
        monkeypatch.setattr(Saver, "done", told)
        os.kill(vault, signal.SIGSTOP)
        handle = ckpt.save(2, tree(2))
        os.kill(vault, signal.SIGKILL)
        with pytest.raises(VaultDiedError, match="1 vaults died while saving step 2"):
            handle.durable(60.0)
    assert asked == [True]


def test_outcomes_become_their_errors() -> None:
    for kind in ("OutOfSpaceError", "ReadOnlyError", "StepExistsError", "SaveError", "AgreementError"):
        error = outcome_error(Outcome(kind=kind, message="m", hint="h"))
        assert type(error).__name__ == kind
        assert (error.message, error.hint) == ("m", "h")
    assert isinstance(outcome_error(Outcome(kind="Nonsense", message="m")), HoldfastError)


# ---- a spawned vault


@pytest.mark.process
def test_vault_holds_only_what_it_needs(root: Path, children: Children) -> None:
    with open(__file__), Checkpointer(root) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        vault = ckpt.vault_pid
        assert vault is not None
        held = open_files(vault)
        assert len(memfds(vault)) > 0
        assert __file__ not in held
        assert not [name for name in held if name.endswith(".lock")]  # the lease is the trainer's
        status = Path(f"/proc/{vault}/status").read_text()
        assert f"NSsid:\t{vault}" in status or os.getsid(vault) == vault
    await_end(vault)


@pytest.mark.process
def test_vault_that_cannot_start_is_a_clear_error(
    root: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.ENV, "no.such.site:kill")
    with within(30.0), Checkpointer(root) as ckpt, pytest.raises(VaultError, match="did not start") as caught:
        ckpt.save(1, tree(1))
    assert "writer='thread'" in str(caught.value)
    assert children.alive() == []
    monkeypatch.delenv(faults.ENV)
    with Checkpointer(root) as again:
        again.save(1, tree(1)).durable(60.0)


# ---- a standing vault


def standing(children: Children, tmp_path: Path, **env: str) -> tuple[Child, str]:
    path = str(tmp_path / "vault.sock")
    child = children.python("-m", "holdfast.vault", "--listen", path, **env)
    await_socket(child, path)
    return child, path


def await_socket(child: Child, path: str) -> None:
    import time

    ends = time.monotonic() + 30.0
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
                return
            except OSError:
                assert time.monotonic() < ends
                assert child.process.poll() is None, child.errors()
        time.sleep(0.005)


@pytest.mark.process
def test_a_trainer_goes_before_its_vault(tmp_path: Path) -> None:
    """Also where processors are shared by session, and the trainer's own session stays as it was."""
    ours = Path("/proc/self/autogroup")
    before = ours.read_text() if ours.exists() else ""
    with Checkpointer(tmp_path, writer="vault") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        pid = ckpt.vault_pid
        assert pid is not None
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        if before and os.geteuid() == 0:  # others have to share ten changes a second with the whole machine
            assert Path(f"/proc/{pid}/autogroup").read_text().endswith(" nice 10\n")
            assert ours.read_text() == before


@pytest.mark.process
def test_standing_vault_serves_several_trainers(children: Children, tmp_path: Path) -> None:
    vault, path = standing(children, tmp_path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with Checkpointer(tmp_path / "a", writer=path) as a, Checkpointer(tmp_path / "b", writer=path) as b:
        handles = [ckpt.save(1, tree(value)) for value, ckpt in ((1, a), (2, b))]
        for handle in handles:
            handle.durable(60.0)
        assert (loaded(a), loaded(b)) == (1, 2)
        assert a.vault_pid is None
    assert vault.process.poll() is None
    # The memory of trainers that left is given back.
    with Checkpointer(tmp_path / "c", writer=path) as c:
        c.save(1, tree(3)).durable(60.0)
    assert_slots_freed(vault.pid)
    vault.kill(signal.SIGTERM)
    assert vault.end() == 0, vault.errors()
    assert not os.path.exists(path)


def assert_slots_freed(pid: int) -> None:
    import time

    ends = time.monotonic() + 30.0
    while memfds(pid):
        assert time.monotonic() < ends, memfds(pid)
        time.sleep(0.01)


@pytest.mark.process
def test_standing_vault_finishes_for_a_dead_trainer(children: Children, tmp_path: Path, root: Path) -> None:
    spec = {faults.ENV: "vault.block.written:delay=0.5@4+"}
    vault, path = standing(children, tmp_path, **spec)
    child = children.python(
        "-m", "tests.checkpoint.trainer", root, "--writer", path, "--steps", 2, "--loose", "--then", "wait"
    )
    child.until("staged", step=2)
    child.kill()
    child.end()
    with Checkpointer(root) as ckpt:
        ckpt.load()
        assert ckpt.last_load is not None
        assert ckpt.last_load.step == 2
    assert vault.process.poll() is None
    assert_slots_freed(vault.pid)
    check_clean(root)


@pytest.mark.process
def test_no_vault_to_attach_to(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.vault.client.REATTACH_S", 0.1)
    with Checkpointer(root, writer=str(tmp_path / "nothing")) as ckpt:
        with pytest.raises(VaultError, match="no vault answers at") as caught:
            ckpt.save(1, tree(1))
        assert "--listen" in str(caught.value)


@pytest.mark.process
def test_losing_a_standing_vault_fails_saves_and_never_hangs(
    children: Children, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.client.REATTACH_S", 1.0)
    vault, path = standing(children, tmp_path)
    ckpt = Checkpointer(root, writer=path, deadline_s=10.0)
    ckpt.save(1, tree(1)).durable(60.0)
    vault.kill()
    vault.end()
    for step in (2, 3, 4):
        with within(30.0), pytest.raises(VaultError):
            ckpt.save(step, tree(step)).durable(30.0)
    with within(30.0):
        ckpt.close(30.0)
    assert ckpt.steps() == [1]


# ---- the protocol


def talk(path: str) -> FrameSocket[Reply]:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    return FrameSocket(sock, REPLIES)


@pytest.mark.process
def test_a_peer_that_breaks_the_protocol_hurts_only_itself(
    children: Children, tmp_path: Path, root: Path
) -> None:
    vault, path = standing(children, tmp_path)
    good = Checkpointer(root, writer=path)
    good.save(1, tree(1)).durable(60.0)
    hello = Hello(
        root=str(tmp_path / "other"), rank=0, world=1, agreement="solo", threads=1, journal=None, recycle=True
    )
    garbage: list[list[object]] = [
        [{"type": "Nonsense"}],
        [b"\xff" * 100],
        [hello, hello],
        [MakeSlot(0, -5)],
        [MakeSlot(0, 1 << 62)],
        [hello, DropSlot(3)],
        [hello, Ready(9, 9), Staged(9)],
        [Define(msgspec.convert({"id": 1, "part": 0, "size": 9, "slices": [], "arrays": []}, _recipe()))],
        [hello, Bye()],
    ]
    for messages in garbage:
        frames = talk(path)
        try:
            for message in messages:
                frames.send(message)
            frames.send(Bye())
            while True:
                frames.receive(timeout_s=10.0)
        except ConnectionLost:
            pass
        finally:
            frames.close()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(path)
        raw.sendall(b"\xff\xff\xff\xff" + bytes(1000))
        raw.settimeout(10.0)
        assert raw.recv(1) == b""
    good.save(2, tree(2)).durable(60.0)
    good.close()
    assert vault.process.poll() is None
    assert_slots_freed(vault.pid)


def _recipe() -> Any:
    from holdfast.vault import Recipe

    return Recipe


@pytest.mark.process
def test_a_trainer_that_leaves_in_mid_frame(children: Children, tmp_path: Path) -> None:
    vault, path = standing(children, tmp_path)
    frames = talk(path)
    hello = Hello(
        root=str(tmp_path / "other"), rank=0, world=1, agreement="solo", threads=1, journal=None, recycle=True
    )
    frames.send(hello)
    assert isinstance(frames.receive(timeout_s=10.0)[0], Welcome)
    frames.send(MakeSlot(0, 1 << 20))
    reply, fds = frames.receive(timeout_s=10.0)
    assert isinstance(reply, SlotReady)
    for fd in fds:
        os.close(fd)
    assert memfds(vault.pid)
    os.write(frames.fileno(), b"\x10\x00\x00\x00half")
    frames.close()
    assert_slots_freed(vault.pid)
    assert vault.process.poll() is None
