"""From what a person types to a checkpoint folder and a step in it."""

from __future__ import annotations

import os
from typing import NamedTuple

from holdfast.checkpoint import committed_steps
from holdfast.errors import MissingPathError, NoCheckpointError, UsageError
from holdfast.format import MANIFEST, parse_step_folder
from holdfast.storage import LocalStore


class Place(NamedTuple):
    """A checkpoint folder, and the step that was asked for, if any."""

    store: LocalStore
    step: int | None


def opened(path: str) -> LocalStore:
    """The checkpoint folder at `path`, which must exist. Nothing is created."""
    if not os.path.isdir(path):
        if os.path.lexists(path) and not os.path.islink(path):
            raise UsageError(
                f"{path} is a file, not a checkpoint folder",
                hint="give the folder that holds the step-... folders",
            )
        raise MissingPathError(
            f"there is no folder {path}",
            path=path,
            hint="give the folder that was passed to Checkpointer",
        )
    return LocalStore(path)


def opened_root(path: str) -> LocalStore:
    """As `opened`, for commands about all steps: a step folder is refused."""
    store = opened(path)
    if _is_step(store.root):
        raise UsageError(
            f"{path} is one step, not a checkpoint folder",
            hint=f"give its parent: {os.path.dirname(store.root)}",
        )
    return store


def placed(text: str, step: int | None = None) -> Place:
    """The place that PATH, PATH@STEP or the path of a step folder means; `step` was given beside it."""
    path, at = text, None
    if not os.path.lexists(text):
        # A path may itself hold an @; it is split only where it does not exist as it stands.
        head, sign, tail = text.rpartition("@")
        if sign and tail.isascii() and tail.isdecimal():
            path, at = head, int(tail)
    store = opened(path)
    if _is_step(store.root):
        parent, name = os.path.split(store.root)
        store, at = LocalStore(parent), at if at is not None else parse_step_folder(name)
    if at is not None and step is not None and at != step:
        raise UsageError(f"{text} names step {at}, but step {step} was asked for", hint="give one of them")
    return Place(store, step if step is not None else at)


def newest_or(place: Place) -> int:
    """The step of a place; the newest committed one if none was given."""
    if place.step is not None:
        return place.step
    steps = committed_steps(place.store)
    if not steps:
        raise NoCheckpointError(f"there is no step in {place.store.root}", hint=no_steps_hint(place.store))
    return steps[-1]


def no_steps_hint(store: LocalStore) -> str:
    """What to try where a folder holds no step."""
    below = os.path.join(store.root, "ckpt")
    if os.path.isdir(below):
        return f"a run keeps its steps in its ckpt folder: try {below}"
    return "nothing has been saved there yet, or this is not a checkpoint folder"


def _is_step(root: str) -> bool:
    return parse_step_folder(os.path.basename(root)) is not None and os.path.lexists(
        os.path.join(root, MANIFEST)
    )
