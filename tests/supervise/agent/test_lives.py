"""Which workers an agent takes for zombies: from the keys of the coordinator, whatever order they come in."""

from __future__ import annotations

from holdfast.coord import Changed
from holdfast.coord.messages import Item
from holdfast.supervise.lives import Lives

PIDS = {100: 1, 200: 2}


def change(*items: tuple[str, bytes | None], reset: bool = False) -> Changed:
    return Changed(1, tuple(Item(f"lives/0/{key}", value, 1) for key, value in items), reset)


def known() -> Lives:
    lives = Lives()
    lives.take_in(change(("a", b"100"), ("b", b"200"), reset=True), PIDS, {}, now=1.0)
    return lives


def test_a_worker_has_its_grace_and_is_named_once() -> None:
    lives = known()
    lives.take_in(change(("a", None)), PIDS, {}, now=10.0)
    assert lives.overdue(PIDS, 2.0, now=11.9) == []
    assert lives.overdue(PIDS, 2.0, now=12.5) == [(1, 2.5)]
    assert lives.overdue(PIDS, 2.0, now=13.0) == []


def test_one_that_ended_meanwhile_is_no_zombie_and_neither_is_the_next_with_its_number() -> None:
    lives = known()
    lives.take_in(change(("a", None)), PIDS, {}, now=10.0)
    assert lives.overdue({200: 2}, 2.0, now=10.5) == []
    assert lives.overdue(PIDS, 2.0, now=20.0) == []


def test_one_that_parted_may_go_on() -> None:
    lives = known()
    lives.take_in(change(("a", b""), ("a", None)), PIDS, {}, now=10.0)
    assert lives.overdue(PIDS, 2.0, now=20.0) == []


def test_what_was_missed_while_the_coordinator_was_away_is_made_up_for() -> None:
    lives = known()
    lives.take_in(change(("b", b"200"), reset=True), PIDS, {}, now=10.0)
    assert lives.overdue(PIDS, 2.0, now=12.0) == [(1, 2.0)]


def test_keys_of_processes_that_are_not_here_mean_nothing() -> None:
    lives = Lives()
    lives.take_in(change(("a", b"300"), ("b", b"no number")), PIDS, {}, now=1.0)
    lives.take_in(change(("a", None), ("b", None), ("c", None)), PIDS, {}, now=2.0)
    assert lives.overdue({**PIDS, 300: 3}, 0.0, now=9.0) == []


MEMBER = {"lives/0/a": 1}


def test_one_whose_key_went_before_anybody_watched_is_made_up_for_as_well() -> None:
    lives = Lives()
    lives.take_in(change(("b", b"200"), reset=True), PIDS, MEMBER, now=10.0)
    assert lives.overdue(PIDS, 2.0, now=12.0) == [(1, 2.0)]
    lives.take_in(change(("b", b"200"), reset=True), PIDS, MEMBER, now=20.0)
    assert lives.overdue(PIDS, 2.0, now=30.0) == []  # it was named


def test_one_that_came_in_while_the_first_view_was_on_its_way_lives() -> None:
    lives = Lives()
    lives.take_in(change(reset=True), PIDS, MEMBER, now=10.0)
    lives.take_in(change(("a", b"100")), PIDS, MEMBER, now=10.1)
    assert lives.overdue(PIDS, 2.0, now=20.0) == []
    lives.take_in(change(("a", None)), PIDS, MEMBER, now=30.0)
    assert lives.overdue(PIDS, 2.0, now=32.0) == [(1, 2.0)]


def test_a_member_that_parted_may_go_on_whoever_was_away_meanwhile() -> None:
    lives = known()
    lives.take_in(change(("a", b"")), PIDS, MEMBER, now=10.0)
    lives.take_in(change(("b", b"200"), reset=True), PIDS, MEMBER, now=11.0)
    assert lives.overdue(PIDS, 2.0, now=20.0) == []
