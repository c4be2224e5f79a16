"""Functions that settings name, `module:function` or `file.py:function`: looked for, then loaded.

A config is checked in processes that run nobody's code: a recipe's parent under launch, `holdfast plan`. So
what a name stands for is first looked for without importing it, as far as the source tells; the process that
needs the function imports it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, final

from holdfast.errors import UsageError
from holdfast.train.problems import Problem

FORMS: Final = "module:function or path/to/file.py:function"


def reference_problems(setting: str, reference: str, *, without: str) -> list[Problem]:
    """Why `reference` can name no function, as far as that shows without running anybody's code.

    `without` says how to do without it, for the hints.
    """
    home, _, name = reference.rpartition(":")
    if not home or not name:
        return [Problem(setting, f"names no function: {reference!r}", f"write {FORMS}")]
    if home.endswith(".py"):
        if not os.path.isfile(home):
            return [Problem(setting, f"names {home}, and there is no such file", without)]
        return _name_problems(setting, reference, Path(home))
    missing, found = _found(home)
    if missing:
        message = f"names {reference!r}, and there is no module {missing}"
        hint = f"install it where the run is, start from the folder that has it, or {without}"
        return [Problem(setting, message, hint)]
    if home in sys.modules:
        module = sys.modules[home]
        return [] if hasattr(module, name) else [_unknown(setting, reference, dir(module))]
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return []
    return _name_problems(setting, reference, Path(found.origin))


def loaded(reference: str) -> Callable[..., Any]:
    """The function. Imports its module. Fails: UsageError, if there is none; what the module raises."""
    home, _, name = reference.rpartition(":")
    if not home or not name:
        raise UsageError(f"{reference!r} names no function", hint=f"write {FORMS}")
    module = file_module(Path(home)) if home.endswith(".py") else named_module(home)
    found = getattr(module, name, None)
    if not callable(found):
        there = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        close = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {home}:{close[0]}?" if close else f"it defines {', '.join(there) or 'nothing'}"
        raise UsageError(f"{home} has no function {name!r}", hint=hint)
    function: Callable[..., Any] = found
    return function


def file_module(path: Path) -> ModuleType:
    """The module in a file, run. Fails: UsageError, if there is none; what it raises."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint=f"write {FORMS}")
    name = f"named_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsItIs(name, str(path)))
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file", hint="its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@final
class _AsItIs(SourceFileLoader):
    """Compiles what the file says now. Kept bytecode is told to be old by second and size alone, and a file
    may have been changed within one."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def named_module(name: str) -> ModuleType:
    """The module of a name. Fails: UsageError, if there is none; what it raises."""
    # As `python` does for a script: a command from a wheel, or a worker, would not look in this folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        hint = f"it must be importable from {os.getcwd()}; a file is given as path/to/file.py:function"
        raise UsageError(f"there is no module {name!r}", hint=hint) from error


def _found(module: str) -> tuple[str, ModuleSpec | None]:
    """The module, or the one around it, that is not there; and its spec, if only an import would tell: None.

    Imports nothing, not even the packages around it.
    """
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if name in sys.modules:
            spec = sys.modules[name].__spec__
            continue
        try:
            if count == 1:
                spec = PathFinder.find_spec(name, [os.getcwd()]) or importlib.util.find_spec(name)
            elif spec is not None:
                spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
            else:
                return "", None
        except (ImportError, ValueError):
            return name or module, None
        if spec is None:
            return name or module, None
    return "", spec


def _name_problems(setting: str, reference: str, path: Path) -> list[Problem]:
    """A problem if the source at `path` cannot be read as Python, or names nothing of that name."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        return [Problem(setting, f"names {path}, which cannot be read: {error.strerror}", "check its mode")]
    except (SyntaxError, ValueError) as error:
        return [Problem(setting, f"names {path}, which is no Python: {error}", "mend it")]
    there = _names(tree)
    name = reference.rpartition(":")[2]
    return [] if there is None or name in there else [_unknown(setting, reference, there)]


def _names(tree: ast.Module) -> set[str] | None:
    """What a module defines, as its text tells; None: it may define more, by `*` or by `__getattr__`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(one.asname or one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return None if found & {"*", "__getattr__"} else found


def _unknown(setting: str, reference: str, there: Iterable[str]) -> Problem:
    home, _, name = reference.rpartition(":")
    close = difflib.get_close_matches(name, list(there), n=1)
    hint = f"did you mean {home}:{close[0]}?" if close else f"name a function that is in {home}"
    return Problem(setting, f"names {reference!r}, and {home} has no {name}", hint)
