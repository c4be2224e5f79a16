"""Agreement through the coordinator holds to the same as any other, and outlives the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.coord import Agreement
from holdfast.coord.client import CoordClient
from holdfast.coord.coord_agreement import CoordAgreement
from holdfast.coord.settings import Settings
from holdfast.errors import UsageError
from holdfast.testing import AgreementConformance, AgreementProcessConformance
from tests.coord.coord_members import member
from tests.coord.memory_coordinator import MemoryCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[MemoryCoordinator]:
    with MemoryCoordinator(tmp_path) as coordinator:
        yield coordinator


class TestCoordinator(AgreementConformance):
    world = 3

    @pytest.fixture(autouse=True)
    def _run(self, coordinator: MemoryCoordinator) -> Iterator[None]:
        self.made: list[CoordAgreement] = []
        yield
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(CoordAgreement.close, self.made))

    def member(self, place: Path, rank: int, world: int) -> Agreement:
        made = member(str(place), rank, world)
        self.made.append(made)
        return made


class TestCoordinatorOfOne(TestCoordinator):
    world = 1


class TestCoordinatorOfTwo(TestCoordinator):
    world = 2


@pytest.mark.process
class TestCoordinatorInProcesses(AgreementProcessConformance):
    world = 3
    factory = "tests.coord.coord_members:member"
    exhaustive = False

    @pytest.fixture(autouse=True)
    def _run(self, coordinator: MemoryCoordinator) -> None:
        """There is a coordinator."""


@pytest.mark.full
class TestCoordinatorInProcessesExhaustively(TestCoordinatorInProcesses):
    exhaustive = True


@pytest.fixture
def pair(coordinator: MemoryCoordinator, tmp_path: Path) -> Iterator[tuple[CoordAgreement, CoordAgreement]]:
    first, second = (member(str(tmp_path), rank, 2) for rank in range(2))
    yield first, second
    first.close()
    second.close()


def test_a_ballot_of_many_mebibytes_arrives(pair: tuple[CoordAgreement, CoordAgreement]) -> None:
    first, second = pair
    large = bytes(range(256)) * (17 << 12) + b"x"
    first.vote("1.a", large)
    first.vote("1.a", b"another")
    second.vote("1.a", b"small")
    assert dict(second.ballots("1.a", 10.0)) == {0: large, 1: b"small"}
    assert second.decide("1.a", large) == large
    assert first.decided("1.a") == large


def test_nothing_is_left_of_a_topic_that_is_over(
    pair: tuple[CoordAgreement, CoordAgreement], coordinator: MemoryCoordinator
) -> None:
    first, second = pair
    for topic in ("1.a", "1.a-1"):
        first.vote(topic, bytes(1 << 20))
        second.decide(topic, b"yes")
    assert sorted(first.topics()) == ["1.a", "1.a-1"]
    first.forget("1.a")
    assert first.topics() == ["1.a-1"]
    first.forget("1.a-1")
    with CoordClient(coordinator.address) as client:
        assert client.scan("") == {}


def test_a_restart_of_the_coordinator_goes_unnoticed(
    pair: tuple[CoordAgreement, CoordAgreement], coordinator: MemoryCoordinator
) -> None:
    first, second = pair
    first.vote("t", b"one")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.ballots, "t", 20.0)
        coordinator.stop()
        coordinator.start()
        second.vote("t", b"two")
        assert dict(waiting.result(20.0)) == {0: b"one", 1: b"two"}


def test_a_rank_that_was_forgotten_comes_back(tmp_path: Path) -> None:
    """Away for longer than a coordinator remembers, while a wait is under way."""
    settings = Settings(session_s=0.01)
    with MemoryCoordinator(tmp_path, settings) as coordinator:
        first, second = (member(str(tmp_path), rank, 2) for rank in range(2))
        first.vote("t", b"one")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.ballots, "t", 30.0)
            gone = threading.Event()
            coordinator.stop()
            gone.wait(0.3)  # nobody can tell when a session was forgotten by a coordinator that is not there
            coordinator.start()
            second.vote("t", b"two")
            assert dict(waiting.result(30.0)) == {0: b"one", 1: b"two"}
        first.close()
        second.close()


def test_a_client_of_its_own_is_not_closed(coordinator: MemoryCoordinator) -> None:
    with CoordClient(coordinator.address) as client:
        agreement = CoordAgreement(client, rank=0, world=1)
        agreement.vote("t", b"x")
        agreement.close()
        assert client.get("agreement/topic/t/vote-0") is not None


@pytest.mark.parametrize("topic", ["", ".t", "a/b", "..", "t\0", "x" * 200])
def test_a_topic_cannot_leave_its_place(topic: str, coordinator: MemoryCoordinator) -> None:
    agreement = CoordAgreement(coordinator.address, rank=0, world=1)
    with pytest.raises(UsageError, match="not a legal topic"):
        agreement.decide(topic, b"")


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 2 is not in a world of 2"):
        CoordAgreement("unix:/nowhere", rank=2, world=2)
