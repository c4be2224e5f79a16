"""The little language of `prune --keep`: `latest(3) | every(1000) | best(2, "loss")`.

It is spelled like the Python it stands for and read with Python's parser, but only calls of the rules below
with literal arguments are accepted, and nothing is evaluated.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any, Final, NamedTuple

from holdfast.checkpoint import Policy, best, every, everything, latest, within
from holdfast.errors import UsageError

_MOST: Final = 2_000
_HINT: Final = (
    'rules are latest(3), every(1000), best(2, "loss"), within(86400) and everything(); | joins them; '
    "see 'holdfast ckpt prune --help'"
)

_RULES: Final[Mapping[str, Callable[..., Policy]]] = {
    rule.__name__: rule for rule in (latest, every, best, within, everything)
}
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "count": (int,),
    "interval": (int,),
    "unit": (str,),
    "metric": (str,),
    "highest": (bool,),
    "seconds": (int, float),
    "spacing_s": (int, float),
}


class Rule(NamedTuple):
    """One rule of a policy, in words and as a policy."""

    text: str
    policy: Policy


def parsed(text: str) -> list[Rule]:
    """The rules that `text` joins with `|`. Fails: UsageError."""
    if len(text) > _MOST:
        raise UsageError(f"a policy of {len(text):,} characters; at most {_MOST:,} are read", hint=_HINT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parser's, about code that is refused below anyway
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"cannot read the policy {text!r}", hint=_HINT) from None
    return [_rule(node) for node in _terms(tree.body)]


def joined(rules: list[Rule]) -> Policy:
    """The policy that keeps what any of the rules keeps."""
    return reduce(or_, (rule.policy for rule in rules))


def _terms(node: ast.expr) -> list[ast.expr]:
    found: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        found.extend(reversed(_terms(node.right)))
        node = node.left
    return [node, *reversed(found)]


def _rule(node: ast.expr) -> Rule:
    text = ast.unparse(node)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Rule(f"latest({node.value})", _made(latest, node.value))  # as in Checkpointer(keep=3)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise UsageError(f"{text!r} is not a rule", hint=_HINT)
    name = node.func.id
    rule = _RULES.get(name)
    if rule is None:
        close = difflib.get_close_matches(name, _RULES, n=1)
        meant = f"did you mean {close[0]}? The " if close else "the "
        raise UsageError(f"there is no rule {name!r}", hint=meant + _HINT)
    return Rule(text, _called(rule, node, text))


def _called(rule: Callable[..., Policy], node: ast.Call, text: str) -> Policy:
    values = [_literal(argument, text) for argument in node.args]
    named = {keyword.arg or "**": _literal(keyword.value, text) for keyword in node.keywords}
    try:
        bound = inspect.signature(rule).bind(*values, **named)
    except TypeError as error:
        raise UsageError(f"{text}: {error}", hint=_HINT) from None
    for name, value in bound.arguments.items():
        # Exact types: True is an int to Python, but not a number of steps to anybody.
        if type(value) not in _TYPES[name]:
            wanted = " or ".join(kind.__name__ for kind in _TYPES[name])
            raise UsageError(f"{text}: {name} is {value!r}, not {wanted}", hint=_HINT)
    return _made(rule, *values, **named)


def _made(rule: Callable[..., Policy], *values: Any, **named: Any) -> Policy:
    try:
        return rule(*values, **named)
    except UsageError as error:
        raise UsageError(error.message, hint=error.hint or _HINT) from None


def _literal(node: ast.expr, text: str) -> Any:
    if not isinstance(node, ast.Constant):
        raise UsageError(f"{text}: {ast.unparse(node)!r} is not a plain number or word", hint=_HINT)
    return node.value
