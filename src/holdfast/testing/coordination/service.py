"""The edge of the coordinator, simulated: it carries out the real core's effects on wires and a disk."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol, final

from holdfast.coord.coordinator import Coordinator
from holdfast.coord.kernel import Close, Closed, Effect, Event, Opened, Received, Send, Tick, Write
from holdfast.coord.ledger import Ledger
from holdfast.coord.messages import Answer, Call, Hello
from holdfast.coord.settings import Settings
from holdfast.testing.coordination.disk import Disk
from holdfast.testing.coordination.network import Connection, Network
from holdfast.testing.coordination.world import Alarm, Clock, World


class Witness(Protocol):
    """Sees all that the core is told and does."""

    def began(self, ledger: Ledger) -> None: ...
    def stepped(self, event: Event | None, effects: list[Effect], now: float) -> None: ...
    def released(self, send: Send) -> None: ...
    def stopped(self) -> None: ...


@final
class Service:
    """One coordinator after another, on one disk."""

    name = "coord"

    def __init__(self, world: World, network: Network, settings: Settings, clock: Clock) -> None:
        self.world = world
        self.settings = settings
        self.clock = clock
        self.core: Coordinator | None = None
        self.witness: Witness | None = None
        self.disk = Disk(world, self._release)
        self.paused = False
        self.lives = 0
        self.gated = True
        """Off: answers go out before their records are written (a planted bug)."""
        self._network = network
        self._conns: dict[int, Connection] = {}
        self._out: dict[int, deque[Send | Close]] = {}
        self._inbox: list[Event] = []
        self._alarm = Alarm(world, self._tick)
        self._wake_at = math.inf

    @property
    def now(self) -> float:
        return self.clock.reads(self.world.now)

    @property
    def up(self) -> bool:
        return self.core is not None

    # ---- life and death

    def start(self) -> None:
        if self.core is not None:
            return
        self.lives += 1
        ledger = self.disk.recover()
        if self.witness is not None:
            self.witness.began(ledger)
        self.core = Coordinator(self.settings, ledger, service=f"s{self.lives}", now=self.now)
        if self.world.tracing:
            self.world.tell(self.name, f"starts as s{self.lives} with {ledger.number} records")
        self._carry_out(None, self.core.begin(now=self.now))

    def kill(self, *, power: bool = False) -> None:
        if self.core is None:
            return
        if self.world.tracing:
            self.world.tell(self.name, "loses power" if power else "is killed")
        self.core, self.paused = None, False
        self._conns.clear()
        self._out.clear()
        self._inbox.clear()
        self._alarm.set(math.inf)
        self._wake_at = math.inf
        self.disk.crash(power=power)
        self._network.end_of(self, silent=power)
        if self.witness is not None:
            self.witness.stopped()

    def pause(self) -> None:
        if self.core is not None:
            self.paused = True

    def resume(self) -> None:
        """Go on. The clock has run; what came meanwhile and the alarm are handled in either order."""
        if not self.paused:
            return
        self.paused = False
        if self.world.chance(0.5):
            self._tick()
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self._step(event)
        self._release()
        # The alarm may have rung while nobody listened.
        self._wake_at = math.inf
        self._set_alarm()

    # ---- events

    def arrived(self, conn: Connection, message: Hello | Call | Answer) -> None:
        if isinstance(message, Hello):
            self._conns[conn.number] = conn
            self._step(Opened(conn.number, message))
        elif isinstance(message, Call) and conn.number in self._conns:
            self._step(Received(conn.number, message))

    def hung_up(self, conn: Connection) -> None:
        if conn.number in self._conns:
            self._step(Closed(conn.number))

    def _tick(self) -> None:
        if self.core is None or self.paused:
            return
        self._wake_at = math.inf
        if self.core.wake_at <= self.now:
            self._step(Tick())
        else:
            self._set_alarm()

    def _step(self, event: Event) -> None:
        if self.core is None:
            return
        if self.paused:
            self._inbox.append(event)
            return
        if isinstance(event, Closed):
            self._conns.pop(event.conn, None)
            self._out.pop(event.conn, None)
        elif isinstance(event, Received) and event.conn not in self._conns:
            return  # it came while the process stood still, and the connection was closed before it was read
        if self.world.tracing and not isinstance(event, Tick):
            self.world.tell(self.name, f"<- {event!r}")
        self._carry_out(event, self.core.step(event, now=self.now))

    def _carry_out(self, event: Event | None, effects: list[Effect]) -> None:
        if self.witness is not None:
            self.witness.stepped(event, effects, self.now)
        tracing = self.world.tracing
        for effect in effects:
            if tracing:
                self.world.tell(self.name, f"   {effect!r}")
            if isinstance(effect, Write):
                self.disk.append(effect)
            elif isinstance(effect, Send | Close) and effect.conn in self._conns:
                self._out.setdefault(effect.conn, deque()).append(effect)
        self._release()
        self._set_alarm()

    def _set_alarm(self) -> None:
        assert self.core is not None
        wake_at = self.core.wake_at
        if wake_at == self._wake_at:
            return
        self._wake_at = wake_at
        if wake_at < math.inf:
            # A loop that has other things to do comes a little late.
            wake_at = self.clock.when(wake_at) + 1e-6 + 0.01 * self.world.rng.random() ** 4
        self._alarm.set(wake_at)

    # ---- effects

    def _release(self) -> None:
        """Let go of every answer whose record is where it must be; those behind it wait."""
        if self.core is None or self.paused:
            return
        written, synced = self.disk.written, self.disk.synced
        for number in list(self._out):
            queue = self._out[number]
            conn = self._conns[number]
            while queue:
                head = queue[0]
                if isinstance(head, Close):
                    self._network.close(conn, self)
                    self._step_later(Closed(number))
                    queue.clear()
                    break
                if self.gated and head.after > (synced if head.sync else written):
                    break
                queue.popleft()
                if self.witness is not None:
                    self.witness.released(head)
                self._network.send_down(conn, head.answer)
            if not queue:
                self._out.pop(number, None)

    def _step_later(self, event: Event) -> None:
        self.world.later(0.0, self._step_in_life, event, self.lives)

    def _step_in_life(self, event: Event, life: int) -> None:
        if life == self.lives:
            self._step(event)
