"""Runs as Python functions that return a complete config. `holdfast train recipes.tiny` runs one of these."""

from holdfast.recipes.dense import dense_1b
from holdfast.recipes.laptop import one_world, small, tiny
from holdfast.recipes.lookup import resolve

__all__ = ["dense_1b", "one_world", "resolve", "small", "tiny"]
