"""From the folder of a run to its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import msgspec

from holdfast.errors import StorageError
from holdfast.format import parse_step_folder
from holdfast.storage import Store, is_url

_MOST: Final = 1 << 20
"""Bytes of a config that are looked at."""


class _Checkpoint(msgspec.Struct):
    folder: str = ""


class _Config(msgspec.Struct):
    """What matters here of the `config.json` of a training run."""

    checkpoint: _Checkpoint = msgspec.field(default_factory=_Checkpoint)


def checkpoints_of(store: Store, opened: Callable[[str], Store]) -> Store:
    """The place of a run's checkpoints, where `store` is the run's and holds no steps itself; else `store`.

    They are in its folder `ckpt`, or where its config says, which is `opened`. Fails: StorageError for a
    config that may not be read.
    """
    inner = store.below("ckpt")
    inside = inner.is_place()
    if not inside and is_url(store.root):
        return store
    if any(parse_step_folder(name) is not None for name in store.names()):
        return store
    if inside:
        return inner
    elsewhere = _saved_elsewhere(store.root)
    return opened(elsewhere) if elsewhere else store


def _saved_elsewhere(folder: str) -> str:
    """Where the run in this folder saves, if its config names another place; else nothing."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(_MOST), type=_Config).checkpoint.folder
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):  # no run of `holdfast train`
        return ""
    except OSError as error:
        raise StorageError.from_os(error, doing="read", path=path) from error
