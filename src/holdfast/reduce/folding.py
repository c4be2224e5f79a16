"""The sums that this member holds: lanes are folded as they come, whole subtrees only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class Folder:
    """Banks by the node whose sum lies in them.

    `take` gives a free bank, `give` takes one back. In order, n lanes need log2(n) + 1 banks at most.
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
        node, chain = self._chain(lane)
        target = chain[-1].bank if chain else self._take()
        flat = [array.reshape(-1) for array in arrays]
        lane_of = _Lane(flat, [one.view(np.uint8) for one in flat])
        try:
            for sibling in chain:
                sibling.bank.void()
            target.void()
            with quiet():
                for at, block in enumerate(layout.blocks):
                    self._fold(lane_of, at, block, chain, target, scratch)
        except BaseException:
            for bank in {id(one): one for one in (target, *(sibling.bank for sibling in chain))}.values():
                self._give(bank)
            raise
        self._held[node] = target
        self._digests[lane] = lane_of.hasher.hexdigest()
        for sibling in chain[:-1]:
            self._give(sibling.bank)

    def _chain(self, lane: int) -> tuple[Node, list[_Sibling]]:
        """The node that the lane completes, and the sums on the way there, which are held no more."""
        if not 0 <= lane < self._num_lanes or lane in self.lanes():
            raise UsageError(
                f"lane {lane} cannot be added: there are {self._num_lanes} lanes, and {self.lanes()} are in"
            )
        node, chain = Node(lane, lane + 1), []
        for sibling, parent, right in climbs(lane, self._num_lanes):
            bank = self._held.pop(sibling, None)
            if bank is None:
                break
            chain.append(_Sibling(bank, right))
            node = parent
        return node, chain

    def _fold(
        self, lane: _Lane, at: int, block: Block, chain: Sequence[_Sibling], target: Bank, scratch: Scratch
    ) -> None:
        if not chain:
            lane.gather(block, target.flat.blocks[at])
            return
        value = scratch.block(0, block)
        lane.gather(block, value)
        for sibling in chain:
            other = sibling.bank.flat.blocks[at]
            out = other if sibling.bank is target else value
            if sibling.right:
                add(value, other, out)
            else:
                add(other, value, out)

    def reset(self) -> None:
        """Let all sums go: a new step begins."""
        for bank in self._held.values():
            self._give(bank)
        self._held.clear()
        self._digests.clear()

    def release(self) -> None:
        """Forget the sums without giving their banks back: they have become something else."""
        self._held.clear()


@final
class _Lane:
    """The arrays of one lane, read once: hashed and copied block by block while they are in the cache."""

    def __init__(self, flat: Sequence[npt.NDArray[Any]], raw: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._flat, self._raw = flat, raw
        self.hasher = xxhash.xxh3_128()

    def gather(self, block: Block, out: Operand) -> None:
        for entry, lo, hi, at in block.pieces:
            values = self._flat[entry]
            size = values.itemsize
            self.hasher.update(self._raw[entry][lo * size : hi * size].data)
            np.copyto(out[at : at + hi - lo], values[lo:hi], casting="unsafe")
