"""Names that change on the way, by rules such as `model=params` and `layers/*/w=blocks/*/kernel`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from holdfast.arrays import Rename, split
from holdfast.errors import TreeError, UsageError

_HINT = "a rule reads OLD=NEW, both as names: 'model=params', 'layers/*/w=blocks/*/kernel'"


def renaming(rules: Rename | None) -> Callable[[str], str]:
    """The function that gives a name its new one.

    A mapping has rules: OLD is a name or the beginning of one, whole components long; each `*` in it stands
    for one component, and the `*` of NEW for the same ones in order. The first rule that fits counts. An
    empty OLD fits everything and puts NEW in front; an empty NEW takes OLD away. Fails: UsageError.
    """
    if rules is None:
        return lambda name: name
    if not isinstance(rules, Mapping):
        return _checked(rules)
    compiled = [_rule(old, new) for old, new in rules.items()]

    def renamed(name: str) -> str:
        for rule in compiled:
            found = rule(name)
            if found is not None:
                return found
        return name

    return _checked(renamed)


def parsed_rules(texts: Iterable[str]) -> dict[str, str]:
    """The rules that a person typed as OLD=NEW. Fails: UsageError."""
    rules: dict[str, str] = {}
    for text in texts:
        old, sign, new = text.partition("=")
        if not sign or old in rules:
            raise UsageError(f"{text!r} is no rule, or its OLD was given before", hint=_HINT)
        rules[old] = new
    return rules


def _rule(old: str, new: str) -> Callable[[str], str | None]:
    if old.count("*") < new.count("*"):
        raise UsageError(f"{old}={new} has more * on the right than on the left", hint=_HINT)
    body = "([^/]+)".join(map(re.escape, old.strip("/").split("*")))
    pattern = re.compile(f"{body}(?:(?<!^)/(.+))?" if body else "(.*)", re.DOTALL)
    stars = new.strip("/").split("*")

    def renamed(name: str) -> str | None:
        found = pattern.fullmatch(name)
        if found is None:
            return None
        *taken, rest = found.groups()
        head = stars[0] + "".join(f"{one}{after}" for one, after in zip(taken, stars[1:], strict=False))
        return "/".join(part for part in (head, rest) if part)

    return renamed


def _checked(rename: Callable[[str], str]) -> Callable[[str], str]:
    def renamed(name: str) -> str:
        found: object = rename(name)
        if not isinstance(found, str):
            raise UsageError(f"{name} would be renamed to {found!r}, which is no name", hint=_HINT)
        try:
            split(found)
        except TreeError as error:
            raise UsageError(
                f"{name} would be renamed to {found!r}: {error.message}", hint=error.hint
            ) from None
        return found

    return renamed
