"""What may not stand in the source at all, and fault sites that are really planted."""

from __future__ import annotations

import ast
import typing
from collections import defaultdict
from pathlib import Path

import pytest

from holdfast import faults
from holdfast.journal import Event
from tests.house.rooms import REPO, SRC, built, files, imports, tree

# Names that say nothing about what is inside.
VAGUE = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc"}

# Each runs code from bytes, or hands objects between processes by pickling them.
CODE_FROM_BYTES = {
    "cloudpickle",
    "concurrent.futures.process",
    "concurrent.futures.ProcessPoolExecutor",
    "dill",
    "joblib",
    "marshal",
    "multiprocessing",
    "pickle",
    "shelve",
    "_pickle",
}
CODE_CALLS = {"eval", "exec", "__import__"}


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(REPO)}:{line}"


def test_no_file_or_folder_has_a_vague_name() -> None:
    roots = [SRC, REPO / "tests", REPO / "bench", REPO / "examples"]
    vague = [
        str(path.relative_to(REPO))
        for root in roots
        for path in root.rglob("*")
        if "__pycache__" not in path.parts and path.name.split(".")[0].removeprefix("test_").lower() in VAGUE
    ]
    assert not vague


def test_nothing_in_the_package_can_run_code_from_bytes() -> None:
    found = []
    for path in files():
        for line, name in imports(path):
            if any(name == bad or name.startswith(f"{bad}.") for bad in CODE_FROM_BYTES):
                found.append(f"{where(path, line)}: imports {name}")
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in CODE_CALLS:
                found.append(f"{where(path, node.lineno)}: calls {node.func.id}()")
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not allowed:
                    found.append(f"{where(path, node.lineno)}: allow_pickle")
    assert not found, "\n" + "\n".join(found)


def planted_sites() -> dict[str, list[str]]:
    """Every site name given to `faults.site(...)` or `site(...)` in the package, and where."""
    planted = defaultdict(list)
    for path in files():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func)
            if called in ("faults.site", "site") and isinstance(node.args[0], ast.Constant):
                planted[str(node.args[0].value)].append(where(path, node.lineno))
    return planted


def test_every_planted_fault_site_is_listed() -> None:
    strangers = {name: at for name, at in planted_sites().items() if name not in faults.SITES}
    assert not strangers, f"add to faults.SITES: {strangers}"


needs_save_and_load = pytest.mark.skipif(
    not {"vault", "checkpoint"} <= set(built()), reason="the rooms that save and load are not built"
)


@needs_save_and_load
def test_every_listed_fault_site_is_planted() -> None:
    unplanted = set(faults.SITES) - set(planted_sites())
    assert not unplanted, f"in faults.SITES but nowhere in src: {sorted(unplanted)}"


@needs_save_and_load
def test_every_kind_of_event_is_written_by_someone() -> None:
    called = {
        ast.unparse(node.func).split(".")[-1]
        for path in files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
    }
    silent = [kind.__name__ for kind in typing.get_args(Event) if kind.__name__ not in called]
    assert not silent, f"defined in journal/events.py and never appended: {silent}"
