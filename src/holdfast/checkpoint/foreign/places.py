"""Which checkpoint a path means, and in whose format it is."""

from __future__ import annotations

import os
import re
from typing import Final, Literal, NamedTuple

from holdfast.checkpoint.foreign import dcp, orbax
from holdfast.checkpoint.foreign.orbax_tree import STEP, TEMPORARY, TREE
from holdfast.checkpoint.foreign.source import ForeignStep
from holdfast.errors import FormatError, MissingPathError, NoCheckpointError, UsageError
from holdfast.format import MANIFEST, parse_step_folder
from holdfast.storage import is_url

Format = Literal["orbax", "dcp"]

_NUMBERED: Final = re.compile(r"(?:[A-Za-z_.-]*[_.-])?([0-9]{1,18})")
"""Folders of steps: 1200, step_1200, checkpoint-1200, ckpt.1200."""
_FORMATS: Final = (
    "a folder of Orbax (_METADATA, _CHECKPOINT_METADATA) or of torch's distributed checkpoints (.metadata), "
    "or one that holds such folders by step"
)


class Place(NamedTuple):
    """One checkpoint of another library."""

    path: str
    format: Format
    step: int | None


def found(path: str, step: int | None = None) -> Place:
    """The checkpoint that `path` is; of several steps in it, the one asked for or the newest.

    Fails: MissingPathError, UsageError, NoCheckpointError, FormatError for a half-written one.
    """
    if is_url(path):
        raise UsageError(
            f"{path} is not on a file system",
            hint="copy the checkpoint to a local disk first, then import it",
        )
    if not os.path.isdir(path):
        if os.path.lexists(path) and not os.path.islink(path):
            raise UsageError(f"{path} is a file, not a checkpoint folder", hint=f"give {_FORMATS}")
        raise MissingPathError(f"there is no folder {path}", path=path, hint=f"give {_FORMATS}")
    path = os.path.realpath(path)
    if TEMPORARY in os.path.basename(path):
        raise orbax.unfinished(path)
    format_ = _format(path)
    if format_ is not None:
        number = numbered(path)
        if number is None and format_ == "orbax" and _is_step(os.path.dirname(path)):
            number = numbered(os.path.dirname(path))
        return Place(path, format_, number)
    return _of_steps(path, step)


def _of_steps(path: str, step: int | None) -> Place:
    names = sorted(one.name for one in os.scandir(path) if one.is_dir())
    steps = {
        number: Place(os.path.join(path, name), format_, number)
        for name in names
        if (number := numbered(name)) is not None
        and TEMPORARY not in name
        and (format_ := _format(os.path.join(path, name))) is not None
    }
    if not steps:
        raise _unknown(path, names)
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        listed = ", ".join(map(str, sorted(steps)[-12:]))
        raise NoCheckpointError(f"there is no step {chosen} in {path}", hint=f"steps there: {listed}")
    return steps[chosen]


def opened(place: Place, *, item: str | None = None, check_source: bool = True) -> ForeignStep:
    """The checkpoint at a place. Fails: see `orbax.opened` and `dcp.opened`."""
    if place.format == "orbax":
        return orbax.opened(place.path, step=place.step, item=item)
    if item is not None:
        raise UsageError("a torch checkpoint has no items", hint="leave the item out")
    return dcp.opened(place.path, step=place.step, check=check_source)


def numbered(path: str) -> int | None:
    """The step that the name of a folder says."""
    matched = _NUMBERED.fullmatch(os.path.basename(path))
    return None if matched is None else int(matched[1])


def _is_step(path: str) -> bool:
    """Whether the folder above a tree is a step of Orbax: it says so, or its name is a number and no more."""
    return os.path.isfile(os.path.join(path, STEP)) or os.path.basename(path).isdecimal()


def _format(path: str) -> Format | None:
    """Whose checkpoint a folder is; None if it is none itself."""
    if os.path.isfile(os.path.join(path, dcp.METADATA)):
        return "dcp"
    if os.path.isfile(os.path.join(path, TREE)) or os.path.isfile(os.path.join(path, STEP)):
        return "orbax"
    with os.scandir(path) as entries:
        below = [one for one in entries if one.is_dir() and TEMPORARY not in one.name]
    if any(os.path.isfile(os.path.join(one.path, TREE)) and numbered(one.name) is None for one in below):
        return "orbax"
    return None


def _unknown(path: str, folders: list[str]) -> Exception:
    names = sorted(os.listdir(path))
    if parts := [name for name in names if name.endswith(dcp.SUFFIX)]:
        return FormatError(
            f"{path} has {parts[0]} but no {dcp.METADATA}, which torch writes last",
            hint="the save was interrupted; take another step",
        )
    if any(TEMPORARY in name for name in folders):
        return FormatError(
            f"{path} holds only steps that Orbax never finished: {', '.join(folders[:5])}",
            hint="there is nothing whole in it to import",
        )
    if MANIFEST in names or any(parse_step_folder(name) is not None for name in folders):
        return UsageError(f"{path} is a Holdfast checkpoint already", hint="holdfast ckpt ls shows its steps")
    if any(name.endswith((".zarray", "zarr.json", "manifest.ocdbt")) for name in names):
        return FormatError(
            f"{path} has arrays but no {TREE}, which says what they are",
            hint="the checkpoint was not copied completely, or is from an Orbax before 0.5",
        )
    return FormatError(f"{path}: not a checkpoint that is known here", hint=f"give {_FORMATS}")
