"""Digests: of blocks, of small files, and bound to their place."""

from __future__ import annotations

import pytest

from holdfast import format as fmt
from holdfast.errors import CorruptError, UsageError
from tests.format.make_golden import block_digests

SAVE = fmt.SaveId("run", 7, "a1")


def test_block_counts_and_ranges() -> None:
    sizes = (0, 1, fmt.BLOCK, fmt.BLOCK + 1, 3 * fmt.BLOCK)
    assert [fmt.num_blocks(size) for size in sizes] == [0, 1, 1, 2, 3]
    assert fmt.block_range(1, fmt.BLOCK + 5) == (fmt.BLOCK, fmt.BLOCK + 5)
    with pytest.raises(UsageError):
        fmt.block_range(2, fmt.BLOCK + 5)


def test_seeds_differ_by_every_part_of_the_place() -> None:
    places = [
        (SAVE, 0, 0, 0), (SAVE, 1, 0, 0), (SAVE, 0, 1, 0), (SAVE, 0, 0, 1), (SAVE, 1, 1, 1),
        (fmt.SaveId("run", 8, "a1"), 0, 0, 0), (fmt.SaveId("run", 7, "a2"), 0, 0, 0),
        (fmt.SaveId("run2", 7, "a1"), 0, 0, 0), (SAVE, 11, 1, 0), (SAVE, 1, 11, 0),
    ]  # fmt: skip
    seeds = {fmt.block_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_digests_are_what_version_1_says() -> None:
    # Fixed numbers: a change here means that no existing checkpoint verifies any more.
    assert fmt.block_seed(SAVE, 3, 5) == 0xACFF1CDD4EEF118B
    assert fmt.block_digest(b"holdfast", 1).hex() == "56f1d1ded5b497cfa95907de623774bf"
    assert fmt.digest(b"holdfast") == "d725ef720e130d9fdf1a3c122ca59e45"


@pytest.mark.parametrize("size", [0, 1, fmt.BLOCK, 2 * fmt.BLOCK])
def test_whole_blocks_have_no_empty_tail(size: int) -> None:
    assert len(block_digests(bytes(size), SAVE, 0)) == 32 * fmt.num_blocks(size)


def test_a_bad_block_of_a_large_file_names_only_its_arrays() -> None:
    data = bytearray(2 * fmt.BLOCK + 10)
    index = fmt.PartIndex(
        version=1,
        save=SAVE,
        part=2,
        files=(fmt.PartFile(fmt.data_name(2, "a1"), len(data), block_digests(data, SAVE, 2)),),
        slices=(
            fmt.Slice("first", (0,), (9,), 0, 4096, fmt.BLOCK),
            fmt.Slice("second", (0,), (9,), 0, 4096 + fmt.BLOCK, 100),
            fmt.Slice("tail", (0,), (10,), 0, 2 * fmt.BLOCK, 10),
        ),
    )
    data[fmt.BLOCK + 1] ^= 1
    fmt.check_block(index, 0, 0, data[: fmt.BLOCK])
    fmt.check_block(index, 0, 2, data[2 * fmt.BLOCK :])
    with pytest.raises(CorruptError, match=r"block 1 .* holds first, second\n") as caught:
        fmt.check_block(index, 0, 1, data[fmt.BLOCK : 2 * fmt.BLOCK])
    assert (caught.value.file, caught.value.block) == (index.files[0].name, 1)
    assert caught.value.arrays == ("first", "second")
