"""A process with the real client core on a simulated wire, and the scripts that it runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

from holdfast.coord import messages as m
from holdfast.coord.calls import ClientCore, Happening, Noticed, OpenCall, Pushed, Stalled
from holdfast.coord.happenings import GRACE_S
from holdfast.errors import FencedError, HoldfastError
from holdfast.testing.coordination.network import Connection, Network
from holdfast.testing.coordination.service import Service
from holdfast.testing.coordination.tasks import Record, Rest, Script, Task, code_of
from holdfast.testing.coordination.world import Alarm, Clock, World
from holdfast.testing.linearizability import Operation


@final
class Member:
    """A process that can be started again and again; each life has a new incarnation."""

    def __init__(
        self, world: World, network: Network, service: Service, record: Record, name: str, clock: Clock,
        script: Callable[[Member], Script], *, silence_s: float = 3.0,
    ) -> None:  # fmt: skip
        self.world = world
        self.name = name
        self.clock = clock
        self.lives = 0
        self.paused = False
        self.core: ClientCore | None = None
        self.joined: m.Joined | None = None
        self.rallied = 0
        """The generation that is known to be over."""
        self.pushes: list[m.Push] = []
        self.watches = ""
        """The prefix of keys that it watches."""
        self.view: dict[str, bytes] = {}
        """What it has been told of them."""
        self.second: Callable[[Member], Script] | None = None
        self.heard: Callable[[Member, m.Push], None] | None = None
        """Called with whatever the coordinator tells on its own account."""
        self.restarts = True
        """Whether it is started again when its session is over."""
        self.is_agent = False
        self.buried: list[str] = []
        """Incarnations that this agent knows to be dead and has not told of."""
        self.done = False
        """The script has come to its end."""
        self._network = network
        self._service = service
        self._record = record
        self._script = script
        self._silence_s = silence_s
        self._tasks: list[Task] = []
        self._conn: Connection | None = None
        self._connecting = False
        self._inbox: list[tuple[Connection, m.Answer | None]] = []
        self._paused_at = 0.0
        self._stood_still = 0.0
        self._failures = 0
        self._alarm = Alarm(world, self._tick)

    @property
    def now(self) -> float:
        return self.clock.reads(self.world.now)

    @property
    def up(self) -> bool:
        return self.core is not None

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.lives}"

    # ---- life and death

    def start(self) -> None:
        """A new process, with a new incarnation."""
        if self.core is not None or self.done:
            return
        self.lives += 1
        self.core = ClientCore(
            run="run", incarnation=self.incarnation, name=self.name, silence_s=self._silence_s
        )
        self.joined, self.rallied, self.pushes = None, 0, []
        if self.world.tracing:
            self.world.tell(self.name, f"starts as {self.incarnation}")
        self._tasks = [Task(self._script(self), main=True)]
        if self.second is not None:
            self._tasks.append(Task(self.second(self)))
        if self.watches:
            self.view = {}
            self.core.watch(self.watches, None, self.now, 1000.0)
        self._dial()
        for task in list(self._tasks):
            self._advance(task, None, None)

    def kill(self, *, machine: bool = False) -> None:
        """SIGKILL; with the machine, nobody tells the coordinator."""
        if self.core is None:
            return
        if self.world.tracing:
            self.world.tell(self.name, "is killed" + (" with its machine" if machine else ""))
        self._end_process(machine)

    def _end_process(self, silent: bool) -> None:
        for task in self._tasks:
            self._note(task, None)
            task.live = False
        self._tasks = []
        self.core, self._conn, self.paused = None, None, False
        self._connecting = False
        self._inbox.clear()
        self._alarm.set(math.inf)
        self._network.end_of(self, silent=silent)

    def pause(self) -> None:
        if self.core is not None and not self.paused:
            self.paused, self._paused_at = True, self.world.now

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        self._stood_still += (self.world.now - self._paused_at) * self.clock.rate
        inbox, self._inbox = self._inbox, []
        for conn, answer in inbox:
            self._take_in(conn, answer)
        self._tick()

    def close(self) -> None:
        """End in an orderly way: say Bye, hang up."""
        core = self.core
        if core is None:
            return
        core.call(m.Bye(), self.now, 1.0)
        self._flush()
        if self._conn is not None:
            self._network.close(self._conn, self)
        self._end_process(False)
        self.done = True

    def bury(self, incarnation: str) -> None:
        """This agent learns that a process is dead."""
        self.buried.append(incarnation)
        if self.core is not None and not self.paused:
            self._wake_resting()

    def stopped(self, step: int) -> None:
        """It stops at `step`; who stops for the same reason must stop there too, or has gone further."""
        assert self.core is not None
        stop = self.core.stopping.stop
        assert stop is not None
        decided = self._record.stops.setdefault(stop.stop, stop.step)
        if decided != stop.step:
            self._record.problems.append(
                f"{self.incarnation}: stop {stop.stop} at {stop.step}, others {decided}"
            )

    # ---- the wire

    def _dial(self) -> None:
        core = self.core
        if core is None or self._connecting or self._conn is not None or core.over is not None:
            return
        self._connecting = True
        wait = self.world.between(0.5, 1.0) * min(0.5, 0.01 * 2.0 ** min(self._failures, 6))
        self.world.later(wait + self._network.delay(), self._reach, self.lives)

    def _reach(self, life: int) -> None:
        core = self.core
        if life != self.lives or core is None or not self._connecting:
            return
        if self.paused:
            self.world.later(0.2, self._reach, life)
            return
        self._connecting = False
        if core.over is not None:
            return
        if not self._service.up or self._network.is_blocked(self.name):
            self._failures += 1
            self._dial()
            return
        conn = self._conn = self._network.connect(self, self._service)
        core.connected(self.now)
        self._flush()
        self.world.later(self.world.between(1.0, 3.0), self._welcomed_by_now, life, conn)

    def _welcomed_by_now(self, life: int, conn: Connection) -> None:
        """A handshake has a deadline too."""
        if life == self.lives and self._conn is conn and self.core is not None and not self.core.ready:
            self._hang_up("no welcome in time")

    def _hang_up(self, reason: str) -> None:
        conn, core = self._conn, self.core
        assert conn is not None
        assert core is not None
        self._conn = None
        self._network.close(conn, self)
        core.disconnected(self.now, reason)
        self._failures += 1
        self._dial()
        self._flush()

    def arrived(self, conn: Connection, message: m.Hello | m.Call | m.Answer) -> None:
        assert isinstance(message, m.Answer)
        if self.paused:
            self._inbox.append((conn, message))
        else:
            self._take_in(conn, message)

    def hung_up(self, conn: Connection) -> None:
        if self.paused:
            self._inbox.append((conn, None))
        else:
            self._take_in(conn, None)

    def _take_in(self, conn: Connection, answer: m.Answer | None) -> None:
        core = self.core
        if core is None or conn is not self._conn:
            return
        if answer is None:
            self._conn = None
            core.disconnected(self.now, "the connection was lost")
            self._dial()
            self._flush()
            return
        if self.world.tracing:
            self.world.tell(self.name, f"<- {answer!r}")
        self._failures = 0
        self._happen(core.received(answer, self.now))

    def _flush(self) -> None:
        """Send what the core has to say, and set the alarm that it asks for."""
        core = self.core
        if core is None:
            return
        out = core.take()
        if self._conn is not None:
            for message in out:
                if isinstance(message, m.Call):
                    self._record.sent(core.incarnation, message)
                self._network.send_up(self._conn, message)
        wake_at = core.wake_at
        self._alarm.set(self.clock.when(wake_at) + 1e-6 if wake_at < math.inf else math.inf)

    def _tick(self) -> None:
        core = self.core
        if core is not None and not self.paused:
            if core.wake_at <= self.now:
                self._happen(core.tick(self.now))
            else:
                self._flush()

    # ---- what comes of it

    def _happen(self, happened: list[Happening]) -> None:
        core = self.core
        self._flush()
        for one in happened:
            if self.core is not core:
                return  # a script ended the process
            if isinstance(one, OpenCall):
                for task in self._tasks:
                    if task.call is one:
                        self._settle(task)
                        break
            elif isinstance(one, Pushed):
                self._pushed(one.push)
            elif isinstance(one, Noticed):
                self._noticed(one.changed)
            elif isinstance(one, Stalled):
                if self._conn is not None:
                    self._hang_up(one.reason)
            else:
                self._is_over()
        if happened:
            self._wake_resting()

    def _is_over(self) -> None:
        """The session is refused for good; a process that does not end by itself is started again."""
        if self._conn is not None:
            self._network.close(self._conn, self)
            self._conn = None
        self.world.later(self.world.between(0.05, 0.3), self._start_again, self.lives)

    def _start_again(self, life: int) -> None:
        if life == self.lives and self.core is not None and self.core.over is not None and self.restarts:
            self._end_process(False)
            self.start()

    def _pushed(self, push: m.Push) -> None:
        self.pushes.append(push)
        if self.heard is not None:
            self.heard(self, push)
        if isinstance(push, m.Rally) and push.urgent:
            self.rallied = max(self.rallied, push.generation)

    def _noticed(self, changed: m.Changed) -> None:
        if changed.reset:
            self.view = {}
        for item in changed.items:
            if item.value is None:
                self.view.pop(item.key, None)
            else:
                self.view[item.key] = item.value

    def _wake_resting(self) -> None:
        for task in list(self._tasks):
            if task.until is not None and task.live and task.until():
                self._advance(task, True, None)

    # ---- scripts

    def spawn(self, script: Script) -> None:
        """Run a script beside those that run."""
        task = Task(script)
        self._tasks.append(task)
        self._advance(task, None, None)

    def _advance(self, task: Task, value: Any, error: HoldfastError | None) -> None:
        """Let a script go on until it has to wait."""
        task.call, task.until = None, None
        task.alarm += 1
        while task.live:
            try:
                wish = task.script.throw(error) if error is not None else task.script.send(value)
            except StopIteration:
                task.live = False
                self._tasks.remove(task)
                if task.main:
                    self.close()
                return
            except FencedError:
                # What a supervisor does: this life is over, start another one.
                self.world.later(self.world.between(0.01, 0.3), self.start)
                self._end_process(False)
                return
            core = self.core
            assert core is not None
            if isinstance(wish, Rest):
                task.until = wish.until
                if wish.until is not None and wish.until():
                    value, error, task.until = True, None, None
                    continue
                self.world.later(wish.seconds, self._rested, task, task.alarm)
                return
            task.op, task.timeout_s = wish.op, wish.timeout_s
            task.invoked, task.invoked_at = self._record.stamp(), self.now
            task.stood_still = self._stood_still
            task.slots = self._slots(wish.op)
            task.call = call = core.call(wish.op, self.now, wish.timeout_s)
            if self.world.tracing:
                self.world.tell(self.name, f"calls {wish.op!r} as {call.seq}")
            self._flush()
            if not call.settled:
                return
            value, error = self._outcome(task)

    def _slots(self, op: m.Op) -> tuple[int, ...]:
        if not isinstance(op, m.Meet):
            return ()
        if op.slots is not None:
            return op.slots
        return tuple(range(self.joined.size)) if self.joined is not None else ()

    def _rested(self, task: Task, alarm: int) -> None:
        if task.live and task.alarm == alarm:
            if self.paused:
                self.world.later(0.1, self._rested, task, alarm)
            else:
                self._advance(task, False, None)

    def _settle(self, task: Task) -> None:
        value, error = self._outcome(task)
        self._advance(task, value, error)

    def _outcome(self, task: Task) -> tuple[Any, HoldfastError | None]:
        call = task.call
        assert call is not None
        op = task.op
        self._note(task, call)
        took = self.now - task.invoked_at - (self._stood_still - task.stood_still)
        if took > task.timeout_s + GRACE_S + 0.05:
            self._record.problems.append(
                f"{self.incarnation}: {op!r} took {took:.3f} s, its deadline was {task.timeout_s} s"
            )
        if self.world.tracing:
            self.world.tell(
                self.name,
                f"   {call.seq}: {call.error!r}" if call.error else f"   {call.seq}: {call.result!r}",
            )
        if isinstance(call.result, m.Joined):
            self.joined = call.result
        return call.result, call.error

    def _note(self, task: Task, call: OpenCall | None) -> None:
        """Put a call into the history, with what its caller knows of its outcome."""
        if task.op is None or task.call is None:
            return
        result: m.Result | None = None
        if call is not None:
            code = code_of(type(call.error)) if call.error is not None else ""
            result = m.Refused(code, str(call.error)) if code else call.result
        returned = self._record.stamp() if result is not None else math.inf
        slot = self.joined.slot if self.joined is not None else -1
        self._record.history.append(
            Operation(self.incarnation, task.op, result, task.invoked, returned, slot, task.slots)
        )
        task.op = None
