"""Blocks that are read piece by piece: each piece is checked, and a bad one is taken from another copy."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import Checkpointer, reading
from holdfast.errors import CorruptError
from holdfast.format import BLOCK
from holdfast.storage import Files
from tests.checkpoint.folder import damage, part_file

PIECES = BLOCK // reading.PIECE
BLOCKS = reading.AHEAD + 2
LAST = BLOCKS - 2
"""A block that nothing is read ahead of: those before it are."""


def large() -> Any:
    return np.random.default_rng(0).integers(0, 256, (BLOCKS - 1) * BLOCK + 5, np.uint8)


@pytest.fixture
def saved(root: Path) -> Path:
    with Checkpointer(root, writer="thread", keep=None, journal=False) as ckpt:
        ckpt.save(1, {"large": large()}).durable(60.0)
    return root


class Broken(Files):
    """Ends, or fails, one reading of a piece."""

    def __init__(self, at: int, *, short: bool) -> None:
        self.at, self.short = at, short
        self.done = False

    def read_at(self, fd: int, buffer: Any, offset: int) -> int:
        if offset == self.at and len(buffer) == reading.PIECE and not self.done:
            self.done = True
            if not self.short:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read_at(fd, buffer[: reading.PIECE // 2], offset)
        return super().read_at(fd, buffer, offset)


def copied(saved: Path, to: Path) -> Path:
    shutil.copytree(saved, to)
    return to


@pytest.mark.parametrize("piece", range(PIECES))
def test_damage_in_any_piece_is_found_and_repaired(saved: Path, tmp_path: Path, piece: int) -> None:
    copy = copied(saved, tmp_path / "copy")
    damage(part_file(saved, 1), LAST * BLOCK + piece * reading.PIECE + 17)
    with Checkpointer(saved, journal=False) as ckpt, pytest.raises(CorruptError) as caught:
        ckpt.load(step=1)
    assert caught.value.block == LAST
    with Checkpointer(saved, copies=[copy], journal=False) as ckpt:
        assert np.array_equal(ckpt.load()["large"], large())
        assert ckpt.last_load is not None
        assert ckpt.last_load.repaired == 1


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("piece", [0, PIECES - 1])
def test_a_piece_that_cannot_be_read_is_taken_from_a_copy(
    saved: Path, tmp_path: Path, short: bool, verify: bool, piece: int
) -> None:
    copy = copied(saved, tmp_path / "copy")
    at = LAST * BLOCK + piece * reading.PIECE
    broken = Checkpointer(saved, files=Broken(at, short=short), journal=False)
    with broken as ckpt, pytest.raises(CorruptError) as caught:
        ckpt.load(step=1, verify=verify)
    assert caught.value.block == LAST
    files = Broken(at, short=short)
    with Checkpointer(saved, copies=[copy], files=files, journal=False) as ckpt:
        assert np.array_equal(ckpt.load(verify=verify)["large"], large())
    assert files.done


@pytest.mark.parametrize(("threads", "readers"), [(None, 8), (1, 1), (3, 3)])
def test_as_many_read_as_asked(
    saved: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, readers: int
) -> None:
    seen: list[int] = []
    made = reading.BlockPipeline.__init__

    def noted(self: Any, *args: Any, threads: int, **options: Any) -> None:
        seen.append(threads)
        made(self, *args, threads=threads, **options)

    monkeypatch.setattr(reading.BlockPipeline, "__init__", noted)
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        ckpt.load()
    assert seen == [readers]
