"""A template matched with a repository: what each leaf is woven from, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from holdfast.arrays import Adapter, FlatTree, Sink, adapter_of, adapters, flatten_tree, match
from holdfast.arrays import dtype as dtype_of
from holdfast.checkpoint.hub.mapping import Found, NameMap, Rule, leaf_of
from holdfast.checkpoint.hub.repository import Repository
from holdfast.checkpoint.hub.weaving import Woven
from holdfast.errors import MismatchError, TreeError

_HINT: Final = (
    "the mapping says which tensors make up which leaf; its ignore= lists tensors that are not needed, "
    "cast=True converts dtypes, strict=False leaves missing leaves as they are and passes over extra tensors"
)


@final
@dataclass(frozen=True, slots=True)
class MatchedLeaf:
    """One leaf of the template that the repository fills; `at` is its place in the flat tree."""

    at: int
    name: str
    adapter: Adapter
    sink: Sink
    woven: Woven

    @property
    def dtype(self) -> str:
        """What is wanted."""
        return self.sink.description.layout.dtype


@final
class Matched:
    """All leaves of a template. Fails: MismatchError, which lists every problem; no data has been read."""

    def __init__(
        self,
        repository: Repository,
        template: Any,
        names: NameMap,
        *,
        cast: bool | Sequence[str],
        strict: bool,
        rank: int,
        world: int,
    ) -> None:
        self._repository = repository
        self._names = names
        self._cast = cast
        self._strict = strict
        self._who = rank, world
        self.flat: FlatTree = flatten_tree(template)
        self.leaves: list[MatchedLeaf] = []
        self._used: dict[str, list[Rule]] = {}
        self._failed: list[Found] = []
        problems: list[str] = []
        known = adapters()
        for at, (name, leaf) in enumerate(zip(self.flat.names(), self.flat.leaves, strict=True)):
            problems += self._match(at, name, leaf, known)
        if strict:
            problems += self._left_over()
        if problems:
            raise MismatchError(dict.fromkeys(problems), source="repository", hint=_HINT)

    def _match(self, at: int, name: str, leaf: Any, known: Sequence[Adapter]) -> list[str]:
        adapter = adapter_of(leaf, known)
        if adapter is None:
            return [f"{name}: the template has a Python scalar, and repositories hold arrays"]
        found = self._names.rule(name)
        if found is None:
            return [f"{name}: no rule of the mapping names this leaf"] if self._strict else []
        problems = self._fill(at, name, leaf, adapter, found)
        if problems:
            self._failed.append(found)
        return problems

    def _fill(self, at: int, name: str, leaf: Any, adapter: Adapter, found: Found) -> list[str]:
        """Add a leaf; returns what is wrong with it."""
        try:
            sink = adapter.sink(leaf, *self._who)
        except TreeError as error:
            return [f"{name}: {error.message}"]
        want = sink.description
        if want.kind == "key":
            return [f"{name}: the template wants a {want.impl} PRNG key, and repositories hold plain arrays"]
        woven, problems = leaf_of(found, want.layout.shape, self._repository.shape)
        if woven is None:
            return [f"{name}: {problem}" for problem in problems]
        tensors = [strand.tensor for strand in woven.strands]
        for tensor in tensors:
            self._used.setdefault(tensor, []).append(found.rule)
        missing = [tensor for tensor in tensors if tensor not in self._repository.tensors]
        if missing:
            if not self._strict:
                return []
            return [f"{tensor} is missing (for {name})" for tensor in missing]
        problems = self._dtypes(name, tensors, want.layout.dtype)
        self.leaves.append(MatchedLeaf(at, name, adapter, sink, woven))
        return problems

    def _dtypes(self, name: str, tensors: Collection[str], wanted: str) -> list[str]:
        if self._cast is True or (self._cast is not False and match(self._cast, name)):
            return []
        have = {tensor: self._repository.tensors[tensor].dtype.name for tensor in tensors}
        return [
            f"{name}: dtype {dtype_of(wanted).name} wanted, {tensor} has {dtype} (cast=True converts)"
            for tensor, dtype in have.items()
            if dtype != wanted
        ]

    def _left_over(self) -> list[str]:
        """Tensors, and parts of tensors, that no leaf takes."""
        found = [
            f"{name} is in the repository, and no leaf takes it"
            for name in self._repository.tensors
            if name not in self._used
            and not self._names.ignores(name)
            and not any(one.speaks_of(name) for one in self._failed)
        ]
        for name, rules in self._used.items():
            gap = untaken(rules)
            if gap and not self._names.ignores(name):
                found.append(f"{name}: {gap} goes into no leaf")
        return found


def untaken(rules: Sequence[Rule]) -> str:
    """What is left of a tensor that these rules take from, in words; empty if nothing is, as far as known."""
    if any(rule.take is None for rule in rules):
        return ""
    ranges: Mapping[str, list[tuple[int, int]]] = {
        rule.take[0]: [] for rule in rules if rule.take is not None
    }
    if len(ranges) > 1:
        return ""
    ((axis, taken),) = ranges.items()
    taken += [(rule.take[1], rule.take[2]) for rule in rules if rule.take is not None]
    at = 0
    for start, stop in sorted(taken):
        if start > at:
            return f"{axis} {at}..{start}"
        at = max(at, stop)
    size = rules[0].sizes[axis]
    return f"{axis} {at}..{size}" if at < size else ""
