"""`holdfast ckpt diff`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from holdfast.arrays import TABLE
from holdfast.format import SaveId, step_folder
from holdfast.storage import LocalStore
from tests.cli.saved import answer, edit_manifest, flip, holdfast, part, save, tree
from tests.format.make_golden import RAMP, Array, make_step


def sharded(path: Path, step: int, arrays: dict[str, Array], attempt: str = "a1") -> Path:
    """A step of any shard grid, written file by file."""
    folder = path / step_folder(step)
    folder.mkdir(parents=True)
    for name, data in make_step(SaveId("run", step, attempt), arrays, {}, {}).items():
        (folder / name).write_bytes(data)
    return path


def one(found: Any, name: str) -> Any:
    (array,) = (array for array in found["arrays"] if array["name"] == name)
    return array


def test_equal_steps_of_two_runs(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", {100: tree()}), save(tmp_path / "b", {100: tree()})
    done = holdfast("ckpt", "diff", a, b)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "equal: 3 of 3 arrays bit-equal"
    assert {array["status"] for array in answer("ckpt", "diff", a, b)["arrays"]} == {"equal"}


def test_what_was_not_read_is_not_called_bit_equal(tmp_path: Path) -> None:
    path = save(tmp_path / "a", {100: tree()})
    shutil.copytree(path, tmp_path / "copy")
    done = holdfast("ckpt", "diff", path, tmp_path / "copy")
    last = "equal: 3 of 3 arrays of the same save with the same digests, not read"
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, last)


def test_what_a_person_sees(tmp_path: Path) -> None:
    before, after = tree(), tree()
    after["params"]["w"][0] += np.float32(0.5)
    after["params"]["w"][2, 3] = np.nan
    after["params"]["b"] = after["params"]["b"].astype(np.float32)
    after["opt"] = [np.zeros((2,), np.int32), np.ones(2, np.int8)]
    after["lr"] = 0.2
    before["old"] = np.ones(1)
    path = save(tmp_path / "ckpt", {1: before, 2: after}, {1: {"a": 1, "m": {"x": 1}}, 2: {"m": {"x": 1.0}}})
    done = holdfast("ckpt", "diff", f"{path}@1", f"{path}@2")
    assert done.exit_code == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"a: {path} step 1 (run/1/")
    assert lines[1].startswith(f"b: {path} step 2 (run/2/")
    assert lines[2:] == [
        "",
        "structure",
        "  NAME      DIFFERENCE",
        "  old       only in a",
        "  opt/0     shape: () in a, (2,) in b",
        "  opt/1     only in b",
        "  params/b  dtype: bfloat16 in a, float32 in b",
        "",
        "scalars",
        "  NAME  A    B",
        "  lr    0.1  0.2",
        "",
        "meta",
        "  NAME  A  B",
        "  a     1  missing",
        "  m/x   1  1.0",
        "",
        "values",
        "  NAME      DTYPE    ELEMENTS  DIFFER  MAX ABS DIFF  NOTE",
        "  params/w  float32        12       5           0.5  1 NaN on one side only",
        "",
        "different: 0 of 5 arrays bit-equal; 1 scalar changed; 2 metadata values changed",
    ]


def test_json_schema(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree(), 2: tree(0.25)}, {2: {"k": [1]}})
    found = answer("ckpt", "diff", path, path, "--step-a", 1, "--step-b", 2)
    assert set(found) == {"equal", "values_compared", "a", "b", "arrays", "scalars", "meta"}
    assert (found["equal"], found["values_compared"]) == (False, True)
    assert set(found["a"]) == {"path", "step", "save", "created"}
    assert one(found, "params/w") == {
        "name": "params/w",
        "status": "values differ",
        "a": {"dtype": "float32", "shape": [3, 4], "kind": "array", "impl": None},
        "b": {"dtype": "float32", "shape": [3, 4], "kind": "array", "impl": None},
        "elements": 12,
        "bits_differ": 12,
        "values_differ": 12,
        "nan_on_one_side": 0,
        "max_abs": 0.25,
    }
    assert one(found, "params/b")["status"] == "equal"
    assert found["meta"] == [{"name": "k", "a": None, "b": "[1]"}]


def test_programs_get_all_of_a_long_scalar(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {n: {"w": np.ones(1), "text": "x" * 100 + str(n)} for n in (1, 2)})
    (change,) = answer("ckpt", "diff", path, path, "--step-a", 1, "--step-b", 2)["scalars"]
    assert change == {"name": "text", "a": repr("x" * 100 + "1"), "b": repr("x" * 100 + "2")}
    assert "x" * 90 not in holdfast("ckpt", "diff", f"{path}@1", f"{path}@2").stdout
    assert "x" * 90 not in holdfast("ckpt", "show", path).stdout


def test_structure_alone_reads_no_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "ckpt", {1: tree(), 2: tree(1)})
    monkeypatch.setattr(LocalStore, "open_part", _refuse)
    done = holdfast("ckpt", "diff", f"{path}@1", path, "--no-values")
    assert done.exit_code == 0
    assert "alike in structure, values not compared" in done.stdout


def test_a_copy_of_the_same_save_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    edit_manifest(copy, 1, meta={"note": "copied"})
    monkeypatch.setattr(LocalStore, "open_part", _refuse)
    found = answer("ckpt", "diff", path, copy)
    assert {array["status"] for array in found["arrays"]} == {"same save"}
    assert [change["name"] for change in found["meta"]] == ["note"]


def test_the_same_step_saved_again_is_read(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", {1: tree()}), save(tmp_path / "b", {1: tree(1)})
    assert one(answer("ckpt", "diff", a, b), "params/w")["status"] == "values differ"


def test_equal_save_ids_with_other_bytes_are_read(tmp_path: Path) -> None:
    a = sharded(tmp_path / "a", 1, {"w": Array(RAMP)})
    b = sharded(tmp_path / "b", 1, {"w": Array(RAMP + 1)})
    assert one(answer("ckpt", "diff", a, b), "w")["max_abs"] == 1.0


def _refuse(*args: object, **named: object) -> NoReturn:
    raise AssertionError("array data was read")


def test_damage_is_an_error_not_a_difference(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree(), 2: tree()})
    flip(part(path, 2), -1)
    done = holdfast("ckpt", "diff", f"{path}@1", path)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "block 0" in done.stderr
    assert "is damaged" in done.stderr


def test_sharding_does_not_matter(tmp_path: Path) -> None:
    changed = RAMP.copy()
    changed[7, 5] += 2
    both = (0, 1)
    a = sharded(tmp_path / "a", 1, {"w": Array(RAMP, ((0, 3, 8), (0, 6)), both)}, "a1")
    b = sharded(tmp_path / "b", 1, {"w": Array(RAMP, ((0, 8), (0, 1, 6)), both)}, "b2")
    c = sharded(tmp_path / "c", 1, {"w": Array(changed, ((0, 2, 8), (0, 5, 6)), (0, 1, 1, 0))}, "c3")
    assert answer("ckpt", "diff", a, b)["equal"] is True
    found = one(answer("ckpt", "diff", a, c), "w")
    assert (found["values_differ"], found["max_abs"]) == (1, 2.0)


def test_keys_differ_without_a_distance(tmp_path: Path) -> None:
    words = np.array([0, 42], np.uint32)
    a = sharded(tmp_path / "a", 1, {"rng": Array(words, impl="threefry2x32")}, "a1")
    b = sharded(tmp_path / "b", 1, {"rng": Array(words + 1, impl="threefry2x32")}, "b2")
    c = sharded(tmp_path / "c", 1, {"rng": Array(words)}, "c3")
    found = one(answer("ckpt", "diff", a, b), "rng")
    assert (found["status"], found["values_differ"], found["max_abs"]) == ("values differ", 2, None)
    assert one(answer("ckpt", "diff", a, c), "rng")["status"] == "kind"
    done = holdfast("ckpt", "diff", a, c)
    assert "kind: uint32 key(threefry2x32) in a, uint32 in b" in done.stdout


def test_every_dtype(tmp_path: Path) -> None:
    ones = {name: np.ones(5, kind.numpy) for name, kind in TABLE.items()}
    others = {name: array.copy() for name, array in ones.items()}
    for array in others.values():
        array[3] = 0 if array.dtype.name != "float8_e8m0fnu" else 2  # which has no zero
    path = save(tmp_path / "ckpt", {1: ones, 2: others, 3: ones})
    assert answer("ckpt", "diff", f"{path}@1", f"{path}@3")["equal"] is True
    for array in answer("ckpt", "diff", f"{path}@1", f"{path}@2")["arrays"]:
        assert (array["name"], array["values_differ"], array["max_abs"]) == (array["name"], 1, 1)


def test_nan_infinity_and_zero(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    quiet, odd = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    before = {
        "same": np.array([nan, inf, -0.0]),
        "nan": np.array([nan, 1.0, 2.0]),
        "inf": np.array([inf, 1.0, inf]),
        "zero": np.array([0.0, 1.0]),
        "payload": np.array([quiet, 1], np.float32),
        "complex": np.array([complex(inf, 1), complex(0, nan)]),
        "wide": np.array([-(2**63), 0]),
        "unsigned": np.array([0, 2**64 - 1], np.uint64),
    }
    after = {
        "same": np.array([nan, inf, -0.0]),
        "nan": np.array([nan, nan, 2.5]),
        "inf": np.array([-inf, 1.0, inf]),
        "zero": np.array([-0.0, 1.0]),
        "payload": np.array([odd, 1], np.float32),
        "complex": np.array([complex(inf, 4), complex(0, nan)]),
        "wide": np.array([2**63 - 1, 1]),
        "unsigned": np.array([1, 2**64 - 2], np.uint64),
    }
    path = save(tmp_path / "ckpt", {1: before, 2: after})
    found = {array["name"]: array for array in answer("ckpt", "diff", f"{path}@1", path)["arrays"]}
    seen = {
        name: (one["status"], one["values_differ"], one["nan_on_one_side"], one["max_abs"])
        for name, one in found.items()
    }
    assert seen == {
        "same": ("equal", 0, 0, None),
        "nan": ("values differ", 2, 1, 0.5),
        "inf": ("values differ", 1, 0, "inf"),
        "zero": ("bits differ", 0, 0, None),
        "payload": ("bits differ", 0, 0, None),
        "complex": ("values differ", 1, 0, 3.0),
        "wide": ("values differ", 2, 0, 2**64 - 1),
        "unsigned": ("values differ", 2, 0, 1),
    }
    assert (
        "1 differ in bits alone (NaN payload or sign of zero)"
        in holdfast("ckpt", "diff", f"{path}@1", path).stdout
    )


def test_errors(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree()})
    assert holdfast("ckpt", "diff", path, tmp_path / "nowhere").exit_code == 2
    assert holdfast("ckpt", "diff", path, f"{path}@9").exit_code == 2
    assert holdfast("ckpt", "diff", path).exit_code == 2
    assert holdfast("ckpt", "diff", f"{path}@1", path, "--step-a", 2).exit_code == 2
