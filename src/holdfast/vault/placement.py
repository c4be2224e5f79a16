"""Whose vault keeps a copy of whose state: a pure function of the nodes and their failure domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def neighbours(nodes: Sequence[str], domains: Mapping[str, str] | None = None) -> dict[str, str]:
    """For every node the one that holds its copy; empty if there is only one node.

    Nobody holds more than one copy, unless avoiding the node's own failure domain (a rack, a power line, a
    host) takes it; then the load is spread over those outside. Where all share one domain, any other node is
    better than none. A node without a domain is one of its own. The answer depends on the set of nodes only,
    not on their order.
    """
    ordered = sorted(set(nodes))
    if len(ordered) < 2:
        return {}
    domain = {node: (domains or {}).get(node, f"\0{node}") for node in ordered}
    # Domains one after the other, the largest first: then a shift by the size of the largest takes every
    # node out of its own domain whenever a permutation can do that at all.
    sizes = Counter(domain.values())
    ring = sorted(ordered, key=lambda node: (-sizes[domain[node]], domain[node], node))
    shift = max(sizes.values())
    if shift == len(ring):
        shift = 1
    placed = {node: ring[(at + shift) % len(ring)] for at, node in enumerate(ring)}
    if len(sizes) == 1:
        return placed
    load = dict.fromkeys(ring, 0)
    for node, holder in placed.items():
        if domain[holder] != domain[node]:
            load[holder] += 1
    for node in ring:
        if domain[placed[node]] == domain[node]:
            outside = [other for other in ring if domain[other] != domain[node]]
            holder = min(outside, key=lambda other: (load[other], other))
            placed[node] = holder
            load[holder] += 1
    return placed
