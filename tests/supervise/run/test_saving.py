"""How often to save, and who."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import journal
from holdfast.checkpoint import saver as checkpoint_saver
from holdfast.checkpoint.lease import Lease
from holdfast.errors import LeaseError, UsageError
from holdfast.storage import opened
from holdfast.supervise.saving import FIRST_GUESS_S, SHORTEST_S, RunSaver, best_interval_s


def test_young_and_daly() -> None:
    # One second per save, an hour between failures: sqrt(2 * 1 * 3600) is 84.9 s; Daly's terms make it 84.2.
    assert best_interval_s(1.0, 0.0, 0) == pytest.approx(math.sqrt(2 * 3600.0) - 1 + 0.33, abs=0.1)


def test_what_costs_nothing_is_still_not_done_all_the_time() -> None:
    assert best_interval_s(0.0, 0.0, 0) == SHORTEST_S


def test_failures_that_were_seen_count() -> None:
    assert (
        best_interval_s(1.0, 3600.0, 20) < best_interval_s(1.0, 3600.0, 1) < best_interval_s(1.0, 36000.0, 1)
    )


def test_a_save_that_takes_longer_than_the_time_between_failures() -> None:
    assert best_interval_s(3 * FIRST_GUESS_S, 0.0, 0) == FIRST_GUESS_S


@given(st.floats(0, 1e4), st.floats(0, 1e7), st.integers(0, 1000))
def test_it_is_always_a_time(cost_s: float, elapsed_s: float, failures: int) -> None:
    assert 0 < best_interval_s(cost_s, elapsed_s, failures) < 1e9


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="make no sense"):
        best_interval_s(-1.0, 0.0, 0)


@pytest.mark.process
def test_the_last_save_waits_for_a_worker_that_is_still_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = tmp_path / "ckpt", {"x": np.arange(4)}
    going, refused = Lease(opened(str(folder)), 0), threading.Event()

    def asked(*given: Any, **more: Any) -> Lease:
        try:
            return Lease(*given, **more)
        except LeaseError:
            refused.set()
            raise

    with journal.Journal(tmp_path / "journal.jsonl", component="test") as events:
        saver = RunSaver(folder, run="r", events=events)
        saver.save(9, state, {})  # one like any other: the next is soon enough
        assert not saver.saved(9)
        assert "is being written by process" in saver.why
        monkeypatch.setattr(checkpoint_saver, "Lease", asked)

        def gone() -> None:
            assert refused.wait(30)
            going.close()

        thread = threading.Thread(target=gone)
        thread.start()
        saver.save(10, state, {}, again=True)
        thread.join(30)
        assert not thread.is_alive()
        saver.settle(30)
        assert saver.saved(10)
        saver.hand_over(ends=True)


def test_workers_that_save_together_come_to_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("holdfast.supervise.saving.time", SimpleNamespace(monotonic=lambda: now[0]))
    stands: dict[str, str] = {}
    with journal.Journal(tmp_path / "journal.jsonl", component="test") as events:
        savers = [RunSaver(tmp_path, run="r", rank=rank, world=2, events=events) for rank in (0, 1)]
        found: list[list[int]] = [[], []]
        for step in range(41, 2000):
            # One has the slower clock, and its saves cost more: left to itself it would save less often.
            for rank in (0, 1) if step % 2 else (1, 0):
                now[0] += 0.05 * (rank + 1)
                if savers[rank].due(step, stands.setdefault):
                    found[rank].append(step)
                    savers[rank]._tried = step
                    if (rank, len(found[rank])) != (1, 2):  # one of the saves fails, for one of them
                        savers[rank].last, savers[rank]._cost_s = step, 0.5 * (rank + 1)
    assert found[0] == found[1]
    assert found[0][0] == 140  # a hundred steps after the one that they began with
    # Then by cost: sqrt(2 * 0.5 s * an hour) is 60 s and sqrt(2 * 1.0 s * an hour) 85 s, of steps of 0.15 s.
    gaps = {after - before for before, after in zip(found[0], found[0][1:], strict=False)}
    assert len(found[0]) > 3
    assert all(60 / 0.15 * 0.9 < gap < 85 / 0.15 * 1.1 for gap in gaps), gaps
