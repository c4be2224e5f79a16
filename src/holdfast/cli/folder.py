"""From what a person types to a place with checkpoints and a step in it."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from holdfast import storage
from holdfast.checkpoint import committed_steps
from holdfast.checkpoint.run_folder import checkpoints_of
from holdfast.cli import terminal
from holdfast.cli.on_disk import reached
from holdfast.errors import MissingPathError, NoCheckpointError, UsageError
from holdfast.format import MANIFEST, parse_step_folder
from holdfast.storage import Store, StoreOptions

_LOOK = StoreOptions(timeout_s=30.0, retry_s=20.0)
"""A person waits for the answer: a store that does not answer is given up sooner than by a run."""


NO_STEPS_HINT: Final = "nothing has been saved there yet, or this is not a checkpoint folder"


class Place(NamedTuple):
    """A checkpoint folder or a place in an object store, and the step that was asked for, if any."""

    store: Store
    step: int | None


def opened(path: str) -> Store:
    """The checkpoints at `path`, which must exist; at a run's folder, those of the run. Makes nothing."""
    return checkpoints_of(_there(path), _there)


def _there(path: str) -> Store:
    if storage.is_url(path):
        store = storage.opened(path, _LOOK)
        # What it does not answer is tried again meanwhile.
        with terminal.unless_soon(f"{path} has not answered yet; trying for about {_LOOK.retry_s:.0f} s"):
            found = store.is_place()
        if not found:
            raise MissingPathError(
                f"there is nothing at {store.root}",
                path=store.root,
                hint="give the place that a run saves its steps in",
            )
        return store
    path = reached(storage.local_path(path))
    store = storage.opened(path)
    if not store.is_place():
        if os.path.lexists(path):
            raise UsageError(
                f"{path} is a file, not a checkpoint folder",
                hint="give the folder that holds the step-... folders",
            )
        raise MissingPathError(
            f"there is no folder {path}",
            path=path,
            hint="give the folder of a run, or the one that its steps are saved in",
        )
    return store


def opened_root(path: str) -> Store:
    """As `opened`, for commands about all steps: a step folder is refused."""
    store = opened(path)
    if _is_step(store):
        raise UsageError(
            f"{path} is one step, not a checkpoint folder",
            hint=f"give its parent: {store.root.rpartition('/')[0]}",
        )
    return store


def placed(text: str, step: int | None = None) -> Place:
    """The place that PATH, PATH@STEP or the path of a step folder means; `step` was given beside it."""
    path, at = storage.local_path(text), None
    if not os.path.lexists(path):
        # A path may itself hold an @; it is split only where it does not exist as it stands.
        head, sign, tail = path.rpartition("@")
        if sign and tail.isascii() and tail.isdecimal():
            path, at = head, int(tail)
    store = opened(path)
    if _is_step(store):
        parent, _, name = store.root.rpartition("/")
        store, at = storage.opened(parent, _LOOK), at if at is not None else parse_step_folder(name)
    if at is not None and step is not None and at != step:
        raise UsageError(f"{text} names step {at}, but step {step} was asked for", hint="give one of them")
    return Place(store, step if step is not None else at)


def newest_or(place: Place) -> int:
    """The step of a place; the newest committed one if none was given."""
    if place.step is not None:
        return place.step
    steps = committed_steps(place.store)
    if not steps:
        raise NoCheckpointError(f"there is no step in {place.store.root}", hint=NO_STEPS_HINT)
    return steps[-1]


def _is_step(store: Store) -> bool:
    name = store.root.rpartition("/")[2]
    if parse_step_folder(name) is None:
        return False
    return store.exists(MANIFEST) or (store.has_locks and os.path.lexists(os.path.join(store.root, MANIFEST)))
