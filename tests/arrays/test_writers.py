"""Every unique byte has one writer, and writers have about the same to do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arrays import ArrayLayout, Layout, cuts, plan, spread
from holdfast.errors import LayoutError, UsageError
from tests.arrays.strategies import layouts, shapes, untimed


@untimed
@given(st.data(), st.integers(1, 40))
def test_spread_refines_and_covers_every_byte_once(data: st.DataObject, min_split_bytes: int) -> None:
    arrays = {
        f"a{i}": data.draw(layouts("float16", data.draw(shapes))) for i in range(data.draw(st.integers(1, 3)))
    }
    before = Layout(arrays)
    after = spread(before, min_split_bytes=min_split_bytes)
    assert list(after) == list(before)
    for name, array in after.items():
        old = before[name]
        assert (array.dtype, array.shape) == (old.dtype, old.shape)
        assert all(len(holders) == 1 for holders in array.holders)
        assert cuts(old) is None or old.geometry.order is not None or cuts(array) is not None
        for box, (holder,) in zip(array.boxes, array.holders, strict=True):
            inside = [
                number
                for number, outer in enumerate(old.boxes)
                if (outer[:, 0] <= box[:, 0]).all() and (box[:, 1] <= outer[:, 1]).all()
            ]
            assert any(holder in old.holders[number] for number in inside)
    # Whoever writes a byte has it already: no copy leaves its holder.
    for one in plan(before, after).values():
        assert np.array_equal(one.source_holder, one.target_holder)


def _loads(layout: Layout) -> Counter[int]:
    loads: Counter[int] = Counter()
    for array in layout.values():
        for box, (holder,) in enumerate(array.holders):
            loads[holder] += array.box_nbytes(box)
    return loads


@pytest.mark.parametrize("holders", [2, 3, 8, 64])
def test_a_replicated_state_is_balanced_within_a_tenth(holders: int) -> None:
    random = np.random.default_rng(holders)
    arrays = {
        f"layer{i}": ArrayLayout.whole("float32", random.integers(1, 4096, 2).tolist(), range(holders))
        for i in range(600)
    }
    loads = _loads(spread(Layout(arrays)))
    assert len(loads) == holders
    assert max(loads.values()) <= 1.1 * min(loads.values())
    assert sum(loads.values()) == Layout(arrays).nbytes


def test_one_large_array_is_shared() -> None:
    layout = Layout({"w": ArrayLayout.whole("float32", (3, 1 << 23), range(8))})
    after = spread(layout)
    assert cuts(after["w"]) == ((0, 3), tuple(range(0, (1 << 23) + 1, 1 << 20)))
    assert set(_loads(after).values()) == {layout.nbytes // 8}


def test_small_arrays_stay_whole_and_outer_dims_are_cut_first() -> None:
    small = ArrayLayout.whole("int8", (100, 100), range(4))
    assert len(spread(Layout({"w": small}))["w"].boxes) == 1
    cut = spread(Layout({"w": small}), min_split_bytes=1000)["w"]
    assert cuts(cut) == ((0, 25, 50, 75, 100), (0, 100))


def test_0d_and_empty_arrays_have_one_writer() -> None:
    shapes_ = {"scalar": (), "empty": (0, 3), "one": (1, 1)}
    layout = Layout({n: ArrayLayout.whole("complex128", s, (4, 5)) for n, s in shapes_.items()})
    for array in spread(layout, min_split_bytes=1).values():
        assert [len(holders) for holders in array.holders] == [1]


def test_forced_boxes_weigh_on_the_choice() -> None:
    layout = Layout(
        {
            "own": ArrayLayout.whole("int8", (1000,), (0,)),
            "shared": ArrayLayout.whole("int8", (900,), (0, 1)),
        }
    )
    assert spread(layout)["shared"].holders == ((1,),)


def test_the_result_does_not_depend_on_the_order_of_names() -> None:
    arrays = {f"a{i}": ArrayLayout.whole("int8", (i % 7 + 1,), (0, 1, 2)) for i in range(30)}
    backwards = dict(reversed(arrays.items()))
    assert spread(Layout(arrays)).digest() == spread(Layout(backwards)).digest()


def test_unheld_boxes_cannot_be_written() -> None:
    lost = Layout({"w": ArrayLayout.grid("int8", (4,), [(0, 2, 4)], [(0,), ()])})
    with pytest.raises(LayoutError, match="nobody holds"):
        spread(lost)
    with pytest.raises(UsageError, match="positive"):
        spread(lost, min_split_bytes=0)
