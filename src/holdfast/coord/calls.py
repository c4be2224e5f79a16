"""What a client of the coordinator knows and decides, without a clock, a socket or a thread.

    core = ClientCore(run="run", incarnation=uuid4().hex)

    core.connected(now)                 a connection stands and its handshake is over
    core.received(answer, now)          a message came: gives happenings, in order
    core.disconnected(now, reason)      the connection is gone
    core.call(op, now, timeout_s)       a call of the user: open until it is `settled`
    core.watch(prefix, token, now, timeout_s)
    core.tick(now)                      the moment `core.wake_at` has come: gives happenings
    core.take()                         messages to send on the connection, in order

Whoever runs it (the two faces, the simulator) calls `take` after every other method and sends what it gives;
no other method sends anything. One thread at a time. Happenings are

    OpenCall    a call that is settled: `call.outcome()` gives its result or raises its error
    Pushed      a message for the user
    Noticed     changes under a watch
    Stalled     the connection is of no use: close it, say `disconnected`, and make another
    Over        the session is refused for good (`core.over`): connect no more

What becomes of a call:

- Sent and not answered when the connection broke: it is sent again on the next one, with the same number and
  what is left of its time; so it is carried out once, whatever happens in between.
- Not answered in time: it is given up with UnreachableError, its outcome unknown. A wait gets a little grace,
  from when this side sees its deadline pass, since the coordinator knows better than this side who did not
  come. Most calls are then forgotten. A meeting (barrier, vote, ...) is not: the next call for the same
  meeting takes it up under its old number and so gets the outcome that everybody else had; this member cannot
  end up an epoch ahead of the others or behind them.
- Reads and watches change nothing, so the coordinator does not remember its answers to them: they are asked
  again under a new number, and do not hold back `acked`.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Final, final

from holdfast.coord import messages as m
from holdfast.coord.happenings import GRACE_S, Happening, Noticed, OpenCall, Over, Pushed, Stalled, WatchState
from holdfast.coord.refusals import error_of
from holdfast.coord.stopping import Stopping
from holdfast.errors import FencedError, HoldfastError, UnreachableError, UsageError

SILENCE_S: Final = 10.0
"""A connection on which a heartbeat was not answered for so long is given up."""
_HELD: Final = 1000
"""An abandoned meeting is taken up without its caller once it holds back so many later answers."""

_READS: Final = (m.Get, m.Scan, m.Status, m.Roster, m.Watch)
_LAST: Final = (m.Leave, m.Bye)
_NEVER: Final = math.inf
_ANEW: Final = "only a new client can take part again"

__all__ = [
    "GRACE_S", "SILENCE_S", "ClientCore", "Happening", "Noticed", "OpenCall", "Over", "Pushed", "Stalled",
    "WatchState",
]  # fmt: skip


_Meeting = tuple[str, str, frozenset[int]]


@final
class ClientCore:
    """One session with the coordinator, over however many connections."""

    def __init__(
        self,
        *,
        run: str,
        incarnation: str,
        name: str = "",
        grace_s: float = GRACE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.run = run
        self.incarnation = incarnation
        self.name = name
        self.sid = 0
        self.term = 0
        self.service = ""
        self.generation = 0
        self.slot = -1
        self._size = 0
        self.max_frame = 0
        self.stopping = Stopping()
        self.phase = ""
        self.over: HoldfastError | None = None
        self.ready = False
        """Whether the session stands on a connection."""
        self.trouble = "it was never reached"
        """Why there is no connection, for people."""
        self.wake_at = _NEVER
        """When `tick` has something to do; it may come to nothing."""
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._seq = 0
        self._seen_error = 0
        self._open: dict[int, OpenCall] = {}
        """Calls without an answer, oldest first, those of abandoned meetings included."""
        self._reads: dict[int, OpenCall] = {}
        self._abandoned: dict[_Meeting, OpenCall] = {}
        self._watches: dict[int, WatchState] = {}
        self._outbox: list[m.Hello | m.Call] = []
        self._heartbeat_s = _NEVER
        self._beats = False
        self._beat_at = _NEVER
        self._unheard_since: float | None = None
        """When the first heartbeat was sent since the coordinator was heard last."""
        self._expiry = _NEVER

    # ---- the connection

    def connected(self, now: float) -> None:
        """A connection stands: say hello. Calls go out once the coordinator has welcomed this client.

        The join that a new client begins with goes along: a coordinator that does not know the client yet has
        carried out nothing of it, so there is nothing to learn from the welcome first.
        """
        self.ready = False
        self._outbox = [m.Hello(self.run, self.incarnation, self.sid, self.name, self._seen_error)]
        first = next(iter(self._open.values()), None)
        if not self.sid and first is not None and type(first.op) is m.Join:
            self._post(first, first.again(now))

    def disconnected(self, now: float, reason: str = "") -> None:
        """The connection is gone. Open calls stay open."""
        self.ready = False
        self.trouble = reason or "the connection was lost"
        self._outbox = []
        self._beat_at, self._unheard_since = _NEVER, None
        for calls in (self._open, self._reads):
            for call in calls.values():
                call.sent = False
        self._reschedule()

    def take(self) -> list[m.Hello | m.Call]:
        """What is to be sent on the connection now, in order."""
        out = self._outbox
        if out:
            self._outbox = []
        return out

    # ---- calls

    def call(self, op: m.Op, now: float, timeout_s: float) -> OpenCall:
        """Open a call. It may be settled at once: by what an abandoned meeting came to, or by `over`."""
        if not (timeout_s >= 0.0 and math.isfinite(timeout_s)):
            raise UsageError(
                f"timeout_s={timeout_s} is not a number of seconds",
                hint="every wait has a deadline; give a finite timeout_s >= 0",
            )
        if self._abandoned and type(op) is m.Meet:
            resumed = self._abandoned.pop(self._meeting(op), None)
            if resumed is not None:
                return self._resume(resumed, op, now + timeout_s)
        self._seq = seq = self._seq + 1
        call = OpenCall(seq, op, self.generation, now + timeout_s)
        if self.over is not None:
            call.error = copy(self.over)
            return call
        if type(op) is m.Join:
            self._beats = True
        (self._reads if isinstance(op, _READS) else self._open)[seq] = call
        self._expect(call.deadline)
        if self.ready:
            self._post(call, op)
        if self._abandoned:
            self._collect(now)
        return call

    def _resume(self, call: OpenCall, op: m.Meet, deadline: float) -> OpenCall:
        """Take up an abandoned meeting for a new caller, under its old number."""
        again = OpenCall(call.seq, op, call.generation, deadline)
        again.told = True
        if call.settled:
            again.result, again.error = call.result, call.error
        elif self.over is not None:
            again.error = copy(self.over)
        else:
            self._open[call.seq] = again
            self._expect(deadline)
            if self.ready:
                self._post(again, op)
        return again

    def _collect(self, now: float) -> None:
        """Fetch the outcome of a meeting that nobody came back for, before it holds back too many answers."""
        oldest = next(iter(self._abandoned.values()))
        if self.ready and not oldest.sent and not oldest.settled and self._seq - oldest.seq > _HELD:
            self._post(oldest, oldest.op)

    def watch(self, prefix: str, token: object, now: float, timeout_s: float) -> tuple[OpenCall, WatchState]:
        """Open a watch; changes come as `Noticed`, from its first answer until `unwatch`."""
        call = self.call(m.Watch(prefix), now, timeout_s)
        state = WatchState(prefix, call.seq, token)
        if not call.settled:
            self._watches[call.seq] = state
        return call, state

    def unwatch(self, state: WatchState) -> None:
        """End a watch; nothing more is told of it."""
        if self._watches.pop(state.seq, None) is not None and self.ready:
            self._send(m.Unwatch(state.seq))

    def _post(self, call: OpenCall, op: m.Op) -> None:
        call.sent = call.told = True
        self._outbox.append(m.Call(call.seq, self._acked(), call.generation, op))

    def _send(self, op: m.Op) -> int:
        """Send something that nobody waits for."""
        self._seq += 1
        self._outbox.append(m.Call(self._seq, self._acked(), self.generation, op))
        return self._seq

    @property
    def has_open(self) -> bool:
        """Whether any call waits for an answer."""
        return bool(self._open or self._reads)

    def _held(self) -> set[int]:
        """The identities of the calls that no caller waits for at present."""
        return {id(call) for call in self._abandoned.values()}

    def _acked(self) -> int:
        """The highest number at or below which the coordinator need not remember an answer."""
        return next(iter(self._open)) - 1 if self._open else self._seq - 1

    # ---- progress, and the end

    def progress(self, step: int, phase: str, now: float) -> None:
        """Note where this member is; the next heartbeat tells it, at once if the phase is another one."""
        self.stopping.step = max(self.stopping.step, step)
        if phase != self.phase:
            self.phase = phase
            if self.ready and self._beats:
                self._beat(now)

    def reached(self, step: int) -> bool | None:
        """Whether `step` is at or after the stop; None while that is not known. False begins the step."""
        return self.stopping.reached(step)

    def refuse(self, seq: int, error: HoldfastError) -> list[Happening]:
        """Settle a call that cannot be sent at all."""
        call = self._open.pop(seq, None) or self._reads.pop(seq, None)
        if call is None:
            return []
        call.error = error
        self._watches.pop(seq, None)
        return [call]

    def finish(self, error: HoldfastError) -> list[Happening]:
        """Settle every open call with `error`, and every later one."""
        if self.over is not None:
            return []
        self.over = error
        self.ready = False
        ended = [call for calls in (self._open, self._reads) for call in calls.values()]
        for call in ended:
            call.error = copy(error)
        held = self._held()
        self._open.clear()
        self._reads.clear()
        self._abandoned.clear()
        self._watches.clear()
        self._outbox.clear()
        self.wake_at = self._beat_at = self._expiry = _NEVER
        return [*(call for call in ended if id(call) not in held), Over(error)]

    # ---- time

    def tick(self, now: float) -> list[Happening]:
        """Give up what ran out of time, and send a heartbeat if it is due."""
        happened: list[Happening] = []
        if now >= self._expiry:
            held = self._held()
            for calls in (self._open, self._reads):
                for call in list(calls.values()):
                    if id(call) not in held and call.expired(now, self._grace_s):
                        self.give_up(call)
                        happened.append(call)
            self._reschedule()
        if now >= self._beat_at:
            if self._unheard_since is not None and now - self._unheard_since > self._silence_s:
                happened.append(Stalled(f"no answer to a heartbeat for {now - self._unheard_since:.1f} s"))
                self._unheard_since = now
            self._beat(now)
        return happened

    def give_up(self, call: OpenCall) -> None:
        """End an open call whose time is over; a meeting that may have reached the coordinator is kept."""
        if call.settled:
            return
        op, seq = call.op, call.seq
        call.error = UnreachableError(
            f"no coordinator answered {call.label()} in time: "
            f"{'it is connected and silent' if self.ready else self.trouble}",
            hint="is the coordinator running, and is this its address? The call may have been done",
        )
        self._reads.pop(seq, None)
        self._watches.pop(seq, None)
        if type(op) is not m.Meet or not call.told:
            self._open.pop(seq, None)
            return
        kept = OpenCall(seq, op, call.generation, _NEVER)
        kept.sent, kept.told = call.sent, True
        older = self._abandoned.pop(self._meeting(op), None)
        if older is not None:
            self._open.pop(older.seq, None)
        self._open[seq] = self._abandoned[self._meeting(op)] = kept

    def _meeting(self, op: m.Meet) -> _Meeting:
        """What a call must share with an abandoned one to go on with it: a barrier of two is none of all."""
        return op.kind, op.name, frozenset(range(self._size) if op.slots is None else op.slots)

    def _expect(self, moment: float) -> None:
        if moment < self._expiry:
            self._expiry = moment
            if moment < self.wake_at:
                self.wake_at = moment

    def _reschedule(self) -> None:
        dues = [call.due() for calls in (self._open, self._reads) for call in calls.values()]
        self._expiry = min(dues, default=_NEVER)
        self.wake_at = min(self._expiry, self._beat_at)

    def _beat(self, now: float) -> None:
        """Send a heartbeat: a member always, others to see whether they are still connected to somebody."""
        if self._beats or self._open or self._reads or self._watches:
            self._send(m.Beat(self.stopping.step, self.phase, self._beats))
            if self._unheard_since is None:
                self._unheard_since = now
        self._beat_at = now + self._heartbeat_s
        self.wake_at = min(self._expiry, self._beat_at)

    # ---- messages of the coordinator

    def received(self, answer: m.Answer, now: float) -> list[Happening]:
        """Take in a message; gives what came of it, in order."""
        self._unheard_since = None
        seq, body = answer.seq, answer.body
        if seq == 0:
            return self._pushed(body, now)
        call = self._open.pop(seq, None) or self._reads.pop(seq, None)
        if call is None:
            return self._unasked(seq, body)
        if type(body) is m.Refused:
            call.error = error_of(body, call.op)
            self._watches.pop(seq, None)
        else:
            call.result = body  # type: ignore[assignment]
            self._learn(body)
            if type(call.op) in _LAST:
                return [call, *self.finish(FencedError("this client has left the run", hint=_ANEW))]
        if self._abandoned and id(call) in self._held():
            return []  # the next caller gets it
        return [call]

    def _unasked(self, seq: int, body: object) -> list[Happening]:
        """An answer that nobody waits for; that a watch could not be set again must be told."""
        if type(body) is m.Refused and self._watches.pop(seq, None) is not None:
            return [Pushed(body)]
        return []

    def _learn(self, body: object) -> None:
        """Note what a result says about this session."""
        if type(body) is m.Joined:
            if body.generation != self.generation:
                # Meetings belong to a generation: there is nothing left to catch up with.
                for call in self._abandoned.values():
                    self._open.pop(call.seq, None)
                self._abandoned.clear()
            self.generation, self.slot, self._size = body.generation, body.slot, body.size
            self._answer_stop()
        elif type(body) is m.Stop:
            self.stopping.heard(body)
            self._answer_stop()

    def _pushed(self, body: object, now: float) -> list[Happening]:
        match body:
            case m.Welcome():
                return self._welcomed(body, now)
            case m.Changed():
                return self._changed(body)
            case m.Trouble():
                if body.number <= self._seen_error:
                    return []
                self._seen_error = body.number
            case m.Stop():
                self.stopping.heard(body)
                self._answer_stop()
            case m.Refused():
                return self._refused(body)
        return [Pushed(body)]  # type: ignore[arg-type]

    def _refused(self, body: m.Refused) -> list[Happening]:
        """The session as a whole is refused: for good, unless another coordinator may yet take it."""
        if body.code in (m.OVER, m.LIMIT):
            return [Pushed(body), Stalled(body.message)]
        return self.finish(error_of(body))

    def _welcomed(self, body: m.Welcome, now: float) -> list[Happening]:
        if self.sid and body.sid != self.sid:
            message = f"the coordinator does not know this session any more ({self.sid}, now {body.sid})"
            return self.finish(FencedError(message, hint=_ANEW))
        self.sid, self.term, self.service = body.sid, body.term, body.service
        self.max_frame, self._heartbeat_s = body.max_frame, body.heartbeat_s
        self.ready = True
        held = self._held()
        for call in self._open.values():
            if not call.sent and id(call) not in held:
                self._post(call, call.again(now))
        self._watch_again(now)
        self._answer_stop()
        if body.fresh and not self.phase:
            self._beat_at = now + self._heartbeat_s  # the hello was sign of life enough
        else:
            self._beat(now)
        self._reschedule()
        return [Pushed(body)]

    def _watch_again(self, now: float) -> None:
        """Ask again, under new numbers, what changes nothing: reads, and the watches that stood."""
        reads, self._reads = self._reads, {}
        watches, self._watches = self._watches, {}
        for call in reads.values():
            state = watches.pop(call.seq, None)
            self._seq += 1
            call.seq = self._seq
            self._reads[call.seq] = call
            if state is not None:
                state.seq = call.seq
                self._watches[call.seq] = state
            self._post(call, call.again(now))
        for state in watches.values():
            state.seq = self._send(m.Watch(state.prefix, state.since))
            self._watches[state.seq] = state

    def _changed(self, body: m.Changed) -> list[Happening]:
        state = self._watches.get(body.watch)
        if state is None:
            return []
        since = state.since
        items = body.items if body.reset else tuple(item for item in body.items if item.revision > since)
        if not items and not body.reset:
            return []
        state.since = max(since, max((item.revision for item in items), default=0))
        return [Noticed(state, m.Changed(body.watch, items, body.reset))]

    def _answer_stop(self) -> None:
        at = self.stopping.answer()
        if at is not None and self.slot >= 0 and self.ready:
            self._send(at)
