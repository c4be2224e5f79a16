"""`holdfast ckpt ls`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from holdfast.checkpoint import Checkpointer
from holdfast.format import data_name, step_folder
from holdfast.storage import Files, LocalStore
from tests.cli.saved import (
    answer,
    edit_manifest,
    flip,
    holdfast,
    leave_uncommitted,
    manifest_path,
    newer_version,
    save,
    tree,
)

METAS = {
    100: {"metrics": {"loss": 2.5}, "samples": 800},
    200: {"metrics": {"loss": 2.25}, "samples": 1600},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "ckpt", {100: tree(), 200: tree(1)}, METAS)


def test_a_run_that_saves_elsewhere_is_listed_from_there(tmp_path: Path) -> None:
    kept = save(tmp_path / "kept", {3: tree(3)}, {})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"name": "run", "checkpoint": {"folder": str(kept)}}))
    done = holdfast("ckpt", "ls", run, "--json")
    assert done.exit_code == 0
    assert [one["step"] for one in json.loads(done.stdout)["steps"]] == [3]
    (run / "config.json").write_text("{")
    assert "no steps in" in holdfast("ckpt", "ls", run).stdout + holdfast("ckpt", "ls", run).stderr


def test_what_a_person_sees(path: Path) -> None:
    done = holdfast("ckpt", "ls", path)
    assert done.exit_code == 0
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "STEP  CREATED (UTC)        AGE  SIZE  ARRAYS  PARTS  STATUS     METRICS",
        " 100  2023-11-14 20:13     2 h  58 B       3      1  committed  loss=2.5 samples=800",
        " 200  2023-11-14 21:13  60 min  58 B       3      1  committed  loss=2.25 samples=1600",
    ]


def test_every_state_of_a_step(path: Path) -> None:
    save(path, {300: tree()})
    flip(manifest_path(path, 300), 100)
    leave_uncommitted(path, 400)
    store = LocalStore(path)
    os.mkdir(path / step_folder(500))
    writer = store.write_part(step_folder(500), data_name(0, "live-1"), size=64)
    with Checkpointer(path, journal=False) as ckpt:
        ckpt.pin(100)
    try:
        done = holdfast("ckpt", "ls", path)
        rows = answer("ckpt", "ls", path)["steps"]
    finally:
        writer.close()
    assert done.exit_code == 0
    assert [(row["step"], row["status"], row["pinned"]) for row in rows] == [
        (100, "committed", True),
        (200, "committed", False),
        (300, "unreadable", False),
        (400, "uncommitted", False),
        (500, "being written", False),
    ]
    assert "step 300 is unreadable: manifest.json: the root says" in done.stdout
    assert "step 400 is uncommitted: left by a save that never finished" in done.stdout
    assert "step 500 is being written: a live process is at work on it" in done.stdout
    assert [row["bytes"] for row in rows[3:]] == [10, 64]


def test_json_schema(path: Path) -> None:
    found = answer("ckpt", "ls", path)
    assert set(found) == {"path", "steps"}
    assert found["path"] == str(path)
    attempt = found["steps"][0].pop("attempt")
    assert isinstance(attempt, str)
    assert found["steps"][0] == {
        "step": 100,
        "status": "committed",
        "reason": None,
        "bytes": 58,
        "created": "2023-11-14T20:13:20.000+00:00",
        "arrays": 3,
        "parts": 1,
        "pinned": False,
        "samples": 800,
        "metrics": {"loss": 2.5},
        "places": [str(path)],
    }


def test_a_newer_format_is_named(path: Path) -> None:
    newer_version(path, 200)
    row = answer("ckpt", "ls", path)["steps"][1]
    assert row["status"] == "unreadable"
    assert "format version 99, this Holdfast reads up to 1" in row["reason"]


def test_counts_among_metrics_are_whole(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {1: tree()}, {1: {"metrics": {"tokens": 16_384, "loss": 5.01234}}})
    assert "tokens=16384 loss=5.012" in holdfast("ckpt", "ls", path).stdout


def test_metrics_come_from_the_top_level_too_and_only_numbers_count(tmp_path: Path) -> None:
    meta = {"loss": 1.5, "name": "x", "ok": True, "metrics": {"acc": 0.5, "note": "n"}}
    path = save(tmp_path / "ckpt", {1: tree()}, {1: meta})
    metrics = answer("ckpt", "ls", path)["steps"][0]["metrics"]
    assert metrics["acc"] == 0.5
    assert metrics["loss"] == 1.5
    assert "name" not in metrics
    assert "note" not in metrics


def test_a_missing_folder(tmp_path: Path) -> None:
    done = holdfast("ckpt", "ls", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"error: there is no folder {tmp_path}/nowhere\n\n"
        "hint: give the folder of a run, or the one that its steps are saved in\n"
    )


def test_a_file_and_a_step_folder_are_not_checkpoint_folders(path: Path) -> None:
    done = holdfast("ckpt", "ls", manifest_path(path, 100))
    assert done.exit_code == 2
    assert "is a file, not a checkpoint folder" in done.stderr
    done = holdfast("ckpt", "ls", path / step_folder(100))
    assert done.exit_code == 2
    assert f"hint: give its parent: {path}" in done.stderr


def test_an_empty_folder_has_no_steps(tmp_path: Path) -> None:
    done = holdfast("ckpt", "ls", tmp_path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith(f"no steps in {tmp_path}\n")
    assert answer("ckpt", "ls", tmp_path)["steps"] == []


def test_the_folder_of_a_run_is_looked_into(path: Path) -> None:
    assert answer("ckpt", "ls", path.parent) == answer("ckpt", "ls", path)
    assert answer("ckpt", "show", f"{path.parent}@100") == answer("ckpt", "show", path, "100")
    save(path / "ckpt", {7: tree()})  # a folder that has steps itself is meant itself
    assert answer("ckpt", "ls", path)["path"] == str(path)


def test_listing_writes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> NoReturn:
        raise AssertionError(f"a listing wrote: {args}")

    for call in ("create", "make_folder", "rename", "link", "unlink", "reserve", "write_at", "sync_folder"):
        monkeypatch.setattr(Files, call, refuse)
    assert holdfast("ckpt", "ls", path).exit_code == 0
    assert holdfast("ckpt", "verify", path).exit_code == 0
    assert holdfast("ckpt", "prune", path, "--keep", "latest(1)", "--dry-run").exit_code == 0


def test_names_from_disk_cannot_send_terminal_codes(path: Path) -> None:
    edit_manifest(path, 200, meta={"metrics": {"\x1b[31mred": 1}})
    done = holdfast("ckpt", "ls", path)
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred=1" in done.stdout
