"""Trees taken apart by whatever framework their leaves belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from holdfast.arrays.numpy_adapter import NUMPY
from holdfast.arrays.protocols import Adapter, FlatTree, adapters
from holdfast.errors import TreeError

_SCALARS: Final = frozenset({bool, int, float, complex, str, bytes})
_CLAIMED: WeakKeyDictionary[type, Adapter] = WeakKeyDictionary()
"""Adapters by the type of leaf: asking each adapter costs microseconds for every leaf of every save."""


def adapter_of(leaf: Any, known: Sequence[Adapter]) -> Adapter | None:
    """The adapter that claims a leaf, or None for a Python scalar."""
    kind = type(leaf)
    if kind in _SCALARS:
        return None
    found = _CLAIMED.get(kind)
    if found is not None:
        return found
    for adapter in (*known, NUMPY):
        if adapter.claims(leaf):
            _CLAIMED[kind] = adapter
            return adapter
    raise TreeError(
        f"a leaf of type {type(leaf).__name__} cannot be stored",
        hint="store arrays and Python scalars, in containers that are registered as pytrees if JAX is in "
        "use; other state belongs into meta= as JSON",
    )


def flatten_tree(tree: Any) -> FlatTree:
    """The tree taken apart by the framework in use, so that its own containers are understood."""
    for adapter in adapters():
        return adapter.flatten(tree)
    return NUMPY.flatten(tree)
