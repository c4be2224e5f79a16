"""A room imports only rooms above it, and nothing above the framework line knows a framework."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.house.rooms import (
    ABOVE_THE_LINE,
    BELOW_THE_LINE,
    FRAMEWORKS,
    GROUND,
    ORDER,
    REPO,
    SRC,
    built,
    files,
    imports,
    imports_of,
    room_imported,
    room_of,
)


def breach(room: str, name: str) -> str | None:
    """What is wrong with a file of `room` importing `name`; None if nothing is."""
    target = room_imported(name)
    if target is None or target == room:
        return None
    if target == "":
        return "imports the package itself; name the room it needs"
    if target not in ORDER:
        return f"imports {target!r}, which is no room of DESIGN.md"
    if ORDER.index(target) > ORDER.index(room):
        return f"imports {target!r}, which lies below {room!r}"
    return None


def test_every_file_belongs_to_a_room() -> None:
    strangers = {room_of(path) for path in files()} - {"", *ORDER}
    assert not strangers, f"not in DESIGN.md's list of rooms: {sorted(strangers)}"


def test_rooms_import_only_rooms_above_them() -> None:
    breaches = [
        f"{path.relative_to(REPO)}:{line}: {problem}"
        for path in files()
        if (room := room_of(path))  # holdfast/__init__.py binds names of any room, lazily
        for line, name in imports(path)
        if (problem := breach(room, name))
    ]
    assert not breaches, "\n" + "\n".join(breaches)


def test_nothing_above_the_line_imports_a_framework_even_inside_a_function() -> None:
    breaches = [
        f"{path.relative_to(REPO)}:{line}: imports {name}"
        for path in files()
        if room_of(path) in ("", *GROUND, *ABOVE_THE_LINE)
        for line, name in imports(path)
        if name.split(".")[0] in FRAMEWORKS
    ]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize(
    ("room", "source", "caught"),
    [
        ("vault", "from holdfast.checkpoint import Checkpointer", True),
        ("vault", "from holdfast import checkpoint", True),
        ("vault", "from holdfast import Checkpointer", True),
        ("vault", "import holdfast.checkpoint.save as s", True),
        ("vault", "from ..checkpoint import save", True),
        ("vault", "from .. import checkpoint", True),
        ("vault", "def f():\n    from holdfast.cli import main", True),
        ("vault", "import holdfast", True),
        ("vault", "from holdfast.attic import junk", True),
        ("vault", "from holdfast import errors, __version__", False),
        ("vault", "from . import arena", False),
        ("vault", "from .arena import Arena\nfrom ..format import manifest", False),
        ("vault", "import importlib\nimportlib.import_module('holdfast.jax')", False),
        ("clock", "from holdfast.errors import UsageError", False),
        ("clock", "from holdfast.faults import site", True),
        ("cli", "from holdfast.checkpoint import Checkpointer\nimport jax", False),
    ],
)
def test_the_check_itself(room: str, source: str, caught: bool) -> None:
    parts = ("holdfast", room) if room in GROUND else ("holdfast", room, "module")
    found = [breach(room, name) for _, name in imports_of(ast.parse(source), parts)]
    assert any(found) == caught


@pytest.mark.process
def test_rooms_above_the_line_bring_no_framework_along() -> None:
    """Every module of them is imported in one bare process."""
    modules = ["holdfast", *(f"holdfast.{name}" for name in GROUND)]
    for room in built(ABOVE_THE_LINE):
        for path in files(SRC / room):
            parts = path.relative_to(SRC.parent).with_suffix("").parts
            if parts[-1] != "__main__":  # a program, not a module
                modules.append(".".join(parts).removesuffix(".__init__"))
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
    came = [name for name in {FRAMEWORKS!r} if name in sys.modules]
    if came:
        sys.exit(f"importing {{module}} brought {{', '.join(came)}} along")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_order_has_no_room_twice() -> None:
    assert len(set(ORDER)) == len(GROUND) + len(ABOVE_THE_LINE) + len(BELOW_THE_LINE)
