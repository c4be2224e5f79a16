"""A step that was exported to Orbax and imported again is the same step; a failed export leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.foreign import export, export_orbax, import_checkpoint, orbax_layout, orbax_writer
from holdfast.checkpoint.foreign.orbax_tree import DICT, SEQUENCE
from holdfast.errors import (
    CorruptError,
    LeaseError,
    NoCheckpointError,
    OutOfSpaceError,
    TreeError,
    UsageError,
)
from holdfast.storage import Files
from tests.checkpoint.foreign.golden import STATE, assert_equal, scalars, stored, unpacked


def saved(path: Path, tree: Any, step: int = 4) -> Path:
    with Checkpointer(path, writer="thread", journal=False) as ckpt:
        ckpt.save(step, tree, meta={"samples": 9}).durable(timeout_s=30)
    return path


def tree() -> dict[str, Any]:
    return {
        **{name: value for name, value in STATE.items() if "/" not in name and "~" not in name},
        "params": {"w": STATE["params/dense/kernel"], "b": STATE["params/dense/bias"]},
        "layers": [{"w": np.ones(2)}, {"w": np.zeros((2, 2), np.int16)}],
        "f8": STATE["params/f8"],
        "step": 7,
        "lr": 0.1,
        "text": "a/b",
        "slash/name": "c",
        "done": True,
        "z": 1 + 2j,
    }


def test_there_and_back_again(tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt", {**tree(), "empty": np.zeros((0, 2)), "raw": b"x", "huge": 2**64})
    report = export_orbax(source, tmp_path / "orbax" / "4")
    assert [one.name for one in report.skipped] == ["empty", "huge", "raw"]
    assert (report.step, report.nbytes) == (4, sum(one.nbytes for one in report.arrays))
    back = import_checkpoint(tmp_path / "orbax", tmp_path / "back")
    assert back.step == 4
    before = stored(source, 4)
    del before["empty"]
    assert_equal(stored(tmp_path / "back", 4), before)
    texts = scalars(source, 4)
    assert scalars(tmp_path / "back", 4) == {n: v for n, v in texts.items() if n not in ("raw", "huge")}
    assert {one.name: one.digest for one in back.arrays} == {one.name: one.digest for one in report.arrays}


def test_what_orbax_reads_of_it(tmp_path: Path) -> None:
    """The structure: names that count from 0 are a list, an empty node is written where it was asked for."""
    source = saved(tmp_path / "ckpt", tree())
    export_orbax(source, tmp_path / "out", arrays=["layers", "params"], empty=["layers/2"])
    leaves = json.loads((tmp_path / "out" / "_METADATA").read_text())["tree_metadata"]
    assert leaves.keys() == {
        "('layers', '0', 'w')",
        "('layers', '1', 'w')",
        "('layers', '2')",
        "('params', 'b')",
        "('params', 'w')",
    }
    types = [one["key_type"] for one in leaves["('layers', '0', 'w')"]["key_metadata"]]
    assert types == [DICT, SEQUENCE, DICT]
    assert leaves["('layers', '2')"]["value_metadata"]["value_type"] == "None"
    assert not list((tmp_path / "out").glob("*lock*"))


def test_keys_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys stay keys; arrays in chunks, and many commits of the store, are the same arrays."""
    source = tmp_path / "ckpt"
    golden = unpacked("orbax-0.12.8-ocdbt-zarr3", tmp_path)
    import_checkpoint(golden, source, step=4)
    monkeypatch.setattr(orbax_writer, "_CHUNK", 24)
    export_orbax(source, tmp_path / "out", rename={"opt/0": "adam"})
    monkeypatch.undo()
    report = import_checkpoint(tmp_path / "out", tmp_path / "back", rename={"adam": "opt/0"})
    assert ("adam/count", "opt/0/count") in report.renamed
    assert_equal(stored(tmp_path / "back", 4), stored(source, 4))


def test_refusals(tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt", {"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
    with pytest.raises(TreeError, match=r"would both be 'a\.b' in Orbax"):
        export_orbax(source, tmp_path / "out")
    with pytest.raises(UsageError, match="is there already"):
        export_orbax(source, source)
    with pytest.raises(NoCheckpointError, match="no step 5"):
        export_orbax(source, tmp_path / "out", step=5)
    with pytest.raises(NoCheckpointError, match="no step in"):
        export_orbax(tmp_path / "none", tmp_path / "out")
    with pytest.raises(UsageError, match="nothing in the step"):
        export_orbax(source, tmp_path / "out", arrays=["x"])
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_nothing_and_a_rest_is_no_hindrance(tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt", {"w": STATE["params/dense/kernel"]})
    out = tmp_path / "out"
    faults.arm("export.written:enospc")
    try:
        with pytest.raises(OutOfSpaceError):
            export_orbax(source, out)
    finally:
        faults.disarm()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    rest = tmp_path / "out.orbax-checkpoint-tmp"
    (rest / "d").mkdir(parents=True)
    (rest / "d" / "old").write_bytes(b"x")
    (rest / "manifest.ocdbt").write_bytes(b"damaged")
    lock = Files().create(str(rest / "holdfast.lock"))
    with Files().opened(lock):
        Files().lock(lock)
        with pytest.raises(LeaseError, match="is being written"):
            export_orbax(source, out)
    export_orbax(source, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
    assert not (out / "d" / "old").exists()


def test_nobody_gets_the_folder_of_an_export_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = saved(tmp_path / "ckpt", {"w": STATE["params/dense/kernel"]}), tmp_path / "out"
    true = export._sync

    def sync(folder: str) -> None:
        monkeypatch.setattr(export, "_sync", true)
        with pytest.raises(LeaseError, match="is being written"):
            export_orbax(source, out)
        true(folder)

    monkeypatch.setattr(export, "_sync", sync)
    export_orbax(source, out)
    assert not (out / "holdfast.lock").exists()
    import_checkpoint(out, tmp_path / "back", step=4)
    assert_equal(stored(tmp_path / "back", 4), stored(source, 4))


def test_the_lock_of_a_folder_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its holder fails and another export begins."""
    source = saved(tmp_path / "ckpt", {"w": np.ones(2)})
    rest, true = tmp_path / "out.orbax-checkpoint-tmp", Files.lock

    def lock(files: Files, fd: int) -> bool:
        shutil.rmtree(rest)
        rest.mkdir()
        (rest / "holdfast.lock").touch()
        (rest / "manifest.ocdbt").write_bytes(b"of another")
        return true(files, fd)

    monkeypatch.setattr(Files, "lock", lock)
    with pytest.raises(LeaseError, match="is being written"):
        export_orbax(source, tmp_path / "out")
    assert sorted(os.listdir(rest)) == ["holdfast.lock", "manifest.ocdbt"]


def test_a_step_of_a_manager_appears_with_its_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root = saved(tmp_path / "ckpt", {"w": np.ones(2)}), tmp_path / "new" / "root"
    true, seen = export._sync, []

    def sync(folder: str) -> None:
        seen.append(os.listdir(root))
        true(folder)

    monkeypatch.setattr(export, "_sync", sync)
    faults.arm("export.written:raise")
    try:
        with pytest.raises(RuntimeError, match="injected"):
            export_orbax(source, root / "1200" / "default")
    finally:
        faults.disarm()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    export_orbax(source, root / "1200" / "default")
    assert seen == [["1200.orbax-checkpoint-tmp"]]
    assert os.listdir(root / "1200") == ["default"]
    export_orbax(source, root / "1200" / "ema")  # the step is there by now
    assert sorted(os.listdir(root / "1200")) == ["default", "ema"]
    assert import_checkpoint(root, tmp_path / "back").step == 1200


def test_what_was_under_way_is_over_when_an_interrupted_export_cleans_up(tmp_path: Path) -> None:
    class Interrupted:
        def __init__(self) -> None:
            self.waits: list[float] = []

        def result(self, timeout: float) -> None:
            self.waits.append(timeout)
            if len(self.waits) == 1:
                raise KeyboardInterrupt

    class Full:
        def result(self, timeout: float) -> None:
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [os_error]")

    writer, future = orbax_writer.OrbaxWriter.__new__(orbax_writer.OrbaxWriter), Interrupted()
    writer._folder = str(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        writer._done("commit", future)
    assert len(future.waits) == 2
    with pytest.raises(OutOfSpaceError, match="no space is left"):
        writer._done("commit", Full())


def test_a_damaged_step_is_not_exported(tmp_path: Path) -> None:
    source = saved(tmp_path / "ckpt", {"w": noise_array()})
    part = next((source / "step-00000004").glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(CorruptError, match="block 0"):
        export_orbax(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_an_export_that_was_damaged_as_it_lay_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one array, flipped between writing and reading back; the format itself protects none."""
    noise = np.frombuffer(np.random.default_rng(1).bytes(1 << 16), np.uint8)  # lies there as it is
    source = saved(tmp_path / "ckpt", {"a": noise[::-1], "w": noise, "z": np.ones(9)})
    needle, flipped = noise[1000:1064].tobytes(), []

    def describe(folder: str, *rest: Any) -> None:
        orbax_layout.describe(folder, *rest)
        for path in Path(folder).rglob("*"):
            data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
            if (at := data.find(needle)) >= 0:
                data[at] ^= 1
                path.write_bytes(data)
                flipped.append(path)

    monkeypatch.setattr(export, "describe", describe)
    with pytest.raises(
        CorruptError, match=r"^w: written as [0-9a-f]{32}, read back as [0-9a-f]{32}"
    ) as caught:
        export_orbax(source, tmp_path / "out")
    assert len(flipped) == 1
    assert caught.value.arrays == ("w",)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    monkeypatch.undo()
    export_orbax(source, tmp_path / "out")


def noise_array() -> Any:
    return np.arange(100, dtype=np.float32).astype(ml_dtypes.bfloat16)
