"""Members in one process, each driven by a thread of its own when they must act at once."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

import numpy as np

from holdfast.reduce import Group, Member, Reducer

DEADLINE_S: Final = 20.0
Result = TypeVar("Result")


def unchecked() -> None:
    """A check that finds nothing."""


def grads(step: int, lane: int, *, size: int = 3000) -> dict[str, Any]:
    """What lane `lane` of a step gives, whoever computes it."""
    random = np.random.default_rng((step, lane))
    return {
        "w": random.standard_normal((size // 10, 10)).astype(np.float32),
        "b": [random.standard_normal(7), random.integers(0, 1 << 30, 3)],
        "tokens": 17 * lane + step,
    }


def alone(step: int, num_lanes: int, **options: Any) -> bytes:
    """The bytes of the total of a step, made by one member."""
    reducer = Reducer(num_lanes=num_lanes, **options)
    try:
        reducer.begin(step, {0: range(num_lanes)})
        for lane in range(num_lanes):
            reducer.add(lane, grads(step, lane))
        reducer.exchange(DEADLINE_S, unchecked)
        return flat(reducer.total())
    finally:
        reducer.close()


def flat(tree: Mapping[str, Any]) -> bytes:
    """The bytes of a tree like those of `grads`."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in (tree["w"], *tree["b"], tree["tokens"]))


def dealt(num_lanes: int, slots: Sequence[int]) -> dict[int, list[int]]:
    """Lanes in whole ranges."""
    cuts = [num_lanes * at // len(slots) for at in range(len(slots) + 1)]
    return {slot: list(range(cuts[at], cuts[at + 1])) for at, slot in enumerate(slots)}


@final
class Crew:
    """Reducers by slot. All are closed with the block."""

    def __init__(self, num_members: int, **options: Any) -> None:
        self.options = options
        self.generation = 0
        self.members: dict[int, Reducer] = {slot: Reducer(**options) for slot in range(num_members)}
        self.closed: list[Reducer] = []
        self.regroup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for reducer in self.members.values():
            reducer.close()

    def groups(self) -> dict[int, Group]:
        """The group of the present members, in a new generation, as each of them sees it."""
        self.generation += 1
        members = tuple(Member(slot, one.incarnation, one.address) for slot, one in self.members.items())
        return {slot: Group(self.generation, slot, members) for slot in self.members}

    def regroup(self) -> None:
        for slot, group in self.groups().items():
            self.members[slot].regroup(group)

    def lose(self, slot: int) -> None:
        """End a member."""
        self.members.pop(slot).close()

    def join(self, slot: int) -> Reducer:
        """A new member; nobody knows of it before the next regroup."""
        self.members[slot] = Reducer(**self.options)
        return self.members[slot]

    def begin(self, step: int, deal: Mapping[int, Sequence[int]], *, add: bool = True) -> None:
        for slot, reducer in self.members.items():
            reducer.begin(step, deal)
            if add:
                self.add(slot, step, deal.get(slot, ()))

    def add(self, slot: int, step: int, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self.members[slot].add(lane, grads(step, lane))

    def together(
        self, act: Callable[[Reducer], Result], slots: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """What `act` returns or raises for each member, all at the same time."""
        found: dict[int, Any] = {}

        def run(slot: int) -> None:
            try:
                found[slot] = act(self.members[slot])
            except Exception as error:
                found[slot] = error

        threads = [threading.Thread(target=run, args=(slot,)) for slot in slots or self.members]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + 2 * DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
            assert not thread.is_alive(), "a member hangs"
        return found

    def announced(self, slots: Sequence[int]) -> None:
        """Return when these have announced what they hold of the step, and have heard it of each other."""
        self.together(lambda one: one._announce(one._shelf.layout), slots)  # type: ignore[arg-type]
        for one, other in itertools.permutations((self.members[slot] for slot in slots), 2):
            hub, key = one._hub, (self.generation, one._step)
            with hub.changed:
                link = hub.link(other.incarnation)
                assert link is not None
                assert hub.changed.wait_for(partial(operator.contains, link.ready, key), DEADLINE_S)

    def exchange(self, slots: Sequence[int] | None = None, deadline_s: float = DEADLINE_S) -> dict[int, Any]:
        """The total's bytes, or the error, for each member."""

        def act(reducer: Reducer) -> bytes:
            reducer.exchange(deadline_s, unchecked)
            return flat(reducer.total())

        return self.together(act, slots)

    def step(self, step: int, deal: Mapping[int, Sequence[int]]) -> dict[int, Any]:
        self.begin(step, deal)
        return self.exchange()
