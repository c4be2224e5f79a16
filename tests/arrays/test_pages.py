"""Memory, of this process or shared: as long as asked, zeroed, and begun where huge pages begin."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.arrays import pages
from holdfast.arrays.copying import address_of
from holdfast.arrays.pages import HUGE, mapped, memfd, region


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 1, HUGE, HUGE + 1, 4 * HUGE + 8192, 7 * HUGE - 3])
def test_a_region_is_as_long_as_asked_and_can_be_written_whole(nbytes: int) -> None:
    one, other = region(nbytes), region(nbytes)
    assert one.size == nbytes
    assert not one.any()
    one[:] = 255
    assert not other.any()
    assert nbytes < HUGE or address_of(one) % HUGE == 0


def test_no_bytes_have_memory_too() -> None:
    assert region(0)[:0].size == 0


def _mapped() -> int:
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def test_memory_goes_with_the_last_view() -> None:
    before = _mapped()
    kept = region(64 * HUGE)[HUGE : 2 * HUGE]
    kept[:] = 7
    assert _mapped() >= before + 64 * HUGE
    assert np.all(kept == 7)
    del kept
    gc.collect()
    assert _mapped() < before + 32 * HUGE


def huge_kib() -> int:
    """Of shared memory, how much this process has on huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ShmemPmdMapped" in line)


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE - 1, HUGE, 3 * HUGE + 5000])
def test_a_memfd_is_the_same_memory_wherever_it_is_mapped(nbytes: int) -> None:
    fd, memory = memfd("test", nbytes)
    try:
        first, second = memory.array(), mapped(fd, nbytes, writable=False).array()
        assert first.size == second.size == nbytes
        assert not first.any(), "fresh"
        first[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
        assert np.array_equal(second, first)
        assert not second.flags.writeable
        if nbytes >= HUGE:
            assert address_of(first) % HUGE == address_of(second) % HUGE == 0
        with pytest.raises(PermissionError):  # sealed: who maps it would be killed
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_all_pages_of_a_memfd_are_there() -> None:
    fd, memory = memfd("test", 5 * HUGE + 4096)
    try:
        assert os.fstat(fd).st_blocks * 512 >= memory.nbytes
    finally:
        os.close(fd)


def test_a_memfd_lies_on_huge_pages_where_the_kernel_makes_them() -> None:
    before = huge_kib()
    fd, memory = memfd("test", 4 * HUGE + 4096)
    os.close(fd)
    found = huge_kib() - before
    if not found:
        pytest.skip("this kernel makes no huge pages for a memfd when asked")
    assert 0 < found <= 4 * HUGE >> 10, "as many as there are"
    del memory
    assert huge_kib() == before, "unmapped with its last view"


def test_without_huge_pages_small_ones_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_COLLAPSE", -1)  # as a kernel that knows no such advice
    fd, memory = memfd("test", 2 * HUGE)
    try:
        assert os.fstat(fd).st_blocks * 512 >= memory.nbytes
        memory.array()[:] = 7
    finally:
        os.close(fd)


def test_a_mapping_goes_with_its_last_view() -> None:
    fd, memory = memfd("test", 2 * HUGE)
    os.close(fd)
    view = memory.array()[HUGE:]
    view[:] = 3
    del memory
    assert (view == 3).all()
    address = address_of(view)
    assert f"{address - HUGE:x}-" in Path("/proc/self/maps").read_text()
    del view
    assert f"{address - HUGE:x}-" not in Path("/proc/self/maps").read_text()


def test_memory_that_cannot_be_had_is_an_error_and_nothing_stays() -> None:
    fds, maps = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n")
    with pytest.raises((OSError, ValueError, OverflowError)):
        memfd("test", 1 << 60)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert Path("/proc/self/maps").read_text().count("\n") <= maps + 2  # the interpreter's own arenas


def test_a_descriptor_that_cannot_be_mapped_so_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * HUGE))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            mapped(fd, 2 * HUGE)
    finally:
        os.close(fd)


def test_memory_beside_it_survives_what_cannot_be_mapped() -> None:
    """Pages of hugetlb, of which most systems have none: the kernel gives up after it has made room."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, 4 * HUGE)
        for nbytes in (4 * HUGE, 2 * HUGE + 4096):
            try:
                memory = mapped(fd, nbytes)
            except OSError:  # what follows takes the room; it must be ours for good
                kept = [region(4 * HUGE) for _ in range(4)]
                gc.collect()
                for one in kept:
                    one[:] = 1
            else:
                assert memory.nbytes == nbytes
    finally:
        os.close(fd)


def test_without_room_for_more_a_memfd_lies_where_the_kernel_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make = mmap.mmap

    def mapping(fd: int, *args: Any, **kwargs: Any) -> mmap.mmap:
        if fd < 0:
            raise OSError(errno.ENOMEM, "no room")
        return make(fd, *args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", mapping)
    fd, memory = memfd("test", 2 * HUGE)
    os.close(fd)
    assert memory.start == 0
    memory.array()[:] = 5


def test_what_fails_after_room_was_made_is_never_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = pages._libc

    class Refusing:
        madvise = libc.madvise

        def mmap(self, *_: int) -> int | None:
            return pages._MAP_FAILED

    kept: list[mmap.mmap] = []
    monkeypatch.setattr(pages, "_libc", Refusing())
    monkeypatch.setattr(pages, "_HOLED", kept)
    fd, memory = memfd("test", 2 * HUGE)
    os.close(fd)
    assert [len(one) for one in kept] == [3 * HUGE]
    assert memory.start == 0
    memory.array()[:] = 9
