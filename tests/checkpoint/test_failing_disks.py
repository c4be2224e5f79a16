"""Disks that fill up, disappear, turn read-only or fail: a clear error, the old step, and then repair."""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.errors import (
    HoldfastError,
    MissingPathError,
    OutOfSpaceError,
    ReadOnlyError,
    StorageError,
)
from holdfast.storage import Files
from tests.checkpoint.children import Children
from tests.checkpoint.disks import Buffered, Failing
from tests.checkpoint.folder import check_clean, check_next_start

MIB = 1 << 20
WRITERS = [pytest.param("vault", marks=pytest.mark.process), "thread"]


def tree(value: int, size: int = 3 * MIB) -> dict[str, Any]:
    return {"x": np.full(size, value, np.uint8)}


def loaded(ckpt: Checkpointer, step: int | None = None) -> int:
    (value,) = np.unique(ckpt.load(step=step)["x"])
    return int(value)


def mount(*command: object) -> None:
    subprocess.run(["mount", *map(str, command)], check=True, capture_output=True, timeout=30)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", path)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


@pytest.mark.parametrize("writer", WRITERS)
def test_full_disk(writer: str, small_disk: Path, children: Children) -> None:
    root = small_disk / "ckpt"
    with Checkpointer(root, writer=writer, keep=None, journal=False) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        with pytest.raises(OutOfSpaceError, match=r"bytes needed, [\d,]+ free") as caught:
            ckpt.save(2, tree(2, 20 * MIB)).durable(60.0)
        assert "free space or keep fewer steps" in (caught.value.hint or "")
        assert ckpt.steps() == [1]
        assert loaded(ckpt) == 1
        # Nothing was taken: the space is there for the next save.
        ckpt.save(3, tree(3, 10 * MIB)).durable(60.0)
        assert loaded(ckpt) == 3
        with pytest.raises(OutOfSpaceError):
            ckpt.save(4, tree(4)).durable(60.0)
        shutil.rmtree(root / "step-00000003")
        ckpt.save(4, tree(4)).durable(60.0)
        assert loaded(ckpt) == 4
    check_clean(root)


def test_disk_filled_to_the_last_byte(small_disk: Path) -> None:
    """Even the index and the manifest must find room, or the step does not exist."""
    root = small_disk / "ckpt"
    with Checkpointer(root, writer="thread", keep=None, journal=False) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        filler = small_disk / "filler"
        free = Files().free_bytes(str(root))
        # Room for the part (3 MiB and a header) and next to nothing else.
        filler.write_bytes(bytes(free - 3 * MIB - 2 * 4096))
        with pytest.raises(StorageError):
            ckpt.save(2, tree(2)).durable(60.0)
        assert ckpt.steps() == [1]
        assert loaded(ckpt) == 1
        filler.unlink()
        ckpt.save(2, tree(2)).durable(60.0)
        assert loaded(ckpt) == 2
    check_clean(root)


@pytest.mark.parametrize("writer", WRITERS)
def test_read_only_disk(writer: str, small_disk: Path, children: Children) -> None:
    root = small_disk / "ckpt"
    with Checkpointer(root, writer=writer, journal=False) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        with open(root / ".holdfast" / "writer-0.lock"):
            pass
    read_only(small_disk)
    with Checkpointer(root, writer=writer, journal=False) as ckpt:
        with pytest.raises(ReadOnlyError, match="Read-only file system") as caught:
            ckpt.save(2, tree(2)).durable(60.0)
        assert "remount it" in (caught.value.hint or "")
        assert loaded(ckpt) == 1
        assert ckpt.verify(1) == []
        mount("-o", "remount,rw", small_disk)
        ckpt.save(2, tree(2)).durable(60.0)
        assert loaded(ckpt) == 2


def read_only(disk: Path) -> None:
    mount("-o", "remount,ro", disk)


def test_read_only_disk_with_the_default_journal(small_disk: Path) -> None:
    """Reading needs no writing: a journal that cannot be written is not a reason to fail."""
    root = small_disk / "ckpt"
    with Checkpointer(root, writer="thread") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
    read_only(small_disk)
    with Checkpointer(root) as ckpt:
        assert loaded(ckpt) == 1
        assert ckpt.verify() == []


@pytest.mark.parametrize("writer", WRITERS)
def test_folder_deleted_while_running(writer: str, root: Path, children: Children) -> None:
    with Checkpointer(root, writer=writer, journal=False) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        shutil.rmtree(root)
        with pytest.raises(MissingPathError, match="was the folder removed"):
            ckpt.save(2, tree(2)).durable(60.0)
        root.mkdir()
        ckpt.save(3, tree(3)).durable(60.0)
        assert loaded(ckpt) == 3


@pytest.mark.parametrize("writer", WRITERS)
def test_folder_replaced_by_a_file_while_running(writer: str, root: Path, children: Children) -> None:
    with Checkpointer(root, writer=writer, journal=False) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        kept = root.rename(root.with_name("kept"))
        root.write_text("in the way")
        with pytest.raises(StorageError) as caught:
            ckpt.save(2, tree(2)).durable(60.0)
        assert str(root) in caught.value.message
        assert caught.value.hint
        root.unlink()
        kept.rename(root)
        ckpt.save(3, tree(3)).durable(60.0)
        assert ckpt.steps() == [1, 3]
        assert loaded(ckpt, 1) == 1


def test_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("in the way")
    for root in (path, path / "ckpt"):
        with Checkpointer(root, writer="thread", journal=False) as ckpt:
            with pytest.raises(MissingPathError, match="a file stands where a folder is needed"):
                ckpt.save(1, tree(1))
            assert ckpt.steps() == []
    assert path.read_text() == "in the way"


OPERATIONS = ["create", "reserve", "write_at", "sync", "link", "rename", "make_folder", "sync_folder"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_failing_operation(
    operation: str, nth: int, number: int, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Failing()
    with Checkpointer(root, writer="thread", files=disk, keep=None, journal=False) as ckpt:
        ckpt.save(1, tree(1, 9 * MIB)).durable(60.0)
        disk.arm(operation, number, nth)
        with caplog.at_level(logging.CRITICAL):
            handle = ckpt.save(2, tree(2, 9 * MIB))
            with suppress(HoldfastError):  # later operations may be none of the save's
                handle.durable(60.0)
        if handle.error is not None:
            expected = OutOfSpaceError if number == errno.ENOSPC else StorageError
            assert isinstance(handle.error, expected), repr(handle.error)
            assert str(root) in handle.error.message
            assert disk.failed
        for step in ckpt.steps():
            assert ckpt.verify(step) == [], f"step {step} is listed and broken"
        assert loaded(ckpt, 1) == 1
        disk.disarm()
        ckpt.save(3, tree(3, 9 * MIB)).durable(60.0)
        assert loaded(ckpt) == 3
    check_next_start(root, 10)


def test_failing_removal_never_hurts(root: Path) -> None:
    disk = Failing()
    with Checkpointer(root, writer="thread", files=disk, keep=1, recycle=False, journal=False) as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        for step in (2, 3):
            disk.arm("unlink", errno.EIO, nth=4)
            ckpt.save(step, tree(step)).durable(60.0)
            assert loaded(ckpt) == step
            ckpt.wait(60.0)  # what is still being removed would count for the next step
    with Checkpointer(root, writer="thread", keep=1, journal=False) as ckpt:
        ckpt.save(4, tree(4)).durable(60.0)
    check_clean(root)


def test_without_direct_io(root: Path) -> None:
    with Checkpointer(root, writer="thread", files=Buffered(), journal=False) as ckpt:
        ckpt.save(1, tree(1, 20 * MIB + 7)).durable(60.0)
        assert loaded(ckpt) == 1
    with Checkpointer(root, journal=False) as direct:
        assert loaded(direct) == 1
        assert direct.verify() == []


def test_journal_that_cannot_be_written_does_not_hurt(root: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with Checkpointer(root, writer="thread", journal=blocked / "journal") as ckpt:
        ckpt.save(1, tree(1)).durable(60.0)
        assert loaded(ckpt) == 1
