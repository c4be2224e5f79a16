"""Where the values of an export come from: live arrays, or a committed step.

A source gives, for a tensor, the copies that a load would make out of it, and the memory of the leaf that
they would fill; run from right to left they make the tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, final

from holdfast.arrays import (
    Bytes1D,
    DType,
    Layout,
    Move,
    adapter_of,
    adapters,
    flatten_tree,
    plan,
)
from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.hub.mapping import NameMap
from holdfast.checkpoint.hub.tensors import Described, Export, Given, Made
from holdfast.checkpoint.step_reader import StepReader
from holdfast.errors import TreeError, UsageError
from holdfast.format import ArrayEntry

Piece = tuple[Move, Bytes1D, DType]
"""A copy out of a tensor, which is made backwards, and the memory of the leaf that it speaks of."""


class Source(ABC):
    """The memory behind the tensors, in the order in which they are written."""

    @abstractmethod
    def begin(self, tensors: Sequence[Made]) -> None:
        """Told once all tensors, in the order of their writing."""

    @abstractmethod
    def pieces(self, made: Made, given: Sequence[Given]) -> list[Piece]:
        """The copies that some leaves' cells of a tensor are."""

    @abstractmethod
    def done(self, made: Made) -> None:
        """This tensor is written; what it alone needed may go."""


@final
class Live(Source):
    """Arrays of a framework."""

    def __init__(self, export: Export, leaves: Sequence[Any], layouts: Layout, local: Sequence[Any]) -> None:
        self._export = export
        self._leaves = leaves
        self._layouts = layouts
        self._local = local
        self._hosts: dict[tuple[int, int], Bytes1D] = {}
        self._users: Counter[int] = Counter()
        source = Layout(
            (leaf.name, export.woven[number].layout(leaf.dtype.name))
            for number, leaf in enumerate(export.leaves)
        )
        self._plan = plan(source, layouts, ranks={0})
        self._rows: dict[int, dict[int, list[int]]] = {}

    def begin(self, tensors: Sequence[Made]) -> None:
        for made in tensors:
            self._users.update({given.leaf for given in (*made.given, *made.tied)})

    def pieces(self, made: Made, given: Sequence[Given]) -> list[Piece]:
        return [piece for one in given for cell in one.cells for piece in self._cell(one.leaf, cell)]

    def _cell(self, number: int, cell: int) -> Iterator[Piece]:
        leaf = self._export.leaves[number]
        rows, layout = self._plan[leaf.name], self._layouts[leaf.name]
        if number not in self._rows:
            by_cell: dict[int, list[int]] = {}
            for row, one in enumerate(rows.source_box.tolist()):
                by_cell.setdefault(one, []).append(row)
            self._rows[number] = by_cell
        for row in self._rows[number].get(cell, ()):
            box = int(rows.target_box[row])
            move = self._export.cell(number, cell).move(
                rows.lo[row].tolist(), rows.hi[row].tolist(), layout.boxes[box].tolist()
            )
            yield move, self._host(number, box), leaf.dtype

    def _host(self, number: int, box: int) -> Bytes1D:
        if (number, box) not in self._hosts:
            adapter, ordinals = self._local[number]
            self._hosts[number, box] = adapter.host(self._leaves[number], ordinals[box])
        return self._hosts[number, box]

    def done(self, made: Made) -> None:
        for number in {given.leaf for given in (*made.given, *made.tied)}:
            self._users[number] -= 1
            if not self._users[number]:
                self._rows.pop(number, None)
                for key in [key for key in self._hosts if key[0] == number]:
                    del self._hosts[key]


def live_source(tree: Any, names: NameMap, dtype: str | None) -> tuple[Export, Live]:
    flat, known = flatten_tree(tree), adapters()
    described: list[Described] = []
    layouts = []
    local = []
    for name, leaf in zip(flat.names(), flat.leaves, strict=True):
        adapter = adapter_of(leaf, known)
        if adapter is None:
            raise TreeError(f"{name} is a Python scalar, and repositories hold arrays", hint="leave it out")
        found = adapter.describe(leaf, 0, 1)
        if found.kind == "key":
            raise TreeError(f"{name} is a PRNG key, and repositories hold plain arrays", hint="leave it out")
        if min(found.local, default=0) < 0:
            raise UsageError(
                f"{name} lies on several processes",
                hint="save a checkpoint with all of them, and export that: export_hub",
            )
        described.append(Described(name, dtype_of(found.layout.dtype), found.layout.shape))
        layouts.append((name, found.layout))
        local.append((adapter, found.local))
    for adapter, _ in {id(one[0]): one for one in local}.values():
        adapter.ready([leaf for leaf, own in zip(flat.leaves, local, strict=True) if own[0] is adapter])
    export = Export(described, names, dtype)
    return export, Live(export, flat.leaves, Layout(layouts), local)


@final
class Stored(Source):
    """A committed step; a cell is read, verified, when its tensor is due."""

    def __init__(self, export: Export, reader: StepReader, entries: Sequence[ArrayEntry]) -> None:
        self._export = export
        self._reader = reader
        self._entries = entries

    def begin(self, tensors: Sequence[Made]) -> None:
        """Nothing is kept from one tensor to the next."""

    def pieces(self, made: Made, given: Sequence[Given]) -> list[Piece]:
        found: list[Piece] = []
        for leaf, number in ((one.leaf, number) for one in given for number in one.cells):
            cell = self._export.cell(leaf, number)
            box = tuple(zip(cell.lo, cell.hi, strict=True))
            data = self._reader.read(self._entries[leaf], box)
            found.append((cell.move(cell.lo, cell.hi, box), data, self._export.leaves[leaf].dtype))
        return found

    def done(self, made: Made) -> None:
        """Nothing is kept."""
