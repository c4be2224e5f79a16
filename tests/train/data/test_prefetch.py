"""Reading ahead: the same bits, never too much, errors and hangs where they are asked for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from holdfast.errors import DataError, DeadlineError, UsageError
from holdfast.train.data import Batch, DataConfig, Prefetcher

TIMEOUT_S = 30.0
STREAM = DataConfig().build(seq_len=16)


def lanes(step: int) -> list[tuple[int, int]]:
    return [(8 * step + 2 * lane, 8 * step + 2 * lane + 2) for lane in range(4)]


def same(one: Batch, two: Batch) -> bool:
    return all(np.array_equal(one[name], two[name]) for name in one)  # type: ignore[literal-required]


def test_the_bits_are_those_of_the_stream() -> None:
    prefetcher = Prefetcher(STREAM.batch, lanes, timeout_s=TIMEOUT_S)
    for step in (0, 1, 2, 7, 3):  # also back, as after a restart
        prefetcher.begin(step)
        for start, stop in reversed(lanes(step)):
            assert same(prefetcher.batch(start, stop), STREAM.batch(start, stop))
    assert same(prefetcher.batch(100, 103), STREAM.batch(100, 103))  # a range that nobody foresaw
    prefetcher.close()


class Reader:
    """Counts what it reads; each read waits to be let through."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.turns = threading.Semaphore(0)
        self.changed = threading.Condition()

    def read(self, start: int, stop: int) -> Batch:
        with self.changed:
            self.begun.append(start)
            self.changed.notify_all()
        assert self.turns.acquire(timeout=TIMEOUT_S)
        return STREAM.batch(start, stop)

    def await_begun(self, num: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= num, TIMEOUT_S)


def test_it_reads_ahead_and_no_further() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader.read, lanes, ahead=1, timeout_s=TIMEOUT_S)
    prefetcher.begin(0)
    reader.turns.release(1_000)
    prefetcher.batch(*lanes(1)[-1])  # of the step after the current one: it is under way
    assert reader.begun == [start for step in (0, 1) for start, _ in lanes(step)]
    prefetcher.begin(1)
    prefetcher.batch(*lanes(2)[-1])
    assert reader.begun == [start for step in (0, 1, 2) for start, _ in lanes(step)]  # nothing twice
    prefetcher.close()


def test_errors_come_where_the_batch_is_asked_for_and_may_pass() -> None:
    failures = [DataError("the disk is away", hint="wait")]

    def read(start: int, stop: int) -> Batch:
        if start == 2 and failures:
            raise failures.pop()
        return STREAM.batch(start, stop)

    prefetcher = Prefetcher(read, lanes, timeout_s=TIMEOUT_S)
    prefetcher.begin(0)
    assert same(prefetcher.batch(4, 6), STREAM.batch(4, 6))
    with pytest.raises(DataError, match="the disk is away"):
        prefetcher.batch(2, 4)
    assert same(prefetcher.batch(2, 4), STREAM.batch(2, 4))
    prefetcher.close()


def test_a_read_that_hangs_has_a_deadline() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader.read, lanes, timeout_s=0.05)
    prefetcher.begin(0)
    reader.await_begun(1)
    with pytest.raises(DeadlineError, match=r"samples 0 to 2 were not read within 0\.05 s"):
        prefetcher.batch(0, 2)
    prefetcher.close()  # does not wait for it for ever either
    reader.turns.release(1_000)


def test_closing_wakes_whoever_waits() -> None:
    reader = Reader()
    prefetcher = Prefetcher(reader.read, lanes, timeout_s=TIMEOUT_S)
    prefetcher.begin(0)
    reader.await_begun(1)
    met: list[BaseException] = []

    def ask() -> None:
        try:
            prefetcher.batch(6, 8)
        except UsageError as error:
            met.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    asking.join(TIMEOUT_S)
    assert [str(error).partition("\n")[0] for error in met] == ["the prefetcher is closed"]
    reader.turns.release(1_000)
    closing.join(TIMEOUT_S)
    assert reader.begun == [0]
    with pytest.raises(UsageError, match="closed"):
        prefetcher.begin(1)
    with pytest.raises(UsageError, match="closed"):
        prefetcher.batch(0, 2)


def test_it_must_look_ahead() -> None:
    with pytest.raises(UsageError, match="ahead is 0"):
        Prefetcher(STREAM.batch, lanes, ahead=0)
