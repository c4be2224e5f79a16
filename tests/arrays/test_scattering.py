"""Stretches of files scattered and hashed in C: digests as xxhash has them, bytes where numpy puts them, and
nothing else touched.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.arrays import Bytes1D, Move, copying, move
from holdfast.arrays.copying import address_of
from holdfast.arrays.pages import region
from holdfast.arrays.scattering import SHORTEST, Scatter, Scattered, scatters
from holdfast.errors import LayoutError, UsageError
from holdfast.storage import Files

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
STEP = 128 * KIB
"""Bytes that the C code copies and hashes at a time."""
GUARD = 96
SEEDS = (0, 1, 2**32 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)
BEFORE_AND_AFTER = (-65, -64, -63, -1, 0, 1, 63, 64, 65)

needs_library = pytest.mark.skipif(
    copying.library is None, reason="built without a C compiler: blocks are read whole and hashed by xxhash"
)
_random = np.random.default_rng(1).integers(0, 256, 3 * MIB + 100, dtype=np.uint8)


def digest(data: Bytes1D, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(data.data, seed=seed)


def pick(size: int) -> int:
    """A seed for a size; neighbours have different ones."""
    return SEEDS[size % len(SEEDS)]


def around(*middles: int) -> list[int]:
    return [middle + by for middle in middles for by in BEFORE_AND_AFTER if middle + by >= SHORTEST]


# ---- digests


@needs_library
def test_the_width_is_what_was_asked_for_or_what_there_is(width: int) -> None:
    assert copying.library is not None
    assert copying.library.holdfast_width(width) == width
    assert copying.library.holdfast_width(0) >= width


@needs_library
@pytest.mark.usefixtures("width")
def test_digests_of_every_short_size() -> None:
    for size in range(SHORTEST, 1501):
        data = _random[size % 67 :][:size]  # at any alignment
        assert Scatter([]).take(data, 0, pick(size)).digest == digest(data, pick(size)), size


@needs_library
@pytest.mark.usefixtures("width")
def test_digests_around_blocks_and_steps() -> None:
    blocks = [KIB * number for number in (2, 3, 4, 7, 16, 127, 129)]
    steps = [STEP * number for number in (1, 2, 3, 8)]
    for size in around(*blocks, *steps):
        data = _random[size % 67 :][:size]
        assert Scatter([]).take(data, 0, pick(size)).digest == digest(data, pick(size)), size


@needs_library
@pytest.mark.usefixtures("width")
def test_digests_of_any_size_and_seed() -> None:
    numbers = np.random.default_rng(2)
    for size in numbers.integers(SHORTEST, 3 * MIB, 12).tolist():
        data = _random[numbers.integers(100) :][:size]
        for seed in (0, 2**64 - 1, int(numbers.integers(2**64, dtype=np.uint64))):
            offset = int(numbers.integers(2**40))
            found = Scatter([]).take(data, offset, seed)
            assert found[:2] == (size, digest(data, seed)), (size, seed, offset)


@needs_library
@given(size=st.integers(SHORTEST, 5000), at=st.integers(0, 130), seed=st.integers(0, 2**64 - 1))
def test_digests_of_any_seed_and_alignment(size: int, at: int, seed: int) -> None:
    data = _random[at : at + size]
    assert Scatter([]).take(data, 0, seed).digest == digest(data, seed)


@needs_library
def test_every_byte_and_the_seed_count() -> None:
    data = _random[: KIB + 100].copy()
    seen = {Scatter([]).take(data, 0, 0).digest, Scatter([]).take(data, 0, 1).digest}
    for at in range(data.size):
        data[at] ^= 1
        seen.add(Scatter([]).take(data, 0, 0).digest)
        data[at] ^= 1
    assert len(seen) == data.size + 2


@needs_library
@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("size", [SHORTEST, 256, 1024, 1025, 5000, 65_536])
def test_hashing_reads_nothing_beyond_either_end(size: int) -> None:
    walled = Walled()
    for data in (walled.first(size), walled.last(size)):
        data[:] = _random[:size]
        assert Scatter([]).take(data, 0, 7).digest == digest(_random[:size], 7)


@needs_library
def test_without_a_seed_there_is_no_digest() -> None:
    target = np.zeros(300, np.uint8)
    assert Scatter([(Move(5, 0, 300), target)]).take(_random[:400], 5, None) == Scattered(400, b"", 0.0)
    assert np.array_equal(target, _random[:300])
    found = Scatter([]).take(_random, 5, 0)
    assert len(found.digest) == 16
    assert found.hash_s > 0.0


@needs_library
@pytest.mark.parametrize("size", [0, 1, 64, SHORTEST - 1])
def test_what_is_too_short_for_a_digest_is_scattered_all_the_same(size: int) -> None:
    target = np.full(SHORTEST, 0xA5, np.uint8)
    scatter = Scatter([(Move(0, 0, SHORTEST), target)])
    assert scatter.take(_random[:size], 0, None) == Scattered(size, b"", 0.0)
    assert np.array_equal(target[:size], _random[:size])
    assert (target[size:] == 0xA5).all()
    try:
        found = scatter.take(_random[:size], 0, 7).digest
    except OSError:
        found = b""
    assert found == b"", "none is better than a wrong one"


# ---- files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@contextmanager
def opened(path: Path, kind: str) -> Iterator[int]:
    """A descriptor that reads through the page cache, or past it."""
    files = Files()
    fd = files.open_read(str(path)) if kind == "buffered" else files.open_read_direct(str(path))
    if fd is None:
        pytest.skip(f"the file system of {path} has no direct I/O")
    with files.opened(fd):
        yield fd


class Room:
    """A buffer to read into, and bytes behind it that must stay what they are."""

    def __init__(self, size: int) -> None:
        self._all = region(size + PAGE)
        self._all[size:] = 0xA5
        self.data = self._all[:size]

    def check(self) -> None:
        assert (self._all[self.data.size :] == 0xA5).all()


def shapes(begin: int, end: int) -> list[tuple[Move, Bytes1D]]:
    """Copies out of a file that has all of [begin, end): all of it, rows with gaps, and rows in rows."""
    size = end - begin
    found = [
        Move(begin, 3, size),
        Move(begin + 7, 0, 100, ((max(1, (size - 110) // 130), 130, 101),)),
        Move(begin, 5, 9, ((max(1, size // 1100), 1100, 60), (6, 180, 10))),
        Move(end - 1, 0, 1),
    ]
    return [(one, np.full(one.target_span()[1] + 5, 0xA5, np.uint8)) for one in found]


def check_scattered(copies: Sequence[tuple[Move, Bytes1D]], data: Bytes1D, begin: int) -> None:
    """Fail unless the targets, which were 0xA5, have what numpy copies out of `data`, and no more."""
    for one, target in copies:
        expected = np.full_like(target, 0xA5)
        for part in one.clip(begin, begin + data.size):
            part.shifted(source=-begin).apply(data, expected)
        assert np.array_equal(target, expected), one


KINDS = ("buffered", "direct")
ROOMS = (4 * KIB, 8 * KIB, MIB)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ROOMS)
def test_files_that_end_at_any_byte(path: Path, kind: str, size: int) -> None:
    numbers = np.random.default_rng(size)
    ends = {SHORTEST, 511, 512, 513, 1024, *(PAGE * 3 + by for by in BEFORE_AND_AFTER), STEP, STEP + 1}
    ends |= {size * count + by for count in (1, 2) for by in (-513, -512, -511, -1, 0, 1, 511, 512, 513)}
    ends |= set(numbers.integers(SHORTEST, 2 * size + STEP, 10).tolist())
    path.write_bytes(_random[: max(ends)].data)
    room = Room(size)
    with opened(path, kind) as fd:
        for end in sorted(ends, reverse=True):
            os.truncate(path, end)
            copies = shapes(0, end)
            found = Scatter(copies).read(fd, 0, end, room.data, pick(end))
            assert found[:2] == (end, digest(_random[:end], pick(end))), end
            assert found.hash_s > 0.0
            check_scattered(copies, _random[:end], 0)
            room.check()


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ROOMS)
def test_stretches_in_the_middle_of_a_file(path: Path, kind: str, size: int) -> None:
    """They begin at a page and end anywhere: where the file goes on, and at its end."""
    numbers = np.random.default_rng(size)
    length = 2 * size + 3 * STEP + 777
    path.write_bytes(_random[:length].data)
    room = Room(size)
    with opened(path, kind) as fd:
        for _ in range(20):
            begin = PAGE * int(numbers.integers(length // PAGE - 1))
            left = length - begin
            count = int(numbers.choice([left, left - 1, int(numbers.integers(SHORTEST, left))]))
            data, seed = _random[begin : begin + count], pick(begin + count)
            copies = shapes(begin, begin + count)
            found = Scatter(copies).read(fd, begin, count, room.data, seed)
            assert found[:2] == (count, digest(data, seed)), (begin, count)
            check_scattered(copies, data, begin)
            room.check()


@needs_library
@pytest.mark.usefixtures("width")
@pytest.mark.parametrize("size", [1, 63, 64, 65, 100, 511, 1000, 1500, 1536, 4097])
def test_rooms_of_any_size(path: Path, size: int) -> None:
    """They do for the page cache, and hash in pieces that are no multiple of anything."""
    path.write_bytes(_random[:10_000].data)
    room = Room(size)
    with opened(path, "buffered") as fd:
        for begin, end in ((0, 10_000), (77, 5000), (5, 5 + SHORTEST), (9000, 10_000)):
            copies = shapes(begin, end)
            found = Scatter(copies).read(fd, begin, end - begin, room.data, pick(size))
            assert found[:2] == (end - begin, digest(_random[begin:end], pick(size)))
            check_scattered(copies, _random[begin:end], begin)
            room.check()


@needs_library
def test_a_stretch_beyond_four_gib(path: Path) -> None:
    """Of a file with a hole, which takes no space."""
    begin, data = (5 << 30) + PAGE, _random[:100_001]
    with path.open("wb") as file:
        file.seek(begin)
        file.write(data.data)
    copies = shapes(begin, begin + data.size)
    with opened(path, "buffered") as fd:
        found = Scatter(copies).read(fd, begin, data.size, region(8 * KIB), 5)
    assert found[:2] == (data.size, digest(data, 5))
    check_scattered(copies, data, begin)


@needs_library
def test_threads_read_one_file_at_once(path: Path) -> None:
    path.write_bytes(_random.data)
    stretches = [(PAGE * number, 600_000 + number) for number in range(0, 400, 50)]
    found: dict[int, Scattered] = {}
    all_copies = {begin: shapes(begin, begin + count) for begin, count in stretches}

    def read(fd: int, begin: int, count: int) -> None:
        found[begin] = Scatter(all_copies[begin]).read(fd, begin, count, region(8 * KIB), begin)

    with opened(path, "buffered") as fd:
        threads = [threading.Thread(target=read, args=[fd, *stretch]) for stretch in stretches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
    for begin, count in stretches:
        assert found[begin].digest == digest(_random[begin : begin + count], begin)
        check_scattered(all_copies[begin], _random[begin : begin + count], begin)


# ---- where the bytes go


class Planned:
    """Copies into one buffer, with bytes between their targets that no copy has."""

    def __init__(self, rows: Sequence[tuple[Move, int, bool]]) -> None:
        """`rows`: a copy, the bytes of its target, and whether it is told of the whole buffer."""
        self.memory = np.full(GUARD + sum(size + GUARD for _, size, _ in rows), 0xA5, np.uint8)
        self.copies: list[tuple[Move, Bytes1D]] = []
        at = GUARD
        for one, size, whole in rows:
            if whole:
                self.copies.append((one.shifted(target=at), self.memory))
            else:
                self.copies.append((one, self.memory[at : at + size]))
            at += size + GUARD

    def check(self, data: Bytes1D, begin: int) -> None:
        """Fail unless the buffer is as numpy makes it."""
        seen = self.memory.copy()
        self.memory[:] = 0xA5
        for one, target in self.copies:
            for part in one.clip(begin, begin + data.size):
                part.shifted(source=-begin).apply(data, target)
        assert np.array_equal(seen, self.memory)


@st.composite
def boxed(draw: st.DrawFn, most: int) -> tuple[Move, int]:
    """The copy of a box out of a larger one into another, of up to `most` to a side; the target's bytes."""
    itemsize = draw(st.sampled_from((1, 2, 4, 8)))
    lo, hi, source, target = [], [], [], []
    for _ in range(draw(st.integers(1, 4 if most < 10 else 3))):
        count = draw(st.integers(1, most) | st.integers(most // 2, most))
        margins = [draw(st.sampled_from((0, 0, 1, 3))) for _ in range(4)]
        lo.append(3)
        hi.append(3 + count)
        source.append((3 - margins[0], 3 + count + margins[1]))
        target.append((3 - margins[2], 3 + count + margins[3]))
    made = move(lo, hi, source, target, itemsize)
    assert made is not None
    return made, itemsize * int(np.prod([stop - start for start, stop in target]))


@st.composite
def planned(draw: st.DrawFn, begin: int, end: int, most: int, rows: int) -> Planned:
    """Copies out of a file of which [begin, end) is scattered: most have a row that an end or a step cuts."""
    found = []
    edges = [*range(begin, end, STEP), end]
    for one, size in draw(st.lists(boxed(most), min_size=1, max_size=rows)):
        extent = one.source_span()[1]
        cut = st.sampled_from(edges).flatmap(lambda at, by=extent: st.integers(at - by, at))  # type: ignore[misc]
        source = draw(cut | cut | st.integers(0, end + 50))
        found.append((one.shifted(source=max(0, source)), size, draw(st.booleans())))
    return Planned(found)


@st.composite
def cases(draw: st.DrawFn, least: int, size: int, most: int, rows: int) -> tuple[Planned, int, int]:
    """Copies, and the stretch of `least` to `size` bytes that is scattered."""
    begin = draw(st.integers(0, size))
    end = begin + draw(st.integers(least, size))
    return draw(planned(begin, end, most, rows)), begin, end


def scattered(plan: Planned, data: Bytes1D, begin: int) -> None:
    seed = 11 if data.size >= SHORTEST else None
    found = Scatter(plan.copies).take(data, begin, seed)
    assert found[:2] == (data.size, b"" if seed is None else digest(data, seed))
    plan.check(data, begin)


@needs_library
@given(cases(0, 600, most=5, rows=8))
def test_small_copies_are_those_of_numpy(case: tuple[Planned, int, int]) -> None:
    plan, begin, end = case
    scattered(plan, _random[begin:end], begin)


@needs_library
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(STEP, 4 * STEP, most=40, rows=12))
def test_copies_that_steps_cut_are_those_of_numpy(case: tuple[Planned, int, int]) -> None:
    plan, begin, end = case
    scattered(plan, _random[begin:end], begin)


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scattering") / "long"
    path.write_bytes(_random[:300_000].data)
    return path


@needs_library
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases(PAGE, 150_000, most=30, rows=8), pages=st.sampled_from((1, 2, 5, 64)))
def test_copies_out_of_a_file_are_those_of_numpy(
    long_file: Path, case: tuple[Planned, int, int], pages: int
) -> None:
    plan, begin, end = case
    begin = begin // PAGE * PAGE
    with opened(long_file, "buffered") as fd:
        found = Scatter(plan.copies).read(fd, begin, end - begin, region(PAGE * pages), 3)
    assert found[:2] == (end - begin, digest(_random[begin:end], 3))
    plan.check(_random[begin:end], begin)


@needs_library
def test_thousands_of_rows() -> None:
    numbers = np.random.default_rng(3)
    sizes = numbers.integers(1, 90, 5000).tolist()
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    rows = [(Move(start, 0, size), size, bool(start % 2)) for start, size in zip(starts, sizes, strict=True)]
    order = numbers.permutation(len(rows)).tolist()
    for begin, end in ((0, sum(sizes)), (1001, sum(sizes) - 777), (STEP - 1, STEP + 1)):
        plan = Planned([rows[at] for at in order])
        scattered(plan, _random[begin:end], begin)


class Walled:
    """Memory between two pages that cannot be touched."""

    LENGTH = 1 << 18

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, self.LENGTH + 2 * mmap.PAGESIZE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        for at in (0, mmap.PAGESIZE + self.LENGTH):
            wall = ctypes.c_void_p(address_of(self._bytes) + at)
            assert ctypes.CDLL(None).mprotect(wall, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    @property
    def wall(self) -> Bytes1D:
        """What ends the process if it is looked at."""
        return self._bytes[: mmap.PAGESIZE]

    def first(self, size: int) -> Bytes1D:
        return self._bytes[mmap.PAGESIZE : mmap.PAGESIZE + size]

    def last(self, size: int) -> Bytes1D:
        return self._bytes[mmap.PAGESIZE + self.LENGTH - size : mmap.PAGESIZE + self.LENGTH]


CUTS = ((0, 1 << 18), (1, 200_001), (999, 1001), (1000, 1001), (131_071, 131_073), (150_000, 262_144))


@needs_library
@pytest.mark.parametrize(
    "one",
    [
        Move(0, 0, 1 << 18),
        Move(500, 0, 1),
        Move(0, 0, 1000, ((131, 2000, 2000),)),
        Move(3, 0, 1, ((50_000, 5, 2),)),
        Move(100, 0, 7, ((20, 12_345, 700), (30, 400, 11))),
    ],
)
def test_nothing_is_touched_beyond_either_end(one: Move) -> None:
    """Neither of what is read nor of what is written, whichever end lies at a wall."""
    size = one.target_span()[1]
    for begin, end in CUTS:
        data = _random[begin:end]
        expected = np.full(size, 0xA5, np.uint8)
        for part in one.clip(begin, end):
            part.shifted(source=-begin).apply(data, expected)
        walls = Walled(), Walled()
        for at in ("first", "last"):
            source, target = (getattr(wall, at)(n) for wall, n in zip(walls, (data.size, size), strict=True))
            source[:] = data
            target[:] = 0xA5
            Scatter([(one, target)]).take(source, begin, None)
            assert np.array_equal(target, expected)


@needs_library
def test_rows_outside_of_the_stretch_are_left_alone() -> None:
    wall = Walled().wall
    outside = [
        Move(0, 0, 1000),
        Move(999, 0, 1),
        Move(400, 0, 2, ((100, 6, 2),)),
        Move(0, 0, 1, ((5, 200, 100), (10, 20, 2))),
        Move(1300, 0, 10),
        Move(1300, 0, 1, ((7, 9, 9),)),
        Move(9 << 40, 0, 10),
        Move(0, 0, 100, ((2, 1300, 100),)),  # the stretch lies in its gap
        Move(0, 0, 10, ((2, 1300, 100), (9, 99, 10))),
    ]
    target = np.zeros(300, np.uint8)
    copies = [*((one, wall) for one in outside), (Move(1000, 0, 300), target)]
    assert Scatter(copies).take(_random[1000:1300], 1000, 1).digest == digest(_random[1000:1300], 1)
    assert np.array_equal(target, _random[1000:1300])


# ---- what goes wrong


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, 100, 511, 512, 4095, 4096, 5000, STEP, 200_000, 262_144])
def test_a_file_that_is_shorter_than_asked(path: Path, kind: str, length: int) -> None:
    path.write_bytes(_random[:length].data)
    room = Room(2 * PAGE)
    with opened(path, kind) as fd:
        for begin in {0, length // 2 // PAGE * PAGE, length // PAGE * PAGE, PAGE * 100}:
            for more in (1, PAGE, 10 * MIB):
                there = max(0, length - begin)
                target = np.full(there + GUARD, 0xA5, np.uint8)
                scatter = Scatter([(Move(begin, 0, target.size), target)])
                found = scatter.read(fd, begin, there + more, room.data, 5)
                assert found[:2] == (there, b""), (begin, more)
                # As far as something was copied it is right, and nothing came from behind the end.
                copied = np.flatnonzero(target != 0xA5)
                assert np.array_equal(target[copied], _random[begin:][copied])
                assert (target[there:] == 0xA5).all()
                room.check()


@needs_library
@pytest.mark.parametrize("kind", ["closed", "never opened"])
def test_a_descriptor_that_is_not_open(path: Path, kind: str) -> None:
    path.write_bytes(_random[:KIB].data)
    fd = 2**31 - 1
    if kind == "closed":
        with opened(path, "buffered") as fd:
            pass
    check_refused(fd, errno.EBADF)


@needs_library
def test_descriptors_that_cannot_be_read_so(path: Path) -> None:
    path.write_bytes(_random[:KIB].data)
    refused: list[tuple[Any, int]] = [
        (os.open(path.parent, os.O_RDONLY), errno.EISDIR),
        (os.open(path, os.O_WRONLY), errno.EBADF),
    ]
    reader, writer = os.pipe()
    refused += [(reader, errno.ESPIPE), (writer, errno.ESPIPE)]
    try:
        for fd, number in refused:
            check_refused(fd, number)
    finally:
        for fd, _ in refused:
            os.close(fd)


@needs_library
@pytest.mark.parametrize("seed", [0, None])
def test_a_negative_descriptor_is_not_open_either(seed: int | None) -> None:
    """A reader that was closed has -1."""
    check_refused(-1, errno.EBADF, seed)


def check_refused(fd: int, number: int, seed: int | None = 0) -> None:
    target = np.full(PAGE, 0xA5, np.uint8)
    with pytest.raises(OSError, match=r"^\[Errno ") as caught:
        Scatter([(Move(0, 0, PAGE), target)]).read(fd, 0, PAGE, region(PAGE), seed)
    assert (caught.value.errno, caught.value.strerror) == (number, os.strerror(number))
    assert (target == 0xA5).all()


@needs_library
def test_a_direct_descriptor_that_is_given_a_crooked_offset(path: Path) -> None:
    """The error is the system's; nothing is made up for it."""
    path.write_bytes(_random[: 4 * PAGE].data)
    with opened(path, "direct") as fd:
        try:
            os.preadv(fd, [region(PAGE).data], 1)
        except OSError as error:
            expected = error.errno
        else:
            pytest.skip(f"the file system of {path} reads directly from any offset")
        with pytest.raises(OSError, match="Errno") as caught:
            Scatter([]).read(fd, 1, PAGE, region(PAGE), 0)
    assert caught.value.errno == expected


@pytest.mark.parametrize(
    "bad",
    [
        Move(0, 0, 101),
        Move(0, 1, 100),
        Move(0, 101, 0),
        Move(0, -1, 10),
        Move(-1, 0, 10),
        Move(0, 0, 10, ((10, 10, 11),)),
        Move(0, 50, 1, ((2, 100, 40), (2, 20, 10))),
        Move(0, 2**63, 10),
    ],
)
def test_a_row_beyond_its_target_is_refused(bad: Move) -> None:
    target = np.full(200, 0xA5, np.uint8)
    with pytest.raises(LayoutError, match="100 bytes"):
        Scatter([(Move(0, 0, 100), target[100:]), (bad, target[:100])])
    assert (target == 0xA5).all()


def test_a_row_up_to_the_very_end_is_not_refused() -> None:
    target = np.zeros(100, np.uint8)
    for good in (Move(0, 0, 100), Move(0, 99, 1), Move(0, 49, 1, ((2, 100, 40), (2, 20, 10)))):
        Scatter([(good, target)])


def test_which_stretches_are_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "library", object())
    assert [scatters(size) for size in (0, SHORTEST - 1, SHORTEST, 8 * MIB)] == [False, False, True, True]
    monkeypatch.setattr(copying, "library", None)
    assert not any(scatters(size) for size in (0, SHORTEST - 1, SHORTEST, 8 * MIB))


@needs_library
def test_memory_of_another_kind_is_refused(path: Path) -> None:
    frozen = np.zeros(PAGE, np.uint8)
    frozen.flags.writeable = False
    for odd in (frozen, np.zeros((2, PAGE), np.uint8).T, np.zeros(PAGE, np.int16)):
        with pytest.raises(UsageError, match="contiguous, writeable uint8"):
            Scatter([(Move(0, 0, 1), odd)])  # type: ignore[list-item]
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file, pytest.raises(UsageError, match="through 0 bytes"):
        Scatter([]).read(file.fileno(), 0, PAGE, region(PAGE)[:0], 0)
