"""Patterns that say how the dims of a tensor become the dims of a leaf: `(kv g d) h -> h kv g d`.

The notation is that of einops (Rogozhnikov, ICLR 2022): names are axes, brackets join several into one dim
with the last one running fastest, `1` is a dim of one element. Both sides name the same axes, so a pattern
can be read in either direction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, final

from holdfast.errors import UsageError

Groups = tuple[tuple[str, ...], ...]

_TOKEN: Final = re.compile(r"\s*(?:([A-Za-z_]\w*)|(1)(?!\w)|([()]))")
_HINT: Final = "write it as '(kv g d) h -> h kv g d': the dims of the tensor, an arrow, the dims of the leaf"


@final
@dataclass(frozen=True, slots=True)
class Pattern:
    """The axes in each dim of the tensor, and of the leaf."""

    tensor: Groups
    leaf: Groups


@lru_cache(maxsize=1024)
def parsed(text: str) -> Pattern:
    """The pattern that `text` writes. Fails: UsageError."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise UsageError(f"the pattern {text!r} has no arrow", hint=_HINT)
    return Pattern(_groups(left, text), _groups(right, text))


@lru_cache(maxsize=64)
def unchanged(ndim: int, stacked: tuple[str, ...] = ()) -> Pattern:
    """Every dim as it is, behind those that are stacked."""
    same = tuple((f"_{dim}",) for dim in range(ndim))
    return Pattern(same, (*((name,) for name in stacked), *same))


def _groups(text: str, whole: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    seen: set[str] = set()
    at, text = 0, text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise UsageError(f"the pattern {whole!r} has {text[at:].strip()[:8]!r} in it", hint=_HINT)
        at = found.end()
        name, _, bracket = found.groups()
        if bracket is not None:
            if (bracket == "(") != (inside is None):
                raise UsageError(f"the brackets of the pattern {whole!r} do not match", hint=_HINT)
            if inside is not None:
                groups.append(tuple(inside))
            inside = [] if bracket == "(" else None
            continue
        if name in seen:
            raise UsageError(f"the pattern {whole!r} names {name!r} twice on one side", hint=_HINT)
        axes = () if name is None else (name,)
        seen.update(axes)
        if inside is None:
            groups.append(axes)
        else:
            inside += axes
    if inside is not None:
        raise UsageError(f"the brackets of the pattern {whole!r} do not match", hint=_HINT)
    return tuple(groups)


def fit(groups: Groups, shape: Sequence[int], sizes: dict[str, int]) -> bool:
    """Whether dims of these axes can have this shape; sizes that follow from it are put into `sizes`.

    A dim with two or more axes of unknown size tells nothing yet: True.
    """
    if len(groups) != len(shape):
        return False
    for group, size in zip(groups, shape, strict=True):
        unknown = [axis for axis in group if axis not in sizes]
        known = math.prod(sizes[axis] for axis in group if axis in sizes)
        if not unknown:
            if known != size:
                return False
        elif len(unknown) == 1 and known:
            if size % known:
                return False
            sizes[unknown[0]] = size // known
    return True


def extents(groups: Groups, sizes: dict[str, int]) -> tuple[int, ...] | None:
    """The shape that dims of these axes have; None while a size is not known."""
    if any(axis not in sizes for group in groups for axis in group):
        return None
    return tuple(math.prod(sizes[axis] for axis in group) for group in groups)


def strides(groups: Groups, sizes: dict[str, int]) -> dict[str, int]:
    """How many elements lie between two neighbours along each axis of a row-major array."""
    found: dict[str, int] = {}
    step = 1
    for group in reversed(groups):
        for axis in reversed(group):
            found[axis] = step
            step *= sizes[axis]
    return found
