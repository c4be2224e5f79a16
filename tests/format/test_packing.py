"""Packing: no holes, and big tensors aligned by order alone."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import format as fmt

sizes_lists = st.lists(
    st.one_of(
        st.integers(0, 300),
        st.integers(0, 5).map(lambda k: k * 4096),
        st.integers(0, 100).map(lambda k: k * 64),
    ),
    max_size=50,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(sizes_lists)
def test_packed_without_holes_and_aligned(sizes: list[int]) -> None:
    order, offsets, total = fmt.pack(sizes)
    assert sorted(order) == list(range(len(sizes)))
    at = 0
    for i in order:
        assert offsets[i] == at
        at += sizes[i]
    assert at == total == sum(sizes)
    for size, offset in zip(sizes, offsets, strict=True):
        for power in (1, 2, 4, 8, 16, 64, 512, 4096):
            if size % power == 0:
                assert offset % power == 0


def test_equal_tensors_keep_their_order() -> None:
    assert fmt.pack([8, 4096, 8, 0, 8])[0] == [1, 3, 0, 2, 4]
    assert fmt.pack([]) == ([], [], 0)


def test_ten_thousand_tensors_are_quick() -> None:
    rng = random.Random(0)
    sizes = [rng.randrange(1 << 26) for _ in range(10_000)]
    begin = time.perf_counter()
    fmt.pack(sizes)
    assert time.perf_counter() - begin < 0.5  # measured 6 ms
