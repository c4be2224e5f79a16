"""Which tensors of a repository make up each leaf of a tree, and how: rules that can be read both ways.

Pure: names and shapes in, `Woven` leaves or the reasons against them out. Nothing here knows a file.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, Final, NamedTuple, final

import msgspec

from holdfast.arrays import split
from holdfast.checkpoint.hub import axes as notation
from holdfast.checkpoint.hub.axes import Pattern
from holdfast.checkpoint.hub.weaving import Strand, Woven, woven
from holdfast.errors import UsageError

Shape = tuple[int, ...]
ShapeOf = Callable[[str], Shape | None]
"""The shape of a tensor by name; None where it is not known, as it is before an export."""

_PLACE: Final = re.compile(r"\{([a-z_]\w*)(\*?)\}")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One leaf, or the like leaves of all layers, and the tensors behind it.

        Rule("layers/{n}/up", "model.layers.{n}.mlp.up_proj.weight", "out in -> in out")

    `{n}` stands for a number, `{name*}` for any text without dot or slash. One that only the tensor's name
    has is stacked: an axis of that name is a dim of the leaf, the first if there is no pattern.
    """

    leaf: str
    """The leaf's name: its path in the tree, joined by slashes."""
    tensors: str | Sequence[str]
    """The tensor's name; several lie side by side along `join`."""
    pattern: str = ""
    """How dims are reordered, `(kv g d) h -> h kv g d`; empty: as they are."""
    join: str = ""
    """The axis along which several tensors lie side by side."""
    parts: Sequence[int] = ()
    """The size of each along it; empty: as their shapes say, and for an export equal ones."""
    take: tuple[str, int, int] | None = None
    """(axis, start, stop): the leaf has this part of the axis, and other leaves the others. Of one index
    alone the leaf's side of the pattern need not name the axis."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of axes that the shapes of leaf and tensor leave open; that of an axis that is taken from."""
    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """What a stacked `{n}` runs over; without it from 0 on."""
    tied: str = ""
    """The tensor to read where the first is not in the repository: a head that is the embedding."""

    def __post_init__(self) -> None:
        count = len(self.names)
        if not count:
            raise UsageError(f"the rule for {self.leaf!r} names no tensor")
        if bool(self.join) != (count > 1):
            raise UsageError(
                f"the rule for {self.leaf!r} has {count} tensors and join={self.join!r}",
                hint="join names the axis along which several tensors lie side by side",
            )
        if self.parts and len(self.parts) != count:
            raise UsageError(f"the rule for {self.leaf!r} has {count} tensors and parts={self.parts}")
        if self.pattern:
            self._check_axes(notation.parsed(self.pattern))
        elif self.join or self.take:
            raise UsageError(f"the rule for {self.leaf!r} has an axis but no pattern that names it")

    def _check_axes(self, pattern: Pattern) -> None:
        left = {axis for group in pattern.tensor for axis in group}
        right = {axis for group in pattern.leaf for axis in group}
        stacked = set(self.stacked)
        if self.take is not None and self.take[2] - self.take[1] == 1:
            right.add(self.take[0])  # one of an axis: the leaf need not name it
        if left | stacked != right or left & stacked:
            odd = sorted((left | stacked) ^ right or left & stacked)
            raise UsageError(
                f"the rule for {self.leaf!r}: {self.pattern!r} has {', '.join(odd)} on one side only",
                hint="both sides name the same axes; the leaf's also a {number} that only the tensors have",
            )
        taken = () if self.take is None else (self.take[0],)
        for axis in (*([self.join] if self.join else []), *taken, *self.sizes):
            if axis not in right:
                raise UsageError(f"the rule for {self.leaf!r} speaks of {axis!r}, which its pattern lacks")
        if self.take is not None:
            axis, start, stop = self.take
            if axis not in self.sizes or axis == self.join or not 0 <= start < stop <= self.sizes[axis]:
                raise UsageError(
                    f"the rule for {self.leaf!r} takes {start}..{stop} of {axis!r}",
                    hint=f"sizes={{{axis!r}: ...}} says how many there are in the tensor",
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, by name."""
        return (self.tensors,) if isinstance(self.tensors, str) else tuple(self.tensors)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The numbers that only the tensors have, in order."""
        own = {name for name, _ in _PLACE.findall(self.leaf)}
        found = [name for text in self.names for name, _ in _PLACE.findall(text) if name not in own]
        return tuple(dict.fromkeys(found))


class Found(NamedTuple):
    """The rule for a leaf, and what its placeholders stand for."""

    rule: Rule
    bound: dict[str, str]

    def speaks_of(self, tensor: str) -> bool:
        """Whether the rule names this tensor for the leaf, fit or not."""
        texts = (*self.rule.names, *([self.rule.tied] if self.rule.tied else []))
        return any(_regex(_filled(text, self.bound)).fullmatch(tensor) for text in texts)


@final
class NameMap:
    """The rules of a model, first match first.

    `ignore` has patterns (`*.inv_freq`) of tensors that a repository may have and no leaf needs. With `rest`,
    leaves that no rule names are tensors of the same name: the keys of their path, joined by dots.
    """

    def __init__(self, rules: Iterable[Rule] = (), *, ignore: Iterable[str] = (), rest: bool = False) -> None:
        self.rules = tuple(rules)
        self.ignore = tuple(ignore)
        self.rest = rest
        self._exact: dict[str, Rule] = {}
        self._open: list[tuple[re.Pattern[str], Rule]] = []
        for rule in self.rules:
            if _PLACE.search(rule.leaf):
                self._open.append((_regex(rule.leaf), rule))
            else:
                self._exact.setdefault(rule.leaf, rule)

    @staticmethod
    def from_json(text: str | bytes) -> NameMap:
        """The map that a JSON object with `rules`, `ignore` and `rest` holds. Fails: UsageError."""
        try:
            found = msgspec.json.decode(text, type=_Written)
            known = {one.name for one in fields(Rule)}
            if odd := sorted({name for rule in found.rules for name in rule} - known):
                raise UsageError(f"a rule has no {', '.join(odd)}", hint=f"it has {', '.join(sorted(known))}")
            rules = msgspec.convert(found.rules, list[Rule])
            return NameMap(rules, ignore=found.ignore, rest=found.rest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(
                f"this is no mapping: {error}",
                hint='{"rules": [{"leaf": "embed", "tensors": ["model.embed_tokens.weight"]}], "ignore": []}',
            ) from None

    def rule(self, leaf: str) -> Found | None:
        """The rule for a leaf."""
        if leaf in self._exact:
            return Found(self._exact[leaf], {})
        for regex, rule in self._open:
            if found := regex.fullmatch(leaf):
                return Found(rule, found.groupdict())
        if self.rest:
            return Found(Rule(_literal(leaf), (_literal(".".join(split(leaf))),)), {})
        return None

    def ignores(self, tensor: str) -> bool:
        """Whether a repository may have this tensor although no leaf needs it."""
        return any(fnmatch.fnmatchcase(tensor, one) for one in self.ignore)


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    rules: list[dict[str, Any]] = []
    ignore: list[str] = []
    rest: bool = False


def _literal(name: str) -> str:
    # A brace in a name would be taken for a placeholder; safetensors and paths allow them, nobody uses them.
    if _PLACE.search(name):
        raise UsageError(f"the name {name!r} looks like a pattern", hint="rename the leaf")
    return name


def _regex(pattern: str) -> re.Pattern[str]:
    text, at = "", 0
    for place in _PLACE.finditer(pattern):
        text += re.escape(pattern[at : place.start()])
        inside = r"[^./]+" if place[2] else r"\d+"
        text += f"(?P<{place[1]}>{inside})" if f"(?P<{place[1]}>" not in text else f"(?P={place[1]})"
        at = place.end()
    return re.compile(text + re.escape(pattern[at:]))


def _filled(pattern: str, bound: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda place: bound.get(place[1], place[0]), pattern)


# ---- from a rule to the strands of a leaf


def leaf_of(found: Found, shape: Shape, tensor_shape: ShapeOf) -> tuple[Woven | None, list[str]]:
    """How a leaf of this shape is woven from tensors, or why it cannot be.

    `tensor_shape` tells shapes that are known; sizes that it leaves open must follow from leaf and rule.
    """
    rule = found.rule
    stacked = rule.stacked
    pattern = (
        notation.parsed(rule.pattern)
        if rule.pattern
        else notation.unchanged(max(0, len(shape) - len(stacked)), stacked)
    )
    sizes = {axis: size for axis, size in rule.sizes.items() if rule.take is None or axis != rule.take[0]}
    if rule.take is not None:
        sizes[rule.take[0]] = rule.take[2] - rule.take[1]
    for _ in range(2):
        if not notation.fit(pattern.leaf, shape, sizes):
            return None, [f"shape {list(shape)} is not what {rule.pattern or 'its rule'!r} makes"]
    numbers, problem = _numbers(rule, sizes)
    if problem:
        return None, [problem]
    names = {
        (part, *at): _filled(text, {**found.bound, **dict(zip(stacked, map(str, at), strict=True))})
        for part, text in enumerate(rule.names)
        for at in product(*numbers)
    }
    if rule.tied and not rule.join and not stacked and tensor_shape(names[(0,)]) is None:
        other = _filled(rule.tied, found.bound)
        if tensor_shape(other) is not None:
            names[(0,)] = other
    parts, problems = _parts(rule, pattern, sizes, names, tensor_shape)
    if problems:
        return None, problems
    index = [{number: at for at, number in enumerate(run)} for run in numbers]
    strands = {
        (key[0], *(index[axis][number] for axis, number in enumerate(key[1:]))): _strand(
            pattern, name, parts[key[0]][1]
        )
        for key, name in names.items()
    }
    total = {**sizes, **({rule.join: sum(one[0] for one in parts)} if rule.join else {})}
    if notation.extents(pattern.leaf, total) != shape:
        told = notation.extents(pattern.leaf, total)
        return None, [
            f"shape {list(shape)} wanted, {list(told or ())} in {', '.join(dict.fromkeys(names.values()))}"
        ]
    cut = [part for part, _ in parts]
    return woven(pattern.leaf, total, stacked, rule.join, cut, rule.take, strands), []


def _numbers(rule: Rule, sizes: dict[str, int]) -> tuple[list[tuple[int, ...]], str]:
    """What each stacked placeholder runs over."""
    found = []
    for axis in rule.stacked:
        run = tuple(rule.numbers.get(axis, range(sizes.get(axis, 0))))
        if axis in sizes and len(run) != sizes[axis]:
            return [], f"{sizes[axis]} are stacked in the leaf, and the rule gives {len(run)} numbers {axis}"
        sizes[axis] = len(run)
        found.append(run)
    return found, ""


def _parts(
    rule: Rule,
    pattern: Pattern,
    sizes: dict[str, int],
    names: Mapping[tuple[int, ...], str],
    tensor_shape: ShapeOf,
) -> tuple[list[tuple[int, dict[str, int]]], list[str]]:
    """For each tensor of a join its size along it, and the sizes of all its axes; or what does not fit."""
    found: list[tuple[int, dict[str, int]]] = []
    problems: list[str] = []
    total = sizes.pop(rule.join, None) if rule.join else None
    for part in range(len(rule.names)):
        own = {axis: size for axis, size in sizes.items() if axis not in rule.stacked}
        if rule.take is not None:
            own[rule.take[0]] = rule.sizes[rule.take[0]]
        if rule.join and rule.parts:
            own[rule.join] = rule.parts[part]
        mine = [name for key, name in names.items() if key[0] == part]
        shapes = {name: tensor_shape(name) for name in mine}
        if rule.join and rule.join not in own and total is not None and not any(shapes.values()):
            own[rule.join] = total // len(rule.names)
        wanted = notation.extents(pattern.tensor, own)
        for name, shape in shapes.items():
            if shape is None:
                continue
            if not (notation.fit(pattern.tensor, shape, own) and notation.fit(pattern.tensor, shape, own)):
                want = "" if wanted is None else f", {list(wanted)} wanted"
                problems.append(f"{name} has the shape {list(shape)}{want}")
        if notation.extents(pattern.tensor, own) is None and not problems:
            lost = sorted({a for group in pattern.tensor for a in group if a not in own})
            problems.append(f"the rule leaves open how large {', '.join(lost)} is: give sizes= or parts=")
        if not problems:
            for axis, size in own.items():
                if axis != rule.join and (rule.take is None or axis != rule.take[0]):
                    sizes[axis] = size
        found.append((own.get(rule.join, 0), own))
    return found, problems


def _strand(pattern: Pattern, name: str, sizes: dict[str, int]) -> Strand:
    shape = notation.extents(pattern.tensor, sizes)
    assert shape is not None, "sizes are complete here"
    return Strand(name, shape, notation.strides(pattern.tensor, sizes))
