"""Who of a node's workers comes before whom while they start. Pure.

Once anybody trains, whoever starts beside it is nice. After a loss of all, replicas are to be ready one after
the other: the run goes on with the first, and the others lose nothing by it. A run that begins needs all of
them for its first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

_WAY: Final = frozenset({"start", "import", "init", "compile", "restore", "step", "parked"})
"""The phases between a start and a first step; "parked" for the moment until the seat is given."""


class Standing(NamedTuple):
    """A worker of the node.

    `trains`: it has done a step. `warming`: it is nice, and has not come to its seat yet. `waits`: it waits
    for others, in a named call.
    """

    replica: int | None
    member: bool = False
    trains: bool = False
    warming: bool = False
    phase: str = "start"
    waits: bool = False

    @property
    def hurries(self) -> bool:
        """Whether it has a seat, and works its way to the first step there."""
        seated = self.replica is not None and not self.warming
        return seated and not self.trains and not self.waits and self.phase in _WAY


def is_nice(replica: int | None, others: Iterable[Standing], *, successor: bool) -> bool:
    """Whether a worker for a seat of `replica` (None: a parked process) is started nice.

    `successor`: the agent follows one that was lost, and so all of its workers were.
    """
    if replica is None:
        return True
    return any(
        one.member or (successor and one.replica is not None and one.replica < replica) for one in others
    )


def is_hushed(crew: Iterable[Standing]) -> bool:
    """Whether those who are warming step back entirely: somebody is on the way to its first step.

    Not for longer than that. On a machine that is busy, a process that steps back hardly moves; and one that
    waits may wait for them. It ends in any case: whoever comes no further in its phase is ended as hung.
    """
    return any(one.hurries for one in crew)
