"""What the library calls an argument and the command line an option: `min_size=4` is `--min-size 4`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import click

from holdfast.cli.settings import SettingsCommand

_ALSO: Final[Mapping[str, str]] = {
    "connect_timeout_s": "--timeout",
    "deadline_s": "--timeout",
    "memory_limit": "--memory",
    "rename": "--map",
    "shard_bytes": "--shard-gib",
    "token": "--token-file",
}
"""Names that an option has in the library alone."""


def in_options(text: str, command: click.Command) -> str:
    """A message or hint of the library as whoever typed `command` reads it.

    Left alone are options that `text` names already, and commands whose settings are written `name=value`.
    """
    if isinstance(command, SettingsCommand):
        return text
    for option in command.get_params(click.Context(command)):
        if not isinstance(option, click.Option):
            continue
        shown = next((one for one in option.opts if one.startswith("--")), "")
        if not shown or re.search(rf"{shown}(?![\w-])", text):
            continue
        for name in _names(option, shown):
            text = _renamed(text, name, shown, flag=option.is_flag)
    return text


def _names(option: click.Option, shown: str) -> list[str]:
    found = {option.name or "", shown[2:].replace("-", "_")}
    found.update(name for name, other in _ALSO.items() if other == shown)
    return sorted(found - {""})


def _renamed(text: str, name: str, shown: str, *, flag: bool) -> str:
    # Neither a part of a path, of a longer word, nor of a setting such as `batch.lanes=8`.
    begin = rf"(?<![\w./-]){re.escape(name)}"
    if flag:
        return re.sub(rf"{begin}=True\b", shown, text)
    text = re.sub(rf"{begin}=(?=[^\s,;)])", f"{shown} ", text)
    text = re.sub(rf"{begin}=", shown, text)
    if "_" not in name:  # else it is an ordinary word
        return text
    return re.sub(rf"{begin}(?![\w/-]|\.\w)", shown, text)
