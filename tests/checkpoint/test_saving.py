"""What `save` promises: captured, staged, durable; back-pressure, budget, and failures that are seen."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer, SaveState
from holdfast.checkpoint.saver import Saver
from holdfast.errors import (
    DeadlineError,
    HoldfastError,
    LeaseError,
    SaveError,
    StepExistsError,
    TreeError,
    UsageError,
)
from holdfast.journal import SaveCaptured, SaveDurable, SaveFailed, SaveSkipped, SaveStaged, SaveStarted
from tests.checkpoint.children import Children, memfds, within
from tests.checkpoint.disks import Gate
from tests.checkpoint.folder import check_clean, damage, events, part_file

WRITERS = [pytest.param("vault", marks=pytest.mark.process), "thread"]
MIB = 1 << 20


def tree(value: int, size: int = MIB) -> dict[str, Any]:
    return {"x": np.full(size, value, np.uint8), "step": value}


def loaded(ckpt: Checkpointer, step: int | None = None) -> int:
    """The value of the tree in a step."""
    found = ckpt.load(step=step)
    (value,) = np.unique(found["x"])
    assert found["step"] == value
    return int(value)


@contextmanager
def slow(root: Path, **settings: Any) -> Iterator[tuple[Checkpointer, Gate]]:
    """A checkpointer on a disk that waits for the test."""
    gate = Gate()
    ckpt = Checkpointer(root, writer="thread", files=gate, **settings)
    try:
        yield ckpt, gate
    finally:
        gate.open.set()
        ckpt.close(60.0)


# ---- captured, staged, durable


@pytest.mark.parametrize("writer", WRITERS)
def test_captured_is_a_copy(writer: str, root: Path) -> None:
    with Checkpointer(root, writer=writer) as ckpt:
        for step in (1, 2):
            state = tree(step, 20 * MIB)
            handle = ckpt.save(step, state)
            state["x"][:] = 99
            handle.durable(60.0)
            assert loaded(ckpt, step) == step


def test_states_come_in_order(root: Path) -> None:
    with slow(root) as (ckpt, gate):
        handle = ckpt.save(1, tree(1))
        handle.fence()
        handle.staged(60.0)
        assert handle.state is SaveState.STAGED
        assert handle.error is None
        assert not handle.skipped
        with (
            within(5.0),
            pytest.raises(DeadlineError, match=r"step 1 is staged after 0.05 s, not yet durable"),
        ):
            handle.durable(0.05)
        assert ckpt.steps() == []
        gate.open.set()
        handle.durable(60.0)
        assert repr(handle) == "SaveHandle(step=1, durable)"
    seen = [type(event) for event in events(root, SaveStarted, SaveCaptured, SaveStaged, SaveDurable)]
    assert seen == [SaveStarted, SaveCaptured, SaveStaged, SaveDurable]


@pytest.mark.process
def test_vault_tells_all_three_states(root: Path, children: Children) -> None:
    with Checkpointer(root) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
    check_all_states_are_told(root)


def check_all_states_are_told(root: Path) -> None:
    seen = [type(event) for event in events(root, SaveStarted, SaveCaptured, SaveStaged, SaveDurable)]
    assert sorted(kind.__name__ for kind in seen) == [
        "SaveCaptured",
        "SaveDurable",
        "SaveStaged",
        "SaveStarted",
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_save_that_is_durable_before_it_is_said_to_be_staged_tells_that_too(
    writer: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = Saver._staged

    def late(self: Saver, seq: int) -> None:
        assert self.wait(60.0)
        staged(self, seq)

    monkeypatch.setattr(Saver, "_staged", late)
    with Checkpointer(root, writer=writer) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
    check_all_states_are_told(root)


def test_a_handle_can_be_awaited(root: Path) -> None:
    async def save() -> None:
        with slow(root) as (ckpt, gate):
            handle = ckpt.save(1, tree(1))
            await handle.until_staged(60.0)
            with pytest.raises(DeadlineError):
                await handle.until_durable(0.05)
            # The event loop is free while a save is awaited.
            asyncio.get_running_loop().call_soon(gate.open.set)
            await asyncio.wait_for(_awaited(handle), 60.0)
            assert handle.state is SaveState.DURABLE

    async def _awaited(handle: Any) -> None:
        await handle

    asyncio.run(save())


def test_handles_can_be_shared_between_threads(root: Path) -> None:
    with slow(root) as (ckpt, gate):
        handle = ckpt.save(1, tree(1))
        done: list[bool] = []

        def wait() -> None:
            handle.durable(60.0)
            done.append(True)

        threads = [threading.Thread(target=wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        gate.open.set()
        for thread in threads:
            thread.join(60.0)
        assert done == [True] * 8


# ---- back-pressure and the budget


def test_busy_wait(root: Path) -> None:
    with slow(root, on_busy="wait") as (ckpt, gate):
        first = ckpt.save(1, tree(1))
        saved: list[Any] = []
        waiter = threading.Thread(target=lambda: saved.append(ckpt.save(2, tree(2))))
        waiter.start()
        assert gate.reached.acquire(timeout=60.0)
        waiter.join(0.2)
        assert waiter.is_alive()  # there is one slot, and it is taken
        assert ckpt.host_bytes < 2 * MIB
        gate.open.set()
        waiter.join(60.0)
        first.durable(60.0)
        saved[0].durable(60.0)
        assert ckpt.host_bytes < 2 * MIB
        assert [loaded(ckpt, step) for step in (1, 2)] == [1, 2]


def test_busy_wait_has_a_deadline(root: Path) -> None:
    with slow(root, on_busy="wait", deadline_s=0.3) as (ckpt, _):
        ckpt.save(1, tree(1))
        with within(10.0):
            handle = ckpt.save(2, tree(2))
        assert isinstance(handle.error, DeadlineError)
        assert "all 1 save slots were busy for 0.3 s" in handle.error.message
        with pytest.raises(DeadlineError):
            handle.durable(0.0)


def test_busy_skip(root: Path) -> None:
    with slow(root, on_busy="skip") as (ckpt, gate):
        ckpt.save(1, tree(1))
        with within(5.0):
            handle = ckpt.save(2, tree(2))
        assert handle.skipped
        assert handle.state is SaveState.SKIPPED
        handle.durable(0.0)  # there is nothing to wait for
        gate.open.set()
        ckpt.wait(60.0)
        ckpt.save(3, tree(3)).durable(60.0)
        assert ckpt.steps() == [1, 3]
    (skipped,) = events(root, SaveSkipped)
    assert skipped.step == 2


def test_busy_queue(root: Path) -> None:
    with slow(root, on_busy="queue") as (ckpt, gate):
        handles = [ckpt.save(step, tree(step)) for step in (1, 2)]
        assert 2 * MIB <= ckpt.host_bytes < 3 * MIB
        waiter = threading.Thread(target=lambda: handles.append(ckpt.save(3, tree(3))))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()  # twice the slots is the default bound of the queue
        gate.open.set()
        waiter.join(60.0)
        for handle in handles:
            handle.durable(60.0)
        assert ckpt.host_bytes < 3 * MIB
        assert [loaded(ckpt, step) for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.process
@pytest.mark.parametrize("settings", [{"slots": 2}, {"on_busy": "queue"}])
def test_a_second_slot_is_made_while_a_save_ends(
    settings: dict[str, Any], root: Path, children: Children
) -> None:
    """The end of the first save is reported while the caller waits for the second slot."""
    small, large = tree(1, 1000), tree(2, 200 * MIB)
    with Checkpointer(root, deadline_s=100.0, **settings) as ckpt:
        ckpt.save(1, small)
        with within(20.0):
            handle = ckpt.save(2, large)
        handle.durable(100.0)


def test_queue_is_bounded_by_bytes(root: Path) -> None:
    limit = 4 * MIB
    with slow(root, on_busy="queue", memory_limit=limit, deadline_s=0.3) as (ckpt, _):
        for step in (1, 2, 3):
            assert ckpt.save(step, tree(step)).error is None
        late = ckpt.save(4, tree(4))
        assert isinstance(late.error, DeadlineError)
        assert ckpt.host_bytes <= limit


@pytest.mark.parametrize("writer", WRITERS)
def test_a_state_over_budget_fails_and_training_goes_on(writer: str, root: Path) -> None:
    with Checkpointer(root, writer=writer, memory_limit=2 * MIB) as ckpt:
        handle = ckpt.save(1, tree(1, 3 * MIB))
        assert isinstance(handle.error, SaveError)
        assert "more than its budget of 2,097,152" in handle.error.message
        assert "memory_limit" in (handle.error.hint or "")
        assert ckpt.host_bytes == 0
        ckpt.save(2, tree(2)).durable(60.0)
        assert ckpt.host_bytes <= 2 * MIB
        assert ckpt.steps() == [2]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_tree_that_grows_gets_a_larger_slot(writer: str, root: Path) -> None:
    sizes = [MIB, 9 * MIB, 2 * MIB, 17 * MIB]
    with Checkpointer(root, writer=writer, memory_limit=18 * MIB) as ckpt:
        for step, size in enumerate(sizes):
            handle = ckpt.save(step, tree(step, size))
            handle.durable(60.0)
            assert size <= ckpt.host_bytes <= 18 * MIB
        assert loaded(ckpt) == 3


def test_prepare_takes_the_memory_before_the_first_save(root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.prepare(tree(0))
        taken = ckpt.host_bytes
        assert taken >= MIB
        assert ckpt.steps() == []
        ckpt.save(1, tree(1)).durable(60.0)
        assert ckpt.host_bytes == taken


# ---- failures


def test_failure_warns_by_default(root: Path, armed: None, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        faults.arm("vault.part.synced:eio")
        with caplog.at_level(logging.WARNING, "holdfast"):
            handle = ckpt.save(2, tree(2))
            with pytest.raises(HoldfastError, match="injected at vault"):
                handle.durable(60.0)
        assert handle.state is SaveState.FAILED
        wait_for(lambda: "the save of step 2 failed" in caplog.text)
        ckpt.save(3, tree(3)).durable(60.0)
        assert ckpt.steps() == [1, 3]
    assert [event.step for event in events(root, SaveFailed)] == [2]
    check_clean(root)


def test_failure_is_raised_at_the_next_call_if_asked(root: Path, armed: None) -> None:
    with Checkpointer(root, writer="thread", on_error="raise") as ckpt:
        faults.arm("vault.part.synced:eio")
        with pytest.raises(HoldfastError):
            ckpt.save(1, tree(1)).durable(60.0)
        wait_for(lambda: ckpt._saver is not None and ckpt._saver._failure is not None)
        with pytest.raises(SaveError, match=r"an earlier save failed: .*injected"):
            ckpt.save(2, tree(2))
        ckpt.save(2, tree(2)).durable(60.0)  # told once
    assert Checkpointer(root).steps() == [2]


def test_failure_is_raised_by_close_if_asked(root: Path, armed: None) -> None:
    ckpt = Checkpointer(root, writer="thread", on_error="raise")
    faults.arm("vault.part.synced:eio")
    ckpt.save(1, tree(1))
    with pytest.raises(SaveError, match="an earlier save failed"):
        ckpt.close()


def test_fence_after_a_failed_save_does_not_stop_training(root: Path, armed: None) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        faults.arm("vault.begin:eio")
        handle = ckpt.save(1, tree(1))
        with pytest.raises(HoldfastError):
            handle.durable(60.0)
        handle.fence()


@pytest.mark.parametrize("site", [site for site in faults.SITES if site.startswith("vault.")])
@pytest.mark.parametrize("writer", WRITERS)
def test_an_error_at_any_site_leaves_whole_steps(
    site: str, writer: str, root: Path, armed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error a step is whole or not there; never half of it."""
    if writer == "vault":
        monkeypatch.setenv(faults.ENV, f"{site}:eio@2")
    with Checkpointer(root, writer=writer) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        if writer == "thread":
            faults.arm(f"{site}:eio")
        handle = ckpt.save(2, tree(2))
        with pytest.raises(HoldfastError, match="injected at vault"):
            handle.durable(60.0)
        for step in ckpt.steps():
            assert ckpt.verify(step) == [], f"step {step} is listed and broken"
        ckpt.save(3, tree(3)).durable(60.0)
        assert loaded(ckpt) == 3
        assert loaded(ckpt, 1) == 1
    check_clean(root)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_failed_save_lets_its_slot_go(
    writer: str, root: Path, armed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that a failed save has used can still be dropped for a larger one, and is freed at the end."""
    held = memfds()
    if writer == "vault":
        monkeypatch.setenv(faults.ENV, "vault.block.written:eio")
    with Checkpointer(root, writer=writer) as ckpt:
        if writer == "thread":
            faults.arm("vault.block.written:eio")
        with pytest.raises(HoldfastError, match="injected"):
            ckpt.save(1, tree(1, 20 * MIB)).durable(60.0)
        vault = ckpt.vault_pid
        ckpt.save(2, tree(2, 40 * MIB)).durable(60.0)
        assert ckpt.vault_pid == vault
        assert loaded(ckpt) == 2
    assert memfds() == held


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.002)


# ---- replacing a step


@pytest.mark.parametrize("writer", WRITERS)
def test_a_good_step_is_replaced_only_when_asked(writer: str, root: Path) -> None:
    with Checkpointer(root, writer=writer) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        with pytest.raises(StepExistsError, match="step 1 is already saved") as caught:
            ckpt.save(1, tree(2)).durable(60.0)
        assert caught.value.hint == "pass overwrite=True to replace it"
        assert loaded(ckpt) == 1
        ckpt.save(1, tree(3), overwrite=True).durable(60.0)
        assert loaded(ckpt) == 3
        assert ckpt.verify(1) == []
    check_clean(root)


@pytest.mark.parametrize(
    "what", ["part", "short part", "missing part", "index", "manifest", "empty manifest"]
)
def test_a_damaged_step_is_replaced_without_asking(what: str, root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        part = part_file(root, 1)
        match what:
            case "part":
                damage(part)
            case "short part":
                part.write_bytes(part.read_bytes()[:-1])
            case "missing part":
                part.unlink()
            case "index":
                damage(next(part.parent.glob("*.index.json")), 100)
            case "manifest":
                damage(part.parent / "manifest.json", 100)
            case _:
                (part.parent / "manifest.json").write_bytes(b"")
        assert ckpt.verify(1) != []
        ckpt.save(1, tree(2)).durable(60.0)
        assert loaded(ckpt) == 2
        assert ckpt.verify(1) == []
    check_clean(root)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_replacement_keeps_the_old_step(overwrite: bool, root: Path, armed: None) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        faults.arm("vault.decided:eio")
        with pytest.raises(HoldfastError):
            ckpt.save(1, tree(2), overwrite=overwrite).durable(60.0)
        assert loaded(ckpt) == 1
        assert ckpt.verify(1) == []
    check_clean(root)


@pytest.mark.process
def test_a_commit_is_not_undone_by_the_vaults_that_follow(root: Path, children: Children) -> None:
    """The first vault dies after the commit; the next one must find the work done, whatever befalls it."""
    env = {"FIRST": "vault.manifest.created:kill", "SECOND": "vault.reserved:enospc"}
    child = children.python("-c", TWO_VAULTS, root, **env)
    line = child.until("ended")
    child.end()
    assert line["steps"] == [1]
    assert line["problems"] == []


TWO_VAULTS = """
import os, sys
from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.errors import HoldfastError
from holdfast.vault import client
from tests.checkpoint.trainer import report, state
spawn = client.VaultWriter._spawn
specs = iter([os.environ["FIRST"], os.environ["SECOND"]])
def each(self):
    os.environ[faults.ENV] = next(specs, "")
    return spawn(self)
client.VaultWriter._spawn = each
ckpt = Checkpointer(sys.argv[1], deadline_s=20.0)
try:
    ckpt.save(1, state(1)).durable(30.0)
except HoldfastError as error:
    report("failed", message=error.message)
report("ended", steps=ckpt.steps(), problems=[p.message for s in ckpt.steps() for p in ckpt.verify(s)])
ckpt.close()
"""


# ---- arguments


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, np.int64(3), 2**63])
def test_a_step_is_a_whole_number(step: Any, root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        with pytest.raises(UsageError):
            ckpt.save(step, tree(1))
        assert ckpt.steps() == []


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"loss": float("nan")}, r"meta\['loss'\] is nan"),
        ({"x": [1, {"y": object()}]}, r"meta\['x'\]\[1\]\['y'\] is a object"),
        ({1: 2}, "a key of meta"),
        ({"x": np.zeros(3)}, "ndarray"),
        ([1], "meta must be a dict"),
    ],
)
def test_meta_is_json(meta: Any, message: str, root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt, pytest.raises(TreeError, match=message):
        ckpt.save(1, tree(1), meta=meta)


def test_meta_comes_back(root: Path) -> None:
    meta = {"samples": 80, "metrics": {"loss": 0.25}, "list": [1, None, True, "ü"], "big": 2**100}
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(7, tree(7), meta=meta).durable(60.0)
        assert ckpt.metadata() == meta
        info = ckpt.info(7)
        assert (info.step, info.samples, info.num_arrays, info.num_parts) == (7, 80, 1, 1)
        assert info.metric("loss") == 0.25
        assert info.nbytes == MIB


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"a": {"b": object()}}, "a/b: a leaf of type object cannot be stored"),
        ({"a": np.array(["x"])}, "a: text dtype"),
        ({"a": np.array([None])}, "a: object dtype"),
        ({"a": np.zeros(2, ">f4")}, "a: >f4 is not little-endian"),
        ({"a": np.zeros(2, [("x", "f4")])}, "a: structured dtype"),
    ],
)
def test_a_tree_that_cannot_be_stored_raises_and_names_the_leaf(bad: Any, message: str, root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        with pytest.raises(TreeError, match=message):
            ckpt.save(1, bad)
        # A wrong argument costs nothing: the slot is free and the next save works.
        ckpt.save(1, tree(1)).durable(60.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"on_busy": "drop"},
        {"on_error": "ignore"},
        {"rank": 0},
        {"world": 2},
        {"keep": 0},
        {"keep": -1},
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any], root: Path) -> None:
    with pytest.raises(UsageError):
        Checkpointer(root, **settings)


def test_no_slots_is_refused(root: Path) -> None:
    with pytest.raises(UsageError), Checkpointer(root, writer="thread", slots=0) as ckpt:
        ckpt.save(1, tree(1))


def test_closed_is_closed(root: Path) -> None:
    ckpt = Checkpointer(root, writer="thread")
    ckpt.save(1, tree(1))
    ckpt.close()
    ckpt.close()
    with pytest.raises(UsageError, match="closed"):
        ckpt.save(2, tree(2))
    assert loaded(ckpt) == 1  # reading goes on


@pytest.mark.parametrize("empty", [{}, {"a": {}}, {"step": 3}, {"x": np.zeros((0, 4), np.float32)}])
def test_trees_without_bytes(empty: Any, root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, empty).durable(60.0)
        found = ckpt.load(into=empty)
        assert ckpt.verify(1) == []
    assert str(found) == str(empty)


# ---- one writer per folder


def test_a_folder_has_one_writer(root: Path) -> None:
    with Checkpointer(root, writer="thread") as first, Checkpointer(root, writer="thread") as second:
        first.save(1, tree(1)).durable(60.0)
        with pytest.raises(LeaseError, match="is being written by process") as caught:
            second.save(2, tree(2))
        assert "its own folder" in str(caught.value)
        assert loaded(second) == 1  # reading needs no lease
        first.close()
        second.save(2, tree(2)).durable(60.0)


@pytest.mark.process
def test_a_second_process_is_refused_until_the_first_is_gone(root: Path, children: Children) -> None:
    child = children.python("-m", "tests.checkpoint.trainer", root, "--steps", 1, "--then", "wait")
    child.until("waiting")
    with Checkpointer(root, writer="thread") as ckpt:
        with pytest.raises(LeaseError, match=f"process {child.pid} on "):
            ckpt.save(2, tree(2))
        child.kill()
        child.end()
        ckpt.save(2, tree(2)).durable(60.0)


# ---- keeping


def test_retention_follows_the_commit(root: Path) -> None:
    with Checkpointer(root, writer="thread", keep=2) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, tree(step)).durable(60.0)
    with Checkpointer(root, keep=2) as again:
        assert again.steps() == [3, 4]
    check_clean(root)


def test_a_failed_save_removes_nothing(root: Path, armed: None) -> None:
    with Checkpointer(root, writer="thread", keep=1) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        faults.arm("vault.voted:eio")
        with pytest.raises(HoldfastError):
            ckpt.save(2, tree(2)).durable(60.0)
    assert Checkpointer(root).steps() == [1]


def test_pin_unpin_prune(root: Path) -> None:
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, tree(step)).durable(60.0)
        ckpt.pin(1)
        ckpt.pin(1)
        assert [ckpt.info(step).pinned for step in (1, 2, 3)] == [True, False, False]
    with Checkpointer(root, keep=1) as ckpt:
        assert ckpt.prune(dry_run=True) == [2]
        assert ckpt.steps() == [1, 2, 3]
        assert ckpt.prune() == [2]
        assert ckpt.steps() == [1, 3]
        ckpt.unpin(1)
        ckpt.unpin(1)
        assert ckpt.prune() == [1]
        assert list(ckpt) == [3]
    check_clean(root)


def test_a_step_that_is_not_there_cannot_be_pinned(root: Path) -> None:
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        with pytest.raises(HoldfastError, match="there is no step 2"):
            ckpt.pin(2)


@pytest.mark.parametrize("recycle", [True, False])
def test_recycling(recycle: bool, root: Path) -> None:
    with Checkpointer(root, writer="thread", keep=1, recycle=recycle) as ckpt:
        inodes = []
        for step in (1, 2, 3, 4):
            ckpt.save(step, tree(step, (5 - step) * 3 * MIB + step)).durable(60.0)
            inodes.append(part_file(root, step).stat().st_ino)
            ckpt.wait(60.0)  # a pruned part is in the pool some time after its step is gone
            assert ckpt.steps() == [step]
            assert loaded(ckpt) == step
            assert ckpt.verify() == []
        pool = root / ".holdfast" / "recycled"
        # A removed inode may be given out again by the file system, so only reuse can be asserted.
        if recycle:
            assert len(set(inodes)) < 4
            assert len(list(pool.iterdir())) <= 1
        else:
            assert not pool.exists()
    check_clean(root)
