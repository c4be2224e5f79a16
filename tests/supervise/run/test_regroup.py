"""Every set of reports has one decision, the same for all, and it loses nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import DeadlineError
from holdfast.supervise.regroup import CIRCLES, NO_STATE, Circle, Decision, Report, decide

STEP = 7


def report(replica: int, index: int = 0, **fields: object) -> Report:
    given: dict[str, object] = {
        "attempt": 0,
        "incarnation": f"{replica}.{index}",
        "reduce": f"r{replica}.{index}",
        "transfer": f"t{replica}.{index}",
        "steps": STEP,
        "decided": STEP - 1,
    }
    return Report(replica=replica, index=index, **{**given, **fields})  # type: ignore[arg-type]


def one(*reports: Report, num_lanes: int = 8) -> Decision:
    return decide(reports, workers=1, num_lanes=num_lanes)


# ---- cases that read like the documentation


def test_lanes_of_the_lost_are_dealt_out_and_what_is_folded_stays() -> None:
    found = one(report(0, lanes=(0, 1)), report(2, lanes=(5, 6, 7)))
    assert found.step == STEP
    assert found.lanes == {0: (0, 1, 2, 3), 2: (4, 5, 6, 7)}
    assert found.steady == {0: (0, 1, 2, 3), 2: (4, 5, 6, 7)}
    assert not found.sources
    assert not found.totals
    assert not found.restart


def test_a_laggard_fetches_the_total_it_lacks() -> None:
    found = one(report(0), report(1, steps=STEP - 1, decided=STEP - 2, lanes=(4, 5, 6, 7)))
    assert found.step == STEP
    assert found.totals == {1: {STEP - 1: 0}}
    assert found.lanes == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


def test_a_laggard_whose_total_nobody_holds_is_late() -> None:
    found = one(report(0, decided=-1), report(1, steps=STEP - 1, decided=STEP - 2))
    assert found.late == {1}
    assert found.lanes == {0: tuple(range(8))}


def test_one_that_is_two_steps_behind_is_late() -> None:
    found = one(report(0), report(1, steps=STEP - 2, decided=STEP - 3))
    assert found.late == {1}
    assert found.members == (0,)


def test_a_newcomer_gets_state_from_a_donor_and_no_lanes_at_first() -> None:
    new = report(2, steps=NO_STATE, decided=-1, entering=True)
    found = one(report(0), report(1), new)
    assert found.sources == {2: (1,)}
    assert found.lanes == {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    assert {lane for own in found.steady.values() for lane in own} == set(range(8))
    assert found.steady[2]


def test_newcomers_are_spread_over_donors() -> None:
    new = [report(r, steps=NO_STATE, decided=-1, entering=True) for r in (2, 3, 4)]
    found = one(report(0), report(1), *new)
    assert found.sources == {2: (1,), 3: (0,), 4: (1,)}


def test_a_newcomer_that_was_given_an_older_state_and_has_not_begun_gets_a_new_one() -> None:
    found = one(report(0), report(1, steps=STEP - 3, decided=-1, entering=True))
    assert found.sources == {1: (0,)}
    assert not found.late


def test_without_any_state_the_lowest_loads_and_all_compute() -> None:
    new = [report(r, steps=NO_STATE, decided=-1, entering=True) for r in (1, 3)]
    found = one(*new)
    assert found.loaders == (1,)
    assert found.sources == {3: (1,)}
    assert found.lanes == found.steady == {1: (0, 1, 2, 3), 3: (4, 5, 6, 7)}


def test_a_replica_with_a_hole_waits() -> None:
    found = decide([report(0, 0), report(0, 1), report(1, 0)], workers=2, num_lanes=8)
    assert found.members == (0, 1)
    assert found.waiting == {2}
    assert decide([report(0, 0), report(1, 1)], workers=2, num_lanes=8).members == ()


def test_the_newest_life_of_a_replica_counts() -> None:
    old, new = report(0, 0, attempt=1), [report(0, i, attempt=2) for i in range(2)]
    assert decide([old, *new], workers=2, num_lanes=4).members == (0, 1)
    assert decide([old, new[1]], workers=2, num_lanes=4).members == ()


def test_a_step_that_one_column_has_decided_and_another_has_not() -> None:
    """Workers of a replica end a step together: those with the total compute along, for the others' sake."""
    lanes = (0, 1)
    reports = [
        report(0, 0, decided=STEP, lanes=lanes),
        report(0, 1, lanes=lanes),
        report(1, 0, lanes=()),
        report(1, 1, lanes=()),
    ]
    found = decide(reports, workers=2, num_lanes=4)
    assert found.totals == {2: {STEP: 0}}
    assert found.lanes == {0: (0, 1, 2), 1: (0, 1, 2), 2: (3,), 3: (3,)}


def test_a_step_that_all_columns_have_decided_is_fetched_and_not_computed() -> None:
    reports = [report(0, 0, decided=STEP), report(0, 1), report(1, 0), report(1, 1, decided=STEP)]
    found = decide(reports, workers=2, num_lanes=4)
    assert found.totals == {1: {STEP: 3}, 2: {STEP: 0}}
    assert not any(found.lanes.values())


def test_lanes_that_two_have_folded_are_kept_by_one_and_the_other_begins_again() -> None:
    found = one(report(0, lanes=(0, 1)), report(1, lanes=(1, 2, 3)), num_lanes=4)
    assert found.restart == {0}
    assert found.lanes == {0: (0,), 1: (1, 2, 3)}


def test_whoever_saves_goes_on_saving() -> None:
    assert one(report(0), report(1, saving=True)).saver == 1
    assert one(report(0), report(1)).saver == 0


# ---- whatever the reports are


@st.composite
def meetings(draw: st.DrawFn) -> tuple[list[Report], int, int]:
    workers = draw(st.integers(1, 3))
    num_lanes = draw(st.integers(1, 11))
    reports = []
    for replica in draw(st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True)):
        steps = draw(st.sampled_from([NO_STATE, STEP - 2, STEP - 1, STEP, STEP]))
        lanes = tuple(draw(st.lists(st.integers(0, num_lanes - 1), unique=True, max_size=num_lanes)))
        entering = steps == NO_STATE or draw(st.booleans())
        for index in range(workers):
            if draw(st.integers(0, 9)) == 0:
                continue
            decided = draw(st.sampled_from([steps - 1, steps])) if steps >= 0 else -1
            reports.append(
                report(
                    replica,
                    index,
                    steps=steps,
                    decided=decided,
                    lanes=tuple(sorted(lanes)) if steps == STEP else (),
                    entering=entering,
                    saving=draw(st.booleans()),
                )
            )
    return reports, workers, num_lanes


@given(meetings(), st.randoms())
@settings(max_examples=300, deadline=None)
def test_the_order_of_reports_means_nothing(
    meeting: tuple[list[Report], int, int], rng: random.Random
) -> None:
    reports, workers, num_lanes = meeting
    found = decide(reports, workers=workers, num_lanes=num_lanes)
    mixed = list(reports)
    rng.shuffle(mixed)
    assert decide(mixed, workers=workers, num_lanes=num_lanes) == found


@given(meetings())
@settings(max_examples=500, deadline=None)
def test_every_lane_once_and_nothing_lost(meeting: tuple[list[Report], int, int]) -> None:
    reports, workers, num_lanes = meeting
    found = decide(reports, workers=workers, num_lanes=num_lanes)
    by_slot = {one.replica * workers + one.index: one for one in reports}
    everybody = set(found.members) | found.waiting | found.late
    assert everybody == set(by_slot)
    assert len(everybody) == len(found.members) + len(found.waiting) + len(found.late)
    if not found.members:
        return
    for index in range(workers):
        column = [slot for slot in found.members if slot % workers == index]
        for lanes, all_of_them in ((found.steady, True), (found.lanes, _undecided(found, by_slot, workers))):
            dealt = [lane for slot in column for lane in lanes.get(slot, ())]
            assert len(dealt) == len(set(dealt))
            if all_of_them:
                assert sorted(dealt) == list(range(num_lanes))
        for slot in column:
            _check(found, by_slot, slot)


def _undecided(found: Decision, by_slot: dict[int, Report], workers: int) -> bool:
    columns = ([s for s in found.members if s % workers == index] for index in range(workers))
    return bool(found.loaders) or not all(
        any(by_slot[slot].decided == found.step for slot in column) for column in columns
    )


def _check(found: Decision, by_slot: dict[int, Report], slot: int) -> None:
    mine = by_slot[slot]
    if found.loaders:
        assert (slot in found.loaders) != (slot in found.sources)
        return
    fetched = found.totals.get(slot, {})
    for step, holder in fetched.items():
        assert by_slot[holder].decided >= step
    if slot in found.sources:
        assert mine.entering or mine.steps == NO_STATE
        assert all(by_slot[donor].steps == found.step for donor in found.sources[slot])
        assert not found.lanes.get(slot)
    elif mine.steps == found.step:
        if slot not in found.restart:
            assert set(mine.lanes) <= set(found.lanes[slot])
    else:
        assert mine.steps == found.step - 1
        assert found.step - 1 in fetched or mine.decided >= found.step - 1


@pytest.mark.parametrize("replicas", range(1, 9))
def test_remaining_work_is_even(replicas: int) -> None:
    found = one(*(report(r) for r in range(replicas)))
    sizes = [len(own) for own in found.lanes.values()]
    assert max(sizes) - min(sizes) <= 1


# ---- meetings that lead nowhere


def test_members_that_meet_over_the_same_step_for_ever_are_told() -> None:
    circle, same = Circle(), [report(0, lanes=(0, 1)), report(1)]
    for number in range(CIRCLES):
        circle.meet(STEP, same, stays=False, now=10.0 * number)
    with pytest.raises(DeadlineError, match=r"met 11 times in 100 s over step 7"):
        circle.meet(STEP, same, stays=False, now=10.0 * CIRCLES)


def test_one_of_them_stays_and_keeps_the_state() -> None:
    circle = Circle()
    for number in range(5 * CIRCLES):
        circle.meet(STEP, [report(0), report(1)], stays=True, now=10.0 * number)


def test_whatever_changes_breaks_the_circle() -> None:
    circle = Circle()
    lanes: tuple[int, ...] = ()
    for number in range(5 * CIRCLES):
        if number % CIRCLES == 0:
            lanes = (*lanes, number)
        circle.meet(STEP, [report(0, lanes=lanes), report(1)], stays=False, now=100.0 * number)
    quick = Circle()
    for number in range(100):
        quick.meet(STEP, [report(0)], stays=False, now=0.5 * number)  # a network that is away for a while
