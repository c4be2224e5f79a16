"""What the writers of one save must agree on, as a small interface.

A save of several writers is committed once or not at all. Each writer casts one ballot; whoever has seen
all ballots proposes an outcome; the first proposal stands and everybody acts on it. Implementations keep:

- a ballot, once cast, does not change; casting the same again is harmless;
- `decide` is first-writer-wins: all callers, in whatever order, on whatever process, get the same outcome;
- every wait has a deadline, and running out of it names the ranks that did not answer;
- a crash of any participant between two calls leaves nothing that another call cannot finish.

`holdfast.testing.agreement` holds the conformance tests; each implementation must pass them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


def listing(ranks: Sequence[int], most: int = 32) -> str:
    """Ranks for a message, which travels: of ten thousand only the first."""
    more = f" and {len(ranks) - most:,} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


class Agreement(Protocol):
    """Agreement between the `world` writers of a run, of whom this process is `rank`."""

    rank: int
    world: int

    def session(self, timeout_s: float) -> str:
        """An id that all ranks of this launch share and no other launch has.

        Called by: all ranks, once, at start. Blocks: until all have called. Fails: MissingRanksError.
        """
        ...

    def vote(self, topic: str, ballot: bytes) -> None:
        """Cast this rank's ballot on a topic, durably."""
        ...

    def ballots(self, topic: str, timeout_s: float) -> Mapping[int, bytes]:
        """The ballots of all ranks.

        Blocks: until all have voted or the topic is decided otherwise. Fails: MissingRanksError.
        """
        ...

    def decide(self, topic: str, outcome: bytes) -> bytes:
        """Propose an outcome, durably; returns the one that stands."""
        ...

    def decided(self, topic: str, timeout_s: float = 0.0) -> bytes | None:
        """The outcome that stands, if any. Blocks: until there is one, `timeout_s` at most.

        Costs the same for any number of ranks, unlike `ballots`: most of a large run waits here.
        """
        ...

    def forget(self, topic: str) -> None:
        """Free the records of a topic that is over. Called by rank 0."""
        ...

    def topics(self) -> list[str]:
        """The topics that have records: those under way, and what crashed launches have left."""
        ...

    def close(self) -> None:
        """Release what this member holds open; its records stay."""
        ...
