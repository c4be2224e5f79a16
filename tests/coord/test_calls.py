"""The client's core: what it sends, when it gives up, and what it makes of what it is told."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coord import messages as m
from holdfast.coord.calls import ClientCore, Happening, Noticed, OpenCall, Over, Pushed, Stalled
from holdfast.coord.coordinator import Coordinator
from holdfast.coord.kernel import Close, Closed, Opened, Received, Send, Tick
from holdfast.coord.ledger import Ledger
from holdfast.coord.settings import Settings
from holdfast.errors import (
    BarrierError,
    BarrierTimeoutError,
    CoordError,
    DeadlineError,
    FencedError,
    KeyExistsError,
    LimitError,
    StaleGenerationError,
    UnreachableError,
    UsageError,
)

HEARTBEAT_S = 0.5


def made() -> ClientCore:
    return ClientCore(run="run", incarnation="me", grace_s=0.5, silence_s=2.0)


def welcome(core: ClientCore, now: float = 0.0, sid: int = 7) -> list[m.Call]:
    """Connect and welcome it; what it sends then."""
    core.connected(now)
    (hello,) = core.take()
    assert isinstance(hello, m.Hello)
    core.received(m.Answer(0, m.Welcome(sid, 1, "s", 0, sid != 7, HEARTBEAT_S, 1 << 20)), now)
    return taken(core)


def taken(core: ClientCore) -> list[m.Call]:
    """What it sends, heartbeats left out."""
    calls = [one for one in core.take() if isinstance(one, m.Call)]
    return [call for call in calls if not isinstance(call.op, m.Beat)]


def joined(core: ClientCore, generation: int = 1, slot: int = 0) -> None:
    call = core.call(m.Join(-1, 9.0), 0.0, 9.0)
    core.received(m.Answer(call.seq, m.Joined(generation, slot, 2)), 0.0)
    core.take()


def meet(name: str = "b", timeout_s: float = 5.0) -> m.Meet:
    return m.Meet(m.BARRIER, name, timeout_s)


# ---- calls and connections


def test_calls_wait_for_the_welcome_and_go_out_in_order() -> None:
    core = made()
    calls = [core.call(m.Put("k", b"%d" % i), 0.0, 10.0) for i in range(3)]
    assert core.take() == []
    assert [call.seq for call in welcome(core)] == [call.seq for call in calls]
    assert core.sid == 7


def test_the_first_join_goes_along_with_the_hello_and_is_not_said_twice() -> None:
    core = made()
    join = core.call(m.Join(-1, 10.0), 0.0, 10.0)
    later = core.call(m.Put("k", b""), 0.0, 10.0)
    core.connected(0.0)
    hello, call = core.take()
    assert isinstance(hello, m.Hello)
    assert isinstance(call, m.Call)
    assert call.seq == join.seq
    core.received(m.Answer(0, m.Welcome(7, 1, "s", 0, True, HEARTBEAT_S, 1 << 20)), 0.1)
    assert [call.seq for call in taken(core)] == [later.seq]
    assert core.wake_at == 0.1 + HEARTBEAT_S


def test_a_first_join_whose_welcome_never_came_is_said_again_under_its_number() -> None:
    core = made()
    join = core.call(m.Join(-1, 10.0), 0.0, 10.0)
    for now in (0.0, 4.0):
        core.connected(now)
        _, call = core.take()
        assert isinstance(call, m.Call)
        assert isinstance(call.op, m.Join)
        assert (call.seq, call.op.timeout_s) == (join.seq, 10.0 - now)
        core.disconnected(now + 1.0)


def test_a_known_client_says_nothing_before_its_welcome() -> None:
    """Another coordinator may have forgotten it, and must not take its calls for those of a new client."""
    core = made()
    welcome(core)
    core.call(m.Join(-1, 10.0), 0.0, 10.0)
    core.disconnected(0.0)
    core.connected(1.0)
    assert [type(message) for message in core.take()] == [m.Hello]


def test_an_answer_settles_its_call_once() -> None:
    core = made()
    welcome(core)
    call = core.call(m.Put("k", b""), 0.0, 10.0)
    assert core.received(m.Answer(call.seq, m.Done(4)), 0.1) == [call]
    assert call.outcome() == m.Done(4)
    assert core.received(m.Answer(call.seq, m.Done(5)), 0.1) == []
    assert call.outcome() == m.Done(4)


@pytest.mark.parametrize(
    ("op", "code", "kind"),
    [
        (m.Put("k", b""), m.STALE, StaleGenerationError),
        (m.Put("k", b""), m.FENCED, FencedError),
        (m.Put("k", b""), m.MISUSE, CoordError),
        (m.Get("k", 1.0), m.DEADLINE, DeadlineError),
        (m.Join(-1, 1.0), m.DEADLINE, DeadlineError),
        (meet(), m.DEADLINE, BarrierTimeoutError),
        (meet(), m.FAILED, BarrierError),
        (m.Put("k", b""), m.EXISTS, KeyExistsError),
        (m.Put("k", b""), m.LIMIT, LimitError),
        (m.Put("k", b""), m.OVER, CoordError),
    ],
)
def test_a_refusal_is_raised_as_its_kind(op: m.Op, code: str, kind: type[Exception]) -> None:
    core = made()
    welcome(core)
    call = core.call(op, 0.0, 1.0)
    core.received(m.Answer(call.seq, m.Refused(code, "no", "try", ("slot 1",))), 0.0)
    with pytest.raises(kind, match="no") as caught:
        call.outcome()
    assert type(caught.value) is kind
    assert isinstance(caught.value, CoordError | DeadlineError)
    assert caught.value.hint == "try"


def test_open_calls_are_sent_again_with_their_number_and_what_is_left_of_their_time() -> None:
    core = made()
    welcome(core)
    put, barrier = core.call(m.Put("k", b""), 0.0, 10.0), core.call(meet(timeout_s=5.0), 0.0, 5.0)
    first = taken(core)
    core.disconnected(2.0)
    again = welcome(core, 3.0)
    assert [call.seq for call in again] == [put.seq, barrier.seq] == [call.seq for call in first]
    assert again[0].op == put.op
    assert isinstance(again[1].op, m.Meet)
    assert again[1].op.timeout_s == pytest.approx(2.0)


def test_reads_are_asked_again_under_a_new_number() -> None:
    """Their old numbers may have been acknowledged with a later change: the coordinator would not answer."""
    core = made()
    welcome(core)
    read = core.call(m.Get("k", 5.0), 0.0, 5.0)
    (first,) = taken(core)
    put = core.call(m.Put("k", b""), 0.0, 10.0)
    (second,) = taken(core)
    assert second.acked >= first.seq, "a wait for a key must not hold back what is remembered"
    core.received(m.Answer(put.seq, m.Done(1)), 0.0)
    core.disconnected(1.0)
    (again,) = welcome(core, 2.0)
    assert again.seq > put.seq
    assert core.received(m.Answer(first.seq, m.Value(b"old", 1)), 2.0) == []
    assert core.received(m.Answer(again.seq, m.Value(b"new", 1)), 2.0) == [read]


def test_a_call_keeps_the_generation_it_was_made_in() -> None:
    core = made()
    welcome(core)
    joined(core, generation=1)
    barrier = core.call(meet(), 0.0, 5.0)
    core.disconnected(0.0)
    joining = core.call(m.Join(-1, 5.0), 0.0, 5.0)
    again = {call.seq: call.generation for call in welcome(core)}
    core.received(m.Answer(joining.seq, m.Joined(2, 0, 2)), 0.0)
    assert again[barrier.seq] == 1
    assert core.call(meet(), 0.0, 5.0).generation == 2


def test_a_timeout_must_be_a_number_of_seconds() -> None:
    for timeout_s in (math.inf, math.nan, -1.0):
        with pytest.raises(UsageError, match="is not a number of seconds"):
            made().call(m.Status(), 0.0, timeout_s)


# ---- time


def test_a_call_that_nobody_answers_is_given_up_at_its_deadline() -> None:
    core = made()
    call = core.call(m.Put("k", b""), 0.0, 3.0)
    assert core.wake_at == 3.0
    assert core.tick(2.9) == []
    assert core.tick(3.0) == [call]
    with pytest.raises(
        UnreachableError, match="no coordinator answered Put 'k' in time: it was never reached"
    ):
        call.outcome()
    assert core.wake_at == math.inf
    assert welcome(core) == [], "a call that was given up is sent no more"


def test_the_coordinator_has_a_little_longer_to_end_a_wait_that_it_knows_of() -> None:
    core = made()
    welcome(core)
    call = core.call(meet(timeout_s=3.0), 0.0, 3.0)
    assert call not in core.tick(3.0)
    assert call not in core.tick(3.4)
    assert call in core.tick(3.5)
    core = made()
    call = core.call(meet(timeout_s=3.0), 0.0, 3.0)
    assert call in core.tick(3.0), "without a connection there is nothing to wait for"


def test_a_client_that_was_away_does_not_blame_the_coordinator() -> None:
    core = made()
    welcome(core)
    call = core.call(meet(timeout_s=3.0), 0.0, 3.0)
    assert call not in core.tick(60.0), "the coordinator has had no time to say who is missing"
    core.received(m.Answer(call.seq, m.Refused(m.DEADLINE, "slot 1 is missing")), 60.1)
    with pytest.raises(BarrierTimeoutError, match="slot 1"):
        call.outcome()
    call = core.call(meet(timeout_s=3.0), 60.1, 3.0)
    assert call not in core.tick(120.0)
    assert core.wake_at <= 120.5
    assert call in core.tick(120.5)


def test_a_meeting_with_no_time_at_all_is_the_coordinators_to_fail() -> None:
    core = made()
    welcome(core)
    call = core.call(meet(timeout_s=0.0), 0.0, 0.0)
    assert call not in core.tick(0.1)
    core.received(m.Answer(call.seq, m.Refused(m.DEADLINE, "slot 1 is missing")), 0.1)
    with pytest.raises(BarrierTimeoutError, match="slot 1"):
        call.outcome()


def test_wake_at_is_never_later_than_what_is_due() -> None:
    core = made()
    late, soon = core.call(m.Status(), 0.0, 9.0), core.call(m.Status(), 0.0, 1.0)
    assert core.wake_at == 1.0
    assert core.tick(1.0) == [soon]
    assert core.wake_at == 9.0
    assert core.tick(9.0) == [late]


def test_a_member_beats_and_others_only_while_they_wait() -> None:
    core = made()
    core.connected(0.0)
    core.received(m.Answer(0, m.Welcome(7, 1, "s", 0, True, HEARTBEAT_S, 0)), 0.0)
    core.take()
    core.tick(0.5)
    assert core.take() == [], "nobody wants to know"
    joined(core)
    core.progress(12, "train", 0.6)
    (beat,) = core.take()
    assert isinstance(beat, m.Call)
    assert beat.op == m.Beat(12, "train", True)
    core.progress(13, "train", 0.7)
    assert core.take() == []
    assert core.wake_at == pytest.approx(1.1)
    core.tick(1.1)
    (beat,) = core.take()
    assert isinstance(beat, m.Call)
    assert beat.op == m.Beat(13, "train", True)


def test_a_connection_on_which_nobody_answers_is_given_up() -> None:
    core = made()
    welcome(core)
    joined(core)
    happened: list[Happening] = []
    now = 0.0
    while not happened and now < 10.0:
        now = core.wake_at
        happened = core.tick(now)
    assert isinstance(happened[0], Stalled)
    assert now == pytest.approx(2.5, abs=0.6)


# ---- meetings


def test_an_abandoned_meeting_is_taken_up_by_the_next_call() -> None:
    core = made()
    welcome(core)
    first = core.call(meet(), 0.0, 1.0)
    taken(core)
    core.disconnected(0.5, "it broke")
    assert core.tick(1.0) == [first]
    with pytest.raises(UnreachableError, match="it broke"):
        first.outcome()
    assert welcome(core, 2.0) == [], "nobody is there to wait for it"
    core.call(m.Put("k", b""), 2.0, 5.0)
    (put,) = taken(core)
    assert put.acked < first.seq, "its outcome must still be remembered"
    second = core.call(meet(), 3.0, 5.0)
    (again,) = taken(core)
    assert again.seq == second.seq == first.seq
    assert core.received(m.Answer(first.seq, m.Met(3)), 3.0) == [second]
    assert second.outcome() == m.Met(3)
    third = core.call(meet(), 3.0, 5.0)
    assert third.seq > first.seq, "and the one after that is a meeting of its own"


def test_a_late_outcome_waits_for_the_next_call() -> None:
    core = made()
    welcome(core)
    core.call(meet(), 0.0, 1.0)
    core.tick(1.0)
    core.tick(1.5)
    assert core.received(m.Answer(1, m.Refused(m.FAILED, "slot 1 died")), 2.0) == []
    second = core.call(meet(), 3.0, 5.0)
    assert second.settled
    with pytest.raises(BarrierError, match="slot 1 died"):
        second.outcome()
    other = core.call(meet("other"), 3.0, 5.0)
    assert not other.settled


def test_a_meeting_that_was_never_sent_is_forgotten() -> None:
    core = made()
    first = core.call(meet(), 0.0, 1.0)
    core.tick(1.0)
    second = core.call(meet(), 2.0, 5.0)
    assert second.seq > first.seq
    assert [call.seq for call in welcome(core, 2.0)] == [second.seq]


def test_a_new_generation_has_no_meetings_to_catch_up_with() -> None:
    core = made()
    welcome(core)
    joined(core, generation=1)
    first = core.call(meet(), 0.0, 1.0)
    core.disconnected(0.5)
    core.tick(1.0)
    welcome(core, 2.0)
    joined(core, generation=2)
    second = core.call(meet(), 3.0, 5.0)
    (sent,) = taken(core)
    assert sent.seq == second.seq > first.seq
    assert sent.acked >= first.seq


def test_an_abandoned_meeting_does_not_hold_back_answers_for_ever() -> None:
    core = made()
    welcome(core)
    first = core.call(meet(), 0.0, 1.0)
    core.disconnected(0.5)
    core.tick(1.0)
    welcome(core, 2.0)
    for _ in range(1100):
        call = core.call(m.Put("k", b""), 2.0, 5.0)
        core.received(m.Answer(call.seq, m.Done(1)), 2.0)
    fetched = [call for call in taken(core) if call.seq == first.seq]
    assert len(fetched) == 1
    core.received(m.Answer(first.seq, m.Met(1)), 2.0)
    core.call(m.Put("k", b""), 2.0, 5.0)
    assert taken(core)[-1].acked > first.seq
    assert core.call(meet(), 2.0, 5.0).outcome() == m.Met(1)


# ---- pushes


def test_an_error_report_is_told_once() -> None:
    core = made()
    welcome(core)
    trouble = m.Trouble(3, 1, "one", "it hurts")
    assert core.received(m.Answer(0, trouble), 0.0) == [Pushed(trouble)]
    assert core.received(m.Answer(0, trouble), 0.0) == []
    core.disconnected(1.0)
    core.connected(2.0)
    (hello,) = core.take()
    assert isinstance(hello, m.Hello)
    assert (hello.seen_error, hello.sid) == (3, 7)


def test_a_watch_goes_on_where_it_was() -> None:
    core = made()
    welcome(core)
    call, state = core.watch("k/", "token", 0.0, 5.0)
    (sent,) = taken(core)
    core.received(m.Answer(call.seq, m.Done(9)), 0.0)
    items = (m.Item("k/1", b"", 4), m.Item("k/2", b"", 8))
    (noticed,) = core.received(m.Answer(0, m.Changed(sent.seq, items, True)), 0.0)
    assert isinstance(noticed, Noticed)
    assert (noticed.watch.token, noticed.changed.items) == ("token", items)
    core.disconnected(1.0)
    (again,) = welcome(core, 2.0)
    assert again.op == m.Watch("k/", since=8)
    assert again.seq > sent.seq
    news = (m.Item("k/2", b"", 8), m.Item("k/1", None, 11))
    (noticed,) = core.received(m.Answer(0, m.Changed(again.seq, news)), 2.0)
    assert isinstance(noticed, Noticed)
    assert noticed.changed.items == news[1:], "what was told before is not told again"
    assert core.received(m.Answer(0, m.Changed(sent.seq, news)), 2.0) == []
    core.unwatch(state)
    (last,) = taken(core)
    assert last.op == m.Unwatch(again.seq)
    assert core.received(m.Answer(0, m.Changed(again.seq, (m.Item("k/3", b"", 12),))), 2.0) == []


def test_a_watch_that_was_asked_for_without_a_connection_is_asked_for_once() -> None:
    core = made()
    call, state = core.watch("k/", None, 0.0, 5.0)
    (sent,) = welcome(core)
    assert (sent.seq, sent.op) == (state.seq, m.Watch("k/"))
    assert core.received(m.Answer(sent.seq, m.Done(1)), 0.0) == [call]


def test_a_watch_that_cannot_be_set_again_is_told() -> None:
    core = made()
    welcome(core)
    call, _ = core.watch("k/", None, 0.0, 5.0)
    core.received(m.Answer(call.seq, m.Done(1)), 0.0)
    core.disconnected(1.0)
    (again,) = welcome(core, 2.0)
    refused = m.Refused(m.LIMIT, "too many")
    assert core.received(m.Answer(again.seq, refused), 2.0) == [Pushed(refused)]
    core.disconnected(3.0)
    assert welcome(core, 4.0) == []


# ---- stops


def test_a_stop_is_answered_at_once_and_the_next_step_waits_for_the_decision() -> None:
    core = made()
    welcome(core)
    joined(core)
    assert core.reached(5) is False
    core.received(m.Answer(0, m.Stop(1, -1, "preempted")), 0.0)
    (at,) = taken(core)
    assert at.op == m.At(1, 5)
    assert core.reached(5) is False, "this one has begun"
    assert core.reached(6) is None
    core.progress(6, "", 0.0)
    core.received(m.Answer(0, m.Stop(1, -1, "preempted")), 0.0)
    assert [call.op for call in taken(core)] == [m.At(1, 5)], "the answer stands"
    assert core.reached(6) is None
    core.received(m.Answer(0, m.Stop(1, 8)), 0.0)
    assert [core.reached(step) for step in (6, 7, 8, 9)] == [False, False, True, True]
    assert core.stopping.past == 1
    core.received(m.Answer(0, m.Stop(1, -1)), 0.0)
    assert core.reached(7) is False, "a decision does not go back"


def test_a_stop_is_answered_again_after_a_reconnect_and_by_members_only() -> None:
    core = made()
    welcome(core)
    core.received(m.Answer(0, m.Stop(1, -1)), 0.0)
    assert taken(core) == []
    joined_call = core.call(m.Join(-1, 5.0), 0.0, 5.0)
    core.received(m.Answer(joined_call.seq, m.Joined(1, 0, 1)), 0.0)
    assert m.At(1, -1) in [call.op for call in taken(core)]
    core.disconnected(1.0)
    assert m.At(1, -1) in [call.op for call in welcome(core, 2.0)]


# ---- the end


def test_a_session_that_is_refused_ends_all_calls() -> None:
    core = made()
    welcome(core)
    call = core.call(meet(), 0.0, 5.0)
    core.disconnected(1.0)
    core.connected(2.0)
    refused = m.Answer(0, m.Refused(m.FENCED, "this client is out: silent for 5 s"))
    ended, over = core.received(refused, 2.0)
    assert ended is call
    assert isinstance(over, Over)
    with pytest.raises(FencedError, match="silent for 5 s"):
        call.outcome()
    with pytest.raises(FencedError, match="silent for 5 s"):
        core.call(m.Status(), 3.0, 5.0).outcome()
    assert core.wake_at == math.inf


def test_a_coordinator_that_is_ending_is_no_end() -> None:
    core = made()
    core.connected(0.0)
    core.take()
    happened = core.received(m.Answer(0, m.Refused(m.OVER, "stopping")), 0.0)
    assert happened[-1] == Stalled("stopping")
    assert core.over is None


def test_whoever_leaves_has_left() -> None:
    core = made()
    welcome(core)
    joined(core)
    left = core.call(m.Leave(""), 0.0, 5.0)
    other = core.call(m.Get("k", 5.0), 0.0, 5.0)
    assert core.received(m.Answer(left.seq, m.Done(1)), 0.0)[:2] == [left, other]
    assert left.outcome() == m.Done(1)
    with pytest.raises(FencedError, match="has left the run"):
        other.outcome()


# ---- all together, against the real coordinator


class World:
    """A coordinator and clients in one thread: messages arrive, and connections break, when told to."""

    def __init__(self, num: int) -> None:
        self.settings = Settings(
            min_size=num,
            max_size=num,
            heartbeat_s=0.5,
            suspect_s=900.0,
            dead_s=1000.0,
            reconnect_s=900.0,
            session_s=900.0,
            last_call_s=0.0,
        )
        self.now = 0.0
        self.core = Coordinator(self.settings, Ledger(), service="0", now=0.0)
        self.core.begin(now=0.0)
        self.clients = [ClientCore(run="run", incarnation=f"c{i}", silence_s=1e9) for i in range(num)]
        self.conn = [0] * num
        self.num_conns = 0
        self.up: list[deque[Any]] = [deque() for _ in range(num)]
        self.down: list[deque[m.Answer]] = [deque() for _ in range(num)]
        self.settled: list[OpenCall] = []

    def carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send | Close) and effect.conn in self.conn:
                i = self.conn.index(effect.conn)
                if isinstance(effect, Send):
                    self.down[i].append(effect.answer)
                else:
                    self.cut(i)

    def connect(self, i: int) -> None:
        if not self.conn[i]:
            self.num_conns += 1
            self.conn[i] = self.num_conns
            self.clients[i].connected(self.now)

    def cut(self, i: int) -> None:
        conn, self.conn[i] = self.conn[i], 0
        if conn:
            self.up[i].clear()
            self.down[i].clear()
            self.clients[i].disconnected(self.now)
            self.carry_out(self.core.step(Closed(conn), now=self.now))

    def flow_up(self, i: int) -> None:
        self.up[i].extend(self.clients[i].take() if self.conn[i] else ())
        if self.up[i]:
            message = self.up[i].popleft()
            made = Opened if isinstance(message, m.Hello) else Received
            self.carry_out(self.core.step(made(self.conn[i], message), now=self.now))

    def flow_down(self, i: int) -> None:
        if self.down[i]:
            happened = self.clients[i].received(self.down[i].popleft(), self.now)
            self.settled += [one for one in happened if isinstance(one, OpenCall)]

    def restart(self) -> None:
        for i in range(len(self.clients)):
            self.cut(i)
        ledger = Ledger.restore(self.core.ledger.snapshot())
        self.core = Coordinator(self.settings, ledger, service="1", now=self.now)
        self.core.begin(now=self.now)

    def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(4000):
            for i in range(len(self.clients)):
                self.connect(i)
                self.flow_up(i)
                self.flow_down(i)
            if not any(self.up) and not any(self.down) and not any(c._outbox for c in self.clients):
                return
            self.carry_out(self.core.step(Tick(), now=self.now))
        raise AssertionError("it does not come to rest")


_MOVES = ("add", "add", "up", "up", "up", "down", "down", "cut", "connect", "restart")
_moves = st.tuples(st.sampled_from(_MOVES), st.integers(0, 2))


@given(st.lists(_moves, max_size=120))
def test_whatever_breaks_a_call_is_carried_out_once(moves: list[tuple[str, int]]) -> None:
    world = World(3)
    opened: list[OpenCall] = []
    for move, i in moves:
        if move == "add":
            opened.append(world.clients[i].call(m.Add("n"), world.now, 1000.0))
        elif move == "restart":
            world.restart()
        else:
            acts = {"up": world.flow_up, "down": world.flow_down, "cut": world.cut, "connect": world.connect}
            acts[move](i)
    world.settle()
    assert all(call.result is not None for call in opened)
    assert len(world.settled) == len({id(call) for call in world.settled}) == len(opened)
    counts = [call.result.count for call in opened if isinstance(call.result, m.Count)]
    assert sorted(counts) == list(range(1, len(opened) + 1)), "every one of them counted, and none twice"
    for session in world.core.ledger.sessions.values():
        assert len(session.results) <= 1 + len(opened)


_BARRIER_MOVES = ("up", "up", "up", "down", "down", "give up", "cut", "connect", "connect", "restart")


@given(st.lists(st.tuples(st.sampled_from(_BARRIER_MOVES), st.integers(0, 2)), max_size=150))
def test_whatever_breaks_members_pass_the_same_barriers(moves: list[tuple[str, int]]) -> None:
    """Each goes on to its next barrier when it has passed the last; who gives up comes back for it."""
    world = World(3)
    joining = [client.call(m.Join(i, 1000.0), 0.0, 1000.0) for i, client in enumerate(world.clients)]
    world.settle()
    assert all(isinstance(call.result, m.Joined) for call in joining)
    waits = [client.call(m.Meet(m.BARRIER, "b", 1000.0), 0.0, 1000.0) for client in world.clients]
    epochs: list[list[int]] = [[], [], []]

    def attend() -> None:
        for i, call in enumerate(waits):
            while waits[i].settled:
                call = waits[i]
                if isinstance(call.result, m.Met):
                    epochs[i].append(call.result.epoch)
                waits[i] = world.clients[i].call(m.Meet(m.BARRIER, "b", 1000.0), 0.0, 1000.0)

    acts = {"up": world.flow_up, "down": world.flow_down, "cut": world.cut, "connect": world.connect}
    for move, i in moves:
        if move == "give up":
            world.clients[i].give_up(waits[i])
        elif move == "restart":
            world.restart()
        else:
            acts[move](i)
        attend()
    for _ in range(2):
        world.settle()
        attend()
    shortest = min(map(len, epochs))
    assert shortest >= 1
    assert len({tuple(passed[:shortest]) for passed in epochs}) == 1, f"out of step: {epochs}"
    assert max(map(len, epochs)) - shortest <= 1
