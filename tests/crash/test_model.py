"""The model of a disk: what is certain after a sync, and what may become of the rest."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.storage import Files, LocalStore
from holdfast.testing import (
    MOUNT,
    SCENARIOS,
    DiskModel,
    Image,
    MemoryFiles,
    RecordingFiles,
    read_tree,
    record,
    recycling,
    same,
    sample_tree,
    second_save,
)

PAGE = 4096


@pytest.fixture
def files() -> RecordingFiles:
    return RecordingFiles(MOUNT, inner=MemoryFiles(Image.empty(), writable=True))


def states(files: RecordingFiles, limit: int = 5000) -> list[dict[str, bytes | None]]:
    model = DiskModel(files.log)
    model.seek(len(files.log))
    found: list[dict[str, bytes | None]] = []
    for state in model.states(limit, seed=0):
        if state.content() not in found:
            found.append(state.content())
    return found


def write(files: RecordingFiles, name: str, data: bytes, *, sync: bool, at: int = 0) -> None:
    with files.opened(files.create(f"{MOUNT}/{name}")) as fd:
        files.write_at(fd, data, at)
        if sync:
            files.sync(fd)


def test_a_synced_file_in_a_synced_folder_is_certain(files: RecordingFiles) -> None:
    write(files, "a", b"x" * 5000, sync=True)
    files.sync_folder(MOUNT)
    assert states(files) == [{"a": b"x" * 5000}]


def test_a_synced_file_may_lack_its_name(files: RecordingFiles) -> None:
    write(files, "a", b"x", sync=True)
    assert {"a" in state for state in states(files)} == {True, False}


def test_bytes_that_were_not_synced_may_be_torn_anywhere(files: RecordingFiles) -> None:
    write(files, "a", b"o" * 1024, sync=True)
    files.sync_folder(MOUNT)
    write(files, "a", b"n" * 1024, sync=False)
    old, new = b"o" * 512, b"n" * 512
    assert {state["a"] for state in states(files)} == {old + old, old + new, new + old, new + new}


def test_sizes_may_lag_and_reserved_space_reads_as_zeros(files: RecordingFiles) -> None:
    with files.opened(files.create(f"{MOUNT}/a")) as fd:
        files.sync_folder(MOUNT)
        files.reserve(fd, 512)
        files.write_at(fd, b"n" * 512, 0)
    assert {state["a"] for state in states(files)} == {b"", bytes(512), b"n" * 512}


def test_a_shorter_file_may_keep_its_tail(files: RecordingFiles) -> None:
    write(files, "a", b"o" * 1024, sync=True)
    files.sync_folder(MOUNT)
    with files.opened(files.create(f"{MOUNT}/a")) as fd:
        files.reserve(fd, 512)
    assert {state["a"] for state in states(files)} >= {b"o" * 1024, b"o" * 512}


def test_a_rename_happens_whole_or_not_at_all(files: RecordingFiles) -> None:
    write(files, "old", b"1", sync=True)
    write(files, "new", b"2", sync=True)
    files.sync_folder(MOUNT)
    files.rename(f"{MOUNT}/new", f"{MOUNT}/old")
    assert states(files) == [{"old": b"1", "new": b"2"}, {"old": b"2"}]


def test_operations_on_different_names_may_change_places(files: RecordingFiles) -> None:
    write(files, "a", b"1", sync=True)
    files.sync_folder(MOUNT)
    files.link(f"{MOUNT}/a", f"{MOUNT}/b")
    files.unlink(f"{MOUNT}/a")
    assert sorted("".join(sorted(state)) for state in states(files)) == ["", "a", "ab", "b"]


def test_operations_on_one_name_keep_their_order(files: RecordingFiles) -> None:
    write(files, "a", b"1", sync=True)
    files.unlink(f"{MOUNT}/a")
    write(files, "a", b"2", sync=True)
    assert [state.get("a") for state in states(files)] == [None, b"1", b"2"]


def test_what_lies_in_a_folder_without_a_certain_name_may_be_gone(files: RecordingFiles) -> None:
    files.make_folder(f"{MOUNT}/d")
    write(files, "d/a", b"1", sync=True)
    files.sync_folder(f"{MOUNT}/d")
    assert sorted(states(files), key=len) == [{}, {"d": None, "d/a": b"1"}]


def test_a_move_between_folders_is_certain_with_either_of_them(files: RecordingFiles) -> None:
    for folder in ("d", "e"):
        files.make_folder(f"{MOUNT}/{folder}")
    write(files, "d/a", b"1", sync=True)
    for folder in ("", "/d", "/e"):
        files.sync_folder(MOUNT + folder)
    files.rename(f"{MOUNT}/d/a", f"{MOUNT}/e/b")
    assert len(states(files)) == 2
    files.sync_folder(f"{MOUNT}/e")
    assert states(files) == [{"d": None, "e": None, "e/b": b"1"}]


def test_a_direct_descriptor_is_the_same_file(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)
    path = str(tmp_path / "a")
    one = files.create(path)
    two = files.reopen_direct(path)
    if two is None:
        pytest.skip("no direct I/O here")
    files.close(one)
    files.sync(two)
    files.close(two)
    assert [op.kind for op in files.log] == ["create", "sync"]
    assert files.log[0].ino == files.log[1].ino


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_a_crash_the_model_is_the_real_disk(name: str, tmp_path: Path) -> None:
    """Nothing that a save does to the disk is missing from the log."""
    log = record(SCENARIOS[name], RecordingFiles(tmp_path))
    model = DiskModel(log)
    model.seek(len(log))
    real = {str(path.relative_to(tmp_path)): _bytes(path) for path in tmp_path.rglob("*")}
    modelled = model.settled().content()
    assert real.keys() == modelled.keys()
    differ = {path for path in real if real[path] != modelled[path]}
    # The name of the holder in a lock file is for people, and not written through `Files`.
    assert {Path(path).suffix for path in differ} <= {".lock"}


def _bytes(path: Path) -> bytes | None:
    return None if path.is_dir() else path.read_bytes()


def test_recycling_really_recycles(tmp_path: Path) -> None:
    log = record(recycling, RecordingFiles(tmp_path))
    moves = [op for op in log if op.kind == "rename" and "/recycled/" in op.path]
    assert moves, "no save took a file of a pruned step"


def test_the_second_opinion_reads_what_was_saved(tmp_path: Path) -> None:
    record(second_save, RecordingFiles(tmp_path))
    for step in (1, 2):
        assert same(read_tree(LocalStore(tmp_path / "ckpt"), step), sample_tree(step))
    assert not same(sample_tree(1), sample_tree(2))


@pytest.mark.parametrize("double", [RecordingFiles, MemoryFiles])
def test_no_operation_gets_past_a_double(double: type[Files]) -> None:
    """A method that `Files` gains must be modelled too, or it would reach the real disk."""
    composed = {"opened", "is_folder", "is_file"}
    own = set(_public(Files)) - composed - set(vars(double))
    assert not own, f"{double.__name__} does not override {sorted(own)}"


def _public(cls: type) -> Iterator[str]:
    return (name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_"))
