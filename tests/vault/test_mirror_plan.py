"""Which steps go to a mirror, in which order, and what may be removed there: the decisions alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StepExistsError
from holdfast.format import MANIFEST, SaveId, data_name, index_name
from holdfast.vault.mirror_plan import (
    LONGEST_S,
    LOOK_S,
    SELDOM_S,
    Agenda,
    Known,
    Look,
    Pace,
    Rest,
    Send,
    own_parts,
    rubbish,
    selected,
    standing,
    wanted,
)


def agenda(*steps: int, every: int = 1, leads: bool = True, sent: tuple[int, ...] = ()) -> Agenda:
    found = Agenda(every=every, leads=leads)
    found.see({step: f"a{step}" for step in steps}, {step: f"a{step}" for step in sent})
    return found


# ---- which steps


def test_the_first_step_at_or_after_each_multiple_is_selected() -> None:
    steps = [90, 105, 150, 199, 230, 300, 310]
    assert selected(steps, [], 100) == {90, 105, 230, 300}
    assert selected(steps, [], 1) == set(steps)


def test_what_was_passed_over_stays_so_when_its_neighbours_are_gone() -> None:
    assert selected([150, 200], [100], 100) == {200}
    # 100 was copied and is gone everywhere; 150 was passed over for it.
    assert selected([150, 250], [200], 100) == set()
    # A multiple itself never is: it was due and another one came first.
    assert selected([100, 150, 250], [200], 100) == {100}


def test_a_lost_step_is_made_up_for_by_the_next() -> None:
    # 200 was due, and pruned before the mirror came back.
    assert selected([250], [100], 100) == {250}


def test_what_the_mirror_would_not_keep_is_not_wanted() -> None:
    assert wanted(range(1, 6), [], 1, 2) == {4, 5}
    assert wanted(range(1, 6), [5], 1, 2) == {4, 5}
    assert wanted([100, 150, 200, 300], [], 100, 2) == {200, 300}


def test_a_run_that_went_back_goes_on_copying() -> None:
    assert wanted([1, 2, 3], [7, 8], 1, 2) == {2, 3}
    assert wanted([650], [900], 100, None) == {650}


@given(st.sets(st.integers(0, 500)), st.integers(1, 60))
def test_every_multiple_is_followed_by_a_selected_step(steps: set[int], every: int) -> None:
    chosen = selected(steps, [], every)
    assert chosen <= steps
    for step in steps:
        begin = step // every * every
        assert min(other for other in steps if other >= begin) in chosen


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 50), st.integers(1, 5))
def test_a_run_that_sends_at_once_sends_the_same_however_it_prunes(
    steps: set[int], every: int, keep: int
) -> None:
    """The decision is made again and again from what is left; it must not change with what is left."""
    local: list[int] = []
    sent: set[int] = set()
    record: set[int] = set()
    for step in sorted(steps):
        local.append(step)
        for due in sorted(selected(local, record, every) - sent, reverse=True):
            sent.add(due)
            record.add(due)
        local = local[-keep:]
        record = {one for one in record if one in local or one == max(record)}
    assert sent == selected(steps, [], every)


def test_parts_of_ranks_that_are_no_more_are_shared_out() -> None:
    assert own_parts(range(4), 1, 4) == [1]
    assert own_parts(range(4), 0, 2) == [0, 2]
    assert sorted(part for rank in range(3) for part in own_parts(range(10), rank, 3)) == list(range(10))


# ---- in which order


def test_the_newest_goes_first_and_one_that_is_there_never_again() -> None:
    todo = agenda(1, 2, 3, sent=(2,))
    order = []
    while isinstance(following := todo.next(0.0), Send):
        order.append(following.step)
        todo.given(following.step, following.attempt, 0.0)
        todo.whole(following.step, following.attempt)
    assert order == [3, 1]
    assert following == Rest(None)


def test_another_save_of_a_step_is_sent_again() -> None:
    todo = agenda(1, 2, sent=(1, 2))
    assert todo.next(0.0) == Rest(None)
    todo.see({1: "a1", 2: "b2"}, {1: "a1", 2: "a2"})
    assert todo.next(0.0) == Send(2, "b2")


def test_a_step_that_is_pruned_is_not_sought_any_more() -> None:
    todo = agenda(1, 2, 3)
    todo.given(3, "a3", 0.0)
    todo.see({2: "a2"}, {})
    assert todo.next(0.0) == Send(2, "a2")
    assert todo.busy == {2}


def test_a_step_that_is_whole_is_not_looked_for_any_more() -> None:
    """The mirror may have removed it by then, which would be taken for a loss."""
    found = agenda(1, leads=False)
    found.given(1, "a1", 0.0)
    found.see({1: "a1"}, {1: "a1"})
    assert found.next(1.0) == Rest(None)
    assert found.busy == set()


def test_a_save_that_is_left_is_not_tried_again_and_its_successor_is() -> None:
    todo = agenda(1, 2)
    todo.leave(2, "a2")
    assert todo.next(0.0) == Send(1, "a1")
    assert not todo.wants(2, "a2")
    todo.see({1: "a1", 2: "b2"}, {})
    assert todo.next(0.0) == Send(2, "b2")


def test_failures_space_out_and_a_success_brings_the_pace_back() -> None:
    todo = agenda(1)
    waits = [todo.failed(0.0) for _ in range(10)]
    assert waits == sorted(waits)
    assert (waits[0], waits[1], waits[-1]) == (1.0, 2.0, LONGEST_S)
    assert todo.next(LONGEST_S - 1.0) == Rest(1.0)
    assert todo.next(LONGEST_S) == Send(1, "a1")
    todo.worked()
    assert todo.failed(0.0, spread=0.5) == 0.5


def test_other_ranks_are_looked_for_ever_more_seldom_and_after_what_is_due() -> None:
    todo = agenda(1, 2)
    todo.given(2, "a2", 0.0)
    assert todo.next(0.0) == Send(1, "a1")
    todo.given(1, "a1", 0.0)
    now, gaps = 0.0, []
    for _ in range(20):
        for _ in range(2):
            found = todo.next(now)
            assert isinstance(found, Look)
            todo.looked(found.step, now)
        rest = todo.next(now)
        assert isinstance(rest, Rest)
        assert rest.seconds is not None
        gaps.append(rest.seconds)
        now += rest.seconds + 1e-9
    assert gaps[0] == pytest.approx(LOOK_S)
    assert gaps[-1] == pytest.approx(SELDOM_S)


def test_parts_that_vanish_are_due_again() -> None:
    todo = agenda(1)
    todo.given(1, "a1", 0.0)
    todo.lost(1)
    assert todo.next(0.0) == Send(1, "a1")


# ---- the end of a run


def test_the_last_step_is_due_at_the_end_and_nothing_that_comes_later() -> None:
    todo = agenda(100, 130, every=100, sent=(100,))
    assert todo.next(0.0) == Rest(None)
    todo.end()
    assert todo.next(0.0) == Send(130, "a130")
    todo.see({100: "a100", 130: "a130", 200: "a200"}, {100: "a100"})
    assert todo.due() == [130]


def test_rank_0_waits_for_the_others_and_they_do_not_wait_for_it() -> None:
    for leads, left in ((True, [1]), (False, [])):
        todo = agenda(1, leads=leads)
        todo.end()
        assert todo.open == [1]
        todo.given(1, "a1", 0.0)
        assert todo.open == left
        todo.whole(1, "a1")
        assert todo.open == []


def test_a_run_without_steps_has_nothing_to_end_with() -> None:
    todo = agenda()
    todo.end()
    assert todo.open == []


# ---- what is there


def known(step: int, attempt: str, created: float, run: str = "r") -> Known:
    return Known(SaveId(run, step, attempt), created)


def test_what_a_manifest_on_the_mirror_means() -> None:
    mine = known(1, "b", 10.0)
    assert standing(mine, None) == "create"
    assert standing(mine, known(1, "b", 10.0)) == "whole"
    assert standing(mine, known(1, "a", 9.0)) == "replace"
    for theirs in (known(1, "c", 11.0), known(1, "b", 9.0, run="other")):
        with pytest.raises(StepExistsError, match="another save of step 1"):
            standing(mine, theirs)


def files(attempt: str) -> list[str]:
    return [data_name(0, attempt), index_name(0, attempt)]


def test_rubbish_is_what_no_step_needs_and_nobody_is_at() -> None:
    found = {
        1: [*files("a"), "notes.txt"],  # half copied, then pruned
        2: [MANIFEST, *files("a"), *files("b")],  # whole, with leftovers of another save
        3: files("a"),  # half copied, and due
        4: [MANIFEST, *files("a"), ".tmp-1234-manifest.json"],
        5: files("a"),  # newer than everything: somebody may be at it
    }
    whole = {2: "b", 4: "a"}
    gone = rubbish(found, whole, busy={3})
    left = [(1, name) for name in files("a")] + [(2, name) for name in files("a")]
    assert gone == [*left, (4, ".tmp-1234-manifest.json")]
    assert rubbish(found, {}, busy=()) == []
    # A whole step that is being replaced keeps what is under way in it.
    assert [step for step, _ in rubbish(found, whole, busy={2})] == [1, 1, 3, 3, 4]


# ---- how fast


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 3)), max_size=50), st.floats(1, 100))
def test_no_second_sees_more_bytes_than_the_rate_and_one_block(
    blocks: list[tuple[int, float]], rate: float
) -> None:
    pace, now, begun = Pace(rate), 0.0, []
    for nbytes, pause in blocks:
        now += pause
        now += pace.delay_s(nbytes, now)
        begun.append((now, nbytes))
    for first, (start, _) in enumerate(begun):
        for last in range(first, len(begun)):
            total = sum(nbytes for _, nbytes in begun[first:last])
            assert total <= rate * (begun[last][0] - start) * (1 + 1e-9) + 1e-6


def test_without_a_rate_nothing_waits() -> None:
    assert Pace(None).delay_s(1 << 40, 0.0) == 0.0
