"""Which steps stay: each policy alone, and what holds for every policy and every listing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import Policy, StepInfo, best, every, everything, latest, within
from holdfast.checkpoint.retention import doomed
from holdfast.errors import UsageError

NOW = 1_000_000.0


def info(step: int, *, created: float = NOW, pinned: bool = False, **meta: Any) -> StepInfo:
    return StepInfo(
        step=step,
        created=created,
        nbytes=1,
        num_arrays=1,
        num_parts=1,
        attempt="a1",
        meta=meta,
        pinned=pinned,
    )


def listing(*steps: int) -> list[StepInfo]:
    return [info(step) for step in steps]


def kept(steps: Sequence[StepInfo], policy: Policy) -> list[int]:
    return sorted(policy.kept(steps, now=NOW))


def live(steps: Sequence[StepInfo], policy: Policy) -> list[int]:
    """What is left of a run that prunes after each of its saves."""
    there: list[StepInfo] = []
    for one in steps:
        there.append(one)
        gone = set(doomed(there, policy, now=NOW))
        there = [other for other in there if other.step not in gone]
    return [one.step for one in there]


# ---- each policy


def test_latest() -> None:
    assert kept(listing(1, 2, 3, 4), latest(2)) == [3, 4]
    assert kept(listing(1), latest(5)) == [1]
    assert kept([], latest(1)) == []


def test_everything() -> None:
    assert kept(listing(1, 5, 9), everything()) == [1, 5, 9]


def test_every_keeps_multiples() -> None:
    assert kept(listing(0, 50, 100, 150, 200, 250), every(100)) == [0, 100, 200]


def test_every_keeps_the_first_step_after_a_multiple_that_was_missed() -> None:
    assert kept(listing(90, 105, 110, 199, 230, 500), every(100)) == [105, 230, 500]


def test_every_keeps_its_steps_as_the_run_goes_on() -> None:
    """A step kept for its multiple stays kept once its neighbours are gone."""
    steps = listing(*range(7, 600, 7))
    assert live(steps, every(100)) == [105, 203, 301, 406, 504, 595]


def test_every_can_count_samples() -> None:
    steps = [info(1, samples=0), info(2, samples=900), info(3, samples=1000), info(4), info(5, samples=2500)]
    assert kept(steps, every(1000, unit="samples")) == [1, 3, 5]


def test_best_takes_the_lowest_or_the_highest() -> None:
    steps = [info(step, metrics={"loss": loss}) for step, loss in enumerate((3.0, 1.0, 2.0, 1.0))]
    assert kept(steps, best(1, "loss")) == [3]  # the newer of two equals
    assert kept(steps, best(3, "loss")) == [1, 2, 3]
    assert kept(steps, best(1, "loss", highest=True)) == [0]


def test_best_passes_over_steps_without_the_metric() -> None:
    steps = [
        info(1, loss=1.0),
        info(2, metrics={"loss": math.nan}),
        info(3),
        info(4, metrics={"loss": "low"}),
    ]
    assert kept(steps, best(3, "loss")) == [1]


def test_within_keeps_the_young() -> None:
    steps = [info(step, created=NOW - age) for step, age in ((1, 300), (2, 100), (3, 50))]
    assert kept(steps, within(100)) == [2, 3]


def test_within_can_space_them_out() -> None:
    steps = [info(age, created=NOW - 100 + age) for age in (0, 5, 10, 19, 20, 31)]
    assert kept(steps, within(1000, spacing_s=10)) == [0, 10, 20, 31]


def test_policies_join_flat() -> None:
    joined = latest(1) | (every(5) | best(1, "x"))
    assert joined == (latest(1) | every(5)) | best(1, "x")
    assert kept(listing(1, 5, 6, 7), latest(1) | every(5)) == [5, 7]


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "3"])
def test_counts_are_positive_whole_numbers(count: Any) -> None:
    for policy in (latest, every, lambda n: best(n, "loss")):
        with pytest.raises(UsageError, match="a positive whole number is needed"):
            policy(count)


def test_other_mistakes() -> None:
    with pytest.raises(UsageError, match="unit 'days' is unknown"):
        every(5, unit="days")
    with pytest.raises(UsageError, match="keeps nothing"):
        within(0)
    with pytest.raises(UsageError, match="keeps nothing"):
        within(5, spacing_s=-1)


# ---- what goes


def test_pinned_steps_and_the_newest_never_go() -> None:
    steps = [info(1, pinned=True), info(2), info(3), info(4, created=0)]
    assert doomed(steps, within(10), now=NOW + 20) == [2, 3]


def test_the_order_of_the_listing_does_not_matter() -> None:
    assert doomed(listing(3, 1, 2), latest(1), now=NOW) == [1, 2]


def test_nothing_goes_from_an_empty_listing() -> None:
    assert doomed([], latest(1), now=NOW) == []


# ---- what holds for all of them

POLICIES = st.recursive(
    st.one_of(
        st.builds(latest, st.integers(1, 5)),
        st.builds(every, st.integers(1, 40), unit=st.sampled_from(["steps", "samples"])),
        st.builds(best, st.integers(1, 4), st.sampled_from(["loss", "acc"]), highest=st.booleans()),
        st.builds(within, st.floats(1, 1000), spacing_s=st.floats(0, 300)),
        st.just(everything()),
    ),
    lambda inner: st.builds(lambda a, b: a | b, inner, inner),
    max_leaves=4,
)
METRICS = st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(width=16) | st.just("n/a"))


@st.composite
def listings(draw: st.DrawFn) -> list[StepInfo]:
    """Steps of a run, ascending, with or without samples and metrics; older ones were made earlier."""
    steps = sorted(draw(st.sets(st.integers(0, 200), max_size=12)))
    ages = sorted((draw(st.floats(0, 2000)) for _ in steps), reverse=True)
    per_step = draw(st.integers(1, 3))
    found = []
    for step, age in zip(steps, ages, strict=True):
        meta: dict[str, Any] = {"metrics": draw(METRICS)}
        if draw(st.booleans()):
            meta["samples"] = step * per_step
        found.append(info(step, created=NOW - age, pinned=draw(st.integers(0, 5)) == 0, **meta))
    return found


@given(listings(), POLICIES)
def test_the_newest_and_the_pinned_stay(steps: list[StepInfo], policy: Policy) -> None:
    gone = set(doomed(steps, policy, now=NOW))
    assert not gone & {one.step for one in steps if one.pinned}
    assert not gone & {one.step for one in steps[-1:]}


@given(listings(), POLICIES)
def test_every_step_either_goes_or_has_a_reason_to_stay(steps: list[StepInfo], policy: Policy) -> None:
    wanted = policy.kept(steps, now=NOW)
    gone = doomed(steps, policy, now=NOW)
    assert wanted <= {one.step for one in steps}
    assert gone == sorted(gone)
    for one in steps:
        assert (one.step in gone) != (one.step in wanted or one.pinned or one is steps[-1])


@given(listings(), POLICIES, POLICIES)
def test_joining_only_adds(steps: list[StepInfo], a: Policy, b: Policy) -> None:
    assert (a | b).kept(steps, now=NOW) == a.kept(steps, now=NOW) | b.kept(steps, now=NOW)
    assert set(doomed(steps, a | b, now=NOW)) <= set(doomed(steps, a, now=NOW))


@given(listings(), POLICIES)
def test_pruning_twice_removes_no_more(steps: list[StepInfo], policy: Policy) -> None:
    gone = set(doomed(steps, policy, now=NOW))
    left = [one for one in steps if one.step not in gone]
    assert doomed(left, policy, now=NOW) == []


@given(listings(), POLICIES)
def test_pinning_a_step_changes_nothing_else(steps: list[StepInfo], policy: Policy) -> None:
    for at, one in enumerate(steps):
        pinned = [*steps[:at], replace(one, pinned=True), *steps[at + 1 :]]
        assert set(doomed(pinned, policy, now=NOW)) == set(doomed(steps, policy, now=NOW)) - {one.step}
