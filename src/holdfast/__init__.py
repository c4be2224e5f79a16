"""Holdfast keeps large training runs going.

The public verbs, bound on first use so that `import holdfast` costs next to nothing and the CLI
and the vault never pay for what they do not touch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpointer, SaveHandle, export_hub, load_hub, save_hub
    from holdfast.errors import HoldfastError
    from holdfast.supervise import join

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "HoldfastError",
    "SaveHandle",
    "__version__",
    "export_hub",
    "join",
    "load_hub",
    "save_hub",
]

# Every public name and the room it comes from. `__all__` and the imports above repeat it, because
# type checkers read only literals; tests/house/test_public_names.py holds the three together.
_HOME = {
    "Checkpointer": "holdfast.checkpoint",
    "HoldfastError": "holdfast.errors",
    "SaveHandle": "holdfast.checkpoint",
    "export_hub": "holdfast.checkpoint",
    "join": "holdfast.supervise",
    "load_hub": "holdfast.checkpoint",
    "save_hub": "holdfast.checkpoint",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
