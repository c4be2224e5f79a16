"""`holdfast ckpt verify`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from holdfast.format import step_folder
from tests.cli.saved import answer, flip, holdfast, manifest_path, newer_version, part, save, tree


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", {100: tree(), 200: tree(1), 300: tree(2)})


def test_a_whole_step(path: Path) -> None:
    done = holdfast("ckpt", "verify", path)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "step 300: ok (58 B, 3 arrays, 1 part)\n", "")


def test_all_steps(path: Path) -> None:
    done = holdfast("ckpt", "verify", path, "--all")
    assert done.exit_code == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 100", "step 200", "step 300"]


def test_what_a_person_sees_of_damage(path: Path) -> None:
    file = part(path, 200)
    flip(file, -1)
    done = holdfast("ckpt", "verify", path, "--all")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "step 100: ok (58 B, 3 arrays, 1 part)"
    assert lines[1:3] == ["step 200: 1 problem", f"  {file.name}, block 0"]
    assert lines[3].startswith("    block 0 (bytes 0 to ")
    assert "is damaged: digest" in lines[3]
    assert lines[4].startswith("    arrays: ")
    assert set(lines[4].removeprefix("    arrays: ").split(", ")) == {"params/w", "params/b", "opt/0"}
    assert lines[5:] == ["step 300: ok (58 B, 3 arrays, 1 part)"]


def test_json_schema(path: Path) -> None:
    file = part(path, 300)
    flip(file, -1)
    found = answer("ckpt", "verify", path)
    assert set(found) == {"path", "ok", "steps"}
    assert found["ok"] is False
    (step,) = found["steps"]
    assert set(step) == {"step", "ok", "bytes", "problems"}
    assert (step["step"], step["ok"], step["bytes"]) == (300, False, 58)
    (problem,) = step["problems"]
    assert set(problem) == {"file", "block", "arrays", "message"}
    assert (problem["file"], problem["block"]) == (file.name, 0)
    assert set(problem["arrays"]) == {"params/w", "params/b", "opt/0"}


def test_a_cut_file_a_missing_file_and_a_damaged_index(path: Path) -> None:
    os.truncate(part(path, 100), 4096)
    os.unlink(part(path, 200))
    (index,) = (path / step_folder(300)).glob("*.index.json")
    flip(index, 50)
    done = holdfast("ckpt", "verify", path, "--all")
    assert done.exit_code == 1
    assert "bytes, but its index says" in done.stdout
    assert "No such file" in done.stdout
    assert f"  {index.name}\n" in done.stdout


@pytest.mark.parametrize("damage", ["flipped", "newer"])
def test_an_unreadable_manifest_is_a_problem(path: Path, damage: str) -> None:
    if damage == "flipped":
        flip(manifest_path(path, 300), 60)
    else:
        newer_version(path, 300)
    done = holdfast("ckpt", "verify", path)
    assert done.exit_code == 1
    assert done.stdout.startswith("step 300: 1 problem\n  manifest.json\n")


def test_a_renamed_step_is_a_problem(path: Path) -> None:
    shutil.move(path / step_folder(300), path / step_folder(400))
    done = holdfast("ckpt", "verify", path)
    assert done.exit_code == 1
    assert "its manifest is that of step 300" in done.stdout


def test_not_found_and_wrong_use(path: Path, tmp_path: Path) -> None:
    assert holdfast("ckpt", "verify", path, 7).exit_code == 2
    assert holdfast("ckpt", "verify", tmp_path / "nowhere").exit_code == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert holdfast("ckpt", "verify", empty, "--all").exit_code == 2
    done = holdfast("ckpt", "verify", path, 100, "--all")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: --all and a step exclude each other\n\nhint: see 'holdfast ckpt verify --help'\n"
    )
