"""Copies of states follow the replicas that are alive, not those that were asked for."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.supervise import messages as m
from holdfast.supervise.copying import copies_wanted
from holdfast.supervise.decisions import Decision, Happening, Resize, Tell
from holdfast.supervise.policy import Policy
from holdfast.supervise.roster import UP
from holdfast.testing.supervision import simulation
from tests.supervise.policy.play import Play

# ---- the rule

ALONE: Final[dict[int, str]] = {}
RACKS: Final = {0: "a", 1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("live", "nodes", "domains", "asked", "wanted"),
    [
        pytest.param([{0}], [0, 1], ALONE, 1, {0: 1, 1: 0}, id="one was asked for"),
        pytest.param([{0}], [0], ALONE, 1, {}, id="there is no other node"),
        pytest.param([{0}, {1}], [0, 1], ALONE, 2, {}, id="two are alive"),
        pytest.param([{0}], [0, 1], ALONE, 2, {0: 1, 1: 0}, id="one of two is alive"),
        pytest.param([], [0, 1], ALONE, 2, {0: 1, 1: 0}, id="none of two is alive"),
        pytest.param([{0}, {1}], [0, 1], ALONE, 1, {0: 1, 1: 0}, id="one of two is to go"),
        pytest.param([{0}, {0}], [0, 1], ALONE, 2, {0: 1, 1: 0}, id="two on one node"),
        pytest.param([{0, 1}, {1, 2}], [0, 1, 2], ALONE, 2, {0: 1, 1: 2, 2: 0}, id="two that share a node"),
        pytest.param([{0}, {1}], [0, 1, 2], RACKS, 2, {0: 2, 1: 2, 2: 1}, id="two in one rack"),
        pytest.param([{0}, {2}], [0, 1, 2], RACKS, 2, {}, id="two in two racks"),
        pytest.param([{0}, {1}, {2}], [0, 1, 2], RACKS, 3, {}, id="three, two of them in one rack"),
    ],
)
def test_copies_are_wanted_where_one_loss_could_take_every_replica(
    live: list[set[int]], nodes: list[int], domains: dict[int, str], asked: int, wanted: dict[int, int]
) -> None:
    assert copies_wanted(live, nodes, domains, asked) == wanted


def test_a_node_that_goes_keeps_no_copies_and_its_own_are_kept_where_they_were() -> None:
    before = copies_wanted([{0}], [0, 1, 2], ALONE, 1)
    after = copies_wanted([{0}], [1, 2], ALONE, 1, going=[0])
    assert before[0] == after[0]
    assert 0 not in after.values()
    assert copies_wanted([{0}], [], ALONE, 1, going=[0]) == {}


@given(
    st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=4),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
    st.dictionaries(st.integers(0, 5), st.sampled_from("ab")),
    st.integers(1, 4),
)
def test_every_state_is_copied_out_of_its_domain_or_needs_no_copy(
    live: list[set[int]], nodes: set[int], going: set[int], domains: dict[int, str], asked: int
) -> None:
    going -= nodes
    found = copies_wanted(live, sorted(nodes), domains, asked, going=sorted(going))
    others = nodes if len(nodes) > 1 else set()
    everyone = {*others, *going} if nodes else set()

    def domain(node: int) -> object:
        return domains.get(node, node)

    if not found:
        hit = [{domain(node) for node in one} for one in live]
        assert not everyone or (asked > 1 and not set.intersection(*hit))
        return
    assert set(found) == everyone
    for owner, holder in found.items():
        assert holder in nodes
        assert holder != owner
        outside = [node for node in nodes if domain(node) != domain(owner)]
        assert domain(holder) != domain(owner) or not outside


# ---- the run


def kept(play: Play) -> dict[int, tuple[int, ...]]:
    """What the vault of each node was last told to copy."""
    return {node: command.nodes for node, command in play.told if isinstance(command, m.KeepCopies)}


def playing(**settings: Any) -> Play:
    return Play(**{"replicas": 2, "nodes": 3, "vaults": True, **settings})


def test_one_replica_is_copied_from_the_start() -> None:
    assert kept(playing(replicas=1, nodes=2)) == {0: (1,), 1: (0,)}
    assert kept(playing(replicas=1, nodes=2, vaults=False)) == {}
    assert kept(playing(replicas=1, nodes=1)) == {}


def test_two_replicas_are_never_told_to_copy_while_they_come_up() -> None:
    play = playing(training=False)
    for node in range(3):
        play.up(node)
    first, second = (seat.worker for seat in play.status.seats)
    play.active(first, 5)  # it has loaded a state
    assert kept(play) == {}
    play.active(second, 5)
    assert kept(play) == {}


def test_copies_begin_when_one_replica_is_left_and_end_when_another_has_the_state() -> None:
    play = playing()
    play.down(1)
    assert kept(play) == {0: (2,), 2: (0, 1)}
    newcomer = play.status.seats[1].worker
    assert play.where[newcomer] == 2
    play.started()
    play.say(m.WorkerActive(2, newcomer, "i", 1, 2))
    assert kept(play) == {0: (2,), 2: (0, 1)}  # it is there, and has no state yet
    play.reach(newcomer, 7)
    assert kept(play) == {0: (), 2: ()}
    play.up(1)
    assert kept(play) == {0: (), 2: ()}


def test_two_that_came_to_be_on_one_node_are_copied_from_there() -> None:
    play = playing(nodes=2)
    play.down(1)
    play.active(play.status.seats[1].worker, 7)
    assert kept(play) == {0: (1,)}  # should it come back as it was: there is nobody else to keep copies
    play.up(1)
    assert kept(play) == {0: (1,), 1: (0,)}


def test_a_lost_worker_is_enough_and_its_node_may_keep_the_copy() -> None:
    play = playing(nodes=2)
    play.ended(play.status.seats[1].worker)
    assert kept(play) == {0: (1,), 1: (0,)}


def test_an_agent_that_comes_back_is_told_again() -> None:
    play = playing(replicas=1, nodes=2)
    play.down(1)
    play.look()
    play.up(1)
    assert m.KeepCopies((0,)) in [command for node, command in play.fresh_told() if node == 1]


def test_a_node_that_goes_away_is_copied_and_copies_nothing() -> None:
    play = playing(replicas=1)
    assert kept(play) == {0: (2,), 1: (0,), 2: (1,)}
    play.say(m.NodePreempted(1, 30.0, "SIGTERM"))
    assert kept(play) == {0: (2,), 1: (), 2: (0, 1)}


def test_a_run_that_is_to_have_one_replica_is_copied_before_the_other_has_gone() -> None:
    play = playing(max_replicas=2)
    play.say(Resize(1))
    assert kept(play) == {0: (2,), 1: (0,), 2: (1,)}
    play.say(Resize(2))
    assert any(kept(play).values())  # the second has no state yet


def test_a_run_that_grows_is_copied_until_the_second_replica_trains() -> None:
    play = playing(replicas=1, nodes=2, max_replicas=2)
    play.say(Resize(2))
    newcomer = play.status.seats[1].worker
    play.say(m.WorkerActive(play.where[newcomer], newcomer, "i", 1, 2))
    assert kept(play) == {0: (1,), 1: (0,)}
    play.reach(newcomer, 3)
    assert kept(play) == {0: (), 1: ()}


def test_a_node_that_never_came_is_not_copied_from() -> None:
    play = playing(replicas=1, training=False)
    play.up(0)
    play.up(2)
    play.train()
    assert kept(play) == {0: (2,), 2: (0,)}


def test_domains_are_heeded() -> None:
    play = playing(replicas=1, nodes=4, domains=("a", "a", "b", "b"))
    assert {owner: holder for holder, owners in kept(play).items() for owner in owners} == {
        0: 2, 1: 3, 2: 0, 3: 1,
    }  # fmt: skip


def test_nobody_is_told_when_all_steps_are_done() -> None:
    play = playing(nodes=2)
    play.ended(play.status.seats[0].worker, m.DONE, 0)
    assert kept(play) == {}


# ---- many runs


def test_what_was_told_is_what_is_wanted_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Policy.step
    told = 0

    def checked(self: Policy, happening: Happening, *, now: float) -> list[Decision]:
        nonlocal told
        decisions = step(self, happening, now=now)
        told += sum(isinstance(one, Tell) and isinstance(one.command, m.KeepCopies) for one in decisions)
        roster, first = self._roster, self._copying._first
        if first is not None and not self._ending and not roster.any_finished():
            up = [node for node in roster.nodes.values() if node.state == UP]
            kept = {owner: node.number for node in up for owner in node.copies}
            assert kept == self._copying._wanted(first), happening
        return decisions

    monkeypatch.setattr(Policy, "step", checked)
    for seed in range(100):
        simulation.simulate(seed)
    assert told > 100
