"""Settings given as text, `model.hidden=128`, put into a config of nested dataclasses.

A value is JSON or a bare word, and is typed by the field it is for: a count takes suffixes (1.5B), a tuple
takes `a,b`, a string takes anything. All mistakes are found before any is reported.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from holdfast.errors import UsageError
from holdfast.train.problems import Problem, refuse
from holdfast.train.quantities import parse_count

_INDEX: Final = re.compile(r"(?P<name>\w+)\[(?P<index>\d{1,4})\]")

ConfigT = TypeVar("ConfigT")


def override(config: ConfigT, assignments: Iterable[str]) -> ConfigT:
    """`config` with each `path=value` in place; the last one of several for a path holds.

    Fails: ConfigError, which lists every assignment that names no setting or does not fit it.
    """
    found: list[Problem] = []
    for text in assignments:
        path, equals, value = text.partition("=")
        if not equals:
            found.append(Problem(text, "has no value", f"write {path}=VALUE"))
            continue
        try:
            config = _replaced(config, path.strip().split("."), value.strip(), path.strip())
        except _Refused as refused:
            found += refused.problems
    refuse(found)
    return config


def settings_of(config: object, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted path."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= settings_of(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = value
    return found


def from_mapping(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """The config that `values`, nested as it is, stand for.

    Fails: ConfigError, with every name that is no setting, or the first value that does not fit.
    """
    refuse(_strangers(values, kind, ""))
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at ")
        setting = where.strip("`").removeprefix("$.") or "the config"
        refuse([Problem(setting, "does not fit", reason.replace("`", ""))])
        raise


class _Refused(Exception):
    def __init__(self, *problems: Problem) -> None:
        super().__init__(*map(str, problems))
        self.problems = problems


def _replaced(config: ConfigT, names: list[str], value: str, path: str) -> ConfigT:
    name, index = _indexed(names[0])
    rest = names[1:]
    fields = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if name not in fields:
        raise _Refused(_unknown(name, fields, path, names))
    inner = getattr(config, name)
    if index is not None:
        new: Any = _with_element(inner, index, rest, value, path)
    elif dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        if not rest:
            first = dataclasses.fields(inner)[0].name
            raise _Refused(Problem(path, "is a group of settings", f"name one of them: {path}.{first}=VALUE"))
        new = _replaced(inner, rest, value, path)
    elif rest:
        raise _Refused(
            Problem(path, f"goes too deep: {name} has no settings of its own", f"write {name}=VALUE")
        )
    else:
        new = _typed(value, typing.get_type_hints(type(config))[name], path)
    return dataclasses.replace(config, **{name: new})  # type: ignore[type-var]


def _indexed(name: str) -> tuple[str, int | None]:
    """A name and the number behind it: `sources[1]`."""
    match = _INDEX.fullmatch(name)
    return (match["name"], int(match["index"])) if match else (name, None)


def _with_element(elements: Any, index: int, rest: list[str], value: str, path: str) -> Any:
    if not isinstance(elements, tuple) or index >= len(elements) or not rest:
        many = (
            f"there are {len(elements)}, counted from 0" if isinstance(elements, tuple) else "it is no list"
        )
        raise _Refused(Problem(path, "names no setting of a list", f"{many}; write NAME[0].SETTING=VALUE"))
    if not dataclasses.is_dataclass(elements[index]):
        name = path.rpartition("[")[0]
        message = f"goes too deep: {elements[index]!r} has no settings of its own"
        raise _Refused(Problem(path, message, f"give the whole list: {name}=A,B"))
    return (*elements[:index], _replaced(elements[index], rest, value, path), *elements[index + 1 :])


def _unknown(name: str, fields: set[str], path: str, names: list[str]) -> Problem:
    above = path.split(".")[: -len(names)]
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    where = f"{'.'.join(above)} has" if above else "there are"
    if close:
        right = ".".join([*above, close[0], *names[1:]])
        return Problem(path, "is no setting", f"did you mean {right}?")
    return Problem(path, "is no setting", f"{where} {', '.join(sorted(fields))}")


def _typed(text: str, kind: Any, path: str) -> Any:
    """The value that `text` is for a field of this type."""
    try:
        value = _value(text, kind)
        if strangers := _strangers(value, kind, path):
            raise _Refused(*strangers)
        return msgspec.convert(value, kind)
    except UsageError as error:
        raise _Refused(Problem(path, f"cannot be {text!r}: {error.message}", error.hint or "")) from error
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").partition(" - at ")[0]
        message = f"cannot be {text!r}"
        raise _Refused(Problem(path, message, f"{reason[:1].lower()}{reason[1:]}")) from error


def _value(text: str, kind: Any) -> Any:
    kinds = typing.get_args(kind) if _is_union(kind) else (kind,)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if str in kinds:
        return _unquoted(text)
    if int in kinds and float not in kinds:
        return text if text.lower() in ("true", "false") else _whole(text)
    if any(typing.get_origin(one) is tuple for one in kinds) and not text.startswith("["):
        return [loose(part) for part in text.split(",") if part]
    return loose(text)


def _whole(text: str) -> int:
    return -parse_count(text[1:]) if text.startswith("-") else parse_count(text)


def loose(text: str) -> Any:
    """The value that `text` stands for where no type says more: JSON, else the word itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {"True": True, "False": False}.get(text, text)


def _unquoted(text: str) -> str:
    value = loose(text) if text.startswith('"') else text
    return value if isinstance(value, str) else text


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _strangers(value: Any, kind: Any, path: str) -> list[Problem]:
    """Names in `value` that a config of this kind does not have; `msgspec` leaves them out without a word."""
    found: list[Problem] = []
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        fields = {field.name for field in dataclasses.fields(kind)}
        for name, inner in value.items():
            place = f"{path}.{name}" if path else str(name)
            if name in fields:
                found += _strangers(inner, kinds[name], place)
            else:
                found.append(_unknown(str(name), fields, place, [str(name)]))
    elif isinstance(value, list | tuple) and typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        for at, inner in enumerate(value):
            found += _strangers(inner, element, f"{path}[{at}]")
    elif _is_union(kind):
        groups = [one for one in typing.get_args(kind) if one is not type(None)]
        found += _strangers(value, groups[0], path) if len(groups) == 1 else []
    return found
