"""The rooms of the house, in the order of DESIGN.md, and how to read their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import holdfast

REPO = Path(__file__).resolve().parents[2]
SRC = REPO / "src" / "holdfast"

# Single modules that every room may import; each may import those before it.
GROUND = ("errors", "clock", "faults")
ABOVE_THE_LINE = (
    "arrays",
    "journal",
    "wire",
    "storage",
    "coord",
    "transfer",
    "reduce",
    "format",
    "vault",
    "checkpoint",
    "supervise",
    "launch",
    "report",
)
BELOW_THE_LINE = ("jax", "torch", "xla", "train", "rl", "recipes", "testing", "cli")
ORDER = (*GROUND, *ABOVE_THE_LINE, *BELOW_THE_LINE)
FRAMEWORKS = ("jax", "jaxlib", "torch")


def built(rooms: tuple[str, ...] = (*ABOVE_THE_LINE, *BELOW_THE_LINE)) -> list[str]:
    """Those of `rooms` that have been built: a folder with an __init__.py."""
    return [room for room in rooms if (SRC / room / "__init__.py").exists()]


def files(root: Path = SRC) -> list[Path]:
    """Every Python file below `root`."""
    return sorted(root.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room_of(path: Path) -> str:
    """The room or ground module that a file of the package belongs to; "" for holdfast itself."""
    first = path.relative_to(SRC).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in the file, inside functions too.

    `from a import b` is given as "a.b": b may be a module. Relative imports are resolved. Names
    inside strings, as for importlib.import_module, are not imports: they are how a room above
    finds a framework's adapter at run time without knowing it.
    """
    yield from imports_of(tree(path), path.relative_to(SRC.parent).with_suffix("").parts)


def imports_of(module: ast.Module, parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """As `imports`, for a module that lies at `parts`, e.g. ("holdfast", "vault", "arena")."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # One dot is the module's own package: for pkg/__init__.py and pkg/mod.py alike, pkg.
            base = list(parts[: len(parts) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def room_imported(name: str) -> str | None:
    """The room or ground module that the dotted name `name` lies in.

    None if it is no part of Holdfast; "" for the package itself, as by `import holdfast`.
    """
    package, _, rest = name.partition(".")
    if package != "holdfast":
        return None
    first = rest.partition(".")[0]
    if first == "__version__":
        return None
    home = holdfast._HOME.get(first, name)
    return home.split(".")[1] if "." in home else ""
