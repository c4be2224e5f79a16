"""Paths that must lie on a file system of this machine."""

from __future__ import annotations

import os
from typing import Any, Final, final
from urllib.parse import unquote, urlsplit

import click

from holdfast.errors import UsageError


@final
class OnDisk(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A path of this machine's file systems, also as `file://`; a URL would become a folder of that name."""

    name = "path"

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from holdfast.storage import is_url  # numpy comes with it, and `--help` shall not wait for that

        text = os.fspath(value)
        if is_url(text):
            given = param.opts[0] if param is not None else "the path"
            raise UsageError(f"{given} {text} is not on a file system", hint=self._instead)
        return unquote(urlsplit(text).path) if text.startswith("file://") else text


RUNS: Final = OnDisk("logs and journals of runs lie there; states may be saved to s3://bucket/run")
