"""Layouts are partitions, know their grids and have content digests."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.arrays import ArrayLayout, Layout, cuts
from holdfast.errors import LayoutError, TreeError, UsageError
from tests.arrays.strategies import grids, layouts, shapes, splits, untimed


@untimed
@given(shapes.flatmap(lambda shape: layouts("float32", shape)))
def test_boxes_cover_every_element_once(array: ArrayLayout) -> None:
    seen = np.zeros(array.shape, np.int64)
    for box in array.boxes:
        seen[tuple(slice(*extent) for extent in box.tolist())] += 1
    assert (seen == 1).all()
    assert sum(array.box_nbytes(box) for box in range(len(array.boxes))) == array.nbytes


@untimed
@given(shapes.flatmap(lambda shape: grids("int8", shape)), st.data())
def test_grids_are_recognised_in_any_order(array: ArrayLayout, data: st.DataObject) -> None:
    if 0 in array.shape:
        return
    assert cuts(array) is not None
    order = data.draw(st.permutations(range(len(array.boxes))))
    holders = tuple(array.holders[box] for box in order)
    mixed = ArrayLayout("int8", array.shape, array.boxes[order], holders)
    assert cuts(mixed) == cuts(array)
    rebuilt = ArrayLayout("int8", array.shape, array.boxes, array.holders)
    assert rebuilt == array
    assert rebuilt.digest() == array.digest()
    assert hash(rebuilt) == hash(array)


@untimed
@given(st.data())
def test_a_broken_partition_is_refused(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple))
    array = data.draw(splits("int8", shape))
    box = data.draw(st.integers(0, len(array.boxes) - 1))
    boxes, holders = array.boxes.copy(), list(array.holders)
    if data.draw(st.booleans()) or len(boxes) == 1:  # grow or shrink one side
        dim, side = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, 1))
        boxes[box, dim, side] += data.draw(st.sampled_from((-1, 1)))
    elif data.draw(st.booleans()):
        boxes, holders = np.delete(boxes, box, axis=0), holders[:box] + holders[box + 1 :]
    else:
        boxes[box] = boxes[box - 1]
    with pytest.raises(LayoutError):
        ArrayLayout("int8", shape, boxes, tuple(holders))


def test_an_L_shaped_partition_is_no_grid() -> None:
    boxes = np.array([[[0, 1], [0, 4]], [[1, 2], [0, 2]], [[1, 2], [2, 4]]])
    assert cuts(ArrayLayout("int8", (2, 4), boxes, ((0,), (1,), (2,)))) is None


def test_0d_and_empty_arrays() -> None:
    scalar = ArrayLayout.whole("float64", ())
    assert scalar.boxes.shape == (1, 0, 2)
    assert (scalar.nbytes, cuts(scalar)) == (8, ())
    assert ArrayLayout("float64", (), np.empty((1, 0, 2), np.int64), ((0,),)) == scalar
    with pytest.raises(LayoutError, match="one box"):
        ArrayLayout("float64", (), np.empty((2, 0, 2), np.int64), ((0,), (1,)))
    empty = ArrayLayout.whole("float64", (3, 0))
    assert (empty.nbytes, len(empty.boxes), cuts(empty)) == (0, 1, ((0, 3), (0, 0)))
    halves = ArrayLayout.grid("float64", (4, 0), [(0, 2, 4), (0, 0)], [(0,), (1,)])
    assert len(halves.boxes) == 2


def test_empty_cells_are_dropped_with_their_holders() -> None:
    uneven = ArrayLayout.grid("int8", (5,), [(0, 2, 4, 5, 5)], [(0,), (1,), (2,), (3,)])
    assert uneven.holders == ((0,), (1,), (2,))
    assert cuts(uneven) == ((0, 2, 4, 5),)


def test_boxes_are_read_only_and_holders_sorted() -> None:
    array = ArrayLayout("int8", (4,), [[[0, 4]]], [[3, 1]])
    assert array.holders == ((1, 3),)
    with pytest.raises(ValueError, match="read-only"):
        array.boxes[0, 0, 0] = 1
    with pytest.raises(AttributeError):
        array.dtype = "int16"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("problem", "make"),
    [
        ("names a holder twice", lambda: ArrayLayout.whole("int8", (4,), (1, 1))),
        ("negative", lambda: ArrayLayout.whole("int8", (-1,))),
        (
            r"\(0, 3\) of dim 0 do not rise",
            lambda: ArrayLayout.grid("int8", (4,), [(0, 3)], [(0,)]),
        ),
        ("rise from 0 to 4", lambda: ArrayLayout.grid("int8", (4,), [(0, 3, 2, 4)], [(0,)] * 3)),
        ("cuts for 1 dims", lambda: ArrayLayout.grid("int8", (4, 4), [(0, 4)], [(0,)])),
        ("2 cells but there are 1", lambda: ArrayLayout.grid("int8", (4,), [(0, 1, 4)], [(0,)])),
        (
            r"shape \(1, 2, 2\)",
            lambda: ArrayLayout("int8", (4,), np.zeros((1, 2, 2), np.int64), ((0,),)),
        ),
        (
            r"shape \(0, 1, 2\)",
            lambda: ArrayLayout("int8", (4,), np.zeros((0, 1, 2), np.int64), ()),
        ),
        ("empty box", lambda: ArrayLayout("int8", (4,), [[[0, 4]], [[4, 4]]], ((0,), (1,)))),
        ("holder sets", lambda: ArrayLayout("int8", (4,), [[[0, 4]]], ((0,), (1,)))),
        ("ints per box", lambda: ArrayLayout("int8", (4,), [[[0, 4]]], (0,))),
        ("overlap", lambda: ArrayLayout("int8", (4,), [[[0, 3]], [[2, 4]]], ((0,), (1,)))),
        ("cover 3 of the 4", lambda: ArrayLayout("int8", (4,), [[[0, 3]]], ((0,),))),
        ("float64, not ints", lambda: ArrayLayout("int8", (4,), [[[0, 4.5]]], ((0,),))),
        ("not inside", lambda: ArrayLayout("int8", (4,), [[[0, 5]]], ((0,),))),
    ],
)
def test_bad_layouts_say_why(problem: str, make: object) -> None:
    with pytest.raises(LayoutError, match=problem):
        make()  # type: ignore[operator]


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(TreeError, match="float33"):
        ArrayLayout.whole("float33", (4,))


def test_layouts_are_equal_by_content() -> None:
    a, b = ArrayLayout.whole("int8", (4,)), ArrayLayout.whole("int16", (4,))
    one, other = Layout({"a": a, "b": b}), Layout([("b", b), ("a", a)])
    assert one == other
    assert one.digest() == other.digest()
    assert hash(one) == hash(other)
    assert one != {"a": a, "b": b}
    assert one.nbytes == 12
    assert repr(one) == "Layout(2 arrays, 12 bytes)"
    changed = [
        Layout({"a": a}),
        Layout({"a": a, "c": b}),
        Layout({"a": b, "b": a}),
        Layout({"a": a, "b": ArrayLayout.whole("int16", (4,), (0, 1))}),
        Layout({"a": a, "b": ArrayLayout.grid("int16", (4,), [(0, 2, 4)], [(0,), (0,)])}),
    ]
    assert len({layout.digest() for layout in [one, *changed]}) == 1 + len(changed)
    with pytest.raises(UsageError, match="not an ArrayLayout"):
        Layout({"a": 3})  # type: ignore[arg-type]


def test_digests_do_not_change_between_releases() -> None:
    layout = Layout({"w": ArrayLayout.grid("bfloat16", (4, 2), [(0, 2, 4), (0, 2)], [(0,), (1,)])})
    assert layout.digest() == "55151aad4e5ed32eb59432736cc7d97f"


def test_speed_of_validation() -> None:
    # 5,000 arrays x 512 boxes out of 40 shardings, as part indexes would describe them.
    rows = np.arange(512)
    holders = tuple((int(row),) for row in rows)
    shardings = []
    for extra in range(40):
        edges = np.array([(512 * 8 + extra) * row // 512 for row in range(513)])
        boxes = np.zeros((512, 2, 2), np.int64)
        boxes[:, 0, 0], boxes[:, 0, 1], boxes[:, 1, 1] = edges[:-1], edges[1:], 64
        shardings.append((int(edges[-1]), boxes))
    start = time.perf_counter()
    for number in range(5000):
        size, boxes = shardings[number % 40]
        ArrayLayout("float32", (size, 64), boxes, holders)
    seconds = time.perf_counter() - start
    print(f"validated 5,000 x 512 boxes in {seconds:.3f} s (bar 1.0)")
    assert seconds < 3.0


def test_speed_of_validating_boxes_that_form_no_grid() -> None:
    edges = np.arange(0, 4097, 2)
    boxes = np.zeros((2048, 2, 2), np.int64)
    boxes[:, 0, 0], boxes[:, 0, 1], boxes[:, 1, 1] = edges[:-1], edges[1:], 8
    split = np.repeat(boxes[:1], 2, axis=0)
    split[0, 1, 1] = split[1, 1, 0] = 4
    every = np.concatenate([split, boxes[1:]])
    start = time.perf_counter()
    array = ArrayLayout("int8", (4096, 8), every, tuple((0,) for _ in every))
    seconds = time.perf_counter() - start
    assert cuts(array) is None
    assert seconds < 0.5
