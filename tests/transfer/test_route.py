"""Streams, chunks and routes against numpy, element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.arrays import ArrayLayout, Layout
from holdfast.errors import MismatchError, TransferError
from holdfast.transfer.manifest import ArrayInfo, Box, Manifest, Scalar, joint
from holdfast.transfer.route import Segment, check_segments, gather, route_digest, routes


def grid(data: st.DataObject, shape: tuple[int, ...]) -> list[Box]:
    """A random grid of boxes over a shape."""
    axes = []
    for size in shape:
        inner = data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2)) if size > 1 else set()
        cuts = sorted({0, size, *inner})
        axes.append(list(itertools.pairwise(cuts)))
    boxes: list[Box] = [()]
    for axis in axes:
        boxes = [(*box, span) for box in boxes for span in axis]
    return boxes


def layout_of(boxes: list[Box], shape: tuple[int, ...], holder: int) -> ArrayLayout:
    table = np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2)
    return ArrayLayout("int16", shape, table, tuple((holder,) for _ in boxes))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_byte_arrives_where_it_belongs(data: st.DataObject) -> None:
    num_peers = data.draw(st.integers(1, 3))
    chunk_bytes = data.draw(st.sampled_from([1, 7, 64, 1000]))
    shapes = data.draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    whole = {f"a{n}": np.arange(np.prod(s), dtype=np.int16).reshape(s) for n, s in enumerate(shapes)}
    # Each source box lies with one or more peers.
    infos: list[list[ArrayInfo]] = [[] for _ in range(num_peers)]
    memories: list[dict[tuple[int, int], bytes]] = [{} for _ in range(num_peers)]
    for name, array in whole.items():
        mine: list[list[Box]] = [[] for _ in range(num_peers)]
        for box in grid(data, array.shape):
            for peer in data.draw(st.sets(st.integers(0, num_peers - 1), min_size=1)):
                mine[peer].append(box)
        for peer, boxes in enumerate(mine):
            at = len(infos[peer])
            infos[peer].append(ArrayInfo(name, "int16", array.shape, tuple(boxes)))
            for number, box in enumerate(boxes):
                memories[peer][at, number] = array[tuple(slice(a, b) for a, b in box)].tobytes()
    manifests = [Manifest(tuple(mine), ()) for mine in infos]
    together = joint(manifests, [f"peer{n}" for n in range(num_peers)])
    wanted = {name: grid(data, array.shape) for name, array in whole.items()}
    target = Layout((name, layout_of(boxes, whole[name].shape, 0)) for name, boxes in wanted.items())
    keys = [(name, n) for name in wanted for n in range(len(wanted[name]))]
    places = {key: at for at, key in enumerate(keys)}
    out = {place: np.full(target[name].box_nbytes(n), 0xEE, np.uint8) for (name, n), place in places.items()}
    moved = 0
    found = routes(
        together, manifests, target, {name: name for name in wanted}, places, rank=0, chunk_bytes=chunk_bytes
    )
    for peer, route in enumerate(found):
        sizes = {place: len(memory) for place, memory in memories[peer].items()}
        check_segments(route.segments, manifests[peer], sizes)
        assert route.digest == route_digest(route.segments, chunk_bytes, manifests[peer].digest())
        numbers = {place: n for n, place in enumerate(memories[peer])}
        held = [np.frombuffer(memory, np.uint8) for memory in memories[peer].values()]
        stream = gather(route.segments, numbers, chunk_bytes)
        assert (stream.nbytes, stream.num_chunks) == (route.stream.nbytes, route.stream.num_chunks)
        for chunk in range(stream.num_chunks):
            size = stream.size(chunk)
            wire = np.full(size, 0xDD, np.uint8)
            taken = 0
            for place, one in stream.pieces(chunk):
                back = type(one)(one.target, one.source, one.run, tuple((n, t, s) for n, s, t in one.dims))
                back.apply(held[place], wire)
                taken += one.nbytes
            assert taken == size
            for place, one in route.stream.pieces(chunk):
                one.apply(wire, out[place])
            moved += size
    assert moved == sum(array.nbytes for array in whole.values())  # exactly the bytes, once
    for (name, n), place in places.items():
        box = wanted[name][n]
        expected = whole[name][tuple(slice(a, b) for a, b in box)]
        assert out[place].tobytes() == expected.tobytes()


def info(name: str, *boxes: Box, dtype: str = "float32", size: int = 4) -> ArrayInfo:
    return ArrayInfo(name, dtype, (size,), boxes or (((0, size),),))


def lr(value: str, kind: str = "float") -> tuple[Scalar, ...]:
    return (Scalar("lr", kind, value),)


def test_everything_on_which_peers_disagree_is_listed() -> None:
    a = Manifest((info("w"), info("x"), info("holes", ((0, 2),)), info("fine")), lr("1"))
    b = Manifest((info("w", dtype="bfloat16"), info("x", size=5), info("fine")), lr("2"))
    with pytest.raises(MismatchError) as caught:
        joint([a, b], ["host-a", "host-b"])
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "w: host-b has bfloat16[4], host-a has float32[4]" in text
    for part in ("x: host-b has float32[5]", "holes:", "lr: host-b has 2"):
        assert part in text
    assert "fine" not in text


def test_overlapping_slices_are_refused() -> None:
    whole, half = Manifest((info("w"),), ()), Manifest((info("w", ((0, 2),)),), ())
    with pytest.raises(MismatchError, match="w: the peers' slices do not make up the array"):
        joint([whole, half], ["a", "b"])


@pytest.mark.parametrize(
    "wrong",
    [
        Segment(0, 0, 0, 17),
        Segment(0, 0, 12, 8),
        Segment(0, 0, -4, 8),
        Segment(0, 0, 0, 0),
        Segment(0, 0, 0, -1),
        Segment(0, 1, 0, 4),
        Segment(1, 0, 0, 4),
        Segment(-1, 0, 0, 4),
        Segment(0, 0, 0, 4, ((5, 4),)),
        Segment(0, 0, 0, 4, ((2, -4),)),
        Segment(0, 0, 0, 4, ((0, 4),)),
        Segment(0, 0, 0, 4, ((2, 1 << 62), (2, 1 << 62))),
    ],
)
def test_a_source_serves_nothing_it_has_not_published(wrong: Segment) -> None:
    manifest = Manifest((info("w"),), ())
    with pytest.raises(TransferError):
        check_segments([wrong], manifest, {(0, 0): 16})
    check_segments([Segment(0, 0, 0, 4, ((4, 4),))], manifest, {(0, 0): 16})


def test_scalars_belong_to_a_version_and_not_to_the_plan() -> None:
    one, two, other = (Manifest((info("w"),), found) for found in (lr("1"), lr("2"), lr("1", "int")))
    assert one.digest() == two.digest() != other.digest()
