"""What every `coord.Agreement` must hold to, as tests.

    class TestMine(AgreementConformance):
        world = 3

        def member(self, place: Path, rank: int, world: int) -> Agreement:
            return MyAgreement(place, rank=rank, world=world)

`place` stands for one run: members made for the same place agree with each other. Making a member again is
what a restarted process does.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import SkipTest

from holdfast.coord import Agreement
from holdfast.errors import MissingRanksError

T = TypeVar("T")

_SOON_S = 0.05
_LONG_S = 30.0


class AgreementConformance:
    """Tests of one implementation with `world` ranks, as threads of one process."""

    world = 3
    keeps_records = True
    """Whether a member made again knows what the one before it knew."""

    @abstractmethod
    def member(self, place: Path, rank: int, world: int) -> Agreement:
        """The member `rank` of the run at `place`, as a new process would make it."""

    def members(self, place: Path) -> list[Agreement]:
        """All members of the run at `place`."""
        return [self.member(place, rank, self.world) for rank in range(self.world)]

    def _others_needed(self) -> None:
        if self.world == 1:
            raise SkipTest("there is only one rank")

    def _records_needed(self) -> None:
        if not self.keeps_records:
            raise SkipTest("nothing outlives a member")

    # ---- sessions

    def test_members_know_who_they_are(self, tmp_path: Path) -> None:
        for rank, member in enumerate(self.members(tmp_path)):
            assert (member.rank, member.world) == (rank, self.world)

    def test_a_session_is_shared_by_all_and_by_no_other_launch(self, tmp_path: Path) -> None:
        seen: set[str] = set()
        for _ in range(3):
            sessions = all_at_once([partial(m.session, _LONG_S) for m in self.members(tmp_path)])
            assert len(set(sessions)) == 1, f"the ranks are in different sessions: {sessions}"
            assert sessions[0], "a session needs a name"
            assert sessions[0] not in seen, "a later launch got the session of an earlier one"
            seen.add(sessions[0])

    def test_a_rank_that_never_comes_is_named(self, tmp_path: Path) -> None:
        self._others_needed()
        missing = self.world - 1
        failures: list[list[int]] = []
        for wait_s in (0.3, 3.0, 20.0):  # who is present and slow is missed too, at first
            present = [self.member(tmp_path, rank, self.world) for rank in range(missing)]
            failures = all_at_once([partial(missing_ranks, partial(m.session, wait_s)) for m in present])
            if failures[0] == [missing]:
                break
        assert failures[0] == [missing], f"rank 0 misses {failures[0]}"
        assert all(failures), "a session was opened without one of the ranks"

    def test_a_crashed_launch_deceives_nobody(self, tmp_path: Path) -> None:
        self._others_needed()
        self._records_needed()
        opened = all_at_once([partial(m.session, _LONG_S) for m in self.members(tmp_path)])
        # A launch that died with only rank 0 there, one with all but rank 0, one with all but the last.
        assert missing_ranks(lambda: self.member(tmp_path, 0, self.world).session(_SOON_S))
        for ranks in (range(1, self.world), range(self.world - 1)):
            crashed = [self.member(tmp_path, rank, self.world) for rank in ranks]
            assert all(all_at_once([partial(missing_ranks, partial(m.session, _SOON_S)) for m in crashed]))
        # The ranks come before rank 0 does, and find only what the dead have left.
        late = threading.Event()

        def rank_0() -> str:
            late.wait(0.1)
            return self.member(tmp_path, 0, self.world).session(_LONG_S)

        calls: list[Callable[[], str]] = [rank_0]
        calls += [partial(m.session, _LONG_S) for m in self.members(tmp_path)[1:]]
        sessions = all_at_once(calls)
        assert len(set(sessions)) == 1, f"the ranks are in different sessions: {sessions}"
        assert sessions[0] not in opened

    # ---- ballots

    def test_all_see_all_ballots(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        ballots = {rank: bytes([rank]) * (rank * 30_000) + b"\0\n" for rank in range(self.world)}
        for member in members:
            member.vote("7.abc-1", ballots[member.rank])
        for member in members:
            assert dict(member.ballots("7.abc-1", _LONG_S)) == ballots

    def test_waiting_for_ballots_ends_with_the_last_of_them(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)

        def work(member: Agreement) -> dict[int, bytes]:
            member.vote("t", b"%d" % member.rank)
            return dict(member.ballots("t", _LONG_S))

        for ballots in all_at_once([partial(work, m) for m in members]):
            assert ballots == {rank: b"%d" % rank for rank in range(self.world)}

    def test_a_ballot_does_not_change(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        for member in members:
            member.vote("t", b"first")
            member.vote("t", b"first")
            member.vote("t", b"second")
        assert set(members[-1].ballots("t", _LONG_S).values()) == {b"first"}

    def test_the_ranks_that_did_not_vote_are_named(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        everybody = list(range(self.world))
        for member in members:
            assert missing_ranks(partial(member.ballots, "t", _SOON_S)) == everybody
        members[0].vote("t", b"")
        if self.world > 1:
            assert missing_ranks(lambda: members[0].ballots("t", _SOON_S)) == everybody[1:]

    def test_a_decision_ends_the_wait_for_ballots(self, tmp_path: Path) -> None:
        self._others_needed()
        members = self.members(tmp_path)
        members[0].vote("t", b"yes")
        members[1].decide("t", b"abort")
        ballots = members[0].ballots("t", _LONG_S)
        assert dict(ballots) == {0: b"yes"}

    def test_a_rank_of_a_larger_launch_is_not_taken_for_one_of_ours(self, tmp_path: Path) -> None:
        """It answers every invitation that it sees, also that of a launch in which it has no place."""
        self._others_needed()
        stale, first = self.member(tmp_path, 2, 3), self.member(tmp_path, 0, 2)
        waits = [partial(stale.session, 1.0), partial(first.session, 0.8)]
        answered, missed = all_at_once([partial(missing_ranks, wait) for wait in waits])
        assert missed == [1], f"rank 0 of 2 misses {missed}"
        assert answered, "a session was opened without one of the ranks"

    # ---- decisions

    def test_nothing_is_decided_at_first(self, tmp_path: Path) -> None:
        for member in self.members(tmp_path):
            assert member.decided("t") is None

    def test_the_first_decision_stands(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        assert members[-1].decide("t", b"one") == b"one"
        for member in members:
            assert member.decide("t", b"two") == b"one"
            assert member.decided("t") == b"one"

    def test_a_decision_is_waited_for_and_nothing_else_is_needed_for_it(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        assert members[0].decided("t", 0.01) is None
        if self.world == 1:
            members[0].decide("t", b"one")
        calls: list[Callable[[], bytes | None]] = [partial(one.decided, "t", _LONG_S) for one in members]
        calls.append(partial(members[-1].decide, "t", b"one"))
        assert set(all_at_once(calls)) == {b"one"}

    def test_one_decision_stands_of_many_at_once(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        for round_ in range(20):
            topic = f"{round_}.x"
            proposals = [partial(m.decide, topic, b"%d" % m.rank) for m in members for _ in range(2)]
            outcomes = all_at_once(proposals)
            assert len(set(outcomes)) == 1, f"different decisions on one topic: {outcomes}"
            assert {member.decided(topic) for member in members} == set(outcomes)

    def test_topics_are_kept_apart(self, tmp_path: Path) -> None:
        member = self.member(tmp_path, 0, self.world)
        topics = ["1.a-1", "1.a-11", "11.a-1", "1.a", "1.a-1.vote-0", "1.a-1.decision"]
        for topic in topics:
            member.decide(topic, topic.encode())
        for topic in topics:
            assert member.decided(topic) == topic.encode()

    # ---- lost members

    def test_a_member_made_again_goes_on_where_it_was(self, tmp_path: Path) -> None:
        """A process may die between any two calls; its successor repeats them all."""
        self._records_needed()
        for calls in range(4):
            topic = f"{calls}.t"
            for member in self.members(tmp_path)[1:]:
                member.vote(topic, b"v%d" % member.rank)
            self._calls(self.member(tmp_path, 0, self.world), topic, calls)
            assert self._calls(self.member(tmp_path, 0, self.world), topic, 4) == b"commit"
            for member in self.members(tmp_path):
                assert member.decide(topic, b"abort") == b"commit"
                assert len(member.ballots(topic, _LONG_S)) == self.world

    @staticmethod
    def _calls(member: Agreement, topic: str, number: int) -> bytes | None:
        outcome = None
        if number > 0:
            member.vote(topic, b"v%d" % member.rank)
        if number > 1:
            member.ballots(topic, _LONG_S)
        if number > 2:
            outcome = member.decide(topic, b"commit")
        if number > 3:
            assert member.decided(topic) == outcome
        return outcome

    def test_the_others_can_abort_what_a_lost_rank_left_open(self, tmp_path: Path) -> None:
        self._others_needed()
        members = self.members(tmp_path)
        for member in members[:-1]:
            member.vote("t", b"yes")
        assert missing_ranks(lambda: members[0].ballots("t", _SOON_S)) == [self.world - 1]
        assert members[0].decide("t", b"abort") == b"abort"
        # It was only slow: what it finds is the decision of the others.
        members[-1].vote("t", b"yes")
        assert members[-1].decide("t", b"commit") == b"abort"

    # ---- the end of a topic

    def test_a_forgotten_topic_is_as_new(self, tmp_path: Path) -> None:
        members = self.members(tmp_path)
        for topic in ("t", "other"):
            for member in members:
                member.vote(topic, b"old")
            members[0].decide(topic, b"old")
        members[0].forget("t")
        members[0].forget("t")
        members[0].forget("never-heard-of")
        for member in members:
            assert member.decided("t") is None
            assert member.decided("other") == b"old"
            assert len(member.ballots("other", _LONG_S)) == self.world
            member.vote("t", b"new")
        assert members[-1].decide("t", b"new") == b"new"
        assert set(members[0].ballots("t", _LONG_S).values()) == {b"new"}


def all_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls made at the same moment, one thread each."""
    gate = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        gate.wait(_LONG_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.result(_LONG_S + 30.0) for future in futures]


def missing_ranks(call: Callable[[], object]) -> list[int]:
    """The ranks that a call has waited for in vain; empty if it did not fail."""
    try:
        call()
    except MissingRanksError as error:
        named = error
    else:
        return []
    for rank in named.ranks:
        assert str(rank) in named.message, f"rank {rank} is not in {named.message!r}"
    return sorted(named.ranks)
