"""JAX below the framework line: arrays in and out of devices, worlds of several workers, compile watch.

Names are bound on first use: the host of worlds needs jaxlib alone, and should not pay for all of JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.jax.abstract import abstract_mesh
    from holdfast.jax.adapter import ADAPTER

__all__ = ["ADAPTER", "abstract_mesh"]

_HOME = {"ADAPTER": "adapter", "abstract_mesh": "abstract"}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.jax' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"holdfast.jax.{home}"), name)
    globals()[name] = value
    return value
