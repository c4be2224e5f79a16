"""Preemption: a step at which every member stops, agreed on while they run.

    none --- Preempt ---> announced --- every member said At ---> decided
    decided --- Preempt by a client that is past it ---> announced, under the next number

A stop that a member asked for is over when the next generation forms without it; one that somebody else asked
for, when the next generation has none of the members it was for.

A member that said At(step) begins no later step before it knows the decision, so `max + 1` lies ahead of all
of them: each gets there, and none has passed it.
"""

from __future__ import annotations

from typing import final

from holdfast.coord.desk import Desk
from holdfast.coord.ledger import Session
from holdfast.coord.messages import MISUSE, STOP_ANNOUNCED, STOP_OVER, At, Call, Done, Preempt, Stop
from holdfast.coord.records import Stopping, StopSet


@final
class Stops:
    """The stop that stands, and who has answered."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._at: dict[int, int] = {}

    def preempt(self, session: Session, call: Call, op: Preempt) -> None:
        desk = self._desk
        standing = desk.ledger.stop
        if standing is not None and standing.stop > op.past and standing.step != STOP_OVER:
            desk.answer(session.sid, call.seq, standing, desk.ledger.number, desk.sync_keys)
            return
        stop = Stop((standing.stop if standing else 0) + 1, STOP_ANNOUNCED, op.reason)
        number = desk.write(
            Stopping(
                stop.stop,
                op.reason,
                session.sid if session.slot >= 0 else 0,
                ((session.sid, call.seq, call.acked),),
            )
        )
        self._at.clear()
        desk.answer(session.sid, call.seq, stop, number, desk.sync_keys)
        desk.push(desk.member_sids(), stop, number)
        desk.note("preempting", f"{desk.name_of(session.sid)} asks the run to stop: {op.reason}")

    def at(self, session: Session, call: Call, op: At) -> None:
        desk = self._desk
        stop = desk.ledger.stop
        if session.slot < 0:
            desk.refuse(session.sid, call.seq, MISUSE, "only members say where they are")
            return
        desk.answer(session.sid, call.seq, Done())
        if stop is None or stop.stop != op.stop:
            return
        if stop.step != STOP_ANNOUNCED:
            desk.push([session.sid], stop, desk.ledger.number, desk.sync_keys)
            return
        self._at[session.sid] = op.step
        self.check()

    def greet(self, sid: int) -> None:
        """Tell a member that has just come, or come back, of the stop that stands."""
        desk = self._desk
        stop = desk.ledger.stop
        if stop is not None and stop.step != STOP_OVER and desk.ledger.sessions[sid].slot >= 0:
            desk.push([sid], stop, desk.ledger.number, desk.sync_keys)

    def check(self) -> None:
        """Decide once every member that is alive has answered."""
        desk = self._desk
        stop = desk.ledger.stop
        if stop is None or stop.step != STOP_ANNOUNCED:
            return
        asked = [sid for sid in desk.member_sids() if not desk.ledger.sessions[sid].parted]
        if not asked or any(sid not in self._at for sid in asked):
            return
        step = max(self._at[sid] for sid in asked) + 1
        number = desk.write(StopSet(stop.stop, step))
        self._at.clear()
        desk.push(desk.member_sids(), Stop(stop.stop, step, stop.reason), number, desk.sync_keys)
        desk.note("stop", f"all stop at step {step}: {stop.reason}", step=step)
