"""The checker can fail: a save with one mistake in it is found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage import LocalStore
from holdfast.storage.local import LocalPartWriter
from holdfast.testing import (
    ForgetfulFiles,
    RecordingFiles,
    Scenario,
    Tally,
    check_crashes,
    overwriting,
    record,
    recycling,
    second_save,
    two_ranks,
)
from holdfast.testing.recording import Kind
from holdfast.vault.commit import Commit


def syncs(ending: str) -> Callable[[Kind, str], bool]:
    return lambda kind, path: kind == "sync" and path.endswith(ending)


def folder_syncs(ending: str) -> Callable[[Kind, str], bool]:
    return lambda kind, path: kind == "sync_folder" and path.endswith(ending)


@pytest.mark.parametrize(
    ("which", "scenario"),
    [
        pytest.param(syncs(".safetensors"), second_save, id="part"),
        pytest.param(syncs(".safetensors"), recycling, id="recycled part"),
        pytest.param(syncs(".index.json"), second_save, id="index"),
        pytest.param(syncs("manifest.json"), second_save, id="manifest"),
        pytest.param(syncs("manifest.json"), overwriting, id="replacing manifest"),
        pytest.param(folder_syncs("step-00000002"), second_save, id="step folder"),
        pytest.param(folder_syncs("ckpt"), second_save, id="checkpoint folder"),
        pytest.param(syncs(".safetensors"), two_ranks, id="part of two"),
        pytest.param(folder_syncs("step-00000002"), two_ranks, id="step folder of two"),
    ],
)
def test_a_missing_sync_is_found(
    which: Callable[[Kind, str], bool], scenario: Scenario, tmp_path: Path
) -> None:
    files = ForgetfulFiles(tmp_path, which)
    log = record(scenario, files)
    assert files.num_forgotten
    assert check_crashes(log, limit=60, most_bad=1).bad


def found(scenario: Scenario, tmp_path: Path) -> Tally:
    return check_crashes(record(scenario, RecordingFiles(tmp_path)), limit=60, most_bad=1)


def test_a_manifest_before_the_part_is_synced_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, close = LocalPartWriter.sync, LocalPartWriter.close

    def late(writer: LocalPartWriter) -> None:
        if writer._fd >= 0:
            sync(writer)
        close(writer)

    monkeypatch.setattr(LocalPartWriter, "sync", lambda writer: None)
    monkeypatch.setattr(LocalPartWriter, "close", late)
    assert found(second_save, tmp_path).bad


def test_removing_the_old_parts_before_the_new_manifest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Commit._create

    def early(commit: Commit, *args: Any) -> None:
        commit._remove_replaced(args[1])
        create(commit, *args)

    monkeypatch.setattr(Commit, "_create", early)
    assert found(overwriting, tmp_path).bad


def test_a_manifest_written_in_place_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(store: LocalStore, *names: str, data: bytes, expected: None = None) -> bool:
        with store.files.opened(store.files.create(store.path(*names))) as fd:
            store.files.reserve(fd, len(data))
            store.files.write_at(fd, data, 0)
            store.files.sync(fd)
        store.sync_folder(*names[:-1])
        return True

    monkeypatch.setattr(LocalStore, "replace", in_place)
    assert found(overwriting, tmp_path).bad
