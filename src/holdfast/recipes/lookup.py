"""From what a user writes for a recipe to the config of the run."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from holdfast.errors import HoldfastError, UsageError
from holdfast.train.config import TrainConfig
from holdfast.train.problems import refuse
from holdfast.train.references import loaded

_FORMS: Final = "recipes.tiny, module:function, file.py:function, or the config.json of a run"
_HERE: Final = "holdfast.recipes"


def resolve(recipe: str, assignments: Iterable[str] = ()) -> TrainConfig:
    """The config of a recipe with settings changed, free of mistakes.

    `recipe` is `recipes.tiny` (or `tiny`), `module:function`, `file.py:function` or a config.json. Fails:
    ConfigError, which lists every mistake; UsageError, if there is no such recipe, it fails or returns
    something else.
    """
    config = _config(recipe).override(assignments)
    refuse(config.problems())
    return config


def names() -> list[str]:
    """The recipes that come with the package."""
    room = importlib.import_module(_HERE)
    return [name for name in room.__all__ if name != resolve.__name__]


def _config(recipe: str) -> TrainConfig:
    if recipe.endswith(".json"):
        return _from_file(Path(recipe))
    try:
        made = _function(recipe)()
    except HoldfastError:
        raise
    except Exception as error:
        said = f"{recipe} failed: {type(error).__name__}: {error}"
        raise UsageError(said, hint="HOLDFAST_DEBUG=1 shows where") from error
    if not isinstance(made, TrainConfig):
        raise UsageError(f"{recipe} returned {type(made).__name__}", hint="a recipe returns a TrainConfig")
    return made


def _from_file(path: Path) -> TrainConfig:
    try:
        return TrainConfig.from_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=f"a recipe is {_FORMS}") from error


def _function(recipe: str) -> Callable[[], Any]:
    if ":" not in recipe:
        return _ours(recipe)
    if recipe.startswith(":") or recipe.endswith(":"):
        raise UsageError(f"{recipe!r} names no recipe", hint=f"a recipe is {_FORMS}")
    return loaded(recipe)


def _ours(recipe: str) -> Callable[[], Any]:
    name = recipe.removeprefix("holdfast.").removeprefix("recipes.")
    if name not in names():
        close = difflib.get_close_matches(name.rpartition(".")[2], names(), n=1)
        ask = f"did you mean recipes.{close[0]}? " if close else ""
        hint = f"{ask}there are {', '.join(f'recipes.{one}' for one in names())}; otherwise {_FORMS}"
        raise UsageError(f"there is no recipe {recipe!r}", hint=hint)
    function: Callable[[], Any] = getattr(importlib.import_module(_HERE), name)
    return function
