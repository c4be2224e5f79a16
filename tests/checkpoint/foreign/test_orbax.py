"""Orbax checkpoints of every layout come in bit by bit; damaged and unfinished ones do not come in at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from holdfast.checkpoint import step_manifest
from holdfast.checkpoint.foreign import MoveReport, Skipped, import_checkpoint, moving
from holdfast.errors import FormatError, HoldfastError, UsageError
from holdfast.storage import LocalStore
from tests.checkpoint.foreign.golden import MANAGERS, ORBAX, STATE, assert_equal, scalars, stored, unpacked

KEYS = {
    "key": np.asarray(jax.random.key_data(jax.random.key(3))),
    "keys": np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1, impl="rbg"), 3))),
}


def imported(tmp_path: Path, name: str, **options: object) -> MoveReport:
    return import_checkpoint(unpacked(name, tmp_path), tmp_path / "ckpt", step=3, **options)  # type: ignore[arg-type]


def test_the_golden_checkpoints_are_all_there() -> None:
    layouts = {name.split("-", 2)[2] for name in ORBAX}
    assert layouts == {"ocdbt-zarr2", "ocdbt-zarr3", "plain-zarr2", "plain-zarr3"}
    assert {name.split("-")[1][:4] for name in ORBAX} == {"0.11", "0.12"}


@pytest.mark.parametrize("name", ORBAX)
def test_every_layout_bit_by_bit(tmp_path: Path, name: str) -> None:
    report = imported(tmp_path, name)
    assert_equal(stored(tmp_path / "ckpt", 3), {**STATE, **KEYS})
    assert scalars(tmp_path / "ckpt", 3) == {
        "step": ("int", "7"),
        "lr": ("float", "0x1.0000000000000p-2"),
        "done": ("bool", "false"),
        "name": ("str", "golden"),
    }
    impls = {
        e.name: e.impl for e in step_manifest(LocalStore(tmp_path / "ckpt"), 3).arrays if e.kind == "key"
    }
    assert impls == {"key": "threefry2x32", "keys": "rbg"}
    assert report.skipped == (
        Skipped("bare", "an empty dict is structure, not a value"),
        Skipped("nothing", "None is structure, not a value"),
        Skipped("opt/1", "None is structure, not a value"),
    )
    assert ("OCDBT" in report.format, "zarr3" in report.format) == ("ocdbt" in name, "zarr3" in name)


@pytest.mark.parametrize("name", MANAGERS)
def test_the_folder_of_a_checkpoint_manager(tmp_path: Path, name: str) -> None:
    root = unpacked(name, tmp_path)
    report = import_checkpoint(root, tmp_path / "ckpt")
    assert report.step == 10
    params = {name: array for name, array in STATE.items() if name.startswith("params/")}
    assert_equal(stored(tmp_path / "ckpt", 10), params)
    assert step_manifest(LocalStore(tmp_path / "ckpt"), 10).meta["data"] == {"position": 10}
    assert import_checkpoint(root, tmp_path / "ckpt", step=5).step == 5
    assert import_checkpoint(root / "10" / "state", tmp_path / "item").step == 10
    with pytest.raises(HoldfastError, match="there is no step 7"):
        import_checkpoint(root, tmp_path / "ckpt", step=7)
    with pytest.raises(UsageError, match="has no item 'other'"):
        import_checkpoint(root, tmp_path / "other", item="other")


def test_several_trees_of_a_step_begin_with_their_items(tmp_path: Path) -> None:
    root = unpacked(MANAGERS[0], tmp_path)
    shutil.copytree(root / "10" / "state", root / "10" / "ema")
    (root / "10" / "odd").mkdir()
    report = import_checkpoint(root, tmp_path / "ckpt")
    assert {one.name.split("/")[0] for one in report.arrays} == {"ema", "state"}
    assert [one.name for one in report.skipped] == ["odd"]
    alone = import_checkpoint(root, tmp_path / "alone", item="ema")
    assert {one.name.split("/")[0] for one in alone.arrays} == {"params"}


def gone(tmp_path: Path, name: str, victim: str) -> Path:
    source = unpacked(name, tmp_path)
    found = [path for path in source.rglob("*") if path.is_file() and path.match(victim)]
    assert found
    max(found, key=lambda path: path.stat().st_size).unlink()
    return source


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ("plain-zarr2", "params.dense.kernel/1.0"),
        ("plain-zarr3", "params.dense.kernel/c/0/1"),
        ("plain-zarr2", "opt.0.count/.zarray"),
        ("plain-zarr3", "flags/zarr.json"),
        ("ocdbt-zarr3", "_strings.json"),
    ],
)
def test_a_missing_file_is_no_array_of_zeros(tmp_path: Path, layout: str, victim: str) -> None:
    name = next(name for name in reversed(ORBAX) if name.endswith(layout))
    source = gone(tmp_path, name, victim)
    with pytest.raises(HoldfastError, match=source.name):
        import_checkpoint(source, tmp_path / "ckpt", step=1)
    assert not (tmp_path / "ckpt").exists()


def test_a_missing_file_of_ocdbt_is_an_error_or_was_not_needed(tmp_path: Path) -> None:
    source = unpacked("orbax-0.12.8-ocdbt-zarr2", tmp_path)
    refused = 0
    for victim in [path for path in source.rglob("*") if path.is_file()]:
        aside = victim.rename(tmp_path / "aside")
        try:
            import_checkpoint(source, tmp_path / "ckpt", step=1, overwrite=True)
        except HoldfastError:
            refused += 1
        else:
            assert_equal(stored(tmp_path / "ckpt", 1), {**STATE, **KEYS})
        aside.rename(victim)
    assert refused >= 3


def test_a_damaged_chunk(tmp_path: Path) -> None:
    source = unpacked("orbax-0.12.8-plain-zarr2", tmp_path)
    chunk = source / "params.dense.kernel" / "1.1"
    chunk.write_bytes(b"\xff" * chunk.stat().st_size)
    with pytest.raises(FormatError, match=r"cannot read params\.dense\.kernel"):
        import_checkpoint(source, tmp_path / "ckpt", step=1)
    assert not (tmp_path / "ckpt").exists()


def test_a_step_that_was_never_finished(tmp_path: Path) -> None:
    source = unpacked("orbax-0.12.8-ocdbt-zarr3", tmp_path)
    (source / "manifest.ocdbt").unlink()
    with pytest.raises(FormatError, match="never merged"):
        import_checkpoint(source, tmp_path / "ckpt", step=1)
    root = unpacked(MANAGERS[0], tmp_path)
    shutil.rmtree(root / "5")
    unfinished = (root / "10").rename(root / "10.orbax-checkpoint-tmp")
    for path in (root, unfinished):
        with pytest.raises(FormatError, match="never finished"):
            import_checkpoint(path, tmp_path / "ckpt")


def test_metadata_that_are_not_orbax(tmp_path: Path) -> None:
    source = unpacked("orbax-0.12.8-plain-zarr2", tmp_path)
    for content in (
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        b'["\\ud800"]',
        b'{"tree_metadata": 3}',
        b'{"tree_metadata": {"a": {}}}',
    ):
        (source / "_METADATA").write_bytes(content)
        with pytest.raises(FormatError, match="_METADATA: not what Orbax writes"):
            import_checkpoint(source, tmp_path / "ckpt", step=1)


def test_numbers_that_json_lacks_are_left_out_by_name(tmp_path: Path) -> None:
    """Python's JSON has NaN and infinities, and so have the metrics of a run that diverged."""
    root = unpacked(MANAGERS[0], tmp_path)
    (root / "10" / "_CHECKPOINT_METADATA").write_text('{"metrics": {"loss": NaN, "best": 0.5}}')
    (root / "10" / "data" / "metadata").write_text('{"all": [{"a": 1}, -Infinity], "position": 10}')
    tree = root / "10" / "state" / "_METADATA"
    custom = {"custom_metadata": {"x": float("nan"), "y": 1}}
    tree.write_text(json.dumps({**json.loads(tree.read_text()), **custom}))
    report = import_checkpoint(root, tmp_path / "ckpt")
    assert report.skipped == (
        Skipped("custom_metadata/x", "nan, which the metadata of a step cannot hold"),
        Skipped("data/all/1", "-inf, which the metadata of a step cannot hold"),
        Skipped("metrics/loss", "nan, which the metadata of a step cannot hold"),
    )
    meta = step_manifest(LocalStore(tmp_path / "ckpt"), 10).meta
    assert (meta["metrics"], meta["data"], meta["custom_metadata"]) == (
        {"best": 0.5},
        {"position": 10},
        {"y": 1},
    )


def test_arrays_beyond_the_memory_are_cut_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(moving, "BLOCK", 64)  # a tile: one chunk of 4 × 4 floats
    monkeypatch.setattr(moving, "_BLOCKS", moving.LEAST_MEMORY)
    imported(tmp_path, "orbax-0.12.8-plain-zarr2", memory_limit=moving.LEAST_MEMORY)
    assert_equal(stored(tmp_path / "ckpt", 3), {**STATE, **KEYS})
    entries = {entry.name: entry for entry in step_manifest(LocalStore(tmp_path / "ckpt"), 3).arrays}
    assert entries["params/dense/kernel"].cuts == ((0, 4, 8), (0, 4, 8))
    assert entries["layers/0/w"].cuts == ((0, 2), (0, 3))
