"""The tree over lanes: fixed by the number of lanes, whoever holds which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.reduce.tree import TOTAL, Node, check_deal, climbs, halves, recipe, roots


def written(node: Node) -> str:
    """The sum of a node, with every pair of brackets."""
    if node.hi - node.lo == 1:
        return str(node.lo)
    left, right = halves(node)
    return f"({written(left)}+{written(right)})"


@pytest.mark.parametrize(
    ("num_lanes", "sum_of_all"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_the_tree_is_cut_at_powers_of_two(num_lanes: int, sum_of_all: str) -> None:
    assert written(Node(0, num_lanes)) == sum_of_all


@given(st.integers(1, 70), st.data())
def test_climbing_meets_every_node_above_a_lane(num_lanes: int, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, num_lanes - 1))
    node = Node(lane, lane + 1)
    for sibling, parent, right in climbs(lane, num_lanes):
        assert halves(parent) == ((node, sibling) if right else (sibling, node))
        node = parent
    assert node == (0, num_lanes)


@given(st.integers(1, 70), st.data())
def test_roots_are_the_largest_nodes_and_cover_exactly_the_lanes(num_lanes: int, data: st.DataObject) -> None:
    lanes = data.draw(st.sets(st.integers(0, num_lanes - 1)))
    found = roots(lanes, num_lanes)
    assert [lane for node in found for lane in range(*node)] == sorted(lanes)
    for node in found:
        way = climbs(node.lo, num_lanes)
        above = next((climb for climb in way if node.hi - node.lo < climb.parent.hi - climb.parent.lo), None)
        assert above is None or not set(range(*above.parent)) <= lanes


@given(st.integers(1, 70), st.integers(1, 9), st.data())
def test_a_recipe_is_the_same_sum_for_any_holders(num_lanes: int, holders: int, data: st.DataObject) -> None:
    owner = data.draw(st.lists(st.integers(0, holders - 1), min_size=num_lanes, max_size=num_lanes))
    nodes = [
        node
        for holder in range(holders)
        for node in roots([lane for lane, one in enumerate(owner) if one == holder], num_lanes)
    ]
    made = recipe(nodes, num_lanes)
    values = {at: written(node) for at, node in enumerate(nodes)}
    for left, right, out in made.additions:
        values[out] = f"({values[left]}+{values[right]})"
    assert values[TOTAL if made.additions else 0] == written(Node(0, num_lanes))
    assert made.num_temporaries <= num_lanes.bit_length()


@given(st.integers(1, 100))
def test_lanes_in_order_keep_few_sums_alive(num_lanes: int) -> None:
    for count in range(num_lanes + 1):
        assert len(roots(range(count), num_lanes)) <= num_lanes.bit_length()


def test_a_recipe_needs_every_lane() -> None:
    with pytest.raises(UsageError, match="lane 2 is missing"):
        recipe([Node(0, 2), Node(3, 4)], 4)


@pytest.mark.parametrize(
    ("deal", "problem"),
    [
        ({0: [0, 1], 1: [2]}, r"\[0, 1, 2\].*each of 0..3"),
        ({0: [0, 1], 1: [1, 2, 3]}, "needed once"),
        ({0: [0, 1], 5: [2, 3]}, r"slots \[5\], which are no members"),
    ],
)
def test_every_lane_belongs_to_one_member(deal: dict[int, list[int]], problem: str) -> None:
    check_deal({0: [3, 1], 1: [0, 2]}, [0, 1, 2], 4)
    with pytest.raises(UsageError, match=problem):
        check_deal(deal, [0, 1], 4)
