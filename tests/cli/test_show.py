"""`holdfast ckpt show`."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.format import step_folder
from tests.cli.saved import answer, edit_manifest, holdfast, newer_version, save, tree
from tests.format.make_golden import GOLDEN


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", {100: tree(), 200: tree(1)}, {200: {"metrics": {"loss": 2.25}}})


def test_what_a_person_sees() -> None:
    done = holdfast("ckpt", "show", GOLDEN, "--arrays", "params/[wbq]", "--arrays", "rng")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == ["step 1200", "  save id     golden/1200/a1"]
    assert "  written by  holdfast 0.1.0" in lines
    assert "  floor    float    -0.0" in lines
    assert lines[lines.index("arrays") :] == [
        "arrays",
        "  NAME      DTYPE                     SHAPE   GRID  BYTES  PARTS",
        "  params/w  float32                   (8, 6)  2x1     192  0-1",
        "  params/b  bfloat16                  (7,)    1        14  0",
        "  params/q  int4                      (16,)   1        16  1",
        "  rng       uint32 key(threefry2x32)  (2,)    1         8  1",
    ]


def test_json_schema() -> None:
    found = answer("ckpt", "show", GOLDEN, 1200)
    assert set(found) == {
        "path", "step", "save", "created", "bytes", "pinned", "format_version", "writer", "meta", "parts",
        "scalars", "arrays",
    }  # fmt: skip
    assert found["save"] == {"run": "golden", "step": 1200, "attempt": "a1"}
    assert found["meta"]["tokens"] == 2**40
    assert found["arrays"][0] == {
        "name": "params/w",
        "dtype": "float32",
        "shape": [8, 6],
        "kind": "array",
        "impl": None,
        "axes": ["embed", "mlp"],
        "grid": [2, 1],
        "bytes": 192,
        "parts": [0, 1],
    }
    assert {entry["name"]: entry["value"] for entry in found["scalars"]} == {
        "step": 1200, "big": -(2**100), "lr": 3e-4, "loss": "nan", "floor": -0.0, "name": "naïve ☃",
        "done": False, "nothing": None, "phase": "0x1.0000000000000p+0,-0x1.0000000000000p+1", "blob": "00ff",
    }  # fmt: skip


def test_the_newest_step_is_shown_unless_one_is_named(path: Path) -> None:
    assert answer("ckpt", "show", path)["step"] == 200
    assert answer("ckpt", "show", path, 100)["step"] == 100
    assert answer("ckpt", "show", f"{path}@100")["step"] == 100
    assert answer("ckpt", "show", path / step_folder(100))["step"] == 100


def test_a_folder_name_with_an_at_sign(tmp_path: Path) -> None:
    path = save(tmp_path / "run@7", {3: tree()})
    assert answer("ckpt", "show", path)["step"] == 3
    assert answer("ckpt", "show", f"{path}@3")["step"] == 3


def test_two_different_steps_are_refused(path: Path) -> None:
    done = holdfast("ckpt", "show", f"{path}@100", 200)
    assert done.exit_code == 2
    assert "names step 100, but step 200 was asked for" in done.stderr


def test_a_missing_step_lists_those_there_are(path: Path) -> None:
    done = holdfast("ckpt", "show", path, 7)
    assert done.exit_code == 2
    assert done.stderr == f"error: there is no step 7 in {path}\n\nhint: steps there: 100, 200\n"


def test_an_empty_folder(tmp_path: Path) -> None:
    done = holdfast("ckpt", "show", tmp_path)
    assert done.exit_code == 2
    assert f"error: there is no step in {tmp_path}" in done.stderr


def test_a_newer_format_says_to_upgrade(path: Path) -> None:
    newer_version(path, 200)
    done = holdfast("ckpt", "show", path)
    assert done.exit_code == 2
    assert "error: manifest.json: format version 99" in done.stderr
    assert "hint: upgrade holdfast" in done.stderr


def test_patterns_that_match_nothing_are_said(path: Path) -> None:
    done = holdfast("ckpt", "show", path, "--arrays", "nothing")
    assert done.exit_code == 0
    assert done.stderr == "no array matches nothing\n"
    assert "arrays\n" not in done.stdout.partition("scalars")[2]


def test_metadata_cannot_send_terminal_codes(path: Path) -> None:
    edit_manifest(path, 200, meta={"k": "\x1b]0;title\x07"}, writer={"holdfast": "\x1b[2J"})
    assert "\x1b" not in holdfast("ckpt", "show", path).stdout
