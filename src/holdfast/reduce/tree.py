"""The fixed binary tree over the lanes 0..n-1: which sums exist, and in which order they are added.

A node is the range [lo, hi) of the lanes under it. It is cut at the largest power of two that is smaller than
it, so that lanes that come in order leave at most one sum for each power of two. The tree depends on the
number of lanes alone: whoever adds, and whatever came first, every sum has the same two operands in the same
order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from holdfast.errors import UsageError

TOTAL: Final = -1
"""Where the last addition of a recipe goes."""


class Node(NamedTuple):
    """The sum of the lanes lo..hi-1."""

    lo: int
    hi: int


class Climb(NamedTuple):
    """One step up: this node and `sibling` make `parent`; `right` says on which side the sibling stands."""

    sibling: Node
    parent: Node
    right: bool


class Addition(NamedTuple):
    """Operands and target by number: the roots first, then temporaries; TOTAL for the end."""

    left: int
    right: int
    out: int


class Recipe(NamedTuple):
    """How roots make the total; without additions the only root is the total."""

    additions: tuple[Addition, ...]
    num_temporaries: int


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes under one of at least two lanes."""
    middle = node.lo + (1 << (node.hi - node.lo - 1).bit_length() - 1)
    return Node(node.lo, middle), Node(middle, node.hi)


def climbs(lane: int, num_lanes: int) -> list[Climb]:
    """The way from a lane up to the total, lowest step first."""
    found: list[Climb] = []
    node = Node(0, num_lanes)
    while node.hi - node.lo > 1:
        left, right = halves(node)
        if lane < left.hi:
            found.append(Climb(right, node, True))
            node = left
        else:
            found.append(Climb(left, node, False))
            node = right
    return found[::-1]


def roots(lanes: Collection[int], num_lanes: int) -> tuple[Node, ...]:
    """The largest nodes that these lanes fill, in order: what their holder has once all are folded."""
    held = sorted(lanes)
    found: list[Node] = []

    def visit(node: Node, mine: Sequence[int]) -> None:
        if len(mine) == node.hi - node.lo:
            found.append(node)
        elif mine:
            left, right = halves(node)
            cut = next((at for at, lane in enumerate(mine) if lane >= right.lo), len(mine))
            visit(left, mine[:cut])
            visit(right, mine[cut:])

    if held:
        visit(Node(0, num_lanes), held)
    return tuple(found)


def recipe(nodes: Sequence[Node], num_lanes: int) -> Recipe:
    """The additions that turn these roots, which must cover every lane once, into the total."""
    number = {node: at for at, node in enumerate(nodes)}
    additions: list[Addition] = []
    free: list[int] = []
    made = 0

    def value(node: Node, out: int | None) -> int:
        nonlocal made
        if node in number:
            return number[node]
        if node.hi - node.lo < 2:
            raise UsageError(f"lane {node.lo} is missing among the roots {[tuple(one) for one in nodes]}")
        left, right = halves(node)
        operands = value(left, None), value(right, None)
        spent = [one for one in operands if one >= len(nodes)]
        if out is None:
            # In place where an operand is a temporary of ours, so that few are alive.
            if spent:
                out = spent.pop(0)
            elif free:
                out = free.pop()
            else:
                out = len(nodes) + made
                made += 1
        free.extend(spent)
        additions.append(Addition(*operands, out))
        return out

    value(Node(0, num_lanes), TOTAL)
    return Recipe(tuple(additions), made)


def check_deal(lanes: Mapping[int, Sequence[int]], slots: Collection[int], num_lanes: int) -> None:
    """Raise UsageError unless every lane belongs to exactly one of `slots`."""
    if strangers := sorted(set(lanes) - set(slots)):
        raise UsageError(f"lanes for slots {strangers}, which are no members; members are {sorted(slots)}")
    dealt = sorted(lane for mine in lanes.values() for lane in mine)
    if dealt != list(range(num_lanes)):
        raise UsageError(
            f"the lanes dealt out are {dealt}, and each of 0..{num_lanes - 1} is needed once",
            hint="deal every lane to one member; members without lanes only receive",
        )
