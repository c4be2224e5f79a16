"""Blocks that are read while a load is still being planned: read once, checked like any other, and given up
with the load.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.arrays.pages import region
from holdfast.checkpoint import Checkpointer, reading
from holdfast.checkpoint.loading import READERS, StepLoad
from holdfast.errors import CorruptError, FormatError
from holdfast.format import BLOCK
from holdfast.journal import BlockBad
from holdfast.storage import Files
from tests.checkpoint.folder import damage, events, part_file

BLOCKS = READERS + 5


def tree(seed: int = 0) -> dict[str, Any]:
    """More blocks than are read ahead, in one large array and a few small ones."""
    numbers = np.random.default_rng(seed)
    large = numbers.integers(0, 256, (BLOCKS - 1) * BLOCK, np.uint8)
    return {"large": large, **{f"small{i}": numbers.standard_normal(7) for i in range(20)}}


class Reads(Files):
    """Remembers where part files were read, and can fail one of those reads."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.fail_at: int | None = None
        self.first = threading.Event()

    def read_at(self, fd: int, buffer: Any, offset: int) -> int:
        if len(buffer) >= BLOCK:
            self.at.append(offset)
            self.first.set()
            if offset == self.fail_at:
                self.fail_at = None
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_at(fd, buffer, offset)


@pytest.fixture
def saved(root: Path) -> Path:
    with Checkpointer(root, writer="thread", keep=None, journal=False) as ckpt:
        ckpt.save(1, tree()).durable(60.0)
    return root


def same(found: Any, seed: int = 0) -> bool:
    return all(np.array_equal(found[name], array) for name, array in tree(seed).items())


def readers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast-read")]


def planning(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    """Call `before` when the plan of a load is asked for."""
    planned = StepLoad.planned

    def late(self: StepLoad, stores: Any) -> Any:
        before()
        return planned(self, stores)

    monkeypatch.setattr(StepLoad, "planned", late)


def test_the_disk_is_read_before_the_plan_is_made_and_every_block_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Reads()
    seen: list[bool] = []
    planning(monkeypatch, lambda: seen.append(files.first.wait(30.0)))
    with Checkpointer(saved, files=files, journal=False) as ckpt:
        assert same(ckpt.load())
        assert ckpt.last_load is not None
        assert ckpt.last_load.bytes_read == part_file(saved, 1).stat().st_size
    assert seen == [True]
    assert sorted(files.at) == [block * BLOCK for block in range(BLOCKS)]


def test_a_load_of_some_arrays_reads_nothing_ahead(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.BlockPipeline, "read_ahead", lambda self: pytest.fail("read ahead"))
    with Checkpointer(saved, journal=False) as ckpt:
        assert np.array_equal(ckpt.load(parts="small3")["small3"], tree()["small3"])


@pytest.mark.parametrize("block", [0, READERS - 1, READERS])
def test_a_block_that_could_not_be_read_ahead_is_read_again(saved: Path, block: int) -> None:
    files = Reads()
    files.fail_at = block * BLOCK
    with Checkpointer(saved, files=files, journal=False) as ckpt:
        if block < READERS:
            assert same(ckpt.load())
            assert files.at.count(block * BLOCK) == 2
        else:  # in its turn: a failure
            with pytest.raises(CorruptError, match="Input/output error"):
                ckpt.load(step=1)


@pytest.mark.parametrize("block", [0, 3, READERS - 1, READERS + 2])
def test_damage_is_found_in_what_was_read_ahead(saved: Path, block: int) -> None:
    damage(part_file(saved, 1), block * BLOCK + BLOCK // 2)
    with Checkpointer(saved) as ckpt, pytest.raises(CorruptError) as caught:
        ckpt.load(step=1)
    assert caught.value.block == block
    assert {event.block for event in events(saved, BlockBad)} == {block}


def test_a_longer_file_is_refused(saved: Path) -> None:
    with part_file(saved, 1).open("ab") as file:
        file.write(b"more")
    with Checkpointer(saved, journal=False) as ckpt, pytest.raises(CorruptError, match="its index says"):
        ckpt.load(step=1)


def test_a_plan_that_fails_leaves_no_reader(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Reads()

    def fail() -> None:
        assert files.first.wait(30.0)
        raise FormatError("no plan")

    planning(monkeypatch, fail)
    with Checkpointer(saved, files=files, journal=False) as ckpt, pytest.raises(FormatError, match="no plan"):
        ckpt.load(step=1)
    assert readers() == []


def test_what_nobody_wants_is_given_up(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without arrays, as a header that fills one would be."""
    monkeypatch.setattr(StepLoad, "_wants_everything", lambda self: True)
    with Checkpointer(saved, journal=False) as ckpt:
        assert np.array_equal(ckpt.load(parts="small3")["small3"], tree()["small3"])
        assert ckpt.last_load is not None
        assert ckpt.last_load.bytes_read <= BLOCK
    assert readers() == []


@pytest.mark.parametrize(("threads", "readers"), [(None, READERS), (1, 1), (3, 3)])
def test_as_many_read_as_asked_each_with_one_buffer(
    saved: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None, readers: int
) -> None:
    seen: list[int] = []
    buffers: list[int] = []
    made = reading.BlockPipeline.__init__

    def noted(self: Any, *args: Any, threads: int, **options: Any) -> None:
        seen.append(threads)
        made(self, *args, threads=threads, **options)

    def taken(nbytes: int) -> Any:
        buffers.append(nbytes)
        return region(nbytes)

    monkeypatch.setattr(reading.BlockPipeline, "__init__", noted)
    monkeypatch.setattr(reading, "region", taken)
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        assert same(ckpt.load())
    assert seen == [readers]
    assert 1 <= len(buffers) <= readers
