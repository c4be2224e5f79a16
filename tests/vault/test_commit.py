"""The commit of a save when ranks die, sleep and come back at the wrong moment."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import final

import msgspec
import pytest

from bench.scale.synthetic import SMALL, STEP, Mesh, Writers
from holdfast import format as fmt
from holdfast.checkpoint import Checkpointer
from holdfast.coord import SharedFolderAgreement, SoloAgreement
from holdfast.errors import AgreementError, MissingRanksError, StepExistsError, StorageError
from holdfast.storage import Files, LocalStore, PartReader, opened
from holdfast.vault.commit import COLLECTORS, Commit, Replaced, existing_step, part
from holdfast.vault.messages import Order, Outcome, Recipe
from holdfast.vault.persist import Job, Persister

TOPIC = f"{STEP}.a1"


@pytest.fixture
def writers() -> Writers:
    return Writers(SMALL, Mesh(6, 2))


@pytest.fixture
def store(tmp_path: Path, writers: Writers) -> LocalStore:
    made = LocalStore(tmp_path)
    for name in ("agreement", writers.folder):
        made.make_folder(name)
    return made


def agreement(store: LocalStore, writers: Writers, rank: int) -> SharedFolderAgreement:
    return SharedFolderAgreement(store.below("agreement"), rank=rank, world=writers.world)


def commit(
    store: LocalStore, writers: Writers, rank: int, *, orphaned: bool = False, attempt: str = ""
) -> Commit:
    index = fmt.decode_index(writers.part(rank).index)
    recipe = Recipe(0, rank, index.files[0].size, index.slices, writers.arrays)
    save = msgspec.structs.replace(writers.save, attempt=attempt) if attempt else writers.save
    order = Order(0, 0, 0, save, 1.7e9, (), b"{}", deadline_s=30.0)
    return Commit(store, agreement(store, writers, rank), order, recipe, orphaned=lambda: orphaned)


def vote(store: LocalStore, writers: Writers, *ranks: int, attempt: str = "") -> None:
    for rank in ranks:
        commit(store, writers, rank, attempt=attempt)._vote(
            writers.part(rank).index, fmt.ArrayTable(writers.arrays), None
        )


def test_replacing_a_step_leaves_the_next_save_of_it_alone(store: LocalStore, writers: Writers) -> None:
    """Another rank has seen this commit, gone on, and written its part and index of the next one."""
    folder = writers.folder
    for name in (fmt.data_name(0, "old"), fmt.index_name(0, "old"), fmt.index_name(1, "next")):
        store.replace(folder, name, data=b"x")
    one = commit(store, writers, 0)
    with closing(store.write_part(folder, fmt.data_name(1, "next"), size=10)):
        one._remove_replaced(Replaced("old", None))
        mine = [fmt.index_name(1, "next"), fmt.data_name(1, "next")]
        assert store.names(folder) == mine
        store.replace(folder, fmt.data_name(0, "older"), data=b"x")
        one._remove_replaced(Replaced("", None))  # the manifest of what was replaced names nobody
        assert store.names(folder) == mine


@final
class Short(Files):
    """Answers with an error to whoever opens a file whose name ends so."""

    def __init__(self, end: str, number: int) -> None:
        self._end = end
        self._number = number

    def open_read(self, path: str) -> int:
        if path.endswith(self._end):
            raise OSError(self._number, os.strerror(self._number))
        return super().open_read(path)


@pytest.mark.parametrize("end", ["manifest.json", "index.json", "safetensors"])
def test_only_damage_makes_a_step_one_that_may_be_replaced(end: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, writer="thread", rank=0, world=1) as ckpt:
        ckpt.save(1, {"x": 1}).durable(60.0)
    again = Order(0, 0, 0, fmt.SaveId("run", 1, "a2"), 1.7e9, (), b"{}", deadline_s=30.0)
    with pytest.raises(StepExistsError):
        existing_step(LocalStore(tmp_path), again)
    with pytest.raises(StorageError, match="Too many open files"):
        existing_step(LocalStore(tmp_path, files=Short(end, errno.EMFILE)), again)
    assert existing_step(LocalStore(tmp_path, files=Short(end, errno.EIO)), again) is not None
    assert existing_step(LocalStore(tmp_path, files=Short(end, errno.ENOENT)), again) is not None


def test_a_store_that_does_not_answer_does_not_make_a_step_one_that_may_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"memory://{tmp_path.name}-{id(tmp_path)}"
    with Checkpointer(place, writer="thread", rank=0, world=1) as ckpt:
        ckpt.save(1, {"x": 1}).durable(60.0)
    store = opened(place)

    def open_part(*names: str) -> PartReader:
        raise StorageError("timed out", path=store.path(*names))

    monkeypatch.setattr(store, "open_part", open_part)
    again = Order(0, 0, 0, fmt.SaveId("run", 1, "a2"), 1.7e9, (), b"{}", deadline_s=30.0)
    with pytest.raises(StorageError, match="timed out"):
        existing_step(store, again)


def test_a_job_that_another_process_is_at_leaves_that_ones_files(tmp_path: Path) -> None:
    store, save = LocalStore(tmp_path), fmt.SaveId("run", STEP, "a1")
    folder, name = fmt.step_folder(STEP), fmt.data_name(0, "a1")
    outcomes: list[Outcome] = []
    persister = Persister(store, SoloAgreement(), on_done=lambda seq, outcome: outcomes.append(outcome))
    order = Order(0, 0, 0, save, 1.7e9, (), b"{}", deadline_s=30.0)

    def attempt() -> None:
        job = Job(order, Recipe(0, 0, 10, (), ()), memoryview(bytearray(10)))
        job.stage()
        persister.submit(job)
        assert persister.drain(30.0)

    with closing(store.write_part(folder, name, size=10)):
        attempt()
        assert outcomes.pop().kind == "BusyPathError"
        assert store.names(folder) == [name]
    assert persister.close(30.0)


@pytest.mark.parametrize("rank", [1, COLLECTORS])
def test_who_sleeps_through_the_end_of_a_save_makes_no_half_step(
    rank: int, store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.commit._TAKEOVER_S", 0.0)
    vote(store, writers, *range(writers.world))
    agreement(store, writers, 0).decide(TOPIC, b"commit")
    # The others are freeing the ballots of the save, which was committed and pruned meanwhile.
    for other in range(3, writers.world):
        store.remove("agreement", f"{TOPIC}.vote-{other}")
    with pytest.raises(AgreementError, match=r"[34] of the 12 ballots"):
        commit(store, writers, rank).run(writers.part(rank).index, fmt.ArrayTable(writers.arrays), None)
    assert not store.exists(writers.folder, fmt.MANIFEST)


def test_who_finishes_late_looks_once_before_it_takes_over(
    store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.commit._TAKEOVER_S", 0.0)
    vote(store, writers, *range(writers.world))
    commit(store, writers, 0).run(writers.part(0).index, fmt.ArrayTable(writers.arrays), None)
    for other in range(writers.world):
        store.remove("agreement", f"{TOPIC}.vote-{other}")
    commit(store, writers, 9).run(
        writers.part(9).index, fmt.ArrayTable(writers.arrays), None
    )  # the step is there: nothing to ask for


def test_an_orphan_does_not_give_up_at_its_first_look(
    store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.commit._LEARN_S", 0.05)
    monkeypatch.setattr("holdfast.vault.commit.ORPHAN_S", 0.04)
    monkeypatch.setattr("holdfast.vault.commit._TAKEOVER_S", 0.0)
    vote(store, writers, *range(writers.world))
    waiting = commit(store, writers, 9, orphaned=True)
    plain, asked = waiting._agreement.decided, []

    def decided(topic: str, timeout_s: float) -> bytes | None:
        asked.append(timeout_s)
        if len(asked) == 2:
            agreement(store, writers, 0).decide(TOPIC, b"commit")
        return plain(topic, timeout_s)

    monkeypatch.setattr(waiting._agreement, "decided", decided)
    waiting.run(writers.part(9).index, fmt.ArrayTable(writers.arrays), None)
    assert len(asked) == 2
    assert len(fmt.read_manifest(store, writers.folder).parts) == writers.world


# ---- ranks that have said that they vote no more

OF_SESSION = "s-3"


def leave(store: LocalStore, writers: Writers, *ranks: int) -> None:
    for rank in ranks:
        part(agreement(store, writers, rank), "s")


@pytest.mark.parametrize("orphaned", [True, False])
def test_who_has_parted_without_a_ballot_is_not_waited_for(
    orphaned: bool, store: LocalStore, writers: Writers
) -> None:
    leave(store, writers, 4, 11)
    vote(store, writers, *range(1, 11), attempt=OF_SESSION)  # 4 had its say, and parted
    waiting = commit(store, writers, 0, orphaned=orphaned, attempt=OF_SESSION)
    with pytest.raises(MissingRanksError, match="rank 11 ended without a part in step") as caught:
        waiting.run(writers.part(0).index, fmt.ArrayTable(writers.arrays), None)
    assert caught.value.ranks == (11,)
    outcome = agreement(store, writers, 1).decided(f"{STEP}.{OF_SESSION}")
    assert outcome is not None
    assert outcome.startswith(b"abort: rank 11 ended")


def test_a_session_is_not_parted_from_with_another(store: LocalStore, writers: Writers) -> None:
    leave(store, writers, *range(writers.world))
    assert commit(store, writers, 0, attempt=OF_SESSION)._parted() == set(range(writers.world))
    for other in ("s2-3", "a1"):
        one = commit(store, writers, 9, attempt=other)
        assert one._parted() == set()
        assert not one._deciders_parted()


@pytest.mark.parametrize("orphaned", [True, False])
def test_a_ballot_that_came_before_the_parting_counts(
    orphaned: bool, store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank votes and parts while another one looks: first at the ballots, then at who has parted."""
    vote(store, writers, *range(1, 11), attempt=OF_SESSION)
    waiting = commit(store, writers, 0, orphaned=orphaned, attempt=OF_SESSION)
    plain = waiting._parted
    looks: list[None] = []

    def parted() -> set[int]:
        looks.append(None)
        if len(looks) == 1 + orphaned:
            vote(store, writers, 11, attempt=OF_SESSION)
            leave(store, writers, *range(1, 12))
        return plain()

    monkeypatch.setattr(waiting, "_parted", parted)
    waiting.run(writers.part(0).index, fmt.ArrayTable(writers.arrays), None)
    assert len(looks) == 1 + orphaned
    assert len(fmt.read_manifest(store, writers.folder).parts) == writers.world


def test_who_only_learns_gives_up_once_all_who_decide_have_parted(
    store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(store, writers, *range(1, COLLECTORS), 8, 10, 11)
    assert not commit(store, writers, 9, attempt=OF_SESSION)._deciders_parted(), "rank 0 may decide"
    leave(store, writers, 0)
    waiting = commit(store, writers, 9, orphaned=True, attempt=OF_SESSION)
    plain, waits = waiting._agreement.decided, []

    def decided(topic: str, timeout_s: float = 0.0) -> bytes | None:
        waits.append(timeout_s)
        return plain(topic, timeout_s)

    monkeypatch.setattr(waiting._agreement, "decided", decided)
    with pytest.raises(AgreementError, match="had not decided when rank 9 gave up"):
        waiting.run(writers.part(9).index, fmt.ArrayTable(writers.arrays), None)
    assert waits == [0.0, 0.0], "the parting, and then the save"


def test_who_only_learns_goes_by_what_was_decided_before_the_parting(
    store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.vault.commit._TAKEOVER_S", 0.0)
    vote(store, writers, *range(writers.world), attempt=OF_SESSION)
    agreement(store, writers, 3).decide(f"{STEP}.{OF_SESSION}", b"commit")
    leave(store, writers, *range(writers.world))
    commit(store, writers, 9, orphaned=True, attempt=OF_SESSION).run(
        writers.part(9).index, fmt.ArrayTable(writers.arrays), None
    )
    assert len(fmt.read_manifest(store, writers.folder).parts) == writers.world


def test_not_all_ranks_take_over_at_once(
    store: LocalStore, writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Told:
        def __init__(self, seconds: float) -> None:
            waits.append(seconds)

        def expired(self) -> bool:
            return True

    monkeypatch.setattr("holdfast.vault.commit.Deadline", Told)
    for rank in (1, 7, 8, 15, 16, 9_999):
        one = commit(store, writers, 1)
        monkeypatch.setattr(one._agreement, "rank", rank)
        assert not one._appeared()
    assert waits == [5.0, 5.0, 10.0, 10.0, 15.0, 60.0]
