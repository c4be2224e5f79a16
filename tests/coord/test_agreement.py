"""Both agreements against the conformance tests of the test kit."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.coord import Agreement, SharedFolderAgreement, SoloAgreement
from holdfast.errors import UsageError
from holdfast.storage import Files, LocalStore
from holdfast.testing import AgreementConformance, AgreementProcessConformance
from tests.coord.members import made_folder, shared_folder


class TestSolo(AgreementConformance):
    world = 1
    keeps_records = False

    def member(self, place: Path, rank: int, world: int) -> Agreement:
        return SoloAgreement()


class TestSharedFolder(AgreementConformance):
    world = 3

    def member(self, place: Path, rank: int, world: int) -> Agreement:
        return made_folder(str(place), rank, world)


class TestSharedFolderOfOne(TestSharedFolder):
    world = 1


class TestSharedFolderOfTwo(TestSharedFolder):
    world = 2


@pytest.mark.process
class TestSharedFolderInProcesses(AgreementProcessConformance):
    world = 3
    factory = "tests.coord.members:made_folder"
    exhaustive = False


@pytest.mark.full
class TestSharedFolderInProcessesExhaustively(TestSharedFolderInProcesses):
    exhaustive = True


def test_records_are_freed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "agreement")
    store.make_root()
    members = [SharedFolderAgreement(store, rank=rank, world=2) for rank in range(2)]
    for member in members:
        member.vote("1.t", b"yes")
    members[0].decide("1.t", b"commit")
    assert store.names()
    members[0].forget("1.t")
    assert store.names() == []


def test_records_of_earlier_launches_are_freed(tmp_path: Path) -> None:
    place = tmp_path / "agreement"
    for _ in range(5):
        SharedFolderAgreement(LocalStore(place), rank=0, world=1).session(5.0)
    sessions = {name.split(".")[0] for name in LocalStore(place).names("hello")}
    assert len(sessions) == 1


def test_a_confirmation_that_is_swept_away_is_not_an_error(tmp_path: Path) -> None:
    """A rank that still looks at an old session must survive that rank 0 removes it."""
    store = LocalStore(tmp_path / "agreement")
    store.make_root()
    store.make_folder("hello")
    store.create("hello", "old.invite", data=b"{}")
    member = SharedFolderAgreement(store, rank=1, world=2)
    assert not member._confirms("old", "nonce")


class Sweeping(Files):
    """Removes the file that is about to become an answer to the old session, as a sweep may."""

    def link(self, source: str, target: str) -> bool:
        if os.path.basename(target).startswith("old."):
            self.unlink(source)
        return super().link(source, target)


def test_an_answer_that_is_swept_away_is_not_an_error(tmp_path: Path) -> None:
    """A rank answers every invitation, also one that rank 0 removes at that moment."""
    place = tmp_path / "agreement"
    store = LocalStore(place)
    store.make_root()
    store.make_folder("hello")
    store.create("hello", "old.invite", data=b"{}")
    zero = SharedFolderAgreement(store, rank=0, world=2)
    one = SharedFolderAgreement(LocalStore(place, files=Sweeping()), rank=1, world=2)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(member.session, 10.0) for member in (one, zero))
        assert first.result(20.0) == second.result(20.0)


@pytest.mark.parametrize("topic", ["", ".t", "a/b", "..", "t\0", "x" * 200])
def test_a_topic_cannot_leave_the_folder(topic: str, tmp_path: Path) -> None:
    member = shared_folder(str(tmp_path), 0, 1)
    with pytest.raises(UsageError, match="not a legal topic"):
        member.decide(topic, b"")


def test_a_rank_outside_the_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank 2 is not in a world of 2"):
        shared_folder(str(tmp_path), 2, 2)
