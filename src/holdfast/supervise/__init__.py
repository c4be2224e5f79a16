"""Keeps a run going: workers that are started, watched, replaced, and told where they are.

What a program needs is bound on first use: an agent pays for no trainer, and a trainer for no agent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.supervise.joining import join
    from holdfast.supervise.run import Run
    from holdfast.supervise.steps import Step

__all__ = ["Run", "Step", "join"]

_HOME = {"Run": "run", "Step": "steps", "join": "joining"}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.supervise' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"holdfast.supervise.{home}"), name)
    globals()[name] = value
    return value
