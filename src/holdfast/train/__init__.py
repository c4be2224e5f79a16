"""The training engine: what a run of a language model is made of.

Names are bound on first use: a config, a plan or a data tool should not pay for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.train.config import TrainConfig
    from holdfast.train.program import run_training
    from holdfast.train.state import RunOptions

__all__ = ["RunOptions", "TrainConfig", "run_training"]

_HOME = {"RunOptions": "state", "TrainConfig": "config", "run_training": "program"}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.train' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"holdfast.train.{home}"), name)
    globals()[name] = value
    return value
