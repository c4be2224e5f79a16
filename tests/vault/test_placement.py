"""Who keeps whose copy; which states are whole; when an orphan ends. No process in sight."""

from __future__ import annotations

import fcntl
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from holdfast.errors import VaultError
from holdfast.vault import neighbours
from holdfast.vault.catalogue import (
    Held,
    decode_catalogue,
    encode_catalogue,
    incomplete_steps,
    offered,
    to_copy,
    whole_states,
)
from holdfast.vault.lease import Orphanhood, lease_held

# ---- placement


def test_one_node_has_no_neighbour() -> None:
    assert neighbours([]) == {}
    assert neighbours(["a"]) == {}
    assert neighbours(["a", "a"]) == {}


def test_two_nodes_have_each_other() -> None:
    assert neighbours(["a", "b"]) == {"a": "b", "b": "a"}
    assert neighbours(["a", "b"], {"a": "rack", "b": "rack"}) == {"a": "b", "b": "a"}


@pytest.mark.parametrize("seed", range(300))
def test_copies_leave_their_failure_domain_and_are_spread(seed: int) -> None:
    chance = random.Random(seed)
    nodes = [f"n{number}" for number in range(chance.randint(2, 24))]
    racks = chance.randint(1, 6)
    domains = {node: f"r{chance.randrange(racks)}" for node in nodes if chance.random() < 0.9}
    found = neighbours(nodes, domains)
    shuffled = nodes[:]
    chance.shuffle(shuffled)
    assert neighbours(shuffled, domains) == found
    assert found.keys() == set(nodes)
    assert all(node != holder for node, holder in found.items())
    of = {node: domains.get(node, node) for node in nodes}
    sizes = Counter(of.values())
    if len(sizes) > 1:
        assert all(of[node] != of[holder] for node, holder in found.items())
    load = Counter(found.values())
    largest = max(sizes.values())
    if 2 * largest <= len(nodes) or len(sizes) == 1:
        assert max(load.values()) == 1  # then nobody has to hold two
    else:
        outside = len(nodes) - largest
        assert max(load.values()) <= -(-largest // outside) + 1


# ---- what makes up a state


def held(step: int, rank: int, world: int, at: str, attempt: str = "s-1", origin: str = "") -> Held:
    return Held("run", "/ckpt", step, attempt, rank, world, 10, at, origin)


def test_catalogues_survive_the_wire() -> None:
    entries = (held(1, 0, 2, "tcp://h:1"), held(1, 1, 2, "tcp://h:2", origin="n1"))
    assert decode_catalogue(encode_catalogue(entries)) == entries
    assert decode_catalogue(encode_catalogue(())) == ()
    with pytest.raises(VaultError, match="none"):
        decode_catalogue('[["x"]]')


def test_the_newest_step_of_which_all_parts_are_held_comes_first() -> None:
    entries = [
        held(1, 0, 2, "a", "s-1"),
        held(1, 1, 2, "b", "s-1"),
        held(2, 1, 2, "b2", "s-2"),
        held(2, 0, 2, "a2", "s-2"),
        held(3, 0, 2, "a3", "s-3"),
    ]
    assert [state.step for state in whole_states(entries, run="run")] == [2, 1]
    assert [state.step for state in whole_states(entries, run="run", min_step=2)] == [2]
    assert whole_states(entries, run="another") == []
    assert incomplete_steps(entries, run="run") == {3: [1]}


def test_parts_of_two_attempts_are_never_mixed() -> None:
    entries = [held(5, 0, 2, "a", "s-1"), held(5, 1, 2, "b", "t-1")]
    assert whole_states(entries, run="run") == []
    assert incomplete_steps(entries, run="run")


def test_copies_come_after_originals_and_every_choice_has_all_ranks() -> None:
    entries = [
        held(5, 0, 2, "copy0", origin="n"),
        held(5, 0, 2, "own0"),
        held(5, 1, 2, "copy1", origin="n"),
        held(5, 1, 2, "own1"),
    ]
    (state,) = whole_states(entries, run="run")
    choices = [tuple(one.address for one in choice) for choice in state.choices()]
    assert choices[0] == ("own0", "own1")
    assert set(choices) == {("own0", "own1"), ("own0", "copy1"), ("copy0", "own1"), ("copy0", "copy1")}


def test_the_newest_own_state_of_each_rank_is_copied() -> None:
    entries = [held(1, 0, 2, "a"), held(9, 0, 2, "x", origin="n"), held(2, 0, 2, "b"), held(2, 1, 2, "c")]
    assert [one.address for one in to_copy(entries)] == ["b", "c"]


def test_versions_are_those_of_the_launch() -> None:
    assert offered("abc-12") == ("abc", 12)
    assert offered("a-b-3") == ("a-b", 3)
    assert offered("odd") == ("odd", 0)


# ---- the lease


def test_an_orphan_ends_after_its_time_and_an_adopted_one_does_not() -> None:
    orphan = Orphanhood(10.0)
    assert not orphan.see(True, 0.0)
    assert not orphan.see(False, 5.0)
    assert not orphan.see(False, 14.9)
    assert not orphan.see(True, 15.0)
    assert not orphan.see(False, 16.0)
    assert not orphan.see(False, 25.9)
    assert orphan.see(False, 26.0)


def test_who_holds_the_lease(tmp_path: Path) -> None:
    path = str(tmp_path / "lease")
    assert not lease_held(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    assert not lease_held(path)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert lease_held(path)
    fcntl.flock(fd, fcntl.LOCK_UN)
    assert not lease_held(path)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # asking left nothing behind
    assert lease_held(path)
    os.close(fd)
    assert not lease_held(path)
