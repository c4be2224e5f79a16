"""Loads by way of C and without it: the same arrays, the same verdicts, and never wrong numbers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.arrays import copying
from holdfast.arrays.scattering import SHORTEST
from holdfast.checkpoint import Checkpointer, reading
from holdfast.errors import CorruptError
from holdfast.format import BLOCK, read_manifest, step_folder
from holdfast.storage import LocalStore, local
from tests.checkpoint.folder import damage, part_file
from tests.checkpoint.test_ranks import Ranks

PAGE, MIB = 4096, 1 << 20

with_readers = pytest.mark.parametrize("threads", [1, None])
"""One reads the first block ahead, and the others piece by piece; sixteen read all of them ahead."""


def bits(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


TREE: dict[str, Any] = {
    "large": bits(2 * BLOCK + 12_345),
    "matrix": bits(4 * 1000 * 333, 1).view(np.uint32).reshape(1000, 333),
    "none": np.zeros((0, 3), np.float32),
    **{f"tiny{number:03}": bits(1 + number % 61, number) for number in range(150)},
}
"""Three blocks: an array over all of them, one within, and many tiny ones side by side."""


def same(found: Any, wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], array) and found[name].dtype == array.dtype
        for name, array in wanted.items()
    )


def save(root: Path, what: Any) -> Path:
    """The part file of what was saved as step 1."""
    with Checkpointer(root, writer="thread", journal=False) as ckpt:
        ckpt.save(1, what).durable(60.0)
    return part_file(root, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whoever changes its part file puts it right again."""
    root = tmp_path_factory.mktemp("scattered") / "ckpt"
    save(root, TREE)
    return root


@pytest.fixture(params=["as installed", "without the library"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "as installed":
        monkeypatch.setattr(copying, "library", None)
    elif copying.library is None:
        pytest.skip("built without a C compiler: there is one way to load")
    return str(request.param)


@contextmanager
def flipped(path: Path, offset: int) -> Iterator[None]:
    """A bit of a file is another one; in place, which is faster than `damage` for a large file."""
    fd = os.open(path, os.O_RDWR)
    try:
        good = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([good[0] ^ 1]), offset)
        yield
        os.pwrite(fd, good, offset)
    finally:
        os.close(fd)


def check_corrupt(ckpt: Checkpointer, path: Path, block: int, **options: Any) -> CorruptError:
    with pytest.raises(CorruptError) as caught:
        ckpt.load(step=1, **options)
    assert caught.value.block == block
    assert caught.value.file == path.name
    assert caught.value.arrays
    return caught.value


# ---- the same arrays


@with_readers
def test_each_way_is_taken(
    way: str, saved: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    """Or the tests below compare something with itself."""
    other = "_copy_out" if way == "as installed" else "_scatter"
    monkeypatch.setattr(reading.BlockPipeline, other, lambda *_: pytest.fail(f"{other} was called"))
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        assert same(ckpt.load(), TREE)


@with_readers
@pytest.mark.usefixtures("way")
def test_everything_comes_back_and_is_read_and_hashed_once(saved: Path, threads: int | None) -> None:
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        for found in (ckpt.load(), ckpt.load(into=TREE)):
            assert same(found, TREE)
            assert ckpt.last_load is not None
            assert ckpt.last_load.bytes_read == part_file(saved, 1).stat().st_size
            assert ckpt.last_load.hash_s > 0.0
            assert sum(ckpt.last_load.blocks.values()) == 3


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("parts", ["large", "matrix", "tiny*", ["tiny000", "tiny149"], "none"])
def test_some_arrays_come_back(saved: Path, parts: str | list[str]) -> None:
    with Checkpointer(saved, journal=False) as ckpt:
        found = ckpt.load(parts=parts)
    assert found
    assert same(found, {name: TREE[name] for name in found})


@with_readers
@pytest.mark.usefixtures("way")
def test_an_unverified_load_is_right_and_hashes_nothing(saved: Path, threads: int | None) -> None:
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        assert same(ckpt.load(verify=False), TREE)
        assert ckpt.last_load is not None
        assert ckpt.last_load.hash_s == 0.0
        assert ckpt.last_load.bytes_read == part_file(saved, 1).stat().st_size


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tail", [1, SHORTEST - 1, SHORTEST, 513])
def test_the_last_block_has_any_size(root: Path, tail: int) -> None:
    """Some are too short to be hashed in C."""
    array = bits(BLOCK - PAGE + tail)
    path = save(root, {"x": array})
    assert path.stat().st_size == BLOCK + tail, "the header has a page"
    for threads in (1, None):
        with Checkpointer(root, threads=threads, journal=False) as ckpt:
            assert np.array_equal(ckpt.load()["x"], array)
            assert ckpt.last_load is not None
            assert ckpt.last_load.bytes_read == BLOCK + tail
            with flipped(path, BLOCK + tail - 1):
                assert check_corrupt(ckpt, path, 1).arrays == ("x",)


@pytest.mark.usefixtures("way")
def test_a_thousand_tiny_arrays_in_one_block(root: Path) -> None:
    wanted = {f"{number}": bits(1 + number % 97, number) for number in range(1000)}
    path = save(root, wanted)
    assert path.stat().st_size < BLOCK
    with Checkpointer(root, journal=False) as ckpt:
        assert same(ckpt.load(), wanted)
        assert same(ckpt.load(parts="7*"), {name: one for name, one in wanted.items() if name[0] == "7"})
        damage(path)
        assert len(check_corrupt(ckpt, path, 0).arrays) == 1000


@with_readers
@pytest.mark.usefixtures("way")
def test_what_ranks_have_cut_by_columns_is_put_together(root: Path, threads: int | None) -> None:
    """Rows of a part lie apart in the array."""
    wanted = {"wide": bits(7 * 2_600_000).reshape(7, -1), "small": bits(7)}
    ranks = Ranks(root, 3)
    ranks.save(1, lambda rank: wanted)
    ranks.close()
    manifest = read_manifest(LocalStore(root), step_folder(1))
    (cuts,) = (entry.cuts for entry in manifest.arrays if entry.name == "wide")
    assert [len(points) - 1 for points in cuts] == [1, 3]
    with Checkpointer(root, threads=threads, journal=False) as ckpt:
        assert same(ckpt.load(), wanted)
        path = part_file(root, 1)
        with flipped(path, PAGE + MIB):
            assert check_corrupt(ckpt, path, 0).arrays == ("wide",)


@with_readers
@pytest.mark.usefixtures("way")
def test_an_array_saved_whole_is_loaded_in_pieces(root: Path, threads: int | None) -> None:
    """By columns, by rows, and by both: rows of a piece lie apart in the file."""
    jax = pytest.importorskip("jax")
    array = bits(4 * 2400 * 1000).view(np.uint32).reshape(2400, 1000)
    path = save(root, {"first": bits(12_345), "x": array})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    with Checkpointer(root, threads=threads, journal=False) as ckpt:
        for spec in ((None, ("a", "b")), (("b", "a"),), ("a", "b"), ("b",), ()):
            where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            template = {
                "first": np.zeros(12_345, np.uint8),
                "x": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
            }
            found = ckpt.load(into=template)
            assert found["x"].sharding == where
            assert np.array_equal(found["x"], array)
            assert np.array_equal(found["first"], bits(12_345))
            with flipped(path, path.stat().st_size - 4):
                check_corrupt(ckpt, path, 1, into=template)


# ---- the same verdicts


@with_readers
@pytest.mark.usefixtures("way")
def test_a_flipped_bit_is_found_wherever_it_is(saved: Path, threads: int | None) -> None:
    path = part_file(saved, 1)
    size = path.stat().st_size
    places = {0, 100, BLOCK // 2, BLOCK - 1, BLOCK, BLOCK + BLOCK // 2, 2 * BLOCK - 1, 2 * BLOCK, size - 1}
    places |= set(np.random.default_rng(3).integers(0, size, 3).tolist())
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        for offset in sorted(places):
            with flipped(path, offset):
                block = offset // BLOCK
                assert f"block {block} " in check_corrupt(ckpt, path, block).message
        assert same(ckpt.load(), TREE)


@pytest.mark.usefixtures("way")
def test_what_is_wrong_names_the_arrays_in_the_block(saved: Path) -> None:
    path = part_file(saved, 1)
    with Checkpointer(saved, threads=1, journal=False) as ckpt:
        found: list[set[str]] = []
        for block in range(3):
            with flipped(path, block * BLOCK + 5):
                bad = set(check_corrupt(ckpt, path, block).arrays)
                found.append(bad)
                good = sorted(TREE.keys() - bad)
                assert same(ckpt.load(step=1, parts=good), {name: TREE[name] for name in good})
    assert set().union(*found) == TREE.keys() - {"none"}
    assert set.intersection(*found) == {"large"}


@with_readers
@pytest.mark.usefixtures("way")
def test_an_unverified_load_has_what_is_in_the_file(saved: Path, threads: int | None) -> None:
    path = part_file(saved, 1)
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        with flipped(path, BLOCK + 777):
            found = ckpt.load(step=1, verify=False)["large"]
        assert np.flatnonzero(found != TREE["large"]).size == 1
        assert same(ckpt.load(step=1), TREE)


class Cutter:
    """Shortens a part file when it is read for the nth time, after it was opened and found whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.path = path
        self._good = path.read_bytes()
        self._lock = threading.Lock()
        self._size = 0
        self._left = 0
        for name in ("read_into", "descriptor"):
            self._before(monkeypatch, name)

    def _before(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        read = getattr(local._LocalPartReader, name)

        def cut_first(reader: Any, *args: Any) -> Any:
            with self._lock:
                if reader.path == str(self.path):
                    self._left -= 1
                    if self._left == 0:
                        os.truncate(self.path, self._size)
            return read(reader, *args)

        monkeypatch.setattr(local._LocalPartReader, name, cut_first)

    @contextmanager
    def at(self, size: int, nth: int = 1) -> Iterator[None]:
        self._size, self._left = size, nth
        try:
            yield
            assert self._left <= 0
        finally:
            self._left = 0
            with self.path.open("r+b") as file:
                file.seek(size)
                file.write(self._good[size:])


CUTS = (0, BLOCK // 2 + 1, BLOCK, BLOCK + 100, -1)


@with_readers
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_cut_after_it_was_opened(
    saved: Path, monkeypatch: pytest.MonkeyPatch, verify: bool, threads: int | None
) -> None:
    """Numbers that are not in the file are never handed on, verified or not."""
    path = part_file(saved, 1)
    size = path.stat().st_size
    cutter = Cutter(monkeypatch, path)
    with Checkpointer(saved, threads=threads, journal=False) as ckpt:
        for cut in CUTS:
            with cutter.at(cut % size), pytest.raises(CorruptError) as caught:
                ckpt.load(step=1, verify=verify)
            # Several readers do not meet bad blocks in order.
            assert caught.value.block in range(cut % size // BLOCK, 3)
            assert caught.value.file == path.name
        assert same(ckpt.load(step=1, verify=verify), TREE)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_cut_between_two_blocks(
    saved: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    path = part_file(saved, 1)
    cutter = Cutter(monkeypatch, path)
    with Checkpointer(saved, threads=1, journal=False) as ckpt:
        for cut in (BLOCK - 1, BLOCK + 100, 2 * BLOCK - 1):
            for nth in (2, 3):
                with cutter.at(cut, nth), pytest.raises(CorruptError, match="its index says") as caught:
                    ckpt.load(step=1, verify=verify)
                assert caught.value.block in (1, 2), "whichever comes second or third"
        assert same(ckpt.load(step=1), TREE)


@pytest.mark.parametrize("there", [0, 1, SHORTEST - 1, SHORTEST, 5000])
def test_a_cut_file_is_said_to_be_short(
    way: str, saved: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """Also where fewer bytes than can be hashed in C are left of a block that is read ahead."""
    path = part_file(saved, 1)
    cutter = Cutter(monkeypatch, path)
    with Checkpointer(saved, threads=1, journal=False) as ckpt, cutter.at(there):
        assert f"{there:,} bytes, but its index says" in check_corrupt(ckpt, path, 0).message
