"""Simulated connections: in order and without gaps while they last, like TCP, and with every way of not
lasting.

What is under way on a connection arrives late, or is lost from some moment on when it is cut; either side
may hear of the cut late or not at all (half open), so that messages of an old connection arrive after those
of the new one. A partition holds everything between a member and the coordinator back until it heals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from holdfast.coord.messages import Answer, Call, Hello
from holdfast.testing.coordination.world import World

_KEEPALIVE_S: Final = 15.0
"""The longest that one end of a connection can take the other one to be there."""


class Host(Protocol):
    """One end of connections."""

    name: str

    def arrived(self, conn: Connection, message: Hello | Call | Answer) -> None: ...
    def hung_up(self, conn: Connection) -> None: ...


@dataclass(slots=True, eq=False)
class Way:
    """One direction of a connection. What would arrive after `cut` does not."""

    to: Host
    last: float = 0.0
    cut: float = math.inf
    closed: bool = False
    """The receiver knows that the connection is gone."""
    held: list[Hello | Call | Answer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Connection:
    number: int
    member: str
    up: Way
    down: Way
    gone: bool = False
    """The wire is cut; nothing that is sent from now on arrives."""


@final
class Network:
    """All wires. `slow` stretches every delay."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self.live: list[Connection] = []
        self.blocked: dict[str, set[str]] = {}
        """Member to the directions ("up", "down") that a partition holds back."""
        self.slow = 1.0

    def delay(self) -> float:
        rng = self._world.rng
        roll = rng.random()
        base = 0.0002 + 0.002 * rng.random() if roll < 0.9 else 0.05 * rng.random()
        if roll > 0.985:
            base = rng.random()
        return min(base * self.slow, 3.0)

    def connect(self, member: Host, service: Host) -> Connection:
        self._count += 1
        conn = Connection(self._count, member.name, Way(service), Way(member))
        self.live.append(conn)
        return conn

    def is_blocked(self, member: str) -> bool:
        return bool(self.blocked.get(member))

    def send_up(self, conn: Connection, message: Hello | Call) -> None:
        self._send(conn, conn.up, "up", message)

    def send_down(self, conn: Connection, message: Answer) -> None:
        self._send(conn, conn.down, "down", message)

    def _send(self, conn: Connection, way: Way, direction: str, message: Hello | Call | Answer) -> None:
        if conn.gone:
            # The other end is not there: a sender learns it by the answer to what it sends.
            back = conn.down if way is conn.up else conn.up
            self._world.later(self.delay(), self._tell_closed, conn, back)
            return
        if direction in self.blocked.get(conn.member, ()):
            way.held.append(message)
            return
        way.last = max(way.last, self._world.now + self.delay())
        self._world.at(way.last, self._deliver, conn, way, message)

    def _deliver(self, conn: Connection, way: Way, message: Hello | Call | Answer) -> None:
        if way.closed or self._world.now > way.cut:
            return
        way.to.arrived(conn, message)

    def _tell_closed(self, conn: Connection, way: Way) -> None:
        if not way.closed:
            way.closed = True
            way.to.hung_up(conn)

    def close(self, conn: Connection, by: Host) -> None:
        """One end closes in an orderly way: what it sent arrives, then the other end hears of it."""
        out, back = (conn.up, conn.down) if by is conn.down.to else (conn.down, conn.up)
        back.closed = True
        if not conn.gone:
            self._drop(conn)
            # A partition keeps the end of a connection from the other side as well.
            delay = (
                self.delay() if not self.is_blocked(conn.member) else self._world.between(0.5, _KEEPALIVE_S)
            )
            self._world.at(max(out.last, self._world.now + delay), self._tell_closed, conn, out)
            self._flush(conn, out)

    def break_off(self, conn: Connection, *, quiet: str = "") -> None:
        """Cut the wire. `quiet` names directions ("up", "down") whose end hears of it late or never."""
        if conn.gone:
            return
        self._drop(conn)
        world = self._world
        for direction, way in (("up", conn.up), ("down", conn.down)):
            way.cut = world.now + (world.between(0.0, 0.3) if world.chance(0.5) else 0.0)
            if direction not in quiet:
                world.at(way.cut + self.delay(), self._tell_closed, conn, way)
            else:
                # The kernel's keepalive notices it at last.
                world.at(way.cut + world.between(0.5, _KEEPALIVE_S), self._tell_closed, conn, way)

    def end_of(self, host: Host, *, silent: bool) -> None:
        """The process at one end died: its kernel tells the other end, unless the machine died with it."""
        for conn in [conn for conn in self.live if host in (conn.up.to, conn.down.to)]:
            mine, other = (conn.up, conn.down) if host is conn.up.to else (conn.down, conn.up)
            mine.closed = True
            self._drop(conn)
            delay = self.delay() if not silent else self._world.between(1.0, _KEEPALIVE_S)
            self._world.at(max(other.last, self._world.now + delay), self._tell_closed, conn, other)

    def _drop(self, conn: Connection) -> None:
        conn.gone = True
        self.live.remove(conn)

    def block(self, member: str, directions: set[str]) -> None:
        self.blocked[member] = directions | self.blocked.get(member, set())

    def heal(self, member: str) -> None:
        self.blocked.pop(member, None)
        for conn in list(self.live):
            if conn.member == member:
                for way in (conn.up, conn.down):
                    self._flush(conn, way)

    def _flush(self, conn: Connection, way: Way) -> None:
        held, way.held = way.held, []
        for message in held:
            way.last = max(way.last, self._world.now + self.delay())
            self._world.at(way.last, self._deliver, conn, way, message)
