"""Flat buffers: every element of every array is owned once, whatever the number of shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.arrays import BucketLayout, BucketRules, FlatArray
from holdfast.errors import LayoutError

arrays = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "float4_e2m1fn"]),
        st.integers(0, 700),
        st.booleans(),
    ),
    max_size=12,
).map(lambda found: [FlatArray(f"layer/{at}/w", *one) for at, one in enumerate(found)])


@given(arrays, st.integers(1, 17), st.integers(1, 17), st.sampled_from([0, 1, 256, 1000]))
def test_the_shards_are_the_whole_and_nothing_is_owned_twice(
    made: list[FlatArray], num_shards: int, num_expert_shards: int, bucket: int
) -> None:
    rules = BucketRules(
        num_shards=num_shards, num_expert_shards=num_expert_shards, bucket=bucket, alone=("layer/3/*",)
    )
    layout = BucketLayout(made, rules)
    owners = {array.name: np.zeros(array.numel, int) for array in made}
    for buffer in layout.buffers:
        taken = np.zeros(buffer.numel, int)
        ends = np.zeros(len(buffer.buckets), int)
        for rank in range(buffer.num_shards):
            sizes = set()
            for number, (start, stop) in enumerate(buffer.shard(rank)):
                taken[start:stop] += 1
                ends[number] = stop
                sizes.add((number, stop - start))
                for array, lo, hi, at in buffer.pieces(start, stop):
                    name = layout.arrays[array].name
                    owners[name][lo:hi] += 1
                    assert layout.param_index_map[name].start + lo == start + at
            assert len(sizes) == len(buffer.buckets)
        assert (taken == 1).all()
        assert [bucket.stop for bucket in buffer.buckets] == list(ends)
    for name, count in owners.items():
        assert (count == 1).all(), name


@given(arrays, st.integers(1, 17), st.sampled_from([0, 256, 1000]))
@example([FlatArray("full", "float32", 256), FlatArray("empty", "float32", 0)], 1, 256)
def test_starts_are_aligned_and_ends_divide(made: list[FlatArray], num_shards: int, bucket: int) -> None:
    layout = BucketLayout(made, BucketRules(num_shards=num_shards, bucket=bucket))
    assert set(layout.param_index_map) == {array.name for array in made}
    for buffer in layout.buffers:
        assert {layout.arrays[number].dtype for number in buffer.arrays} == {buffer.key.dtype}
        before = 0
        for start, stop, number in buffer.spans:
            inside = buffer.buckets[number] if buffer.buckets else None
            assert start >= before
            assert inside is None or (start - inside.start) % 64 == 0
            assert inside is None or stop <= inside.filled
            before = stop
        for start, filled, stop in buffer.buckets:
            assert start <= filled <= stop < filled + np.lcm(128, num_shards)
            assert (stop - start) % np.lcm(128, num_shards) == 0


def test_offsets_are_unpacked_whatever_elements_are_packed_to() -> None:
    made = [FlatArray("a", "float4_e2m1fn", 100), FlatArray("b", "float4_e2m1fn", 10)]
    layout = BucketLayout(made, BucketRules(num_shards=3))
    assert layout.param_index_map == {"a": (0, 100, 0), "b": (128, 138, 0)}
    (buffer,) = layout.buffers
    assert (buffer.numel, buffer.nbytes, buffer.packed_nbytes) == (384, 384, 192)


def test_a_layout_for_one_group_is_refused_by_another() -> None:
    made = [FlatArray("w", "float32", 1000), FlatArray("e", "float32", 1000, expert=True)]
    dense, experts = BucketLayout(made, BucketRules(num_shards=8, num_expert_shards=4)).buffers
    dense.check_group(8, "the axis fsdp")
    experts.check_group(4, "the axis expert")
    with pytest.raises(LayoutError, match=r"the axis fsdp has 4 members.*laid out for 8 shards"):
        dense.check_group(4, "the axis fsdp")
    with pytest.raises(LayoutError, match="no shard 8"):
        dense.shard(8)


def test_an_array_that_is_to_be_alone_has_its_own_bucket() -> None:
    made = [FlatArray(name, "float32", 10) for name in ("a", "embed", "b", "c")]
    layout = BucketLayout(made, BucketRules(alone=("embed",)))
    assert [span.bucket for span in layout.param_index_map.values()] == [0, 1, 2, 2]


def test_an_array_without_elements_begins_no_bucket() -> None:
    made = [FlatArray(name, "float32", size) for name, size in (("embed", 10), ("none", 0), ("b", 10))]
    layout = BucketLayout(made, BucketRules(alone=("embed", "none")))
    assert layout.param_index_map == {"embed": (0, 10, 0), "none": (64, 64, 0), "b": (128, 138, 1)}
    assert len(layout.describe().splitlines()) == 4


def test_the_description_counts_every_byte() -> None:
    made = [FlatArray("w", "float32", 1000), FlatArray("n", "float32", 8), FlatArray("h", "bfloat16", 3)]
    layout = BucketLayout(made, BucketRules(num_shards=2, bucket=900))
    text = layout.describe()
    assert text.splitlines()[1].split() == ["float32", "0", "1", "1,024", "4,096", "2,048", "2.34%"]
    assert text.splitlines()[-1] == "4,864 bytes in all, 21.02% of them padding"
    assert layout.waste == pytest.approx(1 - 1011 / 1280)


@pytest.mark.parametrize(
    "rules", [{"num_shards": 0}, {"start": 0}, {"end": -1}, {"bucket": -1}, {"num_expert_shards": -2}]
)
def test_rules_that_make_no_sense(rules: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=next(iter(rules))):
        BucketRules(**rules)  # type: ignore[arg-type]


def test_two_arrays_of_one_name_are_refused() -> None:
    with pytest.raises(LayoutError, match="names of their own"):
        BucketLayout([FlatArray("a", "int8", 1), FlatArray("a", "int8", 2)], BucketRules())
