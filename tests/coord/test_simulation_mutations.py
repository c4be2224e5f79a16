"""The simulator finds bugs: each of these is planted in the coordinator, the client or the edge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from holdfast.coord import messages as m
from holdfast.coord import records as r
from holdfast.coord.calls import ClientCore
from holdfast.coord.coordinator import Coordinator
from holdfast.coord.desk import Desk
from holdfast.coord.keys import Keys
from holdfast.coord.ledger import Ledger, Session
from holdfast.coord.meetings import Epoch, Meetings
from holdfast.coord.rounds import Rounds
from holdfast.testing.coordination import Failure, simulate
from holdfast.testing.coordination.disk import Disk
from holdfast.testing.coordination.service import Service

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 400
"""A planted bug must show within so many seeds; most show within ten."""


def first_failure(seeds: Iterable[int]) -> Failure | None:
    for seed in seeds:
        try:
            simulate(seed)
        except Failure as failure:
            return failure
    return None


def repeated_calls_are_done_again(patch: pytest.MonkeyPatch) -> None:
    def answer(self: Ledger, calls: Iterable[r.CallId], result: m.Result) -> None:
        for sid, _, acked in calls:
            if sid in self.sessions:
                self._trim(self.sessions[sid], acked)

    patch.setattr(Ledger, "_answer", answer)


def a_client_numbers_its_repeated_calls_anew(patch: pytest.MonkeyPatch) -> None:
    welcomed = ClientCore._welcomed

    def renumbering(self: ClientCore, body: m.Welcome, now: float) -> Any:
        calls, self._open = self._open, {}
        for call in calls.values():
            self._seq += 1
            call.seq = self._seq
            self._open[call.seq] = call
        return welcomed(self, body, now)

    patch.setattr(ClientCore, "_welcomed", renumbering)


def nobody_is_owed_a_failure(patch: pytest.MonkeyPatch) -> None:
    settle = Meetings._settle

    def settled(self: Meetings, epoch: Epoch, result: Any, owed: Any, together: Any = ()) -> None:
        settle(self, epoch, result, (), together)

    patch.setattr(Meetings, "_settle", settled)


def restarted_members_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    check = Meetings._check

    def checked(self: Meetings, epoch: Epoch) -> bool:
        if epoch.meeting[0] == m.BARRIER and len(epoch.arrived) < len(epoch.slots):
            return False
        return check(self, epoch)

    patch.setattr(Meetings, "_check", checked)


def a_barrier_passes_one_short(patch: pytest.MonkeyPatch) -> None:
    check = Meetings._check

    def checked(self: Meetings, epoch: Epoch) -> bool:
        if epoch.meeting[0] == m.BARRIER and len(epoch.arrived) == len(epoch.slots) - 1 > 1:
            self._settle(epoch, self._met(epoch, ()), ())
            return True
        return check(self, epoch)

    patch.setattr(Meetings, "_check", checked)


def ballots_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    met = Meetings._met

    def all_for_it(self: Meetings, epoch: Epoch, absent: tuple[int, ...]) -> m.Met:
        for arrival in epoch.arrived.values():
            arrival.ok = True
        return met(self, epoch, absent)

    patch.setattr(Meetings, "_met", all_for_it)


def two_incarnations_in_a_slot(patch: pytest.MonkeyPatch) -> None:
    def replaced(self: Rounds, session: Session, slot: int) -> None:
        if slot in self._desk.ledger.seats:
            self._desk.vacant.add(slot)

    patch.setattr(Rounds, "_unseat", replaced)
    patch.setattr(Rounds, "_newer_claim", lambda self, session, slot: None)


def the_dead_are_let_in_again(patch: pytest.MonkeyPatch) -> None:
    opened = Coordinator._opened

    def forgiving(self: Coordinator, conn: int, hello: m.Hello) -> None:
        known = self.ledger.by_incarnation.get(hello.incarnation)
        if known is not None and known.over:
            known.over = ""
            self._desk.present[known.sid] = type(next(iter(self._desk.present.values())))(
                known, self._desk.now
            )
        opened(self, conn, hello)

    patch.setattr(Coordinator, "_opened", forgiving)


def owned_keys_outlive_their_owner(patch: pytest.MonkeyPatch) -> None:
    went = Ledger._went

    def kept(self: Ledger, record: r.Went) -> None:
        for key in self.sessions[record.sid].keys:
            self.keys[key].owner = 0
        self.sessions[record.sid].keys.clear()
        went(self, record)

    patch.setattr("holdfast.coord.ledger._APPLY", {**_table(), r.Went: kept})


def _table() -> dict[type, Any]:
    from holdfast.coord import ledger

    return dict(ledger._APPLY)


def answers_go_out_before_their_records(patch: pytest.MonkeyPatch) -> None:
    start = Service.start

    def ungated(self: Service) -> None:
        self.gated = False
        start(self)

    patch.setattr(Service, "start", ungated)


def answers_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    answer = Desk.answer

    def hasty(self: Desk, sid: int, seq: int, body: m.Result, after: int = 0, sync: bool = False) -> None:
        answer(self, sid, seq, body)

    patch.setattr(Desk, "answer", hasty)


def reads_do_not_wait_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    def get(self: Keys, session: Session, call: m.Call, op: m.Get) -> None:
        found = self._desk.ledger.keys.get(op.key)
        value = m.Value(found.value, found.revision) if found is not None else m.Value(None, 0)
        self._desk.answer(session.sid, call.seq, value)

    patch.setattr(Keys, "get", get)


def an_increment_of_32_bits(patch: pytest.MonkeyPatch) -> None:
    add = Keys.add

    def short(self: Keys, session: Session, call: m.Call, op: m.Add) -> None:
        found = self._desk.ledger.keys.get(op.key)
        total = (int(found.value) if found is not None and found.value[:1] != b"v" else 0) + op.by
        wrapped = (total + 2**31) % 2**32 - 2**31
        add(self, session, call, m.Add(op.key, op.by + wrapped - total))

    patch.setattr(Keys, "add", short)


def deadlines_are_a_second_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "wake_at", property(lambda self: self._desk.alarms.next_at() + 1.0))


def a_restart_loses_the_last_record(patch: pytest.MonkeyPatch) -> None:
    crash = Disk.crash

    def careless(self: Disk, *, power: bool) -> None:
        crash(self, power=power)
        del self._file[-1:]

    patch.setattr(Disk, "crash", careless)


def a_snapshot_forgets_what_is_owed(patch: pytest.MonkeyPatch) -> None:
    restore = Ledger.restore

    def forgetful(data: bytes) -> Ledger:
        ledger = restore(data)
        ledger.owed.clear()
        return ledger

    patch.setattr(Ledger, "restore", staticmethod(forgetful))


def waits_of_the_dead_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "forget", lambda self, sid, seq, key: None)


def an_old_connection_still_speaks(patch: pytest.MonkeyPatch) -> None:
    attach, received = Coordinator._attach, Coordinator._received
    old: dict[tuple[int, int], int] = {}

    def remembering(self: Coordinator, conn: int, session: Session) -> None:
        attach(self, conn, session)
        old[id(self), conn] = session.sid

    def lenient(self: Coordinator, conn: int, call: m.Call) -> None:
        sid = old.get((id(self), conn), 0)
        if conn in self._by_conn or sid not in self._desk.present:
            received(self, conn, call)
            return
        self._by_conn[conn] = sid
        received(self, conn, call)
        self._by_conn.pop(conn, None)

    patch.setattr(Coordinator, "_attach", remembering)
    patch.setattr(Coordinator, "_received", lenient)


PLANTED: tuple[Plant, ...] = (
    repeated_calls_are_done_again,
    a_client_numbers_its_repeated_calls_anew,
    nobody_is_owed_a_failure,
    restarted_members_are_waited_for,
    a_barrier_passes_one_short,
    ballots_are_not_counted,
    two_incarnations_in_a_slot,
    the_dead_are_let_in_again,
    owned_keys_outlive_their_owner,
    answers_go_out_before_their_records,
    answers_wait_for_nothing,
    reads_do_not_wait_for_the_disk,
    an_increment_of_32_bits,
    deadlines_are_a_second_late,
    a_restart_loses_the_last_record,
    a_snapshot_forgets_what_is_owed,
    waits_of_the_dead_are_kept,
    an_old_connection_still_speaks,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    failure = first_failure(range(SEEDS))
    assert failure is not None, f"{SEEDS} seeds did not find it"
    print(f"seed {failure.seed}: {failure.problem[:400]}")


def test_a_failure_says_how_it_came_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    a_barrier_passes_one_short(monkeypatch)
    failure = first_failure(range(SEEDS))
    assert failure is not None
    with pytest.raises(Failure, match=f"seed {failure.seed}: ") as told:
        simulate(failure.seed, tracing=True)
    assert told.value.problem == failure.problem
    assert "had not come" in failure.problem
    assert any("Meet(kind='barrier'" in line for line in told.value.trace)
