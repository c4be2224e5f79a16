"""The copy of one step, cut off at every single operation: the mirror has it whole or not at all."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from holdfast.errors import StorageError
from holdfast.format import MANIFEST, read_manifest, step_folder, verify_step
from holdfast.storage import Files, LocalStore
from holdfast.vault.crew import Crew
from holdfast.vault.mirror_copy import StepCopy, attempt_of
from tests.checkpoint.test_ranks import Ranks

FOLDER = step_folder(1)


@final
class Dying(Files):
    """A disk that does so many things, and then nothing any more."""

    def __init__(self, left: int) -> None:
        self._left = left

    def _do(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.EIO, "dead")

    def create(self, path: str, *, exclusive: bool = False) -> int:
        self._do()
        return super().create(path, exclusive=exclusive)

    def reserve(self, fd: int, size: int) -> None:
        self._do()
        super().reserve(fd, size)

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        self._do()
        super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._do()
        super().sync(fd)

    def link(self, source: str, target: str) -> bool:
        self._do()
        return super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._do()
        super().rename(source, target)

    def make_folder(self, path: str) -> bool:
        self._do()
        return super().make_folder(path)

    def sync_folder(self, path: str) -> None:
        self._do()
        super().sync_folder(path)

    def unlink(self, path: str) -> None:
        self._do()
        super().unlink(path)


@contextmanager
def copying(root: Path, target: LocalStore) -> Iterator[StepCopy]:
    crew = Crew(2, "test-copy")
    try:
        yield StepCopy(
            LocalStore(root), target, 1, rank=0, world=1, crew=crew, width=2, gate=lambda nbytes: None
        )
    finally:
        crew.close(10.0)


def copy(root: Path, target: LocalStore) -> int:
    """Bring step 1 to the target; the bytes that had to be sent."""
    with copying(root, target) as made:
        target.make_root()
        sent = 0 if made.is_whole() else made.give()
        assert made.is_complete()
        made.commit()
        return sent


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / FOLDER).iterdir()}


def check_committed(place: Path) -> str | None:
    """The attempt that is committed there; fail unless all of it is right."""
    store = LocalStore(place)
    if not store.exists(FOLDER, MANIFEST):
        return None
    assert list(verify_step(store, FOLDER)) == []
    return attempt_of(store, 1)


def save(root: Path, value: int, *, overwrite: bool = False) -> str:
    """Save step 1 in two parts; its attempt."""
    ranks = Ranks(root, 2)
    tree = {"x": np.full((4, 100), value, np.float32)}
    ranks.save(1, lambda rank: tree, overwrite=overwrite)
    ranks.close()
    return read_manifest(LocalStore(root), FOLDER).save.attempt


def test_a_copy_that_is_cut_off_anywhere_is_none_and_the_next_one_finishes(
    root: Path, tmp_path: Path
) -> None:
    attempt = save(root, 1)
    for left in itertools.count():
        place = tmp_path / f"mirror-{left}"
        try:
            copy(root, LocalStore(place, files=Dying(left)))
        except StorageError:
            assert check_committed(place) in (None, attempt)
            indexes = len(list((place / FOLDER).glob("part-*.index.json"))) if place.exists() else 0
            sent = copy(root, LocalStore(place))
            # Parts whose index is there are not sent again.
            assert (sent == 0) == (indexes == 2)
        else:
            assert left > 20
            break
        assert {name: data for name, data in files(place).items() if ".tmp-" not in name} == files(root)
        shutil.rmtree(place)


@pytest.mark.full
def test_a_step_that_is_replaced_is_the_old_one_or_the_new_one(root: Path, tmp_path: Path) -> None:
    old = save(root, 1)
    before = tmp_path / "before"
    copy(root, LocalStore(before))
    new = save(root, 2, overwrite=True)
    seen = set()
    for left in itertools.count():
        place = tmp_path / f"mirror-{left}"
        shutil.copytree(before, place)
        try:
            copy(root, LocalStore(place, files=Dying(left)))
        except StorageError:
            seen.add(check_committed(place))
            copy(root, LocalStore(place))
            assert check_committed(place) == new
        else:
            assert files(place) == files(root)
            break
        shutil.rmtree(place)
    assert seen == {old, new}


def test_parts_that_vanish_before_the_commit_take_it_back(root: Path, tmp_path: Path) -> None:
    save(root, 1)
    target = LocalStore(tmp_path / "mirror")
    target.make_root()
    with copying(root, target) as made:
        made.give()
        next((tmp_path / "mirror" / FOLDER).glob("*.index.json")).unlink()
        assert not made.is_complete()
        with pytest.raises(StorageError, match="vanished from the mirror"):
            made.check_own()
        with pytest.raises(StorageError, match="vanished from the mirror as it was committed"):
            made.commit()
    assert check_committed(tmp_path / "mirror") is None
    assert copy(root, target) > 0
