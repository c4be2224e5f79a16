"""How the bytes of a chunk lie in memory, and how to hash them.

What is contiguous goes from memory to the socket and from the socket to memory in place. What is strided, or
so small that a view of its own would cost more than a copy, goes through scratch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.arrays import Bytes1D, Move
from holdfast.arrays.copying import Batch, Numbers, address_of
from holdfast.errors import LayoutError
from holdfast.transfer.route import Piece, Stream

SMALL: Final = 16 << 10
"""Up to here a piece is copied. It bounds the views of a chunk, of which a call takes 1,024."""
BLOCK: Final = 256 << 10
"""What is hashed while it is in the cache: measured, four times as fast as from memory. So small that what is
copied and its copy both fit, beside what else the core is at."""
SPAN: Final = 128 << 20
DIGEST_BYTES: Final = 16


class Part(NamedTuple):
    """A stretch of a chunk that is contiguous in the memory `place`, or in scratch if that is -1."""

    place: int
    start: int
    stop: int


Views = list[Any]
"""Buffers, one after the other."""


@final
class Cut:
    """A chunk cut for the memories it lies in."""

    __slots__ = ("_back", "_blocks", "_columns", "_moves", "_parts", "nbytes")

    def __init__(self, pieces: Sequence[Piece], nbytes: int, small: int = SMALL) -> None:
        self.nbytes = nbytes
        parts: list[Part] = []
        moves: list[tuple[int, Move]] = []
        back: list[tuple[int, Move]] = []
        for place, move in pieces:
            size = move.nbytes
            direct = not move.dims and size > small
            if not direct:
                moves.append((place, move))
                back.append((place, turned(move)))
            start = move.target if direct else move.source
            part = Part(place if direct else -1, start, start + size)
            if parts and parts[-1].place == part.place and parts[-1].stop == part.start:
                part = Part(part.place, parts.pop().start, part.stop)
            parts.append(part)
        self._parts = parts
        self._blocks = _in_blocks(parts)
        self._moves = moves
        self._back = back
        self._columns: npt.NDArray[np.int64] | None = None

    @property
    def scratch_bytes(self) -> int:
        """How much scratch it needs."""
        return self.nbytes if self._moves else 0

    def blocks(self, memories: Sequence[Bytes1D], scratch: Bytes1D, *, hashed: bool = True) -> list[Views]:
        """The bytes of the chunk in their order, in blocks that fit a cache; in one if they are not hashed.

        Every view costs some Python that the chunk before has pushed out of the cache, so few are better.
        """
        memory, at = scratch.data, -1
        found: list[Views] = []
        for block in self._blocks if hashed else (self._parts,):
            views: Views = []
            for place, start, stop in block:
                if place != at:
                    memory, at = (scratch if place < 0 else memories[place]).data, place
                views.append(memory[start:stop])
            found.append(views)
        return found

    def stretches(self, memories: Memories, scratch: Bytes1D) -> Numbers:
        """Address and size of each stretch of the chunk, in their order; who uses them keeps both.

        Fails: LayoutError if one lies outside.
        """
        if self._columns is None:  # scratch is the last of the memories
            self._columns = np.array([(place, start, stop) for place, start, stop in self._parts], np.int64).T
        places, starts, stops = self._columns[0], self._columns[1], self._columns[2]
        sizes = np.append(memories.sizes, np.uint64(scratch.size))
        if (stops.astype(np.uint64) > sizes[places]).any():
            raise LayoutError("a chunk does not lie within its memories", hint="prepare the plan again")
        addresses = np.append(memories.addresses, np.uint64(address_of(scratch)))[places]
        found = np.empty((len(places), 2), np.uint64)
        found[:, 0], found[:, 1] = addresses + starts.astype(np.uint64), stops - starts
        return found

    def digest(self, memories: Sequence[Bytes1D], scratch: Bytes1D) -> bytes:
        """xxh3_128 of the bytes."""
        self.gather(memories, scratch)
        hasher = xxhash.xxh3_128()
        for block in self.blocks(memories, scratch):
            for view in block:
                hasher.update(view)
        return hasher.digest()

    def gather(self, memories: Sequence[Bytes1D], scratch: Bytes1D) -> None:
        """Bring into scratch what is read from there."""
        for place, move in self._back:
            copy(move, memories[place], scratch)

    def scatter(self, scratch: Bytes1D, memories: Sequence[Bytes1D]) -> None:
        """Bring to its place what was received into scratch."""
        for place, move in self._moves:
            copy(move, scratch, memories[place])


def copy(move: Move, source: Bytes1D, target: Bytes1D) -> None:
    """Apply a move that was checked before; small ones come by the thousand."""
    if move.dims:
        move.apply(source, target)
    else:
        target[move.target : move.target + move.run] = source[move.source : move.source + move.run]


def turned(move: Move) -> Move:
    """The copy in the other direction."""
    return Move(move.target, move.source, move.run, tuple((n, to, at) for n, at, to in move.dims))


@final
class Cuts:
    """The chunks of a stream, each cut when it is first asked for.

    Pieces of up to `small` bytes go through scratch; none need to that are only hashed.
    """

    def __init__(self, stream: Stream, small: int = SMALL) -> None:
        self.stream = stream
        self._small = small
        self._cuts: list[Cut | None] = [None] * stream.num_chunks

    def __getitem__(self, chunk: int) -> Cut:
        found = self._cuts[chunk]
        if found is None:
            found = self._cuts[chunk] = Cut(self.stream.pieces(chunk), self.stream.size(chunk), self._small)
        return found


@final
class Memories(list[Bytes1D]):
    """The memory of each place of a stream, and where it lies."""

    @cached_property
    def addresses(self) -> Numbers:
        """One for each, in bytes."""
        return np.array([address_of(memory) for memory in self], np.uint64)

    @cached_property
    def sizes(self) -> Numbers:
        """Those of the memories, in bytes."""
        return np.array([memory.size for memory in self], np.uint64)


@final
class Copies:
    """A stream as copies from source memory straight to target memory, `nbytes` of it at a time."""

    def __init__(self, source: Stream, target: Stream, nbytes: int) -> None:
        self._source = source.recut(nbytes)
        self._target = target.recut(nbytes)
        self._found: list[list[tuple[int, Move]] | None] = [None] * self._source.num_chunks
        self._groups: dict[range, Groups] = {}

    def __len__(self) -> int:
        return len(self._found)

    def groups(self, numbers: range) -> Groups:
        """Some of them, to be made by one call each."""
        found = self._groups.get(numbers)
        if found is None:
            found = self._groups[numbers] = Groups([self[number] for number in numbers])
        return found

    def make(self, number: int, memories: Memories, target: Bytes1D) -> None:
        """Copy one of them, past the cache: for bytes that nobody looks at next."""
        group = self.groups(range(number, number + 1))
        group.between(memories, target).stream(0, group.ends[0])
        for place, one in group.strided:
            one.apply(memories[place], target)

    def __getitem__(self, number: int) -> list[tuple[int, Move]]:
        """(source memory, copy) of one of them; the target's memory is one.

        Both streams are packed alike, so they are cut alike: piece by piece one gives the source of a copy
        and the other its target.
        """
        found = self._found[number]
        if found is None:
            pairs = zip(self._source.pieces(number), self._target.pieces(number), strict=True)
            found = self._found[number] = [(a.place, _joined(a.move, b.move)) for a, b in pairs]
        return found


@final
class Groups:
    """Copies of contiguous bytes as columns of numbers; those of group i end before number `ends[i]`.

    The strided ones are kept apart.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[int, Move]]]) -> None:
        # Ends are summed here, as Python's integers: a sum that wrapped around would pass for one within.
        rows = [
            [
                (place, one.source, one.target, one.run, one.source + one.run)
                for place, one in group
                if not one.dims
            ]
            for group in groups
        ]
        self.ends = list(itertools.accumulate(map(len, rows)))
        flat = list(itertools.chain.from_iterable(rows))
        table = np.array(flat, np.uint64).reshape(-1, 5)
        self._places = table[:, 0].astype(np.intp)
        self._sources, self._targets, self._sizes, self._source_ends = (
            np.ascontiguousarray(table[:, at]) for at in (1, 2, 3, 4)
        )
        self._target_end = max((target + run for _, _, target, run, _ in flat), default=0)
        self.strided = [copy for group in groups for copy in group if copy[1].dims]

    def between(self, memories: Memories, target: Bytes1D) -> Batch:
        """The copies between these; who makes them keeps both. Fails: LayoutError if one lies outside."""
        if (self._source_ends > memories.sizes[self._places]).any() or self._target_end > target.size:
            raise LayoutError(
                "a copy does not lie within the memories that it is made between: the source has "
                f"{int(memories.sizes.sum()):,} bytes, the target {target.size:,} of {self._target_end:,}",
                hint="source and target disagree about a plan: prepare it again",
            )
        sources = memories.addresses[self._places] + self._sources
        return Batch(address_of(target), self._targets, sources, self._sizes)


def span_chunks(stream: Stream, workers: int) -> int:
    """How many chunks to copy at once where nothing is hashed.

    Many: what a call costs is paid for once, and without our own copies the C library writes past the cache
    only what is large.
    """
    return max(1, min(-(-stream.num_chunks // workers), SPAN // stream.chunk_bytes))


def _joined(source: Move, target: Move) -> Move:
    dims = tuple((n, at, to) for (n, _, at), (_, _, to) in zip(source.dims, target.dims, strict=True))
    return Move(source.target, target.target, source.run, dims)


def _in_blocks(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts, cut so that they form blocks of BLOCK bytes."""
    blocks: list[list[Part]] = [[]]
    room = BLOCK
    for place, start, stop in parts:
        at = start
        while at < stop:
            if not room:
                blocks.append([])
                room = BLOCK
            end = min(stop, at + room)
            blocks[-1].append(Part(place, at, end))
            room -= end - at
            at = end
    return blocks
