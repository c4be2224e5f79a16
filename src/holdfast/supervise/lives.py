"""Who of a node's workers lives to the coordinator: each has a key, which goes with its session.

    worker                        coordinator                      agent of its node
    declared: key = its pid  -->  owned by the worker's session
                                                              -->  watches the keys of its node
    parted: key is empty     -->  it goes in good order       -->  forgotten
    its link is cut          -->  declares it dead: the key
                                  vanishes with the session   -->  if the process goes on, it is ended

A worker that was declared dead is told so, and exits by itself, if it can be told. One whose link is cut
cannot, and its lanes belong to others by then: whatever it goes on to do is of no use to anybody.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Final, final

from holdfast.coord import Changed, CoordClient
from holdfast.errors import CoordError, UsageError

_DECLARE_S: Final = 60.0
_PART_S: Final = 0.5


def prefix_of(node: int) -> str:
    """What the keys of a node's workers begin with."""
    return f"lives/{node}/"


def key_of(node: int, incarnation: str) -> str:
    """The key of the worker of `node` whose session is that."""
    return f"{prefix_of(node)}{incarnation}"


def declare(client: CoordClient, node: int) -> None:
    """Let the agent of `node` know which session is this process's. Fails: UnreachableError, FencedError."""
    key = key_of(node, client.incarnation)
    client.set(key, str(os.getpid()).encode(), owned=True, timeout_s=_DECLARE_S)


def part(client: CoordClient, node: int) -> None:
    """Say that the end of this session is meant. Where nobody hears it, the process has its grace."""
    with contextlib.suppress(CoordError, UsageError):  # of a client that is closed already
        client.set(key_of(node, client.incarnation), b"", owned=True, timeout_s=_PART_S)


@final
class Lives:
    """An agent's view of them: which workers were declared dead, and since when. Pure."""

    def __init__(self) -> None:
        self._workers: dict[str, int | None] = {}
        """By key; None for one that has parted or was declared dead."""
        self._dead_since: dict[int, float] = {}

    def take_in(
        self, changed: Changed, pids: Mapping[int, int], members: Mapping[str, int], *, now: float
    ) -> None:
        """A change of the keys. `pids` are those of the workers that run, with their numbers.

        `members` are those of them that have come into the run, by key.
        """
        if changed.reset:
            # One that has come in has declared itself: its key may have gone before anybody watched.
            self._workers = {**members, **self._workers}
            there = {item.key for item in changed.items}
            for key in self._workers.keys() - there:
                self._gone(key, now)
        for item in changed.items:
            if item.value is None:
                self._gone(item.key, now)
            elif not item.value:
                self._workers[item.key] = None
            elif item.value.isdigit() and (worker := pids.get(int(item.value))) is not None:
                self._workers[item.key] = worker
                self._dead_since.pop(worker, None)  # it came in after the reset that lacked it was written
        # Of those that are over only the living matter: a reset would bring them back.
        over = {key for key, worker in self._workers.items() if worker is None and key not in members}
        for key in over:
            del self._workers[key]

    def _gone(self, key: str, now: float) -> None:
        worker = self._workers.get(key)
        if worker is not None:
            self._workers[key] = None
            self._dead_since[worker] = now

    def overdue(self, living: Mapping[int, int], grace_s: float, *, now: float) -> list[tuple[int, float]]:
        """Workers declared dead `grace_s` ago or more that are among `living`, each once, and for how long.

        `living` are the pids of those that run, with their numbers.
        """
        numbers = set(living.values())
        self._dead_since = {one: since for one, since in self._dead_since.items() if one in numbers}
        found = [(one, now - since) for one, since in self._dead_since.items() if now - since >= grace_s]
        for one, _ in found:
            del self._dead_since[one]
        return found
