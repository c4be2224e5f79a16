"""Reading boxes of sharded arrays, and comparing them in tiles of any size."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import StepReader, step_reader
from holdfast.cli.values import compared, tiles
from holdfast.format import ArrayEntry, SaveId, read_manifest, step_folder
from holdfast.storage import LocalStore
from tests.format.make_golden import Array, make_step

Cuts = tuple[tuple[int, ...], ...]


def written(root: Path, attempt: str, array: Array) -> tuple[StepReader, ArrayEntry]:
    folder = root / attempt / step_folder(1)
    folder.mkdir(parents=True)
    for name, data in make_step(SaveId("run", 1, attempt), {"x": array}, {}, {}).items():
        (folder / name).write_bytes(data)
    store = LocalStore(root / attempt)
    manifest = read_manifest(store, step_folder(1))
    return StepReader(store, manifest), manifest.arrays[0]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Cuts, tuple[int, ...]]:
    """Cut points per dimension, and a part for each cell."""
    cuts = tuple(
        (0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else ()), size)
        for size in shape
    )
    cells = prod(len(points) - 1 for points in cuts)
    return cuts, tuple(draw(st.lists(st.integers(0, 2), min_size=cells, max_size=cells)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Array, Array, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    data = np.arange(prod(shape), dtype=np.int16).reshape(shape)
    other = data.copy()
    for at in draw(st.sets(st.integers(0, prod(shape) - 1), max_size=4)):
        other.flat[at] += np.int16(draw(st.integers(1, 9)))
    one, two = draw(grids(shape)), draw(grids(shape))
    return Array(data, *one), Array(other, *two), draw(st.integers(1, 2 * data.nbytes))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_two_grids_in_tiles_of_any_size_compare_as_numpy_does(case: tuple[Array, Array, int]) -> None:
    one, two, most = case
    with tempfile.TemporaryDirectory() as root:
        a, b = written(Path(root), "a1", one), written(Path(root), "b2", two)
        tally = compared((a[0], b[0]), (a[1], b[1]), most=most)
    differ = one.value != two.value
    gaps = np.abs(one.value - two.value)[differ]
    assert tally.elements == one.value.size
    assert tally.bits_differ == tally.values_differ == np.count_nonzero(differ)
    assert tally.max_abs == (int(gaps.max()) if gaps.size else None)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tiles_cover_every_element_once_within_their_limit(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    cuts = tuple((0, size // 2, size) if size > 1 else (0, size) for size in shape)
    entry = ArrayEntry(name="x", dtype="float32", shape=shape, cuts=cuts, owners=())
    most = data.draw(st.integers(1, 4 * max(1, prod(shape))))
    seen = np.zeros(shape, np.int8)
    for box in tiles(entry, most):
        where = tuple(slice(lo, hi) for lo, hi in box)
        seen[where] += 1
        assert seen[where].size == 1 or seen[where].size * 4 <= most
    assert (seen == 1).all()


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """However many blocks an array has, only a few stay in memory."""
    array = Array(np.zeros((24, 1 << 20), np.uint8))
    reader, entry = written(tmp_path, "a1", array)
    for box in tiles(entry, 1 << 20):
        assert reader.read(entry, box).nbytes <= 1 << 20
    assert len(reader._blocks) <= step_reader._CACHED
