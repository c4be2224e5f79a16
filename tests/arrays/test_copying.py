"""Copies past the cache: every size and alignment, nothing beyond either end, and without the library too."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hatch_build import LIBRARY, SOURCES, built
from holdfast.arrays import copying
from holdfast.arrays.copying import Batch, Copy, address_of, copy_bytes, load
from tests.arrays.faulty import FaultyLibrary

ROOT = Path(__file__).parents[2]
GUARD = 96

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler here: the package does without the copies in C"
)
_random = np.random.default_rng(1).integers(0, 256, 300_000, dtype=np.uint8)


@pytest.fixture(params=["as installed", "without the library"])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as installed":
        monkeypatch.setattr(copying, "library", None)


@given(
    size=st.integers(0, 140_000) | st.integers(16_300, 16_500) | st.integers(0, 300),
    at=st.integers(0, 130),
    to=st.integers(0, 130),
)
def test_the_bytes_arrive_and_no_others_change(size: int, at: int, to: int) -> None:
    target = np.full(size + to + GUARD, 0xA5, np.uint8)
    copy_bytes(address_of(target) + to, address_of(_random) + at, size)
    expected = np.full_like(target, 0xA5)
    expected[to : to + size] = _random[at : at + size]
    assert np.array_equal(target, expected)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("size", [16_384, 16_448, 32_767, 50_000, 131_072])
@pytest.mark.parametrize(("at", "to"), [(0, 0), (1, 0), (0, 1), (63, 17)])
def test_every_width_of_registers_copies_the_same(size: int, at: int, to: int) -> None:
    target = np.full(size + to + GUARD, 0xA5, np.uint8)
    copy_bytes(address_of(target) + to, address_of(_random) + at, size)
    assert np.array_equal(target[to : to + size], _random[at : at + size])
    assert (target[:to] == 0xA5).all()
    assert (target[to + size :] == 0xA5).all()


@pytest.mark.parametrize("size", [1, 63, 4096, 16_383, 16_384, 16_448, 50_000, 65_536])
def test_nothing_is_touched_beyond_either_end(size: int) -> None:
    """Both copies end where a page that nobody may touch begins."""
    source, target = Walled(), Walled()
    source.last(size)[:] = _random[:size]
    copy_bytes(address_of(target.last(size)), address_of(source.last(size)), size)
    assert np.array_equal(target.last(size), _random[:size])


class Walled:
    """Memory before a page that cannot be read."""

    LENGTH = 1 << 17

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, self.LENGTH + mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        wall = ctypes.c_void_p(address_of(self._bytes) + self.LENGTH)
        assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def last(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._bytes[self.LENGTH - size : self.LENGTH]


@pytest.mark.parametrize("way", ["stream", "copy"])
@pytest.mark.usefixtures("libraries")
def test_many_at_once(way: str) -> None:
    sizes = [0, 1, 17, 20_000, 70_001, 5]
    sources = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    offsets = np.cumsum([0, *(size + 3 for size in sizes)])
    target = np.zeros(offsets[-1], np.uint8)
    batch = Batch(
        address_of(target),
        offsets[:-1].astype(np.uint64),
        np.array([address_of(source) for source in sources], np.uint64),
        np.array(sizes, np.uint64),
    )
    make = batch.stream if way == "stream" else batch.copy
    expected = np.concatenate([np.concatenate([source, np.zeros(3, np.uint8)]) for source in sources])
    make(2, 2)
    assert not target.any()
    assert batch.same(0, 1), "nothing is the same as nothing"
    assert not batch.same(3, 4)
    make(1, 4)
    ends = offsets[[1, 4]]
    assert np.array_equal(target[ends[0] : ends[1]], expected[ends[0] : ends[1]])
    assert not target[ends[1] :].any()
    make(0, len(sizes))
    assert np.array_equal(target, expected)
    for number, size in enumerate(sizes):
        for at in {0, size // 2, size - 1} if size else ():
            sources[number][at] ^= 1
            assert batch.same(0, number)
            assert not batch.same(0, len(sizes))
            assert batch.same(number + 1, len(sizes))
            sources[number][at] ^= 1
    assert batch.same(0, len(sizes))


def test_copied_hashed_and_compared_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 17, 70_001, 40_000, 5]
    sources = [_random[at : at + size].copy() for at, size in enumerate(sizes)]
    offsets = np.cumsum([0, *(size + 3 for size in sizes)])
    target = np.zeros(offsets[-1], np.uint8)
    columns = (
        offsets[:-1].astype(np.uint64),
        np.array([address_of(source) for source in sources], np.uint64),
        np.array(sizes, np.uint64),
    )
    batch = Batch(address_of(target), *columns)
    if copying.library is not None:
        whole = np.concatenate(sources)
        for compared in (True, False):
            target[:] = 0
            assert batch.copy_hashed([5], compared=compared) == [(xxhash.xxh3_128_digest(whole.data), True)]
            assert batch.same(0, len(sizes))
            gaps = [
                target[begin + size : begin + size + 3] for begin, size in zip(offsets, sizes, strict=False)
            ]
            assert not np.concatenate(gaps).any(), "only what was asked for"
        few = Batch(address_of(target), *(column[:2] for column in columns))
        assert few.copy_hashed([2], compared=True) is None, "too few for a digest"
    monkeypatch.setattr(copying, "library", None)
    target[:] = 0
    assert batch.copy_hashed([5], compared=True) is None
    assert not target.any()


PAST = 4096 + 64
"""Copies up to here are made at once, larger ones stripe by stripe."""
_sizes = st.integers(0, 200) | st.integers(PAST - 200, PAST + 1300) | st.integers(0, 20_000)


@pytest.mark.usefixtures("width")
@given(
    sizes=st.lists(_sizes, max_size=6), at=st.integers(0, 64), gap=st.integers(0, 70), compared=st.booleans()
)
def test_copied_hashed_and_compared_in_any_pieces(
    sizes: list[int], at: int, gap: int, compared: bool
) -> None:
    sizes = [*sizes, 300]  # there are enough bytes for a digest
    starts = np.cumsum([at, *sizes])[:-1]
    offsets = np.cumsum([gap, *(size + gap for size in sizes)])[:-1]
    target = np.full(int(offsets[-1]) + sizes[-1] + GUARD, 0xA5, np.uint8)
    expected = target.copy()
    for start, offset, size in zip(starts, offsets, sizes, strict=True):
        expected[offset : offset + size] = _random[start : start + size]
    columns = (offsets, starts + address_of(_random), np.array(sizes))
    batch = Batch(address_of(target), *(column.astype(np.uint64) for column in columns))
    whole = _random[at : at + sum(sizes)]
    assert batch.copy_hashed([len(sizes)], compared=compared) == [(xxhash.xxh3_128_digest(whole.data), True)]
    assert np.array_equal(target, expected), "these bytes and no others"
    target[:] = 0xA5
    both = [xxhash.xxh3_128_digest(part.data) for part in (whole[:-300], whole[-300:])]
    if whole.size > 600:
        ends = [len(sizes) - 1, len(sizes)]
        assert batch.copy_hashed(ends, compared=compared) == [(digest, True) for digest in both]
        assert np.array_equal(target, expected)


@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("size", [300, PAST - 1, PAST, PAST + 1, PAST + 64, 16_384, 50_000, 65_536])
def test_a_copy_that_is_hashed_touches_nothing_beyond_either_end(size: int) -> None:
    source, target = Walled(), Walled()
    source.last(size)[:] = _random[:size]
    row = (np.array([0]), np.array([address_of(source.last(size))]), np.array([size]))
    batch = Batch(address_of(target.last(size)), *(column.astype(np.uint64) for column in row))
    assert batch.copy_hashed([1], compared=True) == [(xxhash.xxh3_128_digest(_random[:size].data), True)]
    assert np.array_equal(target.last(size), _random[:size])


@needs_compiler
def test_every_copy_that_goes_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyLibrary(tmp_path)
    monkeypatch.setattr(copying, "library", faulty.library)
    sizes = [100, 9000, 5, 70_000]
    starts, target = np.cumsum([0, *sizes])[:-1], np.zeros(sum(sizes), np.uint8)
    columns = (starts, starts + address_of(_random), np.array(sizes))
    batch = Batch(address_of(target), *(column.astype(np.uint64) for column in columns))
    digest = xxhash.xxh3_128_digest(_random[: sum(sizes)].data)
    for width in (16, 32, 64):
        faulty.library.holdfast_width(width)
        faulty.fail_at(-1)
        assert batch.copy_hashed([4], compared=True) == [(digest, True)]
        made = faulty.made
        assert made > 1000, "nearly every stripe is a copy of its own"
        for at in range(0, made, 7):
            faulty.fail_at(at)
            found = xxhash.xxh3_128_digest
            assert batch.copy_hashed([4], compared=True) == [(found(target.data), False)]
            assert found(target.data) != digest, "what is there is what is hashed"
            faulty.fail_at(at)
            assert batch.copy_hashed([4], compared=False) == [(found(target.data), True)]


@pytest.mark.parametrize("kind", ["none", "no library", "another one"])
def test_a_library_that_is_not_ours_is_done_without(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "_native.so"
    if kind == "no library":
        path.write_bytes(b"\x7fELF and so on")
    elif kind == "another one":
        path = Path(ctypes.util.find_library("m") or "libm.so.6")
    assert load(path) is None


@needs_compiler
def test_an_installation_has_the_library() -> None:
    """It is made by `make install`; where it is missing, every benchmark measures something else."""
    assert (ROOT / LIBRARY).exists()
    assert load() is not None
    found: Copy = copy_bytes
    assert found is not ctypes.memmove


@needs_compiler
def test_it_is_built_anew(tmp_path: Path) -> None:
    library = tmp_path / "_native.so"
    library.write_bytes(b"old")
    assert built([ROOT / source for source in SOURCES], library) is None
    assert load(library) is not None
    assert list(tmp_path.iterdir()) == [library]


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    library = tmp_path / "_native.so"
    library.write_bytes(b"built from other sources")
    assert compiler in (built([ROOT / source for source in SOURCES], library) or "")
    assert not list(tmp_path.iterdir())


@pytest.mark.process
@needs_compiler
@pytest.mark.parametrize("compiler", ["cc", "false"])
def test_wheels_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=left_out)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    has_it = "holdfast/arrays/_native.so" in zipfile.ZipFile(wheel).namelist()
    assert has_it == (compiler == "cc")
    assert wheel.name.endswith("-none-any.whl") != has_it
    assert ("native code" in done.stdout + done.stderr) != has_it
