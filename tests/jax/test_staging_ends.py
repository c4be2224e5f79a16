"""Saves that end before, or long after, their copies from devices do; and memory that is pinned, or not."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import Checkpointer
from holdfast.checkpoint import SaveState, saver
from holdfast.checkpoint.captures import Captures
from holdfast.clock import Deadline
from holdfast.errors import DeadlineError, StagingError, StepExistsError, VaultError
from holdfast.jax.engine import Copy, CopyEngine
from holdfast.jax.pins import PinBudget
from holdfast.jax.routes import ARENA, PINNED_HOST
from holdfast.jax.staging import StagedCopies
from holdfast.testing.cuda import FakeDriver
from holdfast.vault import Order, Outcome, Slot, ThreadWriter


def checkpointer(path: Path, **options: Any) -> Checkpointer:
    return Checkpointer(path, writer="thread", **{"threads": 1, "journal": False, **options})


def tree(value: float = 0.0) -> dict[str, Any]:
    return {"x": jnp.full(200_000, value)}


# ---- the writer is done first


@pytest.mark.parametrize("fenced", [True, False])
def test_a_save_that_is_refused_before_its_copies_begin_leaves_the_slot_to_the_next(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    driver = FakeDriver()
    use(driver)
    host = {"x": np.arange(200_000.0)}
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree()).durable(30.0)
        copied = driver.calls["copy_out"]
        assert ckpt._saver is not None
        saves = ckpt._saver
        run = StagedCopies.run

        def when_refused(self: StagedCopies, *args: Any) -> None:
            assert saves.wait(10.0), "the writer still has it"
            run(self, *args)

        begin = Captures.begin

        def begun(self: Captures, *args: Any, **options: Any) -> Any:
            found = begin(self, *args, **options)
            assert saves.wait(10.0), "the writer still has it"
            return found

        with monkeypatch.context() as patched:
            # A fenced save copies after `begin`, the other one within it.
            patched.setattr(Captures, "begin", begun)
            patched.setattr(StagedCopies, "run", when_refused)
            refused = ckpt.save(1, tree(), fenced=fenced)
            with pytest.raises(StepExistsError):
                refused.durable(30.0)
            refused.fence()
            ckpt.save(2, host).durable(30.0)
        assert ckpt.load(step=2)["x"].tobytes() == host["x"].tobytes()
    assert driver.calls["copy_out"] == copied, "copied into a slot that is another save's"


def test_a_slot_is_not_given_out_while_a_save_that_is_over_is_copied_into_it(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    stager = use(driver)
    done = saver.Saver.done

    def while_copied(self: saver.Saver, *args: Any) -> None:
        assert driver.first_copy.wait(10.0)
        done(self, *args)

    monkeypatch.setattr(saver.Saver, "done", while_copied)
    with checkpointer(tmp_path, on_busy="skip") as ckpt:
        ckpt.save(1, tree()).durable(30.0)
        driver.first_copy.clear()
        driver.gate.clear()
        refused = ckpt.save(1, tree(), fenced=True)
        with pytest.raises(StepExistsError):
            refused.durable(30.0)
        assert ckpt.save(2, tree()).skipped, "a device may be writing to the only slot"
        driver.gate.set()
        assert ckpt._saver is not None
        pool = ckpt._saver._slots
        with pool._changed:
            assert pool._changed.wait_for(lambda: pool._free, 10.0)
        ckpt.save(3, tree()).durable(30.0)
        assert ckpt.steps() == [1, 3]
    assert driver.calls["register"] == 1
    stager.close()
    driver.check()


def test_a_writer_that_both_refuses_a_save_and_reports_it_frees_the_slot_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vault that is given up while it is asked to begin: every save it had ends, this one too."""
    ending, refused = threading.Event(), threading.Event()
    reports: list[Future[None]] = []
    ended = saver.Saver._ended

    def slowly(*args: Any) -> None:
        ending.set()
        assert refused.wait(10.0)
        ended(*args)

    def broken(self: ThreadWriter, order: Order) -> None:
        outcome = Outcome(kind="VaultDiedError", message="gone")
        reports.append(pool.submit(self._events.done, order.seq, outcome))
        assert ending.wait(10.0)
        raise VaultError("gone")

    with checkpointer(tmp_path) as ckpt, ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(saver.Saver, "_ended", slowly)
            patched.setattr(ThreadWriter, "begin", broken)
            assert ckpt.save(1, {"x": np.zeros(9)}).state is SaveState.FAILED
            refused.set()
            reports[0].result(10.0)
        assert ckpt._saver is not None
        assert ckpt._saver._slots._free == [0]
        assert ckpt._saver.wait(0.0)
        ckpt.save(2, {"x": np.zeros(9)}).durable(30.0)


# ---- the copies are done last


def test_memory_that_is_copied_into_after_close_stays_mapped(
    use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeDriver(), first=2)
    monkeypatch.setattr(saver, "_CANCEL_S", 0.01)
    fetching, fetched, over = threading.Event(), threading.Event(), threading.Event()
    fetch, copied = StagedCopies._fetched, saver.Saver._copied

    def slowly(self: StagedCopies, shard: Any) -> Any:
        fetching.set()
        assert fetched.wait(10.0)
        return fetch(self, shard)

    def noting(*args: Any) -> None:
        copied(*args)
        over.set()

    monkeypatch.setattr(StagedCopies, "_fetched", slowly)
    monkeypatch.setattr(saver.Saver, "_copied", noting)
    ckpt = checkpointer(tmp_path)
    fetched.set()
    ckpt.save(1, tree()).durable(30.0)
    fetching.clear()
    fetched.clear()
    assert ckpt._saver is not None
    (slot,) = ckpt._saver._slots._slots.values()
    refused = ckpt.save(1, tree(1.0), fenced=True)
    assert fetching.wait(10.0)
    with pytest.raises(StepExistsError):
        refused.durable(30.0)
    before = bytes(slot.view)
    ckpt.close(30.0)
    mapped = not slot._map.closed
    fetched.set()
    assert over.wait(10.0)
    assert mapped, "the copies would have gone to memory that is not there"
    assert ctypes.string_at(slot.address, slot.size) == before, "cancelled, and copied all the same"


def test_memory_that_nobody_copies_into_goes_with_close(use: Any, tmp_path: Path) -> None:
    use(FakeDriver())
    ckpt = checkpointer(tmp_path)
    ckpt.save(1, tree(), fenced=True).durable(30.0)
    assert ckpt._saver is not None
    (slot,) = ckpt._saver._slots._slots.values()
    assert not slot._map.closed
    ckpt.close(30.0)
    assert slot._map.closed


class Computing:
    """An array of a step that never ends."""

    def is_ready(self) -> bool:
        return False


def test_a_step_that_hangs_holds_copies_up_no_longer_than_they_may_take(use: Any) -> None:
    def run(stop: threading.Event, deadline_s: float) -> None:
        job = StagedCopies(
            use(FakeDriver()), [], Slot.make(4096), None, {}, {(0, 0): Computing()}, pinned=True
        )
        job.run(lambda _done: None, stop, Deadline(deadline_s))

    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StagingError, match="cancelled"):
        run(stopped, 600.0)
    with pytest.raises(DeadlineError, match="in time"):
        run(threading.Event(), 0.01)


@pytest.mark.parametrize("call", ["happened", "record", "copy_out"])
def test_a_failure_leaves_no_events_behind(call: str) -> None:
    driver = FakeDriver(fail={call: 2})
    engine = CopyEngine(driver, PinBudget())
    source, slot = np.zeros(64, np.uint8), Slot.make(4096)
    assert engine.register(slot.address, slot.size, 0)
    # Batches of one copy each: the copies go to two devices in turn.
    copies = [Copy(at % 2, source.ctypes.data, slot.address + 64 * at, 64) for at in range(9)]
    with pytest.raises(StagingError, match=call):
        engine.run(copies, filled=lambda _done: None, stop=threading.Event(), deadline=Deadline(10.0))
    assert not engine.stuck
    assert engine.unregister(slot.address, 0)
    engine.close()
    slot.close()
    driver.check()


# ---- which memory is pinned


def test_all_slots_are_prepared_before_the_first_save(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    stager = use(driver)
    with checkpointer(tmp_path, slots=2) as ckpt:
        ckpt.prepare(tree())
        assert driver.calls["register"] == 2
        assert stager.pinned == ckpt.host_bytes
        copied = driver.calls["copy_out"]
        driver.gate.clear()
        handles = [ckpt.save(step, tree(step), fenced=True) for step in (1, 2)]
        driver.gate.set()
        for handle in handles:
            handle.durable(30.0)
        assert driver.calls["register"] == 2
        assert driver.calls["copy_out"] == copied + 2, "nothing was checked in save()"
        ckpt.prepare(tree())
        assert driver.calls["register"] == 2
    limited = checkpointer(tmp_path / "limited", slots=2, memory_limit=1_000_000)
    limited.prepare(tree())
    assert limited.host_bytes < 1_000_000, "as many as the budget has room for"
    limited.close(30.0)


def test_a_slot_over_the_limit_takes_another_route_for_itself(use: Any, tmp_path: Path) -> None:
    driver = FakeDriver()
    limit = [1_000_000]
    pins = PinBudget(lambda: limit[0])
    stager = use(driver, pins=pins)
    with checkpointer(tmp_path, slots=2, keep=None) as ckpt:
        ckpt.prepare(tree())
        assert stager.pinned == pins.pinned == ckpt.host_bytes // 2
        driver.gate.clear()
        handles = [ckpt.save(step, tree(step), fenced=True) for step in (1, 2)]
        driver.gate.set()
        for step, handle in enumerate(handles, 1):
            handle.durable(30.0)
            assert (np.asarray(ckpt.load(step=step)["x"]) == step).all()
        assert stager.route == ARENA, "the pinned slot is used as before"
        (first, none), (second, reason), *_ = stager.announcements()
        assert (first, none, second) == (ARENA, "", PINNED_HOST)
        assert "over the limit of 1,000,000" in reason
        limit[0] *= 2  # the machine has grown
        for step in (3, 4):
            ckpt.save(step, tree(step), fenced=True).durable(30.0)
        assert stager.pinned == ckpt.host_bytes
