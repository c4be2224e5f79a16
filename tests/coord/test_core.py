"""The core of the coordinator, call by call. Races across several members are in scenarios/."""

from __future__ import annotations

import math

import pytest

from holdfast.coord.kernel import Received, Send, Tick
from holdfast.coord.messages import (
    Add,
    At,
    Beat,
    Bury,
    Bye,
    Call,
    Cancel,
    Changed,
    Count,
    Delete,
    Done,
    Get,
    Items,
    Join,
    Joined,
    Leave,
    Lost,
    Meet,
    Met,
    Patience,
    Preempt,
    Put,
    Rally,
    Refused,
    Report,
    Roster,
    Scan,
    Status,
    Stop,
    Swap,
    Swapped,
    Trouble,
    Unwatch,
    Value,
    Watch,
)
from tests.coord.core import Run


def barrier(name: str = "b", timeout_s: float = 10.0, **more: object) -> Meet:
    return Meet("barrier", name, timeout_s, **more)  # type: ignore[arg-type]


# ---- keys


def test_keys_and_values() -> None:
    a = Run().client("a")
    assert a.ask(Get("k")) == Value(None, 0)
    first = a.ask(Put("k", b"1")).revision
    assert a.ask(Get("k")) == Value(b"1", first)
    assert a.ask(Put("k", b"2", create=True)).code == "exists"
    assert a.ask(Swap("k", b"x", b"3")) == Swapped(False, b"1", first)
    assert a.ask(Swap("k", b"1", b"3")).done
    assert a.ask(Swap("new", None, b"n")).done
    assert a.ask(Delete("k")).count == 1
    assert a.ask(Delete("k")) == Count(0, 0)
    assert a.ask(Get("k")) == Value(None, 0)


def test_revisions_grow() -> None:
    a = Run().client("a")
    seen = [a.ask(Put("k", b"")).revision, a.ask(Swap("k", b"", b"x")).revision, a.ask(Add("n")).revision]
    assert seen == sorted(set(seen))


def test_counters_have_64_bits() -> None:
    a = Run().client("a")
    assert a.ask(Add("n", 2**31)).count == 2**31
    assert a.ask(Add("n", 2**31)).count == 2**32
    assert a.ask(Add("n", 2**63)).code == "misuse"
    assert a.ask(Add("m", -(2**63))).count == -(2**63)
    assert a.ask(Add("m", -1)).code == "misuse"
    a.ask(Put("text", b"hello"))
    assert a.ask(Add("text")).code == "misuse"


def test_scan_is_ordered_and_in_pages() -> None:
    a = Run().client("a")
    for key in ("p/b", "q", "p/a", "p/c", "o"):
        a.ask(Put(key, key.encode()))
    page = a.ask(Scan("p/", limit=2))
    assert [item.key for item in page.items] == ["p/a", "p/b"]
    assert page.more
    rest = a.ask(Scan("p/", after="p/b", limit=2))
    assert [item.key for item in rest.items] == ["p/c"]
    assert not rest.more
    assert a.ask(Delete("p/", prefix=True)).count == 3
    assert a.ask(Scan("")).items[0].key == "o"


def test_a_scan_stops_before_an_answer_grows_too_large() -> None:
    run = Run(max_value_bytes=100)
    a = run.client("a")
    for n in range(10):
        a.ask(Put(f"k{n}", bytes(90)))
    page: Items = a.ask(Scan("k"))
    assert 1 <= len(page.items) < 10
    assert page.more


def test_waiting_for_a_key() -> None:
    run = Run()
    a, b = run.client("a"), run.client("b")
    seq = a.call(Get("k", 5.0))
    assert a.answer(seq) is None
    b.ask(Put("k", b"v"))
    assert a.answer(seq).value == b"v"
    assert run.core.idle()


def test_waiting_for_a_key_ends_at_its_deadline() -> None:
    run = Run()
    a = run.client("a")
    seq = a.call(Get("k", 0.3))
    assert run.core.wake_at == pytest.approx(run.now + 0.3)
    run.pass_time(0.31)
    assert a.answer(seq).code == "deadline"
    assert run.core.idle()


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 1e300])
def test_every_wait_ends_whatever_a_client_sends(timeout_s: float) -> None:
    run = Run(min_size=2, max_size=2)
    a = run.client("a")
    a.call(Get("k", timeout_s))
    a.call(Join(0, timeout_s))
    run.members(2)
    assert not math.isnan(run.core.wake_at)
    run.pass_time(31 * 86400.0)
    assert run.core.idle()


def test_owned_keys_vanish_with_their_incarnation() -> None:
    run = Run()
    a, b = run.client("a"), run.client("b")
    b.call(Watch(""))
    a.ask(Put("mine", b"1", owned=True))
    a.ask(Put("given", b"1", owned=True))
    b.ask(Put("given", b"2"))
    a.ask(Bye())
    assert b.ask(Get("mine")) == Value(None, 0)
    assert b.ask(Get("given")).value == b"2"
    assert [item.key for push in b.pushes(Changed) for item in push.items if item.value is None] == ["mine"]


def test_limits() -> None:
    run = Run(max_value_bytes=10, max_keys=2, max_store_bytes=1000, max_key_bytes=8, max_watches=1)
    a = run.client("a")
    assert a.ask(Put("k", bytes(11))).code == "limit"
    assert a.ask(Put("", b"")).code == "limit"
    assert a.ask(Put("k" * 9, b"")).code == "limit"
    a.ask(Put("1", b""))
    a.ask(Put("2", b""))
    assert a.ask(Put("3", b"")).code == "limit"
    assert a.ask(Put("2", b"x")) == Done(len(run.records))
    a.call(Watch("a"))
    assert a.ask(Watch("b")).code == "limit"


def test_open_calls_of_one_client_are_bounded() -> None:
    run = Run(max_open_calls=3)
    a = run.client("a")
    for n in range(3):
        a.call(Get(f"k{n}", 10.0))
    assert a.ask(Get("k4", 10.0)).code == "limit"


def test_reads_wait_for_the_disk_that_the_value_waits_for() -> None:
    run = Run()
    a = run.client("a")
    revision = a.ask(Put("k", b"v")).revision
    a.seq += 1
    (sent,) = [e for e in run.step(Received(a.conn, Call(a.seq, 0, 0, Get("k")))) if isinstance(e, Send)]
    assert (sent.after, sent.sync) == (revision, True)


# ---- watches


def test_a_watch_begins_with_what_is_there_and_goes_on_with_changes() -> None:
    run = Run()
    a, b = run.client("a"), run.client("b")
    a.ask(Put("p/1", b"1"))
    watch = b.call(Watch("p/"))
    a.ask(Put("p/2", b"2"))
    a.ask(Put("q", b""))
    a.ask(Delete("p/1"))
    seen = b.pushes(Changed)
    assert [push.reset for push in seen] == [True, False, False]
    assert [(i.key, i.value) for push in seen for i in push.items] == [
        ("p/1", b"1"),
        ("p/2", b"2"),
        ("p/1", None),
    ]
    b.ask(Unwatch(watch))
    a.ask(Put("p/3", b""))
    assert len(b.pushes(Changed)) == 3


def test_a_watch_that_was_away_gets_what_it_missed() -> None:
    run = Run()
    a, b = run.client("a"), run.client("b")
    b.call(Watch(""))
    last = a.ask(Put("k", b"1")).revision
    b.close()
    a.ask(Put("k", b"2"))
    a.ask(Delete("k"))
    b = b.again()
    b.call(Watch("", since=last), seq=1)
    (missed,) = b.pushes(Changed)
    assert [(i.key, i.value) for i in missed.items] == [("k", b"2"), ("k", None)]
    assert not missed.reset


@pytest.mark.parametrize("why", ["restart", "long ago"])
def test_a_watch_that_missed_too_much_is_told_all_there_is(why: str) -> None:
    run = Run(history=4)
    a = run.client("a")
    first = a.ask(Put("gone", b"1")).revision
    a.ask(Delete("gone"))
    for n in range(8):
        a.ask(Put(f"k{n % 2}", b"%d" % n))
    if why == "restart":
        run.restart()
    b = run.client("b")
    b.call(Watch("", since=first))
    (all_there_is,) = b.pushes(Changed)
    assert all_there_is.reset
    assert sorted(i.key for i in all_there_is.items) == ["k0", "k1"]


# ---- exactly once


def test_a_repeated_call_is_answered_again_and_not_carried_out_again() -> None:
    run = Run()
    a = run.client("a")
    seq = a.call(Add("n"))
    a.close()
    a = a.again()
    assert a.ask(Add("n"), seq=seq).count == 1
    assert a.ask(Add("n")).count == 2


def test_a_repeated_call_is_known_after_a_restart() -> None:
    run = Run()
    a = run.client("a")
    seq = a.call(Add("n"))
    run.restart()
    a = a.again()
    assert a.ask(Add("n"), seq=seq).count == 1


def test_an_echo_of_a_call_that_is_over_is_dropped() -> None:
    run = Run()
    a = run.client("a")
    seq = a.call(Add("n"))
    a.call(Add("n"), acked=seq)
    before = len(run.records)
    a = a.again()
    assert a.ask(Add("n"), seq=seq) is None
    assert len(run.records) == before


def test_results_are_forgotten_once_the_client_has_them() -> None:
    run = Run()
    a = run.client("a")
    for n in range(50):
        a.call(Add("n"), acked=n)
    assert len(run.core.ledger.sessions[a.sid].results) == 1


# ---- sessions


def test_another_run_is_refused() -> None:
    run = Run(run="mine")
    stranger = run.client("a", run="other")
    (refused,) = stranger.pushes(Refused)
    assert refused.code == "over"
    assert "mine" in refused.message
    assert stranger.conn in run.closed


def test_the_newest_connection_of_a_client_counts() -> None:
    run = Run()
    old = run.client("a")
    new = old.again()
    assert old.conn in run.closed
    assert old.ask(Put("k", b"old")) is None
    assert new.ask(Get("k")) == Value(None, 0)
    old.close()
    assert isinstance(new.ask(Put("k", b"new")), Done)


def test_a_client_that_is_away_too_long_is_forgotten() -> None:
    run = Run(session_s=3.0)
    a = run.client("a")
    a.ask(Put("mine", b"", owned=True))
    a.close()
    run.pass_time(3.1)
    assert "mine" not in run.core.ledger.keys
    again = a.again()
    assert again.pushes(Refused)[0].code == "fenced"


def test_an_unknown_sid_is_fenced() -> None:
    run = Run()
    ghost = run.client("ghost", sid=77)
    assert ghost.pushes(Refused)[0].code == "fenced"


# ---- members


def test_a_generation() -> None:
    run = Run(min_size=3, max_size=3, num_lanes=7)
    members = run.members(3)
    joined = [member.answer() for member in members]
    assert [(j.generation, j.slot, j.size) for j in joined] == [(1, 0, 3), (1, 1, 3), (1, 2, 3)]
    assert sorted(lane for j in joined for lane in j.lanes) == list(range(7))
    roster = members[1].ask(Roster())
    assert [(m.slot, m.incarnation, m.name) for m in roster.members] == [
        (slot, f"m{slot}", f"host{slot}") for slot in range(3)
    ]


def test_a_slot_that_does_not_exist_is_refused_without_harm() -> None:
    run = Run(min_size=2, max_size=2)
    stray = run.client("stray")
    assert stray.ask(Join(2, 10.0)).code == "misuse"
    assert [m.answer().slot for m in run.members(2)] == [0, 1]


def test_a_registration_that_times_out_names_all_who_are_missing() -> None:
    run = Run(min_size=6, max_size=6)
    a, b = run.client("a"), run.client("b")
    a.call(Join(1, 5.0))
    b.call(Join(4, 50.0))
    run.pass_time(2.0)
    a.call(Beat())
    run.pass_time(3.1)
    refused = a.answer(1)
    assert refused.code == "deadline"
    assert "slots 0, 2-3, 5" in refused.message
    assert refused.names == ("slot 0", "slot 2", "slot 3", "slot 5")
    assert b.answer(1) is None


def test_silence_is_suspected_first_and_death_later() -> None:
    run = Run(min_size=2, max_size=2, rejoin=True)
    a, b = run.members(2)
    for _ in range(6):
        run.pass_time(0.5)
        a.call(Beat(step=7, phase="step"))
    states = {s.slot: s.state for s in a.ask(Status()).members}
    assert states == {0: "alive", 1: "suspect"}
    b.call(Beat())
    assert a.ask(Status()).members[1].state == "alive"
    for _ in range(12):
        run.pass_time(0.5)
        a.call(Beat(step=8, phase="save"))
    overview = a.ask(Status())
    assert overview.members[1].state == "vacant"
    assert (overview.members[0].step, overview.members[0].phase) == (8, "save")
    (lost,) = a.pushes(Lost)
    assert "silent" in lost.reason
    assert b.pushes(Refused)[0].code == "fenced"


def test_a_closed_connection_is_death_after_a_moment_to_come_back() -> None:
    run = Run(min_size=2, max_size=2, reconnect_s=0.25)
    a, b = run.members(2)
    b.close()
    run.pass_time(0.2)
    b = b.again()
    run.pass_time(1.0)
    assert not a.pushes(Lost)
    b.close()
    run.pass_time(0.26)
    assert a.pushes(Lost)[0].slot == 1


@pytest.mark.parametrize("away_s", [0.3, 5.0])
def test_a_coordinator_that_was_away_gives_time_to_come_back(away_s: float) -> None:
    run = Run(min_size=2, max_size=2, reconnect_s=0.25)
    a, b = run.members(2)
    b.close()
    run.now += away_s
    run.step(Tick())  # the alarm rings before what waits in the backlog is looked at
    b.again()
    run.pass_time(1.0)
    assert not a.pushes(Lost)


def test_the_end_of_many_at_once_is_not_told_to_each_of_them() -> None:
    run = Run(min_size=8, max_size=8)
    members = run.members(8)
    for member in members[:-1]:
        member.call(Bye())
    assert [lost.slot for lost in members[-1].pushes(Lost)] == [0]
    assert [rally.urgent for rally in members[-1].pushes(Rally)] == [True]


def test_a_pause_of_the_coordinator_itself_kills_nobody() -> None:
    run = Run(min_size=2, max_size=2)
    members = run.members(2)
    run.pass_time(0.4)
    for member in members:
        member.call(Beat())
    run.now += 60.0
    run.step(Tick())
    assert not members[0].pushes(Lost)
    run.pass_time(5.6)
    assert run.core.ledger.seats[0].sid == 0


def test_an_agent_can_bury_a_member_at_once() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    agent = run.client("agent")
    assert isinstance(agent.ask(Bury("m1", "exit code 139")), Done)
    assert isinstance(agent.ask(Bury("m1", "exit code 139")), Done)
    assert "exit code 139" in a.pushes(Lost)[0].reason
    assert b.pushes(Refused)[0].code == "fenced"


def test_leaving_ends_the_generation_and_those_left_form_the_next() -> None:
    run = Run(min_size=1, max_size=3, num_lanes=6)
    members = run.members(3)
    assert isinstance(members[1].ask(Leave("moving")), Done)
    assert [m.pushes(Rally)[-1].urgent for m in (members[0], members[2])] == [True, True]
    for member in (members[0], members[2]):
        member.call(Join(-1, 10.0))
    first, last = members[0].answer(), members[2].answer()
    assert (first.generation, first.slot, last.slot) == (2, 0, 1)
    assert len(first.lanes) == len(last.lanes) == 3


def test_joining_again_without_a_change_keeps_the_generation() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    assert (a.answer().generation, b.answer().generation) == (1, 1)
    a.call(Join(-1, 10.0))
    assert b.pushes(Rally)[-1].urgent is False
    b.call(Join(-1, 10.0))
    assert (a.answer().generation, b.answer().generation) == (1, 1)


def test_a_failed_commit_starts_the_next_generation() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    a.call(Join(-1, 10.0, failed=True))
    b.call(Join(-1, 10.0))
    assert (a.answer().generation, b.answer().generation) == (2, 2)


def test_surplus_joiners_stand_by_and_step_in() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    spare = run.client("spare")
    assert spare.ask(Join(-1, 10.0, standby=True)).slot == -1
    agent = run.client("agent")
    agent.call(Bury("m1", "dead"))
    assert spare.pushes(Rally)[-1].urgent
    spare.call(Join(-1, 10.0, standby=True))
    a.call(Join(-1, 10.0))
    assert (spare.answer().generation, spare.answer().slot) == (2, 1)
    assert a.answer().slot == 0
    assert b.answer(1).slot == 1  # its first life; it is fenced now


def test_a_restarted_member_takes_its_slot_back() -> None:
    run = Run(min_size=2, max_size=2, rejoin=True)
    a, _ = run.members(2)
    newer = run.client("m1b")
    joined: Joined = newer.ask(Join(1, 10.0))
    assert (joined.generation, joined.slot) == (1, 1)
    assert run.core.ledger.out_of_sync == {1}
    a.call(barrier())
    assert a.answer() == Met(1, absent=(1,))
    newer.call(barrier("other"))
    assert newer.answer() is None
    a.call(barrier("other"))
    assert a.answer() == newer.answer() == Met(2)
    assert not a.ask(Status()).members[1].out_of_sync


def test_the_older_of_two_that_claim_a_slot_loses_in_whatever_order_they_come() -> None:
    run = Run(min_size=2, max_size=2)
    old, new = run.client("old"), run.client("new")
    new.call(Join(0, 10.0))
    assert old.ask(Join(0, 10.0)).code == "fenced"
    other = run.client("other")
    other.call(Join(1, 10.0))
    assert new.answer().slot == 0


# ---- barriers and the like


def test_a_barrier_passes_for_all() -> None:
    run = Run(min_size=3, max_size=3)
    members = run.members(3)
    for member in members:
        member.call(barrier())
    assert [m.answer() for m in members] == [Met(1)] * 3
    assert run.core.idle()


def test_each_waiter_has_its_own_deadline_and_a_straggler_gets_the_same_error() -> None:
    run = Run(min_size=3, max_size=3, dead_s=100.0)
    a, b, c = run.members(3)
    a.call(barrier(timeout_s=60.0))
    b.call(barrier(timeout_s=0.5))
    run.pass_time(0.51)
    for waiter in (a, b):
        assert waiter.answer().code == "deadline"
        assert waiter.answer().names == ("slot 2 (host2)",)
    assert c.ask(barrier()) == a.answer()
    for member in (a, b, c):
        member.call(barrier())
    assert [m.answer().epoch for m in (a, b, c)] == [2, 2, 2]
    assert not run.core.ledger.owed


def test_a_wrong_caller_does_not_poison_the_others() -> None:
    run = Run(min_size=3, max_size=3)
    a, b, c = run.members(3)
    a.call(barrier(slots=(0, 1)))
    assert c.ask(barrier(slots=(0, 1))).code == "misuse"
    assert c.ask(barrier(slots=(1, 2))).code == "misuse"
    assert c.ask(barrier(slots=(2, 9))).code == "misuse"
    assert run.client("x").ask(barrier()).code == "misuse"
    b.call(barrier(slots=(1, 0)))
    assert isinstance(a.answer(), Met)


def test_a_death_fails_a_barrier_at_once_and_names_the_dead() -> None:
    run = Run(min_size=3, max_size=3)
    a, b, c = run.members(3)
    a.call(barrier())
    c.close()
    run.pass_time(0.3)
    assert a.answer().code == "failed"
    assert a.answer().names == ("slot 2 (host2)",)
    assert b.ask(barrier()) == a.answer()  # it was owed this
    assert b.ask(barrier()).code == "failed"  # and the next one is hopeless too


def test_cancel() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    seq = a.call(barrier())
    assert isinstance(b.ask(Cancel("b", "not today")), Done)
    assert a.answer(seq).code == "failed"
    assert "not today" in a.answer(seq).message
    assert b.ask(barrier()).code == "failed"
    a.call(barrier())
    b.call(barrier())
    assert isinstance(a.answer(), Met)


def test_those_who_wait_are_told_for_whom() -> None:
    run = Run(min_size=2, max_size=2, remind_s=1.0, dead_s=100.0)
    a, _ = run.members(2)
    seq = a.call(barrier())
    run.pass_time(1.1)
    (patience,) = a.pushes(Patience)
    assert patience.seq == seq
    assert patience.names == ("slot 1 (host1)",)


def test_a_stale_generation_is_refused() -> None:
    run = Run(min_size=2, max_size=2)
    a, _ = run.members(2)
    assert a.ask(barrier(), generation=7).code == "stale"


def test_votes_are_anded_and_remembered() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    a.call(Meet("vote", "save-7", 5.0, None, True, b"17 files"))
    seq = b.call(Meet("vote", "save-7", 5.0, None, False))
    verdict = a.answer()
    assert (verdict.ok, verdict.notes) == (False, ((0, b"17 files"),))
    assert "slot 1" in verdict.reason
    run.restart()
    b = b.again()
    assert b.ask(Meet("vote", "save-7", 5.0, None, False), seq=seq) == verdict


def test_a_vote_without_a_dead_member_is_against() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    a.call(Meet("vote", "v", 5.0))
    b.close()
    run.pass_time(0.3)
    assert a.answer().ok is False


def test_a_ballot_outlives_its_voter() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    b.call(Meet("vote", "v", 5.0))
    b.close()
    run.pass_time(0.3)
    assert a.ask(Meet("vote", "v", 5.0)).ok is True


def test_live_set_leaves_out_the_dead() -> None:
    run = Run(min_size=3, max_size=3)
    a, b, c = run.members(3)
    a.call(Meet("live", "l", 5.0))
    c.call(Meet("live", "l", 5.0))
    c.close()
    run.pass_time(0.3)
    b.call(Meet("live", "l", 5.0))
    assert a.answer() == b.answer()
    assert a.answer().live == ((0, "m0"), (1, "m1"))
    assert a.answer().absent == (2,)


def test_a_finished_run_is_not_aborted_at_teardown() -> None:
    run = Run(min_size=3, max_size=3)
    a, b, c = run.members(3)
    a.call(Meet("finish", "f", 0.2))
    run.pass_time(0.21)
    assert a.answer().code == "deadline"  # its own; the others go on
    a.close()
    run.pass_time(1.0)
    b.call(Beat())
    c.call(Beat())
    b.call(Meet("finish", "f", 60.0))
    c.call(Meet("finish", "f", 60.0))
    assert isinstance(b.answer(), Met)
    assert not b.pushes(Lost)
    assert b.ask(Bye()) is not None
    assert not c.pushes(Lost)
    assert c.ask(Status()).finished


# ---- trouble


def test_errors_reach_everybody_also_those_who_were_away() -> None:
    run = Run(min_size=3, max_size=3, reconnect_s=2.0)
    a, b, c = run.members(3)
    c.close()
    a.ask(Report("loss is NaN"))
    assert b.pushes(Trouble) == [Trouble(1, 0, "host0", "loss is NaN")]
    assert not a.pushes(Trouble)
    c = c.again()
    assert c.pushes(Trouble)[0].message == "loss is NaN"


def test_all_stop_at_a_step_that_none_has_passed() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    assert a.ask(Preempt("SIGTERM")) == Stop(1, -1, "SIGTERM")
    assert b.pushes(Stop) == [Stop(1, -1, "SIGTERM")]
    a.call(At(1, 100))
    assert b.ask(Preempt("me too")) == Stop(1, -1, "SIGTERM")
    b.call(At(1, 116))
    assert a.pushes(Stop)[-1] == b.pushes(Stop)[-1] == Stop(1, 117, "SIGTERM")
    assert a.ask(Preempt("again", past=1)).stop == 2


def test_a_stop_does_not_wait_for_the_dead() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    a.call(Preempt("SIGTERM"))
    a.call(At(1, 5))
    b.close()
    run.pass_time(0.3)
    assert a.pushes(Stop)[-1].step == 6


def test_a_stop_survives_a_restart_and_is_over_at_the_next_start_of_the_run() -> None:
    run = Run(min_size=1, max_size=1)
    (a,) = run.members(1)
    a.call(Preempt("SIGTERM"))
    run.restart()
    a = a.again()
    assert a.pushes(Stop)[-1].step == -1
    a.call(At(1, 9))
    assert a.pushes(Stop)[-1].step == 10
    a.call(Leave())
    newcomer = run.client("next")
    newcomer.call(Join(0, 5.0))
    assert newcomer.answer().generation == 2
    assert not newcomer.pushes(Stop)
    assert newcomer.ask(Preempt("once more")).stop == 2


def test_a_stop_is_over_once_the_member_that_asked_for_it_is_gone() -> None:
    run = Run(min_size=1, max_size=2)
    a, b = run.members(2)
    b.call(Preempt("this node goes"))
    a.call(At(1, 9))
    b.call(At(1, 9))
    newcomer = run.client("replacement")
    newcomer.call(Join(-1, 60.0, standby=True))
    a.call(Join(-1, 60.0))
    b.call(Join(-1, 60.0, failed=True))
    assert a.answer().generation == 2
    assert run.core.ledger.stop == Stop(1, 10, "this node goes")  # not there yet
    b.call(Leave("preempted"))
    a.call(Join(-1, 60.0))
    newcomer.call(Join(-1, 60.0))
    assert newcomer.answer().generation == 3
    assert not newcomer.pushes(Stop)


def test_answers_that_a_client_never_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.coord.coordinator._MAX_RESULTS", 5)
    a = Run().client("a")
    assert [type(a.ask(Add("n"))).__name__ for _ in range(7)] == ["Count"] * 5 + ["Refused"] * 2
    assert a.ask(Add("n"), acked=7).code == "limit"


def test_status_shows_who_waits_for_whom() -> None:
    run = Run(min_size=2, max_size=2)
    a, b = run.members(2)
    a.call(barrier("eval"))
    overview = b.ask(Status())
    (waiting,) = overview.waiting
    assert (waiting.name, waiting.present, waiting.missing) == ("eval", (0,), (1,))
    assert (overview.generation, overview.term, overview.sessions) == (1, 1, 2)
