"""The same bits for every assignment of lanes, every order, and every loss on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.reduce.adder import Scratch, evaluate, quiet
from holdfast.reduce.banks import Bank, Flat, Header, private
from holdfast.reduce.folding import Folder
from holdfast.reduce.layout import BLOCK, Entry, FlatLayout
from holdfast.reduce.tree import Node, recipe

Values = npt.NDArray[Any]
KINDS = ("float16", "bfloat16", "float32", "float64", "int32", "uint8", "complex64")
SPECIAL = (0.0, -0.0, np.inf, -np.inf, 1e-40, -3e-42, 5e-324, 1.0, -1.0, 1e30, 65504.0, 1 / 3)


def numpy_dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, kind, kind))


def lane_values(kind: str, size: int, seed: int) -> Values:
    """Numbers of every sort: denormals, infinities, both zeros, NaNs with payloads, quiet and signalling."""
    random = np.random.default_rng(seed)
    dtype = numpy_dtype(kind)
    if dtype.kind in "iu":
        return random.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    with quiet():
        values = random.choice(np.array(SPECIAL), size).astype(dtype)
        noise = random.standard_normal(size).astype(dtype)
    values = np.where(random.random(size) < 0.5, values, noise)
    raw = values.view(np.uint8).reshape(size, dtype.itemsize)
    nans = random.random(size) < 0.2
    raw[nans] = 0xFF  # every exponent bit set; the other bits make the payload
    raw[nans, 0] = random.integers(1, 256, int(nans.sum()))
    return values


class Bench:
    """Folders of several members over one kind of layout, without a socket."""

    def __init__(self, lanes: Sequence[Sequence[Values]], wire: str | None) -> None:
        self.lanes = lanes
        entries = [Entry(f"a{at}", one.dtype.name, one.shape) for at, one in enumerate(lanes[0])]
        self.layout = FlatLayout(entries, wire)
        self._header = Header()
        self._banks: list[Bank] = []
        self._free: list[Bank] = []
        self.scratch = Scratch()

    def take(self) -> Bank:
        if self._free:
            return self._free.pop()
        self._banks.append(Bank(len(self._banks), self.layout.nbytes, self.layout.blocks, self._header.words))
        return self._banks[-1]

    def folder(self) -> Folder:
        return Folder(len(self.lanes), self.take, self._free.append)

    def fold(self, folder: Folder, lanes: Sequence[int]) -> None:
        for lane in lanes:
            folder.add(lane, self.lanes[lane], self.layout, self.scratch)

    def total(self, folders: Sequence[Folder]) -> bytes:
        held: dict[Node, Flat] = {node: bank.flat for folder in folders for node, bank in folder.held.items()}
        total = private(self.layout.nbytes, self.layout.blocks)
        made = recipe(list(held), len(self.lanes))
        with quiet():
            for at, block in enumerate(self.layout.blocks):
                evaluate(made, list(held.values()), total, at, block, self.scratch)
        found = b""
        for entry, wire, start in zip(
            self.layout.entries, self.layout.wires, self.layout.starts, strict=True
        ):
            size = int(np.prod(entry.shape)) * wire.itemsize
            found += total.memory[start : start + size].tobytes()
        return found

    def close(self) -> None:
        for bank in self._banks:
            bank.close()
        self._header.close()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 700)), min_size=1, max_size=3),
    st.sampled_from([None, "bfloat16", "float16"]),
    st.integers(0, 1 << 30),
    st.data(),
)
def test_any_assignment_and_order_gives_the_same_bits(
    num_lanes: int,
    num_members: int,
    arrays: list[tuple[str, int]],
    wire: str | None,
    seed: int,
    data: st.DataObject,
) -> None:
    lanes = [
        [
            lane_values(kind, size, hash((seed, lane, at)) & 0xFFFFFFFF)
            for at, (kind, size) in enumerate(arrays)
        ]
        for lane in range(num_lanes)
    ]
    bench = Bench(lanes, wire)
    try:
        first = bench.folder()
        bench.fold(first, range(num_lanes))
        expected = bench.total([first])
        first.reset()
        owner = data.draw(st.lists(st.integers(0, num_members - 1), min_size=num_lanes, max_size=num_lanes))
        order = data.draw(st.permutations(range(num_lanes)))
        folders = [bench.folder() for _ in range(num_members)]
        for lane in order:
            bench.fold(folders[owner[lane]], [lane])
        assert bench.total(folders) == expected
        # One of them is lost, and the others take over what it had.
        lost = data.draw(st.integers(0, num_members - 1))
        if num_members > 1:
            survivors = [one for at, one in enumerate(folders) if at != lost]
            for at, lane in enumerate(lane for lane in order if owner[lane] == lost):
                bench.fold(survivors[at % len(survivors)], [lane])
            assert bench.total(survivors) == expected
    finally:
        bench.close()


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_large_arrays_cross_blocks_with_the_same_bits(kind: str) -> None:
    """NaN + NaN comes out differently in numpy's vector loop and in the loop for what is left over."""
    size = 2 * BLOCK // numpy_dtype(kind).itemsize + 137
    lanes = [[lane_values(kind, size, lane), lane_values(kind, 77, 100 + lane)] for lane in range(5)]
    bench = Bench(lanes, None)
    try:
        one, two, three = (bench.folder() for _ in range(3))
        bench.fold(one, range(5))
        bench.fold(two, [4, 0, 2])
        bench.fold(three, [3, 1])
        assert bench.total([one]) == bench.total([two, three])
    finally:
        bench.close()


def test_a_lane_that_fails_in_the_middle_leaves_no_half_sum() -> None:
    lanes = [[lane_values("float32", 10, lane)] for lane in range(4)]
    bench = Bench(lanes, None)
    try:
        folder = bench.folder()
        bench.fold(folder, [0, 1, 2])
        bad = [np.zeros(3, np.float32)]
        with pytest.raises(ValueError, match="broadcast"):
            folder.add(3, bad, bench.layout, bench.scratch)
        assert folder.lanes() == ()
        bench.fold(folder, [0, 1, 2, 3])
        whole = bench.folder()
        bench.fold(whole, [3, 2, 1, 0])
        assert bench.total([folder]) == bench.total([whole])
    finally:
        bench.close()


def test_few_sums_are_alive_when_lanes_come_in_order() -> None:
    lanes = [[lane_values("float32", 10, lane)] for lane in range(64)]
    bench = Bench(lanes, None)
    try:
        folder = bench.folder()
        for lane in range(64):
            bench.fold(folder, [lane])
            assert len(folder.held) <= 7
        assert len(bench._banks) <= 7
    finally:
        bench.close()
