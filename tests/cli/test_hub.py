"""`holdfast hub`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from tests.checkpoint.hub.repositories import same, single, written
from tests.cli.saved import answer, holdfast, save

GOLDEN = Path(__file__).parents[1] / "train" / "model" / "golden"
SETTINGS = [
    "model.repeats=2", "model.vocab_size=61", "model.hidden=32", "model.num_kv_heads=2", "model.head_dim=8",
    "model.mlp_hidden=40", "model.rope_theta=500", "model.norm_eps=1e-5", "model.tied=false",
    'model.rope_scaling={"factor": 8, "original_positions": 32}', "model.num_heads=4",
]  # fmt: skip


def test_what_a_repository_holds() -> None:
    done = holdfast("hub", "show", GOLDEN / "llama", "--tensors", "*.q_proj.weight")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "DTYPE", "SHAPE", "BYTES", "FILE"]
    assert lines[1].split()[:2] == ["model.layers.0.self_attn.q_proj.weight", "F32"]
    assert len(lines) == 3
    assert "21 tensors (F32)" in done.stderr
    found = answer("hub", "show", GOLDEN / "llama")
    assert len(found["tensors"]) == 21
    assert sum(one["bytes"] for one in found["tensors"]) == found["bytes"]


def test_whether_weights_fit_a_recipe() -> None:
    other = holdfast("hub", "check", GOLDEN / "llama", "recipes.tiny")
    assert other.exit_code == 1
    assert "model.hidden=32" in other.stdout
    fits = holdfast("hub", "check", GOLDEN / "llama", "recipes.tiny", *SETTINGS)
    assert fits.exit_code == 0, fits.stdout
    assert ": ok" in fits.stdout


def test_what_is_damaged_is_found(tmp_path: Path) -> None:
    blob = single(tmp_path / "blobs", {"a": np.arange(4)}) / "model.safetensors"
    digest = hashlib.sha256(blob.read_bytes()).hexdigest()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to(blob.rename(blob.with_name(digest)))
    assert holdfast("hub", "check", link.parent, "--verify").exit_code == 0
    data = bytearray(link.read_bytes())
    data[-1] ^= 1
    link.resolve().write_bytes(data)
    found = answer("hub", "check", link.parent, "--verify")
    assert not found["ok"]
    assert "SHA-256" in found["problems"][0]
    link.resolve().write_bytes(data[:-1])
    cut = holdfast("hub", "check", link.parent)
    assert cut.exit_code == 1
    assert "the tensors end at offset" in cut.stdout


def test_what_is_no_repository_or_matches_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    done = holdfast("hub", "show", tmp_path / "notes.txt")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is a file, and its name does not end in .safetensors" in done.stderr
    done = holdfast("hub", "show", GOLDEN / "llama", "--tensors", "x*")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no tensor matches x*" in done.stderr


def test_a_run_may_be_given_with_a_step(tmp_path: Path) -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    save(tmp_path / "run" / "ckpt", {1: {"params": {"w": value}}, 2: {"params": {"w": 2 * value}}})
    (tmp_path / "names.json").write_text(json.dumps({"rules": [{"leaf": "w", "tensors": "w"}]}))
    done = holdfast(
        "hub", "export", f"{tmp_path / 'run'}@1", tmp_path / "out", "--mapping", tmp_path / "names.json"
    )
    assert done.exit_code == 0, done.stderr
    assert same(written(tmp_path / "out")["w"], value)


def test_a_dtype_has_short_names_too(tmp_path: Path) -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = save(tmp_path / "ckpt", {1: {"params": {"w": value}}})
    (tmp_path / "names.json").write_text(json.dumps({"rules": [{"leaf": "w", "tensors": "w"}]}))
    for word, stored in (("bf16", "BF16"), ("BF16", "BF16"), ("fp16", "F16"), ("float64", "F64")):
        words = ("--mapping", tmp_path / "names.json", "--dtype", word)
        done = holdfast("hub", "export", path, tmp_path / word, *words)
        assert done.exit_code == 0, done.stderr
        assert answer("hub", "show", tmp_path / word)["tensors"][0]["dtype"] == stored
    done = holdfast("hub", "export", path, tmp_path / "x", "--dtype", "bfloat")
    assert done.stderr.endswith(
        "error: --dtype bfloat: there is no such dtype\n\nhint: did you mean bfloat16?\n"
    )


def test_a_checkpoint_is_exported_by_rules(tmp_path: Path) -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = save(tmp_path / "ckpt", {100: {"params": {"w": value}, "opt": {"m": value}}})
    rules = tmp_path / "names.json"
    rules.write_text(json.dumps({"rules": [{"leaf": "w", "tensors": "net.w", "pattern": "a b -> b a"}]}))
    done = holdfast("hub", "export", path, tmp_path / "out", "--mapping", rules)
    assert done.exit_code == 0, done.stderr
    assert same(written(tmp_path / "out")["net.w"], value.T)
    taken = holdfast("hub", "export", path, tmp_path / "out", "--mapping", rules)
    assert taken.exit_code == 2
    assert "not empty" in taken.stderr
    unknown = holdfast("hub", "export", path, tmp_path / "more")
    assert unknown.exit_code == 2
    assert "--mapping" in unknown.stderr
    assert holdfast("hub", "export", path, tmp_path / "x", "--mapping", "gone.json").exit_code == 2
