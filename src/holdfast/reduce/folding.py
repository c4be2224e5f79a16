"""The sums that this member holds: lanes are folded as they come, whole subtrees only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import UsageError
from holdfast.reduce.adder import Operand, Scratch, add, quiet
from holdfast.reduce.banks import Bank
from holdfast.reduce.layout import Block, FlatLayout
from holdfast.reduce.tree import Node, climbs


class _Sibling(NamedTuple):
    bank: Bank
    right: bool


@final
class Fold:
    """One lane on its way into the sums, chunk by chunk.

    Chunks may be folded in any order, and by several threads at once if each has its own scratch memory: they
    have no byte in common, and no bit depends on it.
    """

    def __init__(
        self, lane: int, node: Node, chain: Sequence[_Sibling], target: Bank, layout: FlatLayout
    ) -> None:
        self.lane, self.node, self.target, self.layout = lane, node, target, layout
        self._chain = chain
        # What it writes to or reads from, each once: the target is the last of the chain, if there is one.
        self.banks = [sibling.bank for sibling in chain] or [target]
        self._values: list[npt.NDArray[Any]] = []
        self._raw: list[npt.NDArray[np.uint8]] = []
        self._digests = [b""] * len(layout.chunks)

    def bring(self, arrays: Iterable[npt.NDArray[Any]]) -> None:
        """The next arrays, in the order of the layout, are here. By one thread at a time."""
        flat = [array.reshape(-1) for array in arrays]
        self._values += flat
        self._raw += [one.view(np.uint8) for one in flat]

    def fold(self, number: int, scratch: Scratch) -> None:
        """Fold a chunk whose arrays are here."""
        hasher = xxhash.xxh3_128()
        for at in self.layout.chunks[number].blocks:
            self._block(at, self.layout.blocks[at], hasher, scratch)
        self._digests[number] = hasher.digest()

    def digest(self) -> str:
        """Of the whole lane, in hex: the xxh3_128 of those of its chunks, in order."""
        return xxhash.xxh3_128_hexdigest(b"".join(self._digests))

    def _block(self, at: int, block: Block, hasher: xxhash.xxh3_128, scratch: Scratch) -> None:
        if not self._chain:
            self._gather(block, self.target.flat.blocks[at], hasher)
            return
        value = scratch.block(0, block)
        self._gather(block, value, hasher)
        for sibling in self._chain:
            other = sibling.bank.flat.blocks[at]
            out = other if sibling.bank is self.target else value
            if sibling.right:
                add(value, other, out)
            else:
                add(other, value, out)

    def _gather(self, block: Block, out: Operand, hasher: xxhash.xxh3_128) -> None:
        """Read a block of the lane once: it is hashed and copied while it is in the cache."""
        for entry, lo, hi, at in block.pieces:
            values = self._values[entry]
            size = values.itemsize
            hasher.update(self._raw[entry][lo * size : hi * size].data)
            np.copyto(out[at : at + hi - lo], values[lo:hi], casting="unsafe")


@final
class Folder:
    """Banks by the node whose sum lies in them.

    `take` gives a free bank, `give` takes one back. In order, n lanes need log2(n) + 1 banks at most. Not for
    two threads at once, but for `Fold.fold`.
    """

    def __init__(self, num_lanes: int, take: Callable[[], Bank], give: Callable[[Bank], None]) -> None:
        self._num_lanes = num_lanes
        self._take, self._give = take, give
        self._held: dict[Node, Bank] = {}
        self._digests: dict[int, str] = {}

    @property
    def held(self) -> dict[Node, Bank]:
        """The sums, by node."""
        return dict(sorted(self._held.items()))

    def lanes(self) -> tuple[int, ...]:
        """The lanes in these sums."""
        return tuple(lane for node in sorted(self._held) for lane in range(*node))

    def digest(self, lane: int) -> str:
        """Of what was added for a lane. Fails: UsageError."""
        found = self._digests.get(lane)
        if found is None:
            raise UsageError(f"lane {lane} was not added in this step; {sorted(self._digests)} were")
        return found

    def add(
        self, lane: int, arrays: Sequence[npt.NDArray[Any]], layout: FlatLayout, scratch: Scratch
    ) -> None:
        """Fold a lane. If it fails in the middle, the lanes it was to be added to are not held any more."""
        fold = self.open(lane, layout)
        try:
            fold.bring(arrays)
            with quiet():
                for number in range(len(layout.chunks)):
                    fold.fold(number, scratch)
        except BaseException:
            self.drop(fold)
            raise
        self.close(fold)

    def open(self, lane: int, layout: FlatLayout) -> Fold:
        """Begin to fold a lane; `close` or `drop` it. Until then, what it is added to is not held.

        Fails: UsageError; ReduceError without memory, and then all is as before.
        """
        node, siblings = self._way(lane)
        # The only thing that can fail comes first.
        target = self._held[siblings[-1][0]] if siblings else self._take()
        chain = [_Sibling(self._held.pop(sibling), right) for sibling, right in siblings]
        fold = Fold(lane, node, chain, target, layout)
        for bank in fold.banks:
            bank.void()
        return fold

    def close(self, fold: Fold) -> None:
        """All chunks are folded: their sum is held."""
        self._held[fold.node] = fold.target
        self._digests[fold.lane] = fold.digest()
        for bank in fold.banks:
            if bank is not fold.target:
                self._give(bank)

    def drop(self, fold: Fold) -> None:
        """It failed: neither the lane nor what it was to be added to is held."""
        for bank in fold.banks:
            self._give(bank)

    def _way(self, lane: int) -> tuple[Node, list[tuple[Node, bool]]]:
        """The node that the lane completes, and the held sums on the way there."""
        if not 0 <= lane < self._num_lanes or lane in self.lanes():
            raise UsageError(
                f"lane {lane} cannot be added: there are {self._num_lanes} lanes, and {self.lanes()} are in"
            )
        node = Node(lane, lane + 1)
        siblings: list[tuple[Node, bool]] = []
        for sibling, parent, right in climbs(lane, self._num_lanes):
            if sibling not in self._held:
                break
            siblings.append((sibling, right))
            node = parent
        return node, siblings

    def reset(self) -> None:
        """Let all sums go: a new step begins."""
        for bank in self._held.values():
            self._give(bank)
        self._held.clear()
        self._digests.clear()

    def release(self) -> None:
        """Forget the sums without giving their banks back: they have become something else."""
        self._held.clear()
