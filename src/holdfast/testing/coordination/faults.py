"""Everything that can go wrong in a simulated run, in doses that the seed decides.

A seed turns some kinds of fault on and leaves others off (a schedule with all of them at once finds less,
since nothing gets far enough for the interesting ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from holdfast.testing.coordination.member import Member
from holdfast.testing.coordination.network import Network
from holdfast.testing.coordination.oracle import Oracle
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.world import World


@final
class Faults:
    """Causes faults until `stop`."""

    def __init__(
        self, world: World, network: Network, service: Service, members: Sequence[Member], oracle: Oracle
    ) -> None:
        self._world = world
        self._network = network
        self._service = service
        self._members = members
        self._oracle = oracle
        self._on = True
        kinds: dict[str, Callable[[], None]] = {
            "cut": self._cut,
            "half_open": self._half_open,
            "partition": self._partition,
            "kill": self._kill,
            "pause": self._pause,
            "coord_kill": self._coord_kill,
            "coord_pause": self._coord_pause,
            "power": self._power,
            "slow_disk": self._slow_disk,
            "slow_net": self._slow_net,
            "snapshot": self._snapshot,
        }
        rng = world.rng
        self.kinds = [kind for kind in kinds if rng.random() < (0.15 if kind == "power" else 0.4)]
        self._causes = [kinds[kind] for kind in self.kinds]
        self._rate = rng.choice((0.5, 1.5, 4.0))

    def start(self) -> None:
        if self._causes:
            self._world.later(self._world.rng.expovariate(self._rate), self._next)

    def _next(self) -> None:
        if self._on:
            self._world.rng.choice(self._causes)()
            self._world.later(self._world.rng.expovariate(self._rate), self._next)

    def stop(self) -> None:
        """Heal everything that can heal."""
        self._on = False
        self._network.slow = self._service.disk.slow = 1.0
        for member in self._members:
            self._network.heal(member.name)
            member.resume()
            member.start()
        self._coord_resume()
        self._service.start()

    def _tell(self, text: str) -> None:
        if self._world.tracing:
            self._world.tell("fault", text)

    def _someone(self) -> Member:
        return self._world.rng.choice(self._members)

    # ---- the network

    def _cut(self) -> None:
        if self._network.live:
            conn = self._world.rng.choice(self._network.live)
            self._tell(f"connection {conn.number} of {conn.member} is cut")
            self._network.break_off(conn)

    def _half_open(self) -> None:
        if self._network.live:
            conn = self._world.rng.choice(self._network.live)
            quiet = self._world.rng.choice(("up", "down", "up down"))
            self._tell(f"connection {conn.number} of {conn.member} is cut and {quiet} does not hear of it")
            self._network.break_off(conn, quiet=quiet)

    def _partition(self) -> None:
        name = self._someone().name
        directions = self._world.rng.choice(({"up"}, {"down"}, {"up", "down"}))
        self._tell(f"{name} is cut off {sorted(directions)}")
        self._network.block(name, directions)
        self._world.later(self._world.rng.expovariate(0.7), self._heal, name)

    def _heal(self, name: str) -> None:
        if self._network.is_blocked(name):
            self._tell(f"{name} can be reached again")
            self._network.heal(name)

    def _slow_net(self) -> None:
        self._network.slow = self._world.rng.choice((5.0, 30.0))
        self._world.later(self._world.rng.expovariate(1.0), self._fast_net)

    def _fast_net(self) -> None:
        self._network.slow = 1.0

    # ---- members

    def _kill(self) -> None:
        victim = self._someone()
        if not victim.up:
            return
        gone = victim.incarnation
        victim.kill(machine=self._world.chance(0.3))
        for member in self._members:
            if member.is_agent and member is not victim:
                member.bury(gone)
        self._world.later(self._world.rng.expovariate(1.5), victim.start)

    def _pause(self) -> None:
        victim = self._someone()
        if victim.up and not victim.paused:
            self._tell(f"{victim.name} stands still")
            victim.pause()
            self._world.later(self._world.rng.expovariate(0.4), victim.resume)

    # ---- the coordinator

    def _coord_kill(self) -> None:
        if self._service.up:
            self._service.kill()
            self._world.later(self._world.rng.expovariate(3.0), self._service.start)

    def _power(self) -> None:
        if self._service.up:
            self._oracle.power_lost = True
            self._service.kill(power=True)
            self._world.later(self._world.rng.expovariate(1.0), self._service.start)

    def _coord_pause(self) -> None:
        if self._service.up and not self._service.paused:
            self._tell("coord stands still")
            self._service.pause()
            self._world.later(self._world.rng.expovariate(0.4), self._coord_resume)

    def _coord_resume(self) -> None:
        if self._service.paused:
            self._tell("coord goes on")
            self._oracle.forgive()
            self._service.resume()

    def _slow_disk(self) -> None:
        self._service.disk.slow = self._world.rng.choice((10.0, 100.0))
        self._world.later(self._world.rng.expovariate(0.7), self._fast_disk)

    def _fast_disk(self) -> None:
        self._service.disk.slow = 1.0

    def _snapshot(self) -> None:
        core = self._service.core
        if core is not None:
            self._service.disk.snapshot(core.ledger)
