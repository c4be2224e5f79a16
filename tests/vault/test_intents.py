"""What is being written or copied is nobody's rubbish, and what was given up is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import final

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.upkeep import clean, clean_topics, in_flight, leftovers, remove_step
from holdfast.coord import SharedFolderAgreement
from holdfast.errors import AgreementError
from holdfast.format import MANIFEST, SaveId, data_name, read_manifest, step_folder, verify_step
from holdfast.storage import Files, LocalStore, Store, opened
from holdfast.vault import Accepted, Intent, accepted, announce, revoke
from holdfast.vault.commit import part, parted
from holdfast.vault.crew import Crew
from holdfast.vault.mirror_copy import StepCopy
from holdfast.vault.mirror_sweep import sweep

FOLDER = step_folder(1)


@pytest.fixture(params=["folder", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A mirror of `root`."""
    memory = f"memory://{tmp_path.name}-{id(tmp_path)}"
    made = opened(tmp_path / "mirror" if request.param == "folder" else memory)
    made.make_root()
    return made


@contextmanager
def copying(root: Path, target: Store) -> Iterator[StepCopy]:
    """The copy of a save of step 1."""
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        ckpt.save(1, {"x": np.arange(100)}, overwrite=True).durable(60.0)
    crew = Crew(2, "test-copy")
    try:
        yield StepCopy(
            LocalStore(root), target, 1, rank=0, world=1, crew=crew, width=2, gate=lambda nbytes: None
        )
    finally:
        crew.close(10.0)


def test_a_run_that_saves_into_a_mirror_leaves_what_is_being_copied(root: Path, target: Store) -> None:
    with copying(root, target) as copy:
        intent = copy.announce()
        copy.give()
        assert leftovers(target) == []
        clean(target, lambda path, reason: pytest.fail(f"{path} was removed: {reason}"))
        assert in_flight(target) == []  # no load waits for a copy
        copy.commit()
        intent.close()
        assert accepted(target) == set()
        assert list(verify_step(target, FOLDER)) == []


def test_the_empty_folder_of_an_announced_save_stays(root: Path) -> None:
    store = LocalStore(root)
    store.make_root()
    intent = announce(store, SaveId("run", 1, "a1"))
    store.make_folder(FOLDER)
    clean(store, lambda path, reason: pytest.fail(f"{path} was removed: {reason}"))
    assert FOLDER in store.names()
    intent.close()
    clean(store, lambda path, reason: pytest.fail(f"{path} was removed: {reason}"))
    assert FOLDER not in store.names()


def test_a_copy_that_was_given_up_is_rubbish_and_is_not_committed_later(root: Path, target: Store) -> None:
    with copying(root, target) as copy:
        copy.announce().close()
        copy.give()
        removed: list[str] = []
        clean(target, lambda path, reason: removed.append(path))
        assert len(removed) == 2
        if not target.has_locks:
            copy.give()
            with pytest.raises(AgreementError, match="no sign of life"):
                copy.commit()
        assert not target.exists(FOLDER, MANIFEST)


def test_a_mirror_does_not_sweep_what_another_process_writes_there(root: Path, target: Store) -> None:
    other = SaveId("other", 1, "b1")
    with copying(root, target) as copy:
        copy.give()
        copy.commit()
        intent = announce(target, other)
        target.create(FOLDER, data_name(0, other.attempt), data=b"x")
        assert list(sweep(target, {1}, ())) == []
        intent.close()
        assert list(sweep(target, {1}, ())) == [target.path(FOLDER, data_name(0, other.attempt))]
        assert revoke(target, 1, other.attempt)
        assert list(verify_step(target, FOLDER)) == []


def test_a_replaced_copy_takes_only_its_own_parts_along(root: Path, target: Store) -> None:
    with copying(root, target) as copy:
        copy.give()
        copy.commit()
        old = copy.manifest.save.attempt
    with copying(root, target) as copy:
        target.create(FOLDER, data_name(0, "b1"), data=b"x")
        copy.give()
        copy.commit()
        names = target.names(FOLDER)
        assert data_name(0, "b1") in names
        assert not any(old in name for name in names)


def test_pruning_a_step_leaves_the_save_that_is_to_replace_it(root: Path) -> None:
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        ckpt.save(1, {"x": np.arange(100)}).durable(60.0)
    store, new = LocalStore(root), data_name(0, "b1")
    with closing(store.write_part(FOLDER, new, size=10)):
        remove_step(store, 1)
        assert store.names(FOLDER) == [new]
    # A copy has no lock on what it has sent, but its intent.
    save = SaveId("run", 1, "b1")
    intent = announce(store, save, copied=True)
    remove_step(store, 1)
    assert store.names(FOLDER) == [new]
    intent.close()
    remove_step(store, 1)
    assert store.names(FOLDER) == []


def test_cleaning_spares_what_is_committed_while_it_looks(
    root: Path, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copying(root, target) as copy:
        intent = copy.announce()
        copy.give()

        def look(store: Store) -> set[Accepted]:
            """Right before the intents are looked at, the copy is committed and over."""
            monkeypatch.undo()
            copy.commit()
            intent.close()
            return accepted(store)

        monkeypatch.setattr("holdfast.vault.remains.accepted", look)
        clean(target, lambda path, reason: pytest.fail(f"{path} was removed: {reason}"))
        assert list(verify_step(target, FOLDER)) == []


def test_a_mirror_does_not_sweep_what_is_committed_while_it_looks(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root)
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": np.arange(100)}).durable(60.0)
    manifest = store.read(FOLDER, MANIFEST, max_bytes=1 << 20)
    store.remove(FOLDER, MANIFEST)

    def look(mirror: Store) -> set[str]:
        mirror.create(FOLDER, MANIFEST, data=manifest)
        return set()

    monkeypatch.setattr("holdfast.vault.mirror_sweep.announced_attempts", look)
    assert list(sweep(store, {2}, ())) == []
    assert list(verify_step(store, FOLDER)) == []


def test_pruning_a_step_spares_the_save_that_replaces_it_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root)
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        ckpt.save(1, {"x": np.arange(100)}).durable(60.0)
    manifest = store.read(FOLDER, MANIFEST, max_bytes=1 << 20)

    def look(store: Store) -> set[Accepted]:
        store.create(FOLDER, MANIFEST, data=manifest)
        return set()

    monkeypatch.setattr("holdfast.vault.remains.accepted", look)
    remove_step(store, 1)
    assert list(verify_step(store, FOLDER)) == []


def test_a_step_that_another_process_prunes_too_is_pruned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root)
    with Checkpointer(root, writer="thread", keep=None) as ckpt:
        ckpt.save(1, {"x": np.arange(100)}).durable(60.0)
    plain = LocalStore.remove_folder

    def remove_folder(self: LocalStore, *names: str) -> None:
        plain(self, *names)
        plain(self, *names)  # the other one was quicker

    monkeypatch.setattr(LocalStore, "remove_folder", remove_folder)
    remove_step(store, 1)
    remove_step(store, 1)
    assert store.names() == [".holdfast", "journal.jsonl"]


def test_cleaning_leaves_a_ballot_that_is_being_cast(root: Path) -> None:
    store = LocalStore(root)
    votes = store.below(".holdfast", "agreement")
    votes.make_root()
    with votes._temporary(votes.path("1.a1.vote-1"), b"yes") as ballot:
        clean(store, lambda path, reason: pytest.fail(f"{path} was removed: {reason}"))
        assert os.path.exists(ballot)
    clean(store, lambda path, reason: None)
    assert votes.names() == []  # a crash left it


@pytest.mark.parametrize("by_name", [True, False])
def test_cleaning_leaves_the_partings_from_a_session_that_has_a_save(root: Path, by_name: bool) -> None:
    store = LocalStore(root)
    agreement = SharedFolderAgreement(store.below(".holdfast", "agreement"), rank=0, world=2)
    agreement._store.make_root()

    def forget() -> None:
        if by_name:
            clean(store, lambda path, reason: None)
        else:
            clean_topics(store, agreement)

    part(agreement, "s")
    save = announce(store, SaveId("run", 1, "s-12"))
    forget()
    assert parted(agreement, "s") == {0}, "whoever is at that save would wait for this rank"
    save.close()
    forget()
    assert agreement.topics() == []


def test_cleaning_leaves_the_ballots_of_a_save_that_begins_while_it_looks(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(root)
    agreement = SharedFolderAgreement(store.below(".holdfast", "agreement"), rank=0, world=2)
    agreement._store.make_root()
    begun: list[Intent] = []
    plain = LocalStore.names

    def names(self: LocalStore, *path: str) -> list[str]:
        """Right before the ballots are listed, a save is announced and voted on."""
        if not begun and self.path(*path).endswith("agreement"):
            begun.append(announce(store, SaveId("run", 1, "a1")))
            agreement.vote("1.a1", b"yes")
        return plain(self, *path)

    def forget(by_name: bool) -> None:
        if by_name:
            clean(store, lambda path, reason: None)
        else:
            clean_topics(store, agreement)

    for by_name in (True, False):
        monkeypatch.setattr(LocalStore, "names", names)
        forget(by_name)
        assert agreement.topics() == ["1.a1"]
        monkeypatch.undo()
        begun.pop().close()
        forget(by_name)
        assert agreement.topics() == []


def test_a_name_that_is_none_of_ours_is_no_intent(root: Path) -> None:
    store = LocalStore(root)
    store.make_root()
    announce(store, SaveId("run", 1, "a1")).close()
    for name in ("intent-².a1.0", "intent-1.a1.٣", "copy-x"):
        store.create(".holdfast", name, data=b"")
    assert accepted(store) == set()
    assert store.names(".holdfast") == []


@final
class Hasty(Files):
    """A disk on which somebody cleans up right before each of the first two locks.

    With `anew`, another process makes the same name at once.
    """

    def __init__(self, *, anew: bool = False) -> None:
        self._anew = anew
        self.cleaned: list[str] = []

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        if len(self.cleaned) < 2:
            self.cleaned.append(path := os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(path)
            if self._anew:
                Path(path).touch()
        return super().lock(fd, shared=shared)


@pytest.mark.parametrize("anew", [False, True])
def test_an_intent_that_is_taken_for_a_leftover_as_it_is_made_is_made_again(anew: bool, root: Path) -> None:
    files, store = Hasty(anew=anew), LocalStore(root)
    store.make_root()
    intent = announce(LocalStore(root, files=files), SaveId("run", 1, "a1"))
    assert len(files.cleaned) == 2
    assert [one.attempt for one in accepted(store)] == ["a1"]
    intent.close()
    assert accepted(store) == set()


def test_a_leftover_whose_name_is_no_text_can_be_told_of(root: Path) -> None:
    store = LocalStore(root)
    store.make_root()
    (root / ".tmp-\udcff").write_bytes(b"")
    told: list[str] = []
    clean(store, lambda path, reason: told.append(path))
    assert [path.encode() for path in told] == [b".tmp-?"]
    assert store.names() == []


def test_half_a_part_on_the_mirror_is_none(root: Path, target: Store) -> None:
    with copying(root, target) as copy:
        copy.give()
        assert copy.is_complete()
        attempt = read_manifest(LocalStore(root), FOLDER).save.attempt
        target.remove(FOLDER, data_name(0, attempt))
        assert not copy.is_complete()
