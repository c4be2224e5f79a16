"""Names of array leaves: '/'-joined tree paths, and the trees they came from.

A component escapes `~` as `~0` and `/` as `~1`; the empty key is written `~2`, so no component of
a name is ever empty and `join` and `split` are inverses. The name of a tree that is itself a leaf
is the empty string.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from holdfast.errors import TreeError, UsageError

_Build = Callable[[Iterator[Any]], Any]


def join(keys: Iterable[str]) -> str:
    """The name of the path `keys`; `split` gives the keys back."""
    return "/".join(map(_escape, keys))


def split(name: str) -> tuple[str, ...]:
    """The keys of the path `name`; TreeError if `join` could not have made it."""
    if name == "":
        return ()
    return tuple(_unescape(part, name) for part in name.split("/"))


def _escape(key: str) -> str:
    if key == "":
        return "~2"
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise TreeError(f"the key {key!r} is not valid text: {error.reason}") from error
    return key.replace("~", "~0").replace("/", "~1") if "~" in key or "/" in key else key


def _unescape(part: str, name: str) -> str:
    if part == "~2":
        return ""
    if part == "" or re.search("~(?![01])", part):
        raise TreeError(
            f"{name!r} is not a name: bad component {part!r}",
            hint="in a key write ~ as ~0 and / as ~1, and an empty key as ~2",
        )
    return part.replace("~1", "/").replace("~0", "~")


def flatten(tree: Any) -> tuple[list[tuple[str, Any]], Callable[[Sequence[Any]], Any]]:
    """The (name, leaf) pairs of `tree` in its own order, and a function that rebuilds it.

    Containers are dicts and other mappings, lists, tuples, namedtuples and dataclasses; anything
    else is a leaf. None, empty containers and dataclass fields marked `static=True` (or
    `pytree_node=False`) in their metadata are structure: they come back unchanged.
    """
    leaves: list[tuple[str, Any]] = []
    build = _walk(tree, (), leaves, {})
    count = len(leaves)

    def rebuild(values: Sequence[Any]) -> Any:
        if len(values) != count:
            raise UsageError(f"the tree has {count} leaves, got {len(values)}")
        return build(iter(values))

    return leaves, rebuild


def _walk(tree: Any, path: tuple[str, ...], leaves: list[tuple[str, Any]], above: dict[int, None]) -> _Build:
    if tree is None:
        return lambda values: None
    opened = _open(tree, path)
    if opened is None:
        leaves.append((join(path), tree))
        return next
    keys, children, close = opened
    if id(tree) in above:
        raise TreeError(f"the container at {join(path)!r} contains itself")
    above[id(tree)] = None
    builds = [_walk(child, (*path, key), leaves, above) for key, child in zip(keys, children, strict=True)]
    del above[id(tree)]
    return lambda values: close([build(values) for build in builds])


_Opened = tuple[list[str], list[Any], Callable[[list[Any]], Any]]


def _open(tree: Any, path: tuple[str, ...]) -> _Opened | None:
    """The keys, children and constructor of a container; None for a leaf."""
    if isinstance(tree, Mapping):
        return _open_mapping(tree, path)
    kind = type(tree)
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return list(kind._fields), list(tree), lambda values: kind(*values)
    if isinstance(tree, (list, tuple)):
        return [str(i) for i in range(len(tree))], list(tree), kind
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _open_dataclass(tree)
    return None


def _open_mapping(tree: Mapping[Any, Any], path: tuple[str, ...]) -> _Opened:
    seen: dict[str, Any] = {}
    for key in tree:
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise TreeError(
                f"the key {key!r} of {join(path)!r} is a {type(key).__name__}",
                hint="keys of a stored tree are strings or ints",
            )
        if str(key) in seen:
            raise TreeError(
                f"the keys {seen[str(key)]!r} and {key!r} of {join(path)!r} have the same name",
                hint="rename one of them",
            )
        seen[str(key)] = key
    originals = list(seen.values())

    def close(values: list[Any]) -> Any:
        filled = dict(zip(originals, values, strict=True))
        if type(tree) is dict:
            return filled
        if isinstance(tree, dict):  # a copy keeps a defaultdict's factory and an OrderedDict's order
            same = copy.copy(tree)
            same.update(filled)
            return same
        return type(tree)(filled)  # type: ignore[call-arg]

    return list(seen), [tree[key] for key in originals], close


def _open_dataclass(tree: Any) -> _Opened:
    fields = [field.name for field in dataclasses.fields(tree) if not _is_static(field)]

    def close(values: list[Any]) -> Any:
        # Not the constructor: fields may be init=False, and __post_init__ may refuse or convert.
        same = copy.copy(tree)
        for field, value in zip(fields, values, strict=True):
            object.__setattr__(same, field, value)
        return same

    return fields, [getattr(tree, field) for field in fields], close


def _is_static(field: dataclasses.Field[Any]) -> bool:
    return bool(field.metadata.get("static")) or field.metadata.get("pytree_node") is False


def unflatten(leaves: Mapping[str, Any]) -> Any:
    """The nested dicts that have these leaves under these names."""
    root: dict[str, Any] = {}
    inner = {id(root)}  # dicts made here, as opposed to leaves that happen to be dicts
    for name, leaf in leaves.items():
        keys = split(name)
        if not keys:
            if len(leaves) > 1:
                raise TreeError("the empty name is the whole tree, but there are other leaves too")
            return leaf
        node = root
        for depth, key in enumerate(keys[:-1]):
            if key not in node:
                node[key] = {}
                inner.add(id(node[key]))
            elif id(node[key]) not in inner:
                raise _nested(join(keys[: depth + 1]), name)
            node = node[key]
        if keys[-1] in node:
            raise _nested(name, next(n for n in leaves if n.startswith(f"{name}/")))
        node[keys[-1]] = leaf
    return root


def _nested(outer: str, name: str) -> TreeError:
    return TreeError(f"{outer!r} is a leaf, so {name!r} cannot lie under it", hint="rename one")


def match(patterns: str | Iterable[str], name: str) -> bool:
    """Whether any glob pattern matches `name` or one of its ancestors.

    `*`, `?` and `[...]` stay within one component, `**` crosses components: "params" selects all
    under params, "**/bias" every bias, "layers/*/w" the w of every layer.
    """
    if isinstance(patterns, str):
        patterns = (patterns,)
    return any(_regex(pattern).fullmatch(name) is not None for pattern in patterns)


_TOKEN = re.compile(r"\*\*/|/\*\*(?=/|$)|\*\*|\*|\?|\[!?\]?[^\]/]*\]|.", re.DOTALL)


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    if pattern.strip("/") == "":
        return re.compile(".*", re.DOTALL)  # the root is everyone's ancestor
    body = "".join(map(_translate, _TOKEN.findall(pattern.strip("/"))))
    try:
        return re.compile(f"{body}(?:/.*)?", re.DOTALL)
    except re.error as error:
        raise UsageError(f"bad name pattern {pattern!r}: {error}") from error


def _translate(token: str) -> str:
    fixed = {"**/": "(?:[^/]+/)*", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    if token in fixed:
        return fixed[token]
    if len(token) > 2 and token[0] == "[":
        inside = token[1:-1].replace("\\", "\\\\").replace("[", "\\[")
        return f"(?!/)[^{inside[1:]}]" if inside[0] == "!" else f"(?!/)[{inside}]"
    return re.escape(token)
