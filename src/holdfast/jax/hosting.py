"""Which coordination services there should be: a pure core, fed with the keys under `world/`.

    world/want/NODE/REPLICA/ATTEMPT   worker 0 of a replica asks the host on its node; value: how many workers
    world/at/REPLICA/ATTEMPT          the host answers: the address. Owned: it goes with the host
    world/in/REPLICA/ATTEMPT/INDEX    a worker is connected. Owned: it goes with the worker

A service whose clients live must not close: JAX aborts them. So a service is stopped only when a newer
attempt of its replica is wanted (or its want was taken back), and then as soon as nobody is in it, or after
`linger_s`: whoever is still in a superseded attempt is about to be killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias, final

PREFIX: Final = "world/"


class World(NamedTuple):
    """One life of one replica."""

    replica: int
    attempt: int

    def want(self, node: int) -> str:
        return f"{PREFIX}want/{node}/{self.replica}/{self.attempt}"

    @property
    def at(self) -> str:
        return f"{PREFIX}at/{self.replica}/{self.attempt}"

    def inside(self, index: int) -> str:
        return f"{PREFIX}in/{self.replica}/{self.attempt}/{index}"


class Start(NamedTuple):
    """Start a service and tell where it is."""

    world: World
    workers: int


class Stop(NamedTuple):
    """Stop the service and remove its keys."""

    world: World


Effect: TypeAlias = Start | Stop


@final
class Hosting:
    """The worlds that one node hosts. `now` is any clock that goes forward."""

    def __init__(self, node: int, linger_s: float) -> None:
        self._node = node
        self._linger_s = linger_s
        self._wanted: dict[World, int] = {}
        self._inside: dict[World, set[int]] = {}
        self._running: dict[World, float | None] = {}
        """The services there are; a time if they are of no use any more, since then."""

    @property
    def running(self) -> tuple[World, ...]:
        return tuple(self._running)

    def changed(self, items: Iterable[tuple[str, bytes | None]], reset: bool, now: float) -> list[Effect]:
        """Keys changed; `reset`: these are all there are.

        A want that is missing after a reset was not taken back: the coordinator may have lost its disk, while
        workers train on. Its service stays.
        """
        if reset:
            self._wanted = {world: size for world, size in self._wanted.items() if world in self._running}
            self._inside.clear()
        for key, value in items:
            self._note(key, value)
        return self.due(now)

    def failed(self, world: World) -> None:
        """The service did not start; it is tried again when next something is due."""
        self._running.pop(world, None)

    def due(self, now: float) -> list[Effect]:
        """What is to be done now."""
        newest: dict[int, int] = {}
        for world in self._wanted:
            newest[world.replica] = max(world.attempt, newest.get(world.replica, -1))
        effects: list[Effect] = []
        for world, workers in self._wanted.items():
            if world.attempt == newest[world.replica] and world not in self._running:
                self._running[world] = None
                effects.append(Start(world, workers))
        for world in tuple(self._running):
            if world in self._wanted and world.attempt == newest[world.replica]:
                self._running[world] = None
                continue
            since = self._running[world]
            if since is None:
                since = self._running[world] = now
            if not self._inside.get(world) or now >= since + self._linger_s:
                del self._running[world]
                effects.append(Stop(world))
        return effects

    def next_due(self) -> float | None:
        """When `due` should be asked again although nothing changes; None for never."""
        times = [since + self._linger_s for since in self._running.values() if since is not None]
        return min(times, default=None)

    def _note(self, key: str, value: bytes | None) -> None:
        kind, *rest = key.removeprefix(PREFIX).split("/")
        try:
            numbers = [int(part) for part in rest]
            if kind == "want" and len(numbers) == 3 and numbers[0] == self._node:
                world = World(*numbers[1:])
                if value is None:
                    self._wanted.pop(world, None)
                else:
                    self._wanted[world] = int(value)
            elif kind == "in" and len(numbers) == 3:
                inside = self._inside.setdefault(World(*numbers[:2]), set())
                (inside.discard if value is None else inside.add)(numbers[2])
                if not inside:
                    del self._inside[World(*numbers[:2])]
        except ValueError:
            return  # somebody else's key
