"""Whose vault keeps copies of whose states: decided anew whenever replicas or nodes come or go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import final

from holdfast.supervise.messages import KeepCopies
from holdfast.supervise.roster import FILLED, UP, Roster
from holdfast.vault import neighbours


def copies_wanted(
    live_replicas: Iterable[Collection[int]],
    nodes: Iterable[int],
    domains: Mapping[int, str],
    asked: int,
    *,
    going: Iterable[int] = (),
) -> dict[int, int]:
    """For every node the one whose vault keeps copies of its states; empty where none are needed.

    None are needed where at least two replicas were `asked` for and no failure domain takes all of the
    `live_replicas` (the nodes of each one that holds the state) with it. Copies are kept on `nodes`. Those
    that are `going`, or gone, keep none, but have theirs kept.
    """
    if asked > 1 and _outlives_any_loss(live_replicas, domains):
        return {}
    staying = [str(node) for node in nodes]
    named = {str(node): domain for node, domain in domains.items()}
    found = neighbours(staying, named)
    if staying:
        found |= {node: neighbours([*staying, node], named)[node] for node in map(str, going)}
    return {int(node): int(holder) for node, holder in found.items()}


def _outlives_any_loss(live_replicas: Iterable[Collection[int]], domains: Mapping[int, str]) -> bool:
    in_all: set[object] | None = None
    for nodes in live_replicas:  # the first two decide, nearly always
        touched: set[object] = {domains.get(node, node) for node in nodes}
        in_all = touched if in_all is None else in_all & touched
        if not in_all:
            return True
    return False


@final
class Copying:
    """Tells agents what their vaults are to copy."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._domains = dict(enumerate(roster.settings.domains))
        self._first: dict[int, int] | None = None
        """The attempts of replicas that were there before anybody trained: they are coming, not lost."""
        self._kept = False

    def update(self) -> None:
        """Tell those whose vaults are to copy other states than before; nobody if none has a vault."""
        roster = self._roster
        if not roster.settings.vaults or roster.newest < 0 or roster.any_finished():
            return  # nothing was staged yet, or all is done
        if self._first is None:
            self._first = {one.number: one.attempt for one in roster.wanted_replicas() if one.state == FILLED}
        wanted = self._wanted(self._first)
        if bool(wanted) != self._kept:
            self._kept = bool(wanted)
            if roster.wanted > 1:
                roster.say(
                    "copies of saved states are kept on other nodes: too few replicas would outlive a loss"
                    if wanted
                    else "no copies of saved states are needed any more: enough replicas hold the state"
                )
        by_holder: dict[int, list[int]] = {}
        for owner, holder in sorted(wanted.items()):
            by_holder.setdefault(holder, []).append(owner)
        for node in roster.nodes.values():
            kept = tuple(by_holder.get(node.number, ()))
            if node.state == UP and kept != node.copies:
                node.copies = kept
                roster.tell(node.number, KeepCopies(kept))

    def _wanted(self, first: Mapping[int, int]) -> dict[int, int]:
        roster = self._roster
        staying = [one.number for one in roster.nodes.values() if one.state == UP and one.usable]
        # One that never came has nothing to copy.
        going = [n.number for n in roster.nodes.values() if n.pid and not (n.state == UP and n.usable)]
        return copies_wanted(self._live(first), staying, self._domains, roster.wanted, going=going)

    def _live(self, first: Mapping[int, int]) -> Iterator[set[int]]:
        for one in self._roster.wanted_replicas():
            comes = one.state == FILLED and first.get(one.number) == one.attempt
            if comes or self._roster.holds_state(one):
                yield {worker.node for worker in one.workers.values()}
