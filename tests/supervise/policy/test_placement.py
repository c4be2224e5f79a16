"""Where workers go, budgets and alarms: the small pure parts by themselves."""

from __future__ import annotations

import math

from holdfast.supervise.alarms import Alarms
from holdfast.supervise.budgets import Allowance, Budget
from holdfast.supervise.placement import NEW, PARKED, SPARE, Place, Site, first_place, next_place, room


def site(node: int, **fields: object) -> Site:
    return Site(**{"node": node, "up": True, "free": math.inf, "load": 0, **fields})  # type: ignore[arg-type]


def test_the_order_of_remedies() -> None:
    sites = [
        site(0, load=1),
        site(1, load=1, ready=1),
        site(2, load=1, ready=1),
        site(3, load=1, warming=1),
        site(4, spare=True),
        site(5, load=1),
    ]
    order = []
    while sites:
        place = next_place(sites, 1, last=2)
        assert place is not None
        order.append((place.nodes[0], place.remedy))
        sites = [one for one in sites if one.node != place.nodes[0]]
    assert order == [(2, PARKED), (1, PARKED), (3, PARKED), (4, SPARE), (0, NEW), (5, NEW)]


def test_the_same_node_is_worth_waiting_for_if_nobody_is_parked_elsewhere() -> None:
    sites = [site(0, load=1), site(1, up=False)]
    assert next_place(sites, 1, last=1) == Place((1,), NEW, up=False)
    sites[0] = site(0, load=1, ready=1)
    assert next_place(sites, 1, last=1) == Place((0,), PARKED)


def test_a_lemon_comes_last() -> None:
    sites = [site(0, lemon=True, ready=4), site(1, load=7)]
    assert next_place(sites, 1, last=0) == Place((1,), NEW)
    assert next_place(sites[:1], 1, last=0) == Place((0,), PARKED)
    assert first_place(sites, 1) == Place((1,), NEW)


def test_what_does_not_fit_on_one_node_is_spread_and_what_does_not_fit_is_not() -> None:
    sites = [site(0, free=1.0, ready=1), site(1, free=2.0, ready=2), site(2, up=False, free=2.0)]
    assert next_place(sites, 3, last=0) == Place((0, 1, 1), PARKED)
    assert next_place(sites, 4, last=0) is None
    assert first_place(sites, 2) == Place((1, 1), NEW)
    assert first_place([], 1) is None


def test_room_counts_whole_replicas() -> None:
    assert room([site(0, free=1.0, load=2), site(1, free=2.0)], 2) == 2
    assert room([site(0)], 2) > 1_000_000
    assert room([], 1) == 0


def test_a_budget_forgets_what_is_outside_its_window_and_keeps_no_more_than_it_needs() -> None:
    budget = Budget(Allowance(limit=3, window_s=10.0, first_s=1.0, longest_s=2.0))
    assert [budget.spend(float(at)) for at in (0, 1, 2)] == [0.0, 1.0, 2.0]
    assert budget.spend(3.0) is None
    assert budget.used(11.5) == 2
    for at in range(1000):
        budget.spend(20.0 + at)
    assert len(budget._times) == 4
    budget.reset()
    assert (budget.used(2000.0), budget.spend(2000.0)) == (0, 0.0)


def test_a_budget_without_a_limit_is_never_spent_and_its_waits_end_somewhere() -> None:
    budget = Budget(Allowance(limit=0, longest_s=10.0))
    waits = [budget.spend(0.0) for _ in range(2000)]
    assert waits[:3] == [0.0, 1.0, 2.0]
    assert waits[-1] == 10.0


def test_alarms_ring_in_order_and_can_be_moved_and_cleared() -> None:
    alarms = Alarms()
    alarms.set("a", 1, 5.0)
    alarms.set("b", 1, 3.0)
    alarms.set("c", 1, 4.0)
    alarms.set("a", 1, 2.0)
    alarms.clear("c", 1)
    assert alarms.is_set("a", 1)
    assert not alarms.is_set("c", 1)
    assert alarms.next_at() == 2.0
    assert alarms.pop_due(1.0) is None
    assert [alarms.pop_due(9.0) for _ in range(3)] == [("a", 1), ("b", 1), None]
    for at in range(10_000):
        alarms.set("a", 1, float(at))
    assert len(alarms._heap) < 100
    assert alarms.next_at() == 9999.0
