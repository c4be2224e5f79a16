"""`holdfast ckpt import` and `export`: what people see, what programs read, what a failure leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from holdfast import faults
from holdfast.checkpoint import Checkpointer, step_manifest
from holdfast.checkpoint.foreign import import_checkpoint, moving, orbax_writer, places, plan, target
from holdfast.checkpoint.lease import Lease
from holdfast.errors import CorruptError, LeaseError, StepExistsError, UsageError
from holdfast.format import BLOCK
from holdfast.storage import LocalStore
from tests.checkpoint.foreign.golden import DCP, MANAGERS, ORBAX, STATE, assert_equal, stored, unpacked
from tests.cli.saved import answer, holdfast


def test_what_a_person_sees(tmp_path: Path) -> None:
    source = unpacked(DCP[0], tmp_path)
    words: list[str | int] = [
        "--step",
        500,
        "--map",
        "params=model",
        "--arrays",
        "params",
        "--arrays",
        "groups/*/foreach",
    ]
    done = holdfast("ckpt", "import", source, tmp_path / "ckpt", *words)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "step 500: 4 arrays (283 B) moved and read back, all equal",
        "  format  torch DCP",
        f"  from    {source}",
        f"  to      {tmp_path / 'ckpt'}",
    ]
    assert lines[4:6] == ["renamed 4:", "  params/dense/bias -> model/dense/bias"]
    assert "  device: device: names 'torch.device', which is refused" in lines
    assert "  flags: matches none of the patterns that were given" in lines
    assert holdfast("ckpt", "verify", tmp_path / "ckpt").exit_code == 0


def test_what_programs_read(tmp_path: Path) -> None:
    found = answer("ckpt", "import", unpacked(MANAGERS[0], tmp_path), tmp_path / "ckpt")
    assert found.keys() == {
        "source", "target", "format", "step", "bytes", "seconds", "arrays", "scalars", "renamed", "skipped",
    }  # fmt: skip
    kernel = next(one for one in found["arrays"] if one["name"] == "params/dense/kernel")
    assert kernel["source_name"] == "params.dense.kernel"
    assert (kernel["dtype"], kernel["shape"], kernel["bytes"]) == ("float32", [8, 8], 256)
    assert len(kernel["xxh3_128"]) == 32
    out = answer("ckpt", "export", f"{tmp_path / 'ckpt'}@10", tmp_path / "out", "--format", "orbax")
    digests = [{one["name"]: one["xxh3_128"] for one in side["arrays"]} for side in (found, out)]
    assert digests[0] == digests[1]


def emptied(path: Path) -> Path:
    shutil.rmtree(path)
    path.mkdir()
    return path


def without(path: Path, name: str) -> Path:
    (path / name).unlink()
    return path


def truncated(path: Path) -> Path:
    victim = sorted(path.glob("*.distcp"))[0]
    victim.write_bytes(victim.read_bytes()[:100])
    return path


BAD: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "no folder": (DCP[0], lambda path: path / "none", "there is no folder"),
    "a file": (DCP[0], lambda path: path / ".metadata", "is a file, not a checkpoint folder"),
    "nothing in it": (DCP[0], emptied, "not a checkpoint that is known here"),
    "a half-written torch save": (DCP[1], lambda path: without(path, ".metadata"), "which torch writes last"),
    "a truncated torch file": (DCP[1], truncated, "its metadata says that a record ends at"),
    "a missing torch file": (DCP[1], lambda path: without(path, "__1_0.distcp"), "is missing"),
    "a half-written Orbax step": (
        ORBAX[0],
        lambda path: path.rename(path.with_name("7.orbax-checkpoint-tmp-1")),
        "was never finished",
    ),
    "an Orbax step that was not merged": (
        "orbax-0.12.8-ocdbt-zarr2",
        lambda path: without(path, "manifest.ocdbt"),
        "were never merged",
    ),
    "no number": (DCP[0], lambda path: path.rename(path.with_name("final")), "says which step it is"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_an_error_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    name, spoil, message = BAD[what]
    source = spoil(unpacked(name, tmp_path))
    target_ = tmp_path / "runs" / "new" / "ckpt"
    number = [] if what == "no number" else ["--step", "1"]
    done = holdfast("ckpt", "import", source, target_, *number)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "\nhint: " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_mistakes_in_the_options(tmp_path: Path) -> None:
    source = unpacked(DCP[0], tmp_path)
    for words, message in (
        (["--map", "params"], "is no rule"),
        (["--map", "params=flags", "--map", "flags=params"], ""),
        (["--arrays", "nothing"], "nothing in it is to be moved"),
        (["--memory", "1MB"], "a memory limit of 1,000,000 bytes"),
        (["--map", "layers/0/w=x", "--map", "layers/1/w=x"], "names would be given twice, such as x"),
        (["--item", "state"], "has no items"),
    ):
        done = holdfast("ckpt", "import", source, tmp_path / "ckpt", "--step", 1, *words)
        if message:
            assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
            assert not (tmp_path / "ckpt").exists()
        else:
            assert done.exit_code == 0
            shutil.rmtree(tmp_path / "ckpt")


def test_a_rule_that_fits_nothing_is_said(tmp_path: Path) -> None:
    source = unpacked(DCP[0], tmp_path)
    words = ["--map", "parms=model", "--map", "layers/*=blocks/*"]
    done = holdfast("ckpt", "import", source, tmp_path / "ckpt", "--step", 1, *words)
    assert (done.exit_code, done.stderr) == (0, "--map parms=model renamed nothing\n")


def test_a_step_that_is_there_stays_unless_asked(tmp_path: Path) -> None:
    source, path = unpacked(DCP[0], tmp_path), tmp_path / "ckpt"
    import_checkpoint(source, path, step=1, arrays=["flags"])
    before = step_manifest(LocalStore(path), 1).save
    with pytest.raises(StepExistsError, match="step 1 is already saved"):
        import_checkpoint(source, path, step=1)
    assert step_manifest(LocalStore(path), 1).save == before
    import_checkpoint(source, path, step=1, overwrite=True)
    assert len(stored(path, 1)) == len(STATE) + 2
    assert len(list((path / "step-00000001").iterdir())) == 3


def test_beside_a_live_run(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "ckpt", writer="thread", journal=False) as ckpt:
        ckpt.save(1, {"w": np.ones(2)}).durable(timeout_s=30)
        with pytest.raises(LeaseError, match="is being written by"):
            import_checkpoint(unpacked(DCP[0], tmp_path), tmp_path / "ckpt", step=2)
    import_checkpoint(unpacked(DCP[1], tmp_path), tmp_path / "ckpt", step=2)
    with Checkpointer(tmp_path / "ckpt", writer="thread", journal=False) as ckpt:
        assert ckpt.steps() == [1, 2]
        loaded = ckpt.load(into={"params": {"norm": np.zeros(3, np.float16)}}, step=2, parts=["params/norm"])
    assert loaded["params"]["norm"].tobytes() == STATE["params/norm"].tobytes()


def test_whoever_is_refused_the_lease_of_a_new_folder_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the folder missing; the one that gets there first is at work when the other gives up."""
    store, true = LocalStore(tmp_path / "runs" / "new"), target.missing
    first = target.StepTarget(store, 1)

    def missing(path: str) -> list[str]:
        found = true(path)
        monkeypatch.setattr(target, "missing", true)
        first.__enter__()
        return found

    monkeypatch.setattr(target, "missing", missing)
    with pytest.raises(LeaseError, match="is being written"):
        target.StepTarget(store, 2).__enter__()
    try:
        names = os.listdir(tmp_path / "runs" / "new" / ".holdfast")
        assert [name.partition("-")[0] for name in sorted(names)] == ["intent", "writer"]
        with pytest.raises(LeaseError, match="is being written"):
            Lease(store, 0, wait_s=0.0)
    finally:
        first.__exit__()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("exp-42/final/.metadata", None),
        ("exp-42/step-7/.metadata", 7),
        ("2026/final/.metadata", None),
        ("exp-42/params/_METADATA", None),
        ("1200/default/_METADATA", 1200),
        ("step_1200/default/_METADATA", None),
    ],
)
def test_the_number_of_a_step_is_its_own(tmp_path: Path, path: str, step: int | None) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.touch()
    assert places.found(str(file.parent)).step == step


def test_an_item_of_a_step_that_says_so_has_its_number(tmp_path: Path) -> None:
    (tmp_path / "step_1200" / "state").mkdir(parents=True)
    (tmp_path / "step_1200" / "state" / "_METADATA").touch()
    (tmp_path / "step_1200" / "_CHECKPOINT_METADATA").touch()
    assert places.found(str(tmp_path / "step_1200" / "state")).step == 1200


@pytest.mark.parametrize("site", ["import.block.written", "import.written"])
def test_a_failure_leaves_the_folder_as_it_was(tmp_path: Path, site: str) -> None:
    source, path = unpacked(DCP[0], tmp_path), tmp_path / "ckpt"
    import_checkpoint(source, path, step=1)
    before = sorted(str(one) for one in path.rglob("*"))
    faults.arm(f"{site}:raise")
    try:
        with pytest.raises(RuntimeError, match="injected"):
            import_checkpoint(source, path, step=2)
    finally:
        faults.disarm()
    assert sorted(str(one) for one in path.rglob("*")) == before


def test_bytes_that_changed_on_the_way_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the store is compared with what was read, not with what was handed to the store."""

    def wrong(image: target._Image, data: np.ndarray, number: int) -> bytes:
        data[-1] ^= 1
        return true(image, data, number)

    true = target._Image._write
    monkeypatch.setattr(target._Image, "_write", wrong)
    with pytest.raises(CorruptError, match=r"was read as [0-9a-f]{32} and lies there as"):
        import_checkpoint(unpacked(DCP[0], tmp_path), tmp_path / "ckpt", step=1)
    assert not (tmp_path / "ckpt").exists()


def test_many_blocks_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays over several blocks and part files, one of them cut into cells, through both formats."""
    rows = np.arange(5 << 20, dtype=np.float32).reshape(5 << 10, 1 << 10)
    tree = {"a": rows, "b": rows[:700].astype(np.float64), "c": np.float32(1)}
    with Checkpointer(tmp_path / "ckpt", writer="thread", journal=False) as ckpt:
        ckpt.save(1, tree).durable(timeout_s=30)
    monkeypatch.setattr(orbax_writer, "_CHUNK", 4 << 20)
    assert holdfast("ckpt", "export", tmp_path / "ckpt", tmp_path / "1", "--format", "orbax").exit_code == 0
    monkeypatch.setattr(plan, "FILE_BYTES", 9 << 20)
    import_checkpoint(tmp_path / "1", tmp_path / "back", memory_limit=moving.LEAST_MEMORY)
    assert_equal(stored(tmp_path / "back", 1), stored(tmp_path / "ckpt", 1))
    entries = {entry.name: entry for entry in step_manifest(LocalStore(tmp_path / "back"), 1).arrays}
    assert len(entries["a"].cuts[0]) > 2
    parts = sorted((tmp_path / "back" / "step-00000001").glob("*.safetensors"))
    assert len(parts) >= 3
    assert all(part.stat().st_size <= (9 << 20) + 4096 for part in parts)
    assert sum(part.stat().st_size for part in parts) > 3 * BLOCK
    assert holdfast("ckpt", "verify", tmp_path / "back").exit_code == 0


def test_progress_counts_every_byte_twice(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    report = import_checkpoint(
        unpacked(DCP[0], tmp_path), tmp_path / "ckpt", step=1, progress=lambda *one: told.append(one)
    )
    assert told[-1] == (2 * report.nbytes, 2 * report.nbytes)
    assert told == sorted(told)


def test_to_an_object_store(tmp_path: Path) -> None:
    report = import_checkpoint(unpacked(DCP[0], tmp_path), "memory://moving/ckpt", step=1)
    with Checkpointer("memory://moving/ckpt", writer="thread", journal=False) as ckpt:
        assert ckpt.steps() == [1]
        loaded = ckpt.load(step=1)
    assert loaded["flags"].tobytes() == STATE["flags"].tobytes()
    assert report.target == "memory://moving/ckpt"
    with pytest.raises(UsageError, match="is not on a file system"):
        import_checkpoint("s3://bucket/step", tmp_path / "ckpt")


def test_without_tensorstore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    done = holdfast("ckpt", "import", unpacked(ORBAX[0], tmp_path), tmp_path / "ckpt", "--step", 1)
    assert done.exit_code == 2
    assert "pip install 'holdfast[orbax]'" in done.stderr
    import_checkpoint(unpacked(DCP[0], tmp_path), tmp_path / "ckpt", step=1)


@pytest.mark.process
@pytest.mark.parametrize(
    "site", [pytest.param("import.block.written", marks=pytest.mark.full), "import.written"]
)
def test_a_killed_import_shows_nothing_and_can_be_run_again(tmp_path: Path, site: str) -> None:
    source, path = unpacked(DCP[0], tmp_path), tmp_path / "ckpt"
    command = [sys.executable, "-m", "holdfast.cli", "ckpt", "import", str(source), str(path), "--step", "1"]
    env = {**os.environ, faults.ENV: f"{site}:kill"}
    killed = subprocess.run(command, env=env, timeout=60, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert answer("ckpt", "ls", path)["steps"][0]["status"] == "uncommitted"
    again = subprocess.run(command, timeout=60, capture_output=True, check=False, text=True)
    assert again.returncode == 0, again.stderr
    assert len(list((path / "step-00000001").iterdir())) == 3
    assert json.loads(holdfast("ckpt", "verify", path, "--json").stdout)["ok"]
