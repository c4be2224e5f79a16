"""Where the workers of a replica go: the order of remedies. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

PARKED: Final = "parked process"
SPARE: Final = "spare node"
NEW: Final = "new process"


class Site(NamedTuple):
    """A node as a place for workers. `free` is the room it has, `load` the seats that it holds."""

    node: int
    up: bool
    free: float
    load: int
    ready: int = 0
    """Parked processes that wait for a seat."""
    warming: int = 0
    """Processes on their way to be parked."""
    spare: bool = False
    lemon: bool = False


class Place(NamedTuple):
    """A node for each worker of the replica. Not `up`: worth waiting for."""

    nodes: tuple[int, ...]
    remedy: str
    up: bool = True


def first_place(sites: Iterable[Site], width: int) -> Place | None:
    """For the first life of a replica: spread over the nodes, spares kept free."""

    def rank(site: Site) -> tuple[bool, bool, int, int]:
        return (site.lemon, site.spare, site.load, site.node)

    ordered = sorted(sites, key=rank)
    for site in ordered:
        if site.free >= width:
            return Place((site.node,) * width, NEW, site.up)
    return _spread(ordered, width, NEW)


def next_place(sites: Iterable[Site], width: int, last: int) -> Place | None:
    """For a replica that was lost on node `last`.

    Parked processes first, of the same node if it has enough; then a spare node; then new processes, on the
    same node if it can be. A lemon comes after all others. All on one node where that fits.
    """
    ranked = sorted(((_rank(site, width, last), site) for site in sites), key=lambda one: one[0])
    for (_, kind, *_rest), site in ranked:
        if site.free >= width:
            return Place((site.node,) * width, _REMEDIES[kind], site.up)
    remedy = PARKED if sum(site.ready for _, site in ranked) >= width else NEW
    return _spread([site for _, site in ranked], width, remedy)


_REMEDIES: Final = (PARKED, PARKED, SPARE, NEW)


def _rank(site: Site, width: int, last: int) -> tuple[bool, int, bool, int, int]:
    if site.up and site.ready >= width:
        kind = 0
    elif site.up and site.ready + site.warming >= width:
        kind = 1
    elif site.up and site.spare and site.load == 0:
        kind = 2
    else:
        kind = 3
    return (site.lemon, kind, site.node != last, site.load, site.node)


def _spread(ordered: list[Site], width: int, remedy: str) -> Place | None:
    """A replica that fits on no single node, over several."""
    nodes: list[int] = []
    for site in ordered:
        if site.up:
            nodes += [site.node] * int(min(site.free, width - len(nodes)))
    return Place(tuple(nodes), remedy) if len(nodes) == width else None


def room(sites: Iterable[Site], width: int) -> int:
    """How many replicas could be on these nodes, with whom is on them now."""
    total = sum(site.free + site.load for site in sites)
    return int(min(total, 1 << 30)) // width
