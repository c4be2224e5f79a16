"""Paths as people write them: also as `file://`; and why one cannot be looked at."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final, final

import click

from holdfast.errors import MissingPathError, StorageError, UsageError


@final
class OnDisk(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A path of this machine's file systems, also as `file://`; a URL would become a folder of that name.

    `instead` is the hint for whoever gives a URL. With `reads`, what is there must be open to be read.
    """

    name = "path"

    def __init__(self, instead: str, *, reads: bool = False) -> None:
        self._instead = instead
        self._reads = reads

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from holdfast.storage import is_url, local_path  # numpy comes along; `--help` shall not wait

        text = os.fspath(value)
        if is_url(text):
            given = param.opts[0] if isinstance(param, click.Option) else _argument(param)
            raise UsageError(f"{given} {text} is not on a file system", hint=self._instead)
        return reached(local_path(text), reads=self._reads)


@final
class Anywhere(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A path as `OnDisk` takes it, or the URL of a place in an object store."""

    name = "place"

    def __init__(self, *, reads: bool = False) -> None:
        self._reads = reads

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from holdfast.storage import is_url, local_path

        text = os.fspath(value)
        return text if is_url(text) else reached(local_path(text), reads=self._reads)


def _argument(param: click.Parameter | None) -> str:
    return "the path" if param is None else param.human_readable_name


RUNS: Final = OnDisk("logs and journals of runs lie there; states may be saved to s3://bucket/run")
FILE: Final = OnDisk("it is a file; name one of this machine")


def reached(path: str, *, reads: bool = False) -> str:
    """`path`, where it can be said whether something is there; what is there lets this user in.

    With `reads`, it can also be listed or read. Fails: StorageError with the reason of the file system, and
    MissingPathError for a link that leads nowhere.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            os.stat(os.path.join(path, "."))  # refused if it may not be entered
        if reads and stat.S_ISDIR(mode):
            os.scandir(path).close()
        elif reads and stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        if os.path.islink(path):
            raise MissingPathError(
                f"{path} is a link to {os.readlink(path)}, which is not there",
                path=path,
                hint="mend the link, or give another path",
            ) from None
    except OSError as error:
        raise refused(error, doing="look at", path=path) from error
    return path


def refused(error: OSError, *, doing: str, path: str) -> StorageError:
    """The error of the file system, with a hint; where permission is lacking, it says where."""
    told = StorageError.from_os(error, doing=doing, path=path)
    closed = _closed(path) if isinstance(error, PermissionError) else None
    if closed is not None:
        told.hint = f"this user may not enter {closed}: check its owner and mode"
    told.hint = told.hint or "check the path, and where the links on the way lead"
    return told


def _closed(path: str) -> str | None:
    """The first folder on the way that may not be entered."""
    for folder in (*reversed(Path(path).parents), Path(path)):
        try:
            os.stat(os.path.join(folder, "."))
        except PermissionError:
            return str(folder)
        except OSError:
            return None
    return None
