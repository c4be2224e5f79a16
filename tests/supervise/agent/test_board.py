"""What a worker writes on its board is what its agent reads, whatever becomes of the worker."""

from __future__ import annotations

import os
import time

import pytest

from holdfast.supervise.board import NO_STEP, Board, BoardReader, make_board


@pytest.fixture
def pair() -> tuple[Board, BoardReader]:
    fd = make_board()
    reader = BoardReader(fd, since=5.0)
    return Board.open(fd), reader


def test_an_untouched_board_says_start(pair: tuple[Board, BoardReader]) -> None:
    _, reader = pair
    reading = reader.read()
    assert (reading.step, reading.phase, reading.phase_since) == (NO_STEP, "start", 5.0)
    assert (reading.waiting, reading.median_step_s, reading.num_steps) == ("", 0.0, 0)


def test_steps_and_their_median(pair: tuple[Board, BoardReader]) -> None:
    board, reader = pair
    moments = iter([100.0, 101.0, 102.0, 112.0, 113.0])
    board._monotonic = lambda: next(moments)
    for step in (0, 1, 2, 3, 4):
        board.progress(step)
    reading = reader.read()
    assert (reading.step, reading.progressed_at, reading.num_steps) == (4, 113.0, 4)
    assert reading.median_step_s == 1.0


def test_the_median_is_of_the_last_steps(pair: tuple[Board, BoardReader]) -> None:
    board, reader = pair
    now = 0.0

    def clock() -> float:
        return now

    board._monotonic = clock
    for step in range(200):
        now += 10.0 if step < 100 else 2.0
        board.progress(step)
    assert reader.read().median_step_s == 2.0
    assert reader.read().num_steps == 199


def test_phases_are_left_to_the_one_before(pair: tuple[Board, BoardReader]) -> None:
    board, reader = pair
    assert board.phase("step") == "start"
    before = board.phase("compile")
    assert (before, reader.read().phase) == ("step", "compile")
    board.phase(before)
    reading = reader.read()
    assert reading.phase == "step"
    assert 0.0 <= time.monotonic() - reading.phase_since < 60.0


def test_a_compile_that_another_thread_ends_leaves_no_trace(pair: tuple[Board, BoardReader]) -> None:
    """It begins before a save and ends within it: after the save, a step has the deadline of a step."""
    board, reader = pair
    board.phase("step")
    board.compiling(True)
    before = board.phase("save")
    assert (before, reader.read().phase) == ("step", "compile")
    board.compiling(False)
    assert reader.read().phase == "save"
    board.phase(before)
    assert reader.read().phase == "step"


def test_waits_have_a_name_a_beginning_and_a_pulse(pair: tuple[Board, BoardReader]) -> None:
    board, reader = pair
    board.waiting("exchange")
    first = reader.read()
    assert (first.waiting, first.pulsed_at) == ("exchange", first.waiting_since)
    board.waiting("exchange")
    again = reader.read()
    assert again.waiting_since == first.waiting_since
    assert again.pulsed_at > first.pulsed_at
    board.waiting(None)
    assert reader.read().waiting == ""


def test_names_that_are_too_long_or_strange_are_cut(pair: tuple[Board, BoardReader]) -> None:
    board, reader = pair
    board.phase("p" * 1000)
    board.waiting("wörter " * 100)
    assert reader.read().phase == "p" * 32
    assert reader.read().waiting.startswith("wörter wörter")


def test_a_death_in_the_middle_of_a_write_does_not_stop_the_reader(pair: tuple[Board, BoardReader]) -> None:
    board, reader = pair
    board.progress(7)
    board._begin()
    assert reader.read().step == 7


def test_no_descriptor_is_kept(pair: tuple[Board, BoardReader]) -> None:
    held = os.listdir("/proc/self/fd")
    fd = make_board()
    reader = BoardReader(fd)
    Board.open(fd)
    reader.close()
    # mmap keeps a duplicate until its page is given back.
    assert len(os.listdir("/proc/self/fd")) <= len(held) + 1
