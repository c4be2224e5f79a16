"""Batch schedules: Megatron's syntax and rule, closed forms both ways, mistakes that say what would work."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.train.batches import BatchConfig, BatchSchedule
from holdfast.train.quantities import parse_count, short_count


def samples(text: str) -> BatchSchedule:
    return BatchSchedule.parse(text, 1, "samples")


def walked(entries: list[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """Megatron's rule, step by step: the last entry whose point is not above what is consumed."""
    consumed, ranges = 0, []
    for _ in range(steps):
        size = next(size for point, size in reversed(entries) if consumed >= point)
        ranges.append((consumed, consumed + size))
        consumed += size
    return ranges


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 90)), max_size=6, unique_by=lambda pair: pair[0]),
    st.integers(1, 90),
)
@settings(max_examples=200, deadline=None)
def test_the_closed_forms_are_the_walk(later: list[tuple[int, int]], first: int) -> None:
    entries = [(0, first), *sorted(later)]
    schedule = samples(" ".join(f"{point}:{size}" for point, size in entries))
    ranges = walked(entries, 60)
    assert [schedule.batch_range(step) for step in range(60)] == ranges
    for step, (start, stop) in enumerate(ranges):
        assert schedule.samples_at(step) == start
        for sample in (start, (start + stop) // 2, stop - 1):
            assert schedule.step_at(sample) == step
            assert schedule.size_at(sample) == stop - start
            assert schedule.total_steps(sample + 1) == step + 1
    switches = [start for (last, start), (same, stop) in pairwise(ranges) if start - last != stop - same]
    assert [phase.start for phase in schedule.changes() if phase.step < 60] == switches


def test_the_schedule_of_megatrons_release_test() -> None:
    schedule = BatchSchedule.parse("0:384 200B:768 400B:1152", 4096)
    points = [200_000_000_000 // 4096, 400_000_000_000 // 4096]
    assert [phase.size for phase in schedule.phases] == [384, 768, 1152]
    for phase, point, before in zip(schedule.changes(), points, (384, 768), strict=True):
        assert 0 <= phase.start - point < before
    assert schedule.total_steps(0) == 0
    # A thousand times the run, and no loop over steps: this returns at once.
    assert schedule.samples_at(schedule.total_steps(10**14)) >= 10**14


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("64", [(0, 64)]),
        ("0:64", [(0, 64)]),
        ("0:64,128:32", [(0, 64), (128, 32)]),
        (" 0:1k ,  1.5K:2K ", [(0, 1000), (2000, 2000)]),
        ("0:64 100:64 200:128", [(0, 64), (256, 128)]),
        # The batch that starts at 0 reaches past two points: the size between them never comes.
        ("0:100 10:7 20:50", [(0, 100), (100, 50)]),
        ("0:100 10:7 20:100", [(0, 100)]),
    ],
)
def test_what_a_text_means(text: str, phases: list[tuple[int, int]]) -> None:
    assert [(phase.start, phase.size) for phase in samples(text).phases] == phases


def test_points_in_tokens_are_floored_to_samples() -> None:
    assert [phase.start for phase in BatchSchedule.parse("0:1 1000:2", 300).phases] == [0, 3]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("0:64 128", "'128' without a point"),
        ("0:0", "empty batch"),
        ("0:6.5", "not a whole number"),
        ("0:many", "'many' is not a count"),
        ("0:-4", "'-4' is not a count"),
        ("5:64", "the first point is 0: 0:64"),
        ("0:64 9:1 3:2", "did you mean '0:64 3:2 9:1'"),
        ("0:64 9:1 9:2", "two sizes from sample 9"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        samples(text)
    assert says in str(error.value)
    problems = BatchConfig(schedule=text, unit="samples").problems(1)
    assert {problem.setting for problem in problems} == {"batch.schedule"}


def test_all_wrong_entries_are_named_at_once() -> None:
    problems = BatchConfig(schedule="0:x y:4 8", unit="samples").problems(1)
    assert [problem.message.split("'")[1] for problem in problems] == ["0:x", "y:4", "8"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BatchConfig(schedule="60", lanes=8, micro=1), "use 56 or 64 or batch.lanes=5, 6, 10, 12"),
        (BatchConfig(schedule="64", lanes=8, micro=3), "use 48 or 72 or batch.micro=1, 2, 4, 8"),
        (BatchConfig(schedule="4", lanes=8, micro=1), "use 8 or batch.lanes=2, 4"),
        (BatchConfig(schedule="0:64 1K:60", lanes=8), "has a batch of 60"),
        (BatchConfig(schedule="10", lanes=0, micro=4), "use 8 or 12 or batch.micro=1, 2, 5, 10"),
        (BatchConfig(lanes=-1), "batch.lanes is -1"),
        (BatchConfig(lanes=8, micro=0), "batch.micro is 0"),
        (BatchConfig(unit="steps"), "batch.unit is 'steps'"),
    ],
)
def test_sizes_that_do_not_divide_say_what_would_work(config: BatchConfig, says: str) -> None:
    problems = config.problems(16)
    assert len(problems) == 1
    assert says in str(problems[0])


def test_pieces_of_a_batch() -> None:
    assert BatchConfig(lanes=8, micro=2).microbatches(64) == 4
    assert BatchConfig(lanes=0, micro=2).microbatches(64) == 32
    assert BatchConfig(lanes=0, micro=0).microbatches(64) == 1
    assert BatchConfig(schedule="7", lanes=0, micro=0).problems(16) == []


def test_a_run_cannot_go_on_inside_a_batch() -> None:
    samples("0:64 6400:96").check(6400 + 96)
    with pytest.raises(UsageError, match="inside a batch of 96 that starts at 6336"):
        samples("96").check(6400)


@pytest.mark.parametrize("where", [-1, -(10**6)])
def test_nothing_lies_before_the_start(where: int) -> None:
    for ask in (samples("8").size_at, samples("8").step_at, samples("8").samples_at):
        with pytest.raises(UsageError, match="from 0"):
            ask(where)


def test_counts() -> None:
    assert [parse_count(text) for text in ("0", "768", "1_000", "1.1B", ".5k", "2T", "1e6")] == [
        0, 768, 1000, 1_100_000_000, 500, 2 * 10**12, 10**6,
    ]  # fmt: skip
    for wrong in ("", "B", "-1", "1.5", "0x10", "1BB", "9" * 20):
        with pytest.raises(UsageError):
            parse_count(wrong)
    assert [short_count(value) for value in (956e6, 64, 1.5e9)] == ["956M", "64", "1.5B"]
