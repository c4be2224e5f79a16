"""Exports: whole or not there, of a stated size, the same from a tree and from a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import holdfast
from holdfast.checkpoint import NameMap, Rule
from holdfast.checkpoint.hub import exporting, places
from holdfast.checkpoint.hub.loading import CHUNK
from holdfast.checkpoint.hub.packed import PACKED, WORDS, unpacked
from holdfast.checkpoint.hub.repository import INDEX
from holdfast.checkpoint.loading import READERS
from holdfast.errors import (
    FormatError,
    LeaseError,
    MismatchError,
    NoCheckpointError,
    StorageError,
    TreeError,
    UsageError,
)
from holdfast.format import BLOCK
from holdfast.storage import LocalStore, Store, opened
from tests.checkpoint.hub.repositories import noise, same, written
from tests.checkpoint.hub.test_loading import described

RULES = NameMap(
    [
        Rule("layers/up", "m.{n}.up", "o i -> n i o"),
        Rule("q", "fused", "(h three d) c -> c h d", take=("three", 0, 1), sizes={"three": 3}),
        Rule("k", "fused", "(h three d) c -> c h d", take=("three", 1, 2), sizes={"three": 3}),
        Rule("v", "fused", "(h three d) c -> c h d", take=("three", 2, 3), sizes={"three": 3}),
        Rule("norm", "norm.weight"),
    ]
)


def tree() -> dict[str, Any]:
    """Arrays on a mesh and off it, in several dtypes."""
    spread = described((3, 8, 24), np.float32, None, "x", "y").sharding
    return {
        "layers": {"up": jax.device_put(np.arange(576, dtype=np.float32).reshape(3, 8, 24), spread)},
        **{name: noise("BF16", (4, 2, 5), seed) for seed, name in enumerate("qkv")},
        "norm": noise("F16", (8,)),
    }


def test_shards_have_a_stated_size_and_the_index_names_them(tmp_path: Path) -> None:
    params = tree()
    holdfast.save_hub(tmp_path / "out", params, RULES, shard_bytes=1000, files={"config.json": b"{}"})
    found = written(tmp_path / "out")
    for n in range(3):
        assert same(found[f"m.{n}.up"], np.asarray(params["layers"]["up"])[n].T)
    fused = np.stack([params[name] for name in "qkv"], axis=2)  # c h three d
    assert same(found["fused"], fused.reshape(4, 30).T)
    assert same(found["norm.weight"], params["norm"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", *(f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)),
                     "model.safetensors.index.json"]  # fmt: skip
    assert set(index["weight_map"].values()) == set(names[1:5])
    assert os.listdir(tmp_path) == ["out"]


def test_a_checkpoint_gives_the_same_bytes_as_the_tree(tmp_path: Path) -> None:
    params = tree()
    with holdfast.Checkpointer(tmp_path / "ckpt", writer="thread") as checkpointer:
        checkpointer.save(7, {"params": params, "step": np.zeros(())}).durable(60.0)
    holdfast.save_hub(tmp_path / "live", params, RULES, dtype="bfloat16", shard_bytes=1000)
    told: list[int] = []
    step = holdfast.export_hub(
        tmp_path / "stored", tmp_path / "ckpt", RULES, part="params", dtype="bfloat16", shard_bytes=1000,
        progress=told.append,
    )  # fmt: skip
    assert step == 7
    assert told[-1] == sum(one.nbytes for one in written(tmp_path / "live").values())
    for path in sorted((tmp_path / "live").iterdir()):
        assert path.read_bytes() == (tmp_path / "stored" / path.name).read_bytes()
    with pytest.raises(UsageError, match="no arrays under 'weights'"):
        holdfast.export_hub(tmp_path / "more", tmp_path / "ckpt", RULES, part="weights")
    with pytest.raises(NoCheckpointError):
        holdfast.export_hub(tmp_path / "more", tmp_path / "empty", RULES)
    assert not (tmp_path / "more").exists()


def test_a_failed_export_leaves_nothing_and_the_next_clears_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".out.hub-killed"
    left.mkdir()
    (left / ".writing").touch()
    (left / "model.safetensors").write_bytes(b"half")

    def broken(*_: Any) -> None:
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []
        raise RuntimeError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "_write_tensor", broken)
        with pytest.raises(RuntimeError, match="gone"):
            holdfast.save_hub(tmp_path / "out", tree(), RULES)
    assert os.listdir(tmp_path) == []
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    holdfast.save_hub(tmp_path / "out", tree(), RULES)
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(UsageError, match="not empty"):
        holdfast.save_hub(tmp_path / "out", tree(), RULES)


def test_tied_leaves_must_be_equal(tmp_path: Path) -> None:
    names = NameMap([Rule("embed", "embed"), Rule("head", "embed", "v h -> h v")])
    table = noise("F32", (6, 4))
    holdfast.save_hub(tmp_path / "out", {"embed": table, "head": table.T.copy()}, names)
    assert same(written(tmp_path / "out")["embed"], table)
    with pytest.raises(MismatchError, match="with other values"):
        holdfast.save_hub(tmp_path / "other", {"embed": table, "head": table.T + 1}, names)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("word", sorted(PACKED))
def test_tied_leaves_of_packed_dtypes_must_be_equal_too(word: str, tmp_path: Path) -> None:
    names = NameMap([Rule("embed", "embed"), Rule("head", "embed", "v h -> h v")])
    table = noise(word, (6, 4))
    holdfast.save_hub(tmp_path / "out", {"embed": table, "head": table.T.copy()}, names)
    with pytest.raises(MismatchError, match="with other values"):
        holdfast.save_hub(tmp_path / "other", {"embed": table, "head": np.zeros_like(table.T)}, names)


def test_a_failed_export_to_an_object_store_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "memory://hub-test/failed"
    true = exporting._create
    left: list[str] = []

    def broken(made: places.Target, name: str, data: bytes) -> None:
        if name == INDEX:
            left.extend(made.store.names())
            raise RuntimeError("the network is gone")
        true(made, name, data)

    def save() -> None:
        holdfast.save_hub(place, tree(), RULES, shard_bytes=1, files={"config.json": b"{}"})

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "_create", broken)
        with pytest.raises(RuntimeError, match="gone"):
            save()
    assert {"config.json", "model-00001-of-00005.safetensors"} < set(left)
    assert opened(place).names() == []
    save()
    assert INDEX in opened(place).names()
    assert list(opened(place).below(".holdfast").walk()) == []


def left_behind(place: str, *names: str) -> Store:
    """What an export of these files left that was killed before the last of them."""
    store = opened(place)
    for name in names[:-1]:
        store.create(name, data=b"half")
    record = json.dumps({"export": "dead", "names": names}).encode()
    store.create(".holdfast", "export", "files", data=record)
    return store


def test_what_a_killed_export_left_in_an_object_store_goes_whatever_comes_next() -> None:
    shards = [f"model-{n:05d}-of-00009.safetensors" for n in range(1, 10)]
    store = left_behind("memory://hub-test/killed", "old.json", *shards, INDEX)
    holdfast.save_hub(store.root, {"w": np.arange(4)})
    assert list(store.walk()) == [("model.safetensors",)]


def test_what_is_of_others_stays_beside_a_killed_export() -> None:
    store = left_behind("memory://hub-test/others", "config.json", INDEX)
    store.create("notes.md", data=b"by hand")
    with pytest.raises(UsageError, match="not empty"):
        holdfast.save_hub(store.root, {"w": np.arange(4)})
    assert store.names() == ["notes.md"]


def test_a_place_without_a_record_is_left_alone() -> None:
    store = opened("memory://hub-test/foreign")
    store.create("model-00001-of-00002.safetensors", data=b"half")
    run = opened("memory://hub-test/run")
    run.create(".holdfast", "writer-0.lock", data=b"a run that has saved nothing yet")
    for one in (store, run):
        before = list(one.walk())
        with pytest.raises(UsageError, match="not empty"):
            holdfast.save_hub(one.root, {"w": np.arange(4)})
        assert list(one.walk()) == before


def test_a_repository_that_was_whole_when_its_export_was_killed_stays() -> None:
    store = opened("memory://hub-test/whole")
    holdfast.save_hub(store.root, {"w": np.arange(4)})
    left_behind(store.root, "model.safetensors")
    with pytest.raises(UsageError, match="not empty"):
        holdfast.save_hub(store.root, {"w": np.zeros(4)})
    assert same(holdfast.load_hub(store.root)["w"], np.arange(4))


def test_a_record_that_is_none_is_not_believed() -> None:
    store = opened("memory://hub-test/unreadable")
    store.create("model.safetensors", data=b"of somebody")
    store.create(".holdfast", "export", "files", data=b"[]")
    with pytest.raises(FormatError, match="not the record of an export"):
        holdfast.save_hub(store.root, {"w": np.arange(4)})
    assert store.exists("model.safetensors")


def test_an_export_that_was_taken_over_removes_nothing_and_commits_nothing() -> None:
    store = opened("memory://hub-test/taken")

    def taken(_: int) -> None:
        store.replace(".holdfast", "export", "files", data=b'{"export": "another", "names": []}')

    with pytest.raises(LeaseError, match="was taken over"):
        holdfast.save_hub(store.root, tree(), RULES, shard_bytes=1000, progress=taken)
    assert store.exists("model-00001-of-00004.safetensors")
    assert not store.exists(INDEX)


def test_uploads_that_may_not_be_listed_do_not_keep_an_export_from_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = left_behind("memory://hub-test/refused", "config.json", INDEX)

    def refused(_: Any) -> Any:
        raise StorageError("403 Forbidden", path="")

    monkeypatch.setattr(type(store), "uploads", refused)
    holdfast.save_hub(store.root, {"w": np.arange(4)})
    assert store.names() == ["model.safetensors"]
    assert "403" in caplog.text


def test_what_another_export_has_put_into_an_object_store_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "memory://hub-test/shared"
    true = places.check_free

    def check_free(place: str, options: Any) -> None:
        true(place, options)
        opened(place).create("config.json", data=b"of another")

    monkeypatch.setattr(places, "check_free", check_free)
    with pytest.raises(UsageError, match=r"config\.json is there by now"):
        holdfast.save_hub(place, tree(), RULES, files={"config.json": b"{}"})
    assert opened(place).read("config.json", max_bytes=99) == b"of another"


def test_a_folder_that_is_renamed_while_it_is_looked_at_is_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.hub-other").mkdir()

    def renamed(path: str) -> LocalStore:
        os.rename(path, tmp_path / "out")
        return LocalStore(path)

    monkeypatch.setattr(places, "LocalStore", renamed)
    places._remove_stale(str(tmp_path), "out")
    assert os.listdir(tmp_path) == ["out"]


def test_everything_that_cannot_be_written_is_listed(tmp_path: Path) -> None:
    params = {**tree(), "extra": np.zeros(2), "norm": np.zeros(8, np.complex128)}
    del params["k"], params["layers"]
    with pytest.raises(MismatchError) as caught:
        holdfast.save_hub(tmp_path / "out", params, RULES)
    assert caught.value.problems == (
        "extra: no rule of the mapping names this leaf",
        "norm: safetensors has no dtype complex128 (dtype= converts)",
        "fused: no leaf has three 1..2",
        "layers/up: the mapping has a rule for it, and there is no such leaf",
        "k: the mapping has a rule for it, and there is no such leaf",
    )
    open_ = NameMap([Rule("w", "w", "a (b c) -> (a b) c")])
    with pytest.raises(MismatchError, match="leaves open how large a, b is"):
        holdfast.save_hub(tmp_path / "out", {"w": np.zeros((6, 2))}, open_)
    with pytest.raises(TreeError, match="Python scalar"):
        holdfast.save_hub(tmp_path / "out", {"w": 1.0})
    with pytest.raises(TreeError, match="PRNG key"):
        holdfast.save_hub(tmp_path / "out", {"w": jax.random.key(0)})
    with pytest.raises(UsageError, match="'float7'"):
        holdfast.save_hub(tmp_path / "out", tree(), RULES, dtype="float7")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", sorted(PACKED))
def test_packed_dtypes_go_both_ways(word: str, tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << PACKED[word], (3, 16), dtype=np.uint8)
    value = bits.view(WORDS[word].numpy)
    holdfast.save_hub(tmp_path / "out", {"w": value, "x": np.arange(3, dtype=np.int8)})
    assert same(holdfast.load_hub(tmp_path / "out")["w"], value)
    file = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert np.array_equal(
        unpacked(word, np.frombuffer(file, np.uint8)[-bits.size * PACKED[word] // 8 :], bits.size),
        bits.reshape(-1),
    )


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_above(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that was resident while `work` ran, above what was before; and what it returned."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    done = work()
    return status_bytes("VmHWM") - before, done


@pytest.mark.full
@pytest.mark.process
def test_memory_beside_the_arrays_is_bounded(tmp_path: Path) -> None:
    value = np.ones((64, 1 << 20), np.float32)  # 256 MiB
    names = NameMap([Rule("w", "w", "a b -> b a")])
    with holdfast.Checkpointer(tmp_path / "ckpt", writer="thread") as checkpointer:
        checkpointer.save(1, {"w": value}).durable(120.0)
    holdfast.save_hub(tmp_path / "warm", {"w": value[:1]}, names)
    live, _ = peak_above(lambda: holdfast.save_hub(tmp_path / "live", {"w": value}, names))
    assert live < 32 << 20
    stored, _ = peak_above(lambda: holdfast.export_hub(tmp_path / "stored", tmp_path / "ckpt", names))
    assert stored < value.nbytes + READERS * BLOCK + (32 << 20)
    loaded, tree = peak_above(lambda: holdfast.load_hub(tmp_path / "live", {"w": value}, names))
    assert same(tree["w"], value)
    assert loaded < value.nbytes + READERS * CHUNK + (32 << 20)
