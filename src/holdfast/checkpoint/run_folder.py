"""From the folder of a run to its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import msgspec

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

    They are in its folder `ckpt`, or where its config says, which is `opened`.
    """
    inner = store.below("ckpt")
    inside = inner.is_place()
    elsewhere = "" if inside else _saved_elsewhere(store)
    if not inside and not elsewhere:
        return store
    if any(parse_step_folder(name) is not None for name in store.names()):
        return store
    return inner if inside else opened(elsewhere)


def _saved_elsewhere(store: Store) -> str:
    """Where the run in this folder saves, if its config names another place; else nothing."""
    if is_url(store.root):
        return ""
    try:
        with open(os.path.join(store.root, "config.json"), "rb") as file:
            return msgspec.json.decode(file.read(_MOST), type=_Config).checkpoint.folder
    except (OSError, msgspec.MsgspecError):  # no run of `holdfast train`
        return ""
