"""`holdfast ckpt verify`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.upkeep import remove_step
from holdfast.cli import verification
from holdfast.errors import StorageError
from holdfast.format import Manifest, Problem, step_folder, verify_step
from holdfast.storage import Store
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


def test_a_step_that_a_live_run_removes_meanwhile_is_not_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One goes while it is read, the next before its turn."""

    def verify(store: Store, folder: str, **named: Any) -> Iterator[Problem]:
        if folder == step_folder(100):
            remove_step(store, 100)
            remove_step(store, 200)
        return verify_step(store, folder, **named)

    monkeypatch.setattr(verification, "verify_step", verify)
    done = holdfast("ckpt", "verify", path, "--all", "--json")
    assert (done.exit_code, done.stderr) == (
        0,
        "".join(f"step {n} was removed meanwhile\n" for n in (100, 200)),
    )
    assert [step["step"] for step in json.loads(done.stdout)["steps"]] == [300]
    save(path, {100: tree()})
    done = holdfast("ckpt", "verify", path, 100)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "step 100 was removed" in done.stderr


def test_a_step_that_goes_before_its_manifest_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def manifest(store: Store, step: int) -> Manifest:
        remove_step(store, step)
        raise StorageError("cannot read manifest.json", path=store.root)

    monkeypatch.setattr(verification, "step_manifest", manifest)
    done = holdfast("ckpt", "verify", path, 200)
    assert (done.exit_code, "step 200 was removed" in done.stderr) == (2, True)


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
