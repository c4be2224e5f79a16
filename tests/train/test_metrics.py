"""Metrics: every step once in the file, whatever happened to its writer."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.train.metrics import MetricsFile, line_of, read_metrics

NUMBERS = {
    "step": 11,
    "loss": 3.25,
    "rate": 3e-4,
    "grad_norm": 0.5,
    "param_norm": 10.0,
    "tokens_per_s": 12345.0,
    "tflops": 1.5,
}


def steps_in(path: Path) -> list[int]:
    return [one["step"] for one in read_metrics(path)]


def test_a_restart_writes_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(5):
        first.add({"step": step, "loss": 1.0}, leads=True)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"step":5,"lo')  # it was killed
    again = MetricsFile(path)
    for step in range(3, 7):  # from a checkpoint at step 3
        again.add({"step": step, "loss": 2.0}, leads=True)
    again.close()
    assert [(one["step"], one["loss"]) for one in read_metrics(path)] == [
        *((step, 1.0) for step in range(3)),
        *((step, 2.0) for step in range(3, 7)),
    ]


def test_who_leads_next_adds_what_the_last_leader_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    leader, other = MetricsFile(path), MetricsFile(path)
    for step in range(6):
        if step < 4:
            leader.add({"step": step}, leads=True)
        other.add({"step": step}, leads=step == 5)
    assert steps_in(path) == list(range(6))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(0, 200)), max_size=6))
def test_the_file_is_whatever_was_written_last(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    expected: dict[int, int] = {}
    for life, (start, count, size) in enumerate(lives):
        begin = min(start, len(expected))
        file = MetricsFile(path)
        for step in range(begin, begin + count):
            file.add({"step": step, "life": life, "pad": 10**size}, leads=True)
            expected = {at: one for at, one in expected.items() if at < step} | {step: life}
        file.close()
    found = {one["step"]: one["life"] for one in read_metrics(path)} if lives else {}
    assert found == expected


def test_records_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    for step in range(4):
        file.add({"step": step, "pad": float("1" * 300), "more": int("9" * 4000)}, leads=True)
    for _ in range(40):
        file.add({"step": 4, "pad": int("7" * 4000)}, leads=True)
    file.close()
    MetricsFile(path).add({"step": 2}, leads=True)
    assert steps_in(path) == [0, 1, 2]


def test_a_full_disk_ends_nothing_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write, room = os.write, {0: None, 1: 7, 2: 0, 3: 7, 4: None}  # bytes that the disk takes, by step
    file = MetricsFile(path)
    for step, left in room.items():

        def written(fd: int, data: bytes, left: int | None = left) -> int:
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data[:left])

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os, "write", written)
            file.add({"step": step, "loss": 1.0}, leads=True)
        assert steps_in(path) == ([*range(5)] if step == 4 else [0])
    file.close()
    assert caplog.text.count("metrics.jsonl cannot be written; training goes on: No space left") == 1


def test_a_line_for_people() -> None:
    assert line_of(NUMBERS, 2000) == (
        "step 12/2,000  loss 3.2500  rate 0.0003  grad norm 0.5  param norm 10  12,345 tokens/s  1.5 TFLOP/s"
    )
    more = line_of({**NUMBERS, "mfu": 0.571, "memory": 3 << 29, "skipped": 1.0, "eval_loss": 3.0}, 2000)
    assert "MFU 57.1%  1.50 GiB  SKIPPED" in more
    assert more.endswith("held-out loss 3.0000")
