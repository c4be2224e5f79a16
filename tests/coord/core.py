"""A coordinator's core in a test: clients by name, answers by call, the ledger checked after every step."""

from __future__ import annotations

from typing import Any

from holdfast.coord.coordinator import Coordinator
from holdfast.coord.kernel import Close, Closed, Effect, Event, Note, Opened, Received, Send, Tick, Write
from holdfast.coord.ledger import Ledger, replay
from holdfast.coord.messages import Call, Hello, Join, Op, Welcome
from holdfast.coord.records import Record
from holdfast.coord.settings import Settings


class Run:
    """A run with a clock that tests move."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.now = 100.0
        self.records: list[Record] = []
        self.notes: list[Note] = []
        self.closed: dict[int, str] = {}
        self._answers: dict[tuple[int, int], Any] = {}
        self._pushes: dict[int, list[Any]] = {}
        self._conns = 0
        self.core = self._start(Ledger())

    def _start(self, ledger: Ledger) -> Coordinator:
        self.core = Coordinator(self.settings, ledger, service="service", now=self.now)
        self._took(self.core.begin(now=self.now))
        return self.core

    def restart(self) -> None:
        """Kill the coordinator and start another one from its log; all connections are gone."""
        self._start(replay(self.records))

    def step(self, event: Event) -> list[Effect]:
        return self._took(self.core.step(event, now=self.now))

    def _took(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            match effect:
                case Write(number, record):
                    self.records.append(record)
                    assert number == len(self.records)
                case Send(conn, answer, after, _):
                    assert after <= len(self.records), "an answer waits for a record that is not written yet"
                    if answer.seq:
                        assert (conn, answer.seq) not in self._answers, "a call is answered once"
                        self._answers[conn, answer.seq] = answer.body
                    else:
                        self._pushes.setdefault(conn, []).append(answer.body)
                case Close(conn, reason):
                    self.closed[conn] = reason
                case Note():
                    self.notes.append(effect)
        assert replay(self.records).snapshot() == self.core.ledger.snapshot()
        return effects

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a Tick whenever one is due and everybody beating."""
        ends = self.now + seconds
        while self.core.wake_at <= ends:
            self.now = max(self.now, self.core.wake_at)
            self.step(Tick())
        self.now = ends

    def client(self, incarnation: str, sid: int = 0, **hello: Any) -> Client:
        return Client(self, incarnation, sid, **hello)

    def members(self, count: int, **join: Any) -> list[Client]:
        """That many members, in slots 0, 1, ... of a generation."""
        found = [self.client(f"m{slot}", name=f"host{slot}") for slot in range(count)]
        for slot, member in enumerate(found):
            member.call(Join(join.get("slot", slot), 60.0))
        return found


class Client:
    """One connection of one client."""

    def __init__(self, test: Run, incarnation: str, sid: int, run: str = "run", **hello: Any) -> None:
        test._conns += 1
        self._run = test
        self.conn = test._conns
        self.incarnation = incarnation
        self.seq = 0
        self.sid = sid
        test.step(Opened(self.conn, Hello(run, incarnation, sid, **hello)))
        for push in self.pushes(Welcome):
            self.sid = push.sid

    def call(self, op: Op, *, seq: int = 0, generation: int | None = None, acked: int = 0) -> int:
        """Send a call; its number."""
        if not seq:
            self.seq += 1
            seq = self.seq
        if generation is None:
            session = self._run.core.ledger.sessions.get(self.sid)
            generation = self._run.core.ledger.generation if session and session.slot >= 0 else 0
        self._run.step(Received(self.conn, Call(seq, acked, generation, op)))
        return seq

    def answer(self, seq: int = 0) -> Any:
        """The answer to a call (the last one), or None."""
        return self._run._answers.get((self.conn, seq or self.seq))

    def ask(self, op: Op, **how: Any) -> Any:
        return self.answer(self.call(op, **how))

    def pushes(self, kind: type) -> list[Any]:
        return [push for push in self._run._pushes.get(self.conn, []) if isinstance(push, kind)]

    def close(self) -> None:
        self._run.step(Closed(self.conn))

    def again(self) -> Client:
        """A new connection of the same client."""
        found = Client(self._run, self.incarnation, self.sid)
        found.seq = self.seq
        return found
