"""What an export writes: every tensor that the leaves of a tree make up, and the files they go into. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, final

from holdfast.arrays import TABLE, DType
from holdfast.checkpoint.hub.mapping import NameMap, Rule, leaf_of
from holdfast.checkpoint.hub.matching import untaken
from holdfast.checkpoint.hub.packed import WORD_OF, file_bytes
from holdfast.checkpoint.hub.repository import SINGLE
from holdfast.checkpoint.hub.weaving import Cell, Shape, Woven
from holdfast.errors import MismatchError, UsageError
from holdfast.format import Tensor


class Described(NamedTuple):
    """A leaf that is to be exported."""

    name: str
    dtype: DType
    shape: Shape


class Given(NamedTuple):
    """Cells of a leaf that are, together, a tensor or its part of one."""

    leaf: int
    cells: tuple[int, ...]
    rule: Rule


@final
@dataclass(frozen=True, slots=True)
class Made:
    """A tensor of the export; `tied` are leaves that hold the same once more, and must be equal."""

    name: str
    shape: Shape
    dtype: DType
    given: list[Given] = field(default_factory=list)
    tied: list[Given] = field(default_factory=list)

    @property
    def word(self) -> str:
        """What safetensors calls its dtype."""
        return WORD_OF[self.dtype.name]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return file_bytes(self.word, self.num_elements)


@final
class Export:
    """The tensors of a tree. Fails: MismatchError, which lists everything that cannot be written."""

    def __init__(self, leaves: Sequence[Described], names: NameMap, dtype: str | None) -> None:
        if dtype is not None and dtype not in TABLE:
            raise UsageError(f"there is no dtype {dtype!r}", hint=f"one of {', '.join(WORD_OF)}")
        self.leaves = leaves
        self.woven: dict[int, Woven] = {}
        self.tensors: dict[str, Made] = {}
        self._names = names
        self._used: set[int] = set()
        self._dtype = None if dtype is None else TABLE[dtype]
        problems: list[str] = []
        for number, leaf in enumerate(leaves):
            problems += self._add(number, leaf)
        for made in self.tensors.values():
            problems += _coverage(made)
        problems += [
            f"{rule.leaf}: the mapping has a rule for it, and there is no such leaf"
            for rule in names.rules
            if id(rule) not in self._used
        ]
        if not self.tensors and not problems:
            problems.append("there is no leaf to export")
        if problems:
            raise MismatchError(
                dict.fromkeys(problems),
                source="mapping",
                hint="every leaf needs a rule that says all sizes, and every tensor all its elements",
            )

    def _add(self, number: int, leaf: Described) -> list[str]:
        found = self._names.rule(leaf.name)
        if found is None:
            return [f"{leaf.name}: no rule of the mapping names this leaf"]
        self._used.add(id(found.rule))
        kind = leaf.dtype if self._dtype is None else self._dtype
        if kind.name not in WORD_OF:
            return [f"{leaf.name}: safetensors has no dtype {kind.name} (dtype= converts)"]
        woven, problems = leaf_of(found, leaf.shape, lambda _: None)
        if woven is None:
            return [f"{leaf.name}: {problem}" for problem in problems]
        self.woven[number] = woven
        cells: dict[str, list[int]] = {}
        for at, cell in enumerate(woven.cells):
            cells.setdefault(cell.strand.tensor, []).append(at)
        problems = []
        for strand in woven.strands:
            made = self.tensors.setdefault(strand.tensor, Made(strand.tensor, strand.shape, kind))
            if (made.shape, made.dtype) != (strand.shape, kind):
                problems.append(
                    f"{strand.tensor}: {leaf.name} makes it {kind.name}{list(strand.shape)}, another leaf "
                    f"{made.dtype.name}{list(made.shape)}"
                )
            whole = found.rule.take is None
            given = Given(number, tuple(cells[strand.tensor]), found.rule)
            (made.tied if whole and made.given else made.given).append(given)
        return problems

    def cell(self, leaf: int, number: int) -> Cell:
        """One cell of a leaf."""
        return self.woven[leaf].cells[number]


def _coverage(made: Made) -> list[str]:
    """Why the leaves do not make up the tensor exactly once."""
    rules = [given.rule for given in made.given]
    takes = sorted((rule.take for rule in rules if rule.take is not None), key=lambda take: take[1:])
    if not takes:
        return []
    if len(takes) < len(rules) or made.tied or len({take[0] for take in takes}) > 1:
        return [f"{made.name}: its leaves take parts of it along different axes"]
    if gap := untaken(rules):
        return [f"{made.name}: no leaf has {gap}"]
    for (axis, _, stop), (_, start, _) in pairwise(takes):
        if start < stop:
            return [f"{made.name}: two leaves have {axis} {start}..{stop}"]
    return []


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, and its tensors in order."""

    name: str
    tensors: tuple[Made, ...]

    def entries(self) -> list[Tensor]:
        """The tensors as the header has them."""
        found, at = [], 0
        for made in self.tensors:
            found.append(Tensor(made.name, made.word, made.shape, at, at + made.nbytes))
            at += made.nbytes
        return found


def sharded(tensors: Iterable[Made], shard_bytes: int) -> list[Shard]:
    """The files of an export, none larger than `shard_bytes` unless a single tensor is.

    Wide elements come first, so that each tensor is aligned to its own, as the reference writer has it; apart
    from that in the order of the leaves, so that each leaf is at hand once.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes={shard_bytes}", hint="the most bytes of tensors in one file")
    groups: list[list[Made]] = [[]]
    filled = 0
    for made in sorted(tensors, key=lambda one: (file_bytes(one.word, 8) % 8 != 0, -one.dtype.itemsize)):
        if groups[-1] and filled + made.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(made)
        filled += made.nbytes
    if len(groups) == 1:
        return [Shard(SINGLE, tuple(groups[0]))]
    count = len(groups)
    return [
        Shard(f"model-{at + 1:05d}-of-{count:05d}.safetensors", tuple(group))
        for at, group in enumerate(groups)
    ]


def weight_map(shards: Sequence[Shard]) -> Mapping[str, str]:
    """Which file has which tensor."""
    return {made.name: shard.name for shard in shards for made in shard.tensors}
