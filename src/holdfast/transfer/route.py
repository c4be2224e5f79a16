"""The bytes that go from one peer to one target, as a stream cut into chunks. Pure.

The stream of a peer is all slices that the target needs from it, one after the other, each packed row by
row. A chunk is a fixed stretch of that stream, so both ends know what is in chunk n without being told: the
source cuts its gather list at the same bytes at which the target cuts its scatter list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, final

import msgspec
import xxhash
from msgspec import Struct

from holdfast.arrays import Layout, Move, coalesce, move, plan
from holdfast.errors import TransferError
from holdfast.transfer.manifest import Joint, Manifest

MAX_CHUNKS: Final = 1 << 20
"""Of one stream: both ends keep a little for each."""
MIN_CHUNK_BYTES: Final = 512
MAX_CHUNK_BYTES: Final = 1 << 30


class Segment(Struct, frozen=True, array_like=True, gc=False):
    """A slice that a target asks for: `run` bytes at each point of `dims` (count, stride), from `start`.

    `array` and `box` are indexes into the source's manifest.
    """

    array: int
    box: int
    start: int
    run: int
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        total = self.run
        for count, _ in self.dims:
            total *= count
        return total


class Placed(Struct, frozen=True, array_like=True, gc=False):
    """Where a slice goes in the target's memory: its first byte, and the stride of each of its dims."""

    start: int
    strides: tuple[int, ...] = ()


class Stretch(NamedTuple):
    """A slice in the stream: `move` goes from stream offsets to offsets in the memory numbered `place`."""

    place: int
    move: Move


class Piece(NamedTuple):
    """What of a chunk belongs to one memory; the source offsets of `move` are those in the chunk."""

    place: int
    move: Move


@final
class Stream:
    """Slices one after the other, in chunks of `chunk_bytes`."""

    def __init__(self, stretches: Sequence[Stretch], chunk_bytes: int) -> None:
        self._stretches = stretches
        self._starts = [stretch.move.source for stretch in stretches]
        last = stretches[-1].move if stretches else None
        self.nbytes = 0 if last is None else last.source + last.nbytes
        self.chunk_bytes = chunk_bytes
        self.num_chunks = -(-self.nbytes // chunk_bytes)

    def size(self, chunk: int) -> int:
        """The bytes of a chunk."""
        return min(self.chunk_bytes, self.nbytes - chunk * self.chunk_bytes)

    def pieces(self, chunk: int) -> list[Piece]:
        """Where the bytes of a chunk belong, in their order."""
        lo = chunk * self.chunk_bytes
        hi = lo + self.size(chunk)
        found: list[Piece] = []
        at = bisect_right(self._starts, lo) - 1
        while at < len(self._stretches) and self._starts[at] < hi:
            place, whole = self._stretches[at]
            found += [Piece(place, part.shifted(source=-lo)) for part in whole.clip(lo, hi)]
            at += 1
        return found

    def recut(self, chunk_bytes: int) -> Stream:
        """The same stream in other chunks."""
        return Stream(self._stretches, chunk_bytes)

    def places(self) -> list[int]:
        """The memories it touches, in the order of their first bytes."""
        return list(dict.fromkeys(stretch.place for stretch in self._stretches))

    def within(self, offsets: Mapping[int, int]) -> Stream:
        """The same stream where all memories lie in one, each at its offset."""
        moved = [Stretch(0, one.move.shifted(target=offsets[one.place])) for one in self._stretches]
        return Stream(moved, self.chunk_bytes)

    def placed(self) -> tuple[Placed, ...]:
        """Where its slices go, for a peer that writes them itself."""
        return tuple(
            Placed(one.move.target, tuple(to for _, _, to in one.move.dims)) for one in self._stretches
        )


def _packed(start: int, at: int, run: int, dims: Iterable[tuple[int, int]]) -> Move:
    """The move from stream offset `start`, packed, to offset `at` with these (count, stride)."""
    nested: list[tuple[int, int, int]] = []
    size = run
    for count, stride in reversed(list(dims)):
        nested.append((count, size, stride))
        size *= count
    return Move(start, at, run, tuple(reversed(nested)))


def gather(segments: Sequence[Segment], places: dict[tuple[int, int], int], chunk_bytes: int) -> Stream:
    """The stream at its source; `places` numbers the memory of each (array, box)."""
    stretches = []
    start = 0
    for one in segments:
        stretches.append(Stretch(places[one.array, one.box], _packed(start, one.start, one.run, one.dims)))
        start += one.nbytes
    return Stream(stretches, chunk_bytes)


def scattered(segments: Sequence[Segment], placed: Sequence[Placed], chunk_bytes: int) -> Stream:
    """The stream at its target, whose memory is one, as its source knows it. Fails: TransferError."""
    stretches = []
    start = 0
    if len(segments) != len(placed):
        raise TransferError(f"{len(segments)} slices but {len(placed)} places for them")
    for one, place in zip(segments, placed, strict=True):
        if len(place.strides) != len(one.dims):
            raise TransferError(f"a slice of {len(one.dims)} dims for a place of {len(place.strides)}")
        dims = [(count, stride) for (count, _), stride in zip(one.dims, place.strides, strict=True)]
        stretches.append(Stretch(0, _packed(start, place.start, one.run, dims)))
        start += one.nbytes
    return Stream(stretches, chunk_bytes)


def check_placed(segments: Sequence[Segment], placed: Sequence[Placed], nbytes: int) -> None:
    """Raise TransferError unless every place lies within a memory of `nbytes`."""
    for one, place in zip(segments, placed, strict=True):
        last = place.start + one.run
        for (count, _), stride in zip(one.dims, place.strides, strict=True):
            if stride < 0:
                raise TransferError(f"rows {stride} bytes apart make no sense")
            last += (count - 1) * stride
        if place.start < 0 or last > nbytes:
            raise TransferError(f"bytes {place.start}..{last} of a memory of {nbytes} were to be written")


@final
class Route:
    """What a target takes from one peer: the segments to ask for, and where they go.

    Places of the target are (array, box) of its own layout, numbered in `boxes`.
    """

    def __init__(self, rows: Sequence[tuple[Segment, int, Move]], chunk_bytes: int, manifest: str) -> None:
        self.segments = tuple(segment for segment, _, _ in rows)
        self.manifest = manifest
        stretches = []
        start = 0
        for segment, place, whole in rows:
            dims = [(count, to) for count, _, to in whole.dims]
            stretches.append(Stretch(place, _packed(start, whole.target, whole.run, dims)))
            start += segment.nbytes
        self.stream = Stream(stretches, chunk_bytes)

    @cached_property
    def digest(self) -> str:
        """Both ends compute it; a run names the plan by it."""
        return route_digest(self.segments, self.stream.chunk_bytes, self.manifest)


def route_digest(segments: Sequence[Segment], chunk_bytes: int, manifest: str) -> str:
    """The name of what a target asks of a peer."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((segments, chunk_bytes, manifest)))


def routes(
    source: Joint,
    manifests: Sequence[Manifest],
    target: Layout,
    stored: dict[str, str],
    places: dict[tuple[str, int], int],
    *,
    rank: int,
    chunk_bytes: int,
) -> list[Route]:
    """One route for each peer, over which `rank` gets exactly the bytes it wants.

    `stored` gives the source's name of each target array; `places` numbers the target's boxes (name, box).
    """
    layout = Layout((name, source.arrays[stored[name]].layout) for name in target)
    copies = plan(layout, target, ranks={rank})
    rows: list[list[tuple[Segment, int, Move]]] = [[] for _ in manifests]
    for name, array in copies.items():
        joint_array = source.arrays[stored[name]]
        by_place: dict[tuple[int, int, int], list[Move]] = {}
        for row in range(len(array)):
            peer, box, into = (
                int(array.source_holder[row]),
                int(array.source_box[row]),
                int(array.target_box[row]),
            )
            found = move(
                array.lo[row],
                array.hi[row],
                layout[name].boxes[box],
                target[name].boxes[into],
                array.itemsize,
            )
            if found is not None:
                by_place.setdefault((peer, box, into), []).append(found)
        for (peer, box, into), moves in by_place.items():
            at, number = joint_array.places[box, peer]
            for one in coalesce(moves):
                dims = tuple((count, stride) for count, stride, _ in one.dims)
                segment = Segment(at, number, one.source, one.run, dims)
                rows[peer].append((segment, places[name, into], one))
    for mine in rows:
        mine.sort(key=lambda row: (row[0].array, row[0].box, row[0].start))
    return [Route(mine, chunk_bytes, m.digest()) for mine, m in zip(rows, manifests, strict=True)]


def check_segments(
    segments: Sequence[Segment], manifest: Manifest, sizes: dict[tuple[int, int], int]
) -> None:
    """Raise TransferError unless every segment lies within the memory of its box.

    `sizes` are the bytes of each (array, box). A source serves nothing that it has not published.
    """
    for one in segments:
        size = sizes.get((one.array, one.box))
        last = one.start + one.run
        for count, stride in one.dims:
            if count < 1 or stride < 0:
                raise TransferError(f"a slice with {count} rows {stride} bytes apart makes no sense")
            last += (count - 1) * stride
        if size is None or one.start < 0 or one.run < 1 or last > size:
            shown = manifest.arrays[one.array].name if 0 <= one.array < len(manifest.arrays) else one.array
            raise TransferError(f"{shown}: bytes {one.start}..{last} asked for, {size} published")
