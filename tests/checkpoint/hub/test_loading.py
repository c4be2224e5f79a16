"""Loads: every dtype, any mesh and reordering against numpy, every mismatch at once, only what is needed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast
from holdfast.arrays import ArrayLayout, Description, copying
from holdfast.checkpoint import NameMap, Rule
from holdfast.checkpoint.hub import Matched, Repository, loading
from holdfast.checkpoint.hub.loading import HubLoad
from holdfast.checkpoint.hub.packed import PACKED, WORDS, packed
from holdfast.errors import FormatError, MismatchError, UsageError
from tests.checkpoint.hub.repositories import Array, noise, raw, same, sharded, single, written

PLAIN = [word for word in WORDS if word not in PACKED]
WIDE = ("I64", "U64", "F64")


def described(
    shape: tuple[int, ...], dtype: Any, *spec: str | None, devices: tuple[int, ...] = (2, 4)
) -> Any:
    names = ("x", "y", "z")[: len(devices)]
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(devices))]).reshape(devices), names)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def test_every_dtype_of_a_file_that_mixes_them(tmp_path: Path) -> None:
    tensors = {word: noise(word, (3, 8), at) for at, word in enumerate(PLAIN)}
    # Odd sizes put what follows at odd offsets: the format does not align.
    header: dict[str, Any] = {"odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    data = b"\x07"
    for word, one in tensors.items():
        end = len(data) + one.nbytes
        header[word] = {"dtype": word, "shape": [3, 8], "data_offsets": [len(data), end]}
        data += one.tobytes()
    nibbles = np.arange(16, dtype=np.uint8)
    for word in PACKED:
        small = packed(word, nibbles)
        header[word] = {"dtype": word, "shape": [2, 8], "data_offsets": [len(data), len(data) + small.size]}
        data += small.tobytes()
    loaded = holdfast.load_hub(raw(tmp_path / "r", header, data))
    for word, one in tensors.items():
        assert same(loaded[word], one), word
    for word in PACKED:
        assert loaded[word].dtype == WORDS[word].numpy
        np.testing.assert_array_equal(loaded[word].view(np.uint8).reshape(-1), nibbles)
    on_device = [word for word in PLAIN if word not in WIDE]
    template = {word: described((3, 8), tensors[word].dtype, None, "y") for word in on_device}
    names = NameMap(rest=True, ignore=["odd", *WIDE, *PACKED])
    for word, array in holdfast.load_hub(tmp_path / "r", template, names).items():
        assert same(np.asarray(array), tensors[word]), word


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A tensor with named axes, how they are grouped on both sides, and a mesh over the leaf."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))

    def grouped(axes: list[int]) -> list[list[int]]:
        groups: list[list[int]] = [[axes[0]]]
        for axis in axes[1:]:
            if draw(st.booleans()):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        return groups

    tensor, leaf = grouped(list(range(len(sizes)))), grouped(list(order))
    shape = [int(np.prod([sizes[axis] for axis in group])) for group in leaf]
    devices = draw(st.sampled_from([(1,), (8,), (2, 4), (4, 2), (2, 2, 2)]))
    names = ["x", "y", "z"][: len(devices)]
    spec: list[str | None] = []
    for size in shape:
        fit = [name for name, count in zip(["x", "y", "z"], devices, strict=False) if size % count == 0]
        chosen = draw(st.sampled_from([None, *[name for name in fit if name in names and name not in spec]]))
        spec.append(chosen)
    return {
        "sizes": sizes, "tensor": tensor, "leaf": leaf, "order": order, "shape": shape, "devices": devices,
        "spec": spec, "word": draw(st.sampled_from(PLAIN)), "cast": draw(st.booleans()),
    }  # fmt: skip


def text_of(groups: list[list[int]]) -> str:
    return " ".join("(" + " ".join(f"a{axis}" for axis in group) + ")" for group in groups)


@settings(max_examples=30)
@given(case=cases())
def test_any_reordering_on_any_mesh_is_that_of_numpy(case: dict[str, Any], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    sizes, word = case["sizes"], case["word"]
    file_shape = tuple(int(np.prod([sizes[axis] for axis in group])) for group in case["tensor"])
    value = noise(word, file_shape, seed=len(sizes))
    cast = case["cast"] and word in ("F32", "F16", "BF16", "I8", "U8", "I16")
    if cast:
        value = np.asarray(np.arange(value.size) % 100, value.dtype).reshape(file_shape)
    single(folder, {"t": value})
    rule = Rule(
        "leaf",
        "t",
        f"{text_of(case['tensor'])} -> {text_of(case['leaf'])}",
        sizes={f"a{axis}": size for axis, size in enumerate(sizes)},
    )
    wanted = np.dtype(np.float32) if cast else value.dtype
    shape = tuple(case["shape"])
    template: Any = np.empty(shape, wanted)
    if word not in WIDE or cast:
        template = described(shape, wanted, *case["spec"], devices=case["devices"])
    got = holdfast.load_hub(folder, {"leaf": template}, NameMap([rule]), cast=cast, threads=2)["leaf"]
    axes = value.reshape(sizes).transpose(case["order"]).reshape(shape)
    assert same(np.asarray(got), axes.astype(wanted))
    if not cast:
        holdfast.save_hub(folder / "again", {"leaf": got}, NameMap([rule]))
        assert same(holdfast.load_hub(folder / "again")["t"], value)


def model(folder: Path) -> tuple[Path, dict[str, Array]]:
    tensors = {
        f"m.{n}.{name}": noise("BF16", shape, n)
        for n in range(3)
        for name, shape in (("q", (16, 8)), ("k", (4, 8)), ("v", (4, 8)), ("up", (24, 8)), ("norm", (8,)))
    }
    tensors["embed"] = noise("BF16", (40, 8))
    halves = dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])
    return sharded(folder, *halves), tensors


RULES = [
    Rule("layers/qkv", [f"m.{{n}}.{one}" for one in "qkv"], "(kv g d) h -> n h kv g d", join="g",
         parts=(4, 1, 1), sizes={"kv": 2}),
    Rule("layers/up", "m.{n}.up", "o i -> n i o"),
    Rule("layers/norm", "m.{n}.norm"),
    Rule("embed", "embed"),
    Rule("head", "head", "v h -> h v", tied="embed"),
]  # fmt: skip


def template_of(**changes: Any) -> dict[str, Any]:
    bf16 = ml_dtypes.bfloat16
    tree = {
        "layers": {
            "qkv": described((3, 8, 2, 6, 2), bf16, None, "y", "x"),
            "up": described((3, 8, 24), bf16, None, "x", "y"),
            "norm": described((3, 8), bf16),
        },
        "embed": described((40, 8), bf16, "x"),
        "head": described((8, 40), bf16, None, "y"),
    }
    return tree | changes


def test_a_stacked_model_with_tied_embeddings_and_back(tmp_path: Path) -> None:
    folder, tensors = model(tmp_path / "r")
    repository = Repository(folder)
    matched = Matched(repository, template_of(), NameMap(RULES), cast=False, strict=True, rank=0, world=1)
    load = HubLoad(repository, matched, rank=0, window=1)  # one group of leaves at a time
    params = load.run()
    for n in range(3):
        parts = [tensors[f"m.{n}.{one}"].reshape(2, -1, 2, 8) for one in "qkv"]
        assert same(np.asarray(params["layers"]["qkv"][n]), np.concatenate(parts, 1).transpose(3, 0, 1, 2))
        assert same(np.asarray(params["layers"]["up"][n]), tensors[f"m.{n}.up"].T)
        assert same(np.asarray(params["layers"]["norm"][n]), tensors[f"m.{n}.norm"])
    assert same(np.asarray(params["head"]), tensors["embed"].T)
    assert load.bytes_read == sum(one.nbytes for one in tensors.values())  # the tied one was read once
    del params["head"]
    holdfast.save_hub(tmp_path / "out", params, NameMap(RULES[:-1]), shard_bytes=500)
    again = holdfast.load_hub(tmp_path / "out")
    for name, one in tensors.items():
        part = again
        for key in name.split("."):
            part = part[key]
        assert same(part, one), name


def test_every_mismatch_is_listed_before_anything_is_read(tmp_path: Path) -> None:
    folder, tensors = model(tmp_path / "r")
    for file in folder.glob("*.safetensors"):
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        os.truncate(file, header)  # no data: reading any would fail
        with file.open("ab") as end:
            end.truncate(header + sum(one.nbytes for name, one in tensors.items() if in_file(file, name)))
    changed = template_of(
        layers={
            **template_of()["layers"],
            "up": described((4, 8, 24), ml_dtypes.bfloat16),
            "norm": described((3, 8), np.float32),
            "down": described((3, 8), np.float32),
        },
        scale=1.0,
    )
    changed["embed"] = described((40, 9), ml_dtypes.bfloat16)
    del changed["layers"]["qkv"]
    with pytest.raises(MismatchError) as caught:
        holdfast.load_hub(folder, changed, NameMap(RULES))
    problems = caught.value.problems
    for told in (
        "m.3.up is missing (for layers/up)",
        "layers/norm: dtype float32 wanted, m.2.norm has bfloat16 (cast=True converts)",
        "layers/down: no rule of the mapping names this leaf",
        "embed: embed has the shape [40, 8], [40, 9] wanted",
        "scale: the template has a Python scalar, and repositories hold arrays",
        "m.0.q is in the repository, and no leaf takes it",
    ):
        assert told in problems, "\n".join(problems)
    assert not [one for one in problems if one.startswith(("m.0.up is", "embed is"))]


def in_file(file: Path, name: str) -> bool:
    index = json.loads((file.parent / "model.safetensors.index.json").read_text())
    return bool(index["weight_map"][name] == file.name)


def test_parts_that_no_leaf_takes_are_found(tmp_path: Path) -> None:
    single(tmp_path, {"f": np.zeros((6, 2), np.float32)})
    rule = Rule("a", "f", "(t d) h -> d h", take=("t", 0, 1), sizes={"t": 3})
    with pytest.raises(MismatchError, match=r"f: t 1\.\.3 goes into no leaf"):
        holdfast.load_hub(tmp_path, {"a": np.zeros((2, 2), np.float32)}, NameMap([rule]))


def test_only_the_ranges_that_are_needed_are_read(tmp_path: Path) -> None:
    rows = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    single(tmp_path, {"w": rows, "other": np.zeros(1 << 20, np.float32)})
    rule = Rule("some", "w", "(t r) c -> r c", take=("t", 3, 4), sizes={"t": 8})
    repository = Repository(tmp_path)
    template = {"some": described((128, 1024), np.float32, "x", "y"), "kept": np.ones(3)}
    matched = Matched(repository, template, NameMap([rule]), cast=False, strict=False, rank=0, world=1)
    load = HubLoad(repository, matched, rank=0)
    tree = load.run()
    assert same(np.asarray(tree["some"]), rows[384:512])
    assert tree["kept"] is template["kept"]  # not strict: as it was
    assert load.bytes_read == rows.nbytes // 8


@final
class Half:
    """A framework in which this process holds one half of each array."""

    def __init__(self, layout: ArrayLayout, mine: int) -> None:
        local = tuple(0 if box == mine else -1 for box in range(2))
        self.description = Description(layout, local)

    def place(self, batch: Any) -> list[Any]:
        return [{box: data.copy() for box, data in one.boxes.items()} for one in batch]

    def ready(self, leaves: Any) -> None:
        """Nothing is under way."""

    def landing(self, sinks: Any) -> None:
        """They stay in host memory."""


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_reads_its_own_shards(rank: int, tmp_path: Path) -> None:
    rows = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    single(tmp_path, {"w": rows})
    repository = Repository(tmp_path)
    matched = Matched(
        repository, {"w": rows}, NameMap(rest=True), cast=False, strict=True, rank=rank, world=2
    )
    half = Half(ArrayLayout.grid("float32", (1024, 1024), [(0, 512, 1024), (0, 1024)], [(0,), (1,)]), rank)
    fake: Any = half
    matched.leaves = [replace(matched.leaves[0], sink=half, adapter=fake)]
    load = HubLoad(repository, matched, rank=rank)
    tree = load.run()
    assert same(tree["w"][rank].view(np.float32), rows[512 * rank : 512 * (rank + 1)].reshape(-1))
    assert list(tree["w"]) == [rank]
    assert load.bytes_read == rows.nbytes // 2


def test_wide_numbers_are_not_narrowed_behind_ones_back(tmp_path: Path) -> None:
    single(tmp_path, {"n": np.array([2**40, 1])})
    with pytest.raises(MismatchError, match="n: JAX keeps no int64 arrays"):
        holdfast.load_hub(tmp_path, {"n": described((2,), np.int64)})
    got = holdfast.load_hub(tmp_path, {"n": described((2,), np.float32)}, cast=["n"])
    np.testing.assert_array_equal(np.asarray(got["n"]), np.array([2**40, 1], np.float32))


@pytest.mark.timeout(30)
def test_readers_that_get_no_memory_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(size: int) -> Any:
        raise MemoryError(f"no {size} bytes")

    holdfast.save_hub(tmp_path / "hub", {"w": np.ones(8, np.float32)})
    monkeypatch.setattr(loading, "region", refused)
    with pytest.raises(MemoryError):
        holdfast.load_hub(tmp_path / "hub")


@pytest.mark.parametrize("lost", [(2, 3), (3,), ()])
def test_files_of_several_without_their_index_are_refused(lost: tuple[int, ...], tmp_path: Path) -> None:
    sharded(tmp_path, *({name: np.arange(3)} for name in "abc"))
    (tmp_path / "model.safetensors.index.json").unlink()
    for n in lost:
        (tmp_path / f"model-{n:05d}-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00001-of-00003\.safetensors.*no model.*index") as caught:
        holdfast.load_hub(tmp_path)
    assert "cut off" in (caught.value.hint or "")
    with pytest.raises(FormatError, match="a part of a repository"):
        holdfast.load_hub(tmp_path, {"a": np.zeros(3, np.int64)}, strict=False)
    # Who names a file means that file.
    alone = holdfast.load_hub(tmp_path / "model-00001-of-00003.safetensors")
    assert list(alone) == ["a"]


@pytest.mark.parametrize("name", ["model-00001-of-00001", "part-of-00002", "best-of-3"])
def test_a_file_that_is_not_one_of_several_is_loaded(name: str, tmp_path: Path) -> None:
    single(tmp_path, {"a": np.arange(3)})
    (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    assert same(holdfast.load_hub(tmp_path)["a"], np.arange(3))


def test_places(tmp_path: Path) -> None:
    blobs = single(tmp_path / "blobs", {"a.b": np.arange(3), "c": np.zeros((0, 4), np.float16)})
    # As a Hugging Face cache has it: the snapshot is a folder of links.
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (blobs / "model.safetensors").rename(blobs / "1234")
    (snapshot / "model.safetensors").symlink_to(blobs / "1234")
    loaded = holdfast.load_hub(snapshot)
    assert same(loaded["a"]["b"], np.arange(3))
    assert loaded["c"].shape == (0, 4)
    (snapshot / "model.safetensors").rename(snapshot / "weights.safetensors")
    assert same(holdfast.load_hub(snapshot)["a"]["b"], np.arange(3))
    assert same(holdfast.load_hub(snapshot / "weights.safetensors")["a"]["b"], np.arange(3))
    (snapshot / "more.safetensors").symlink_to(blobs / "1234")
    with pytest.raises(UsageError, match=r"2 files \*\.safetensors"):
        holdfast.load_hub(snapshot)
    with pytest.raises(UsageError, match="without into"):
        holdfast.load_hub(snapshot, mapping=NameMap())
    with pytest.raises(UsageError, match="threads=0"):
        holdfast.load_hub(snapshot, threads=0)


def test_names_are_what_they_are_whatever_characters_they_have(tmp_path: Path) -> None:
    arrays = {
        "mlp/w": np.arange(3),
        "x~y": np.arange(4),
        "mlp/~/linear.w": np.arange(5),
        "a..b": np.arange(6),
    }
    single(tmp_path / "given", arrays)
    loaded = holdfast.load_hub(tmp_path / "given")
    assert same(loaded["mlp/~/linear"]["w"], arrays["mlp/~/linear.w"])
    assert same(loaded["a"][""]["b"], arrays["a..b"])
    for name, tree in (("flat", arrays), ("nested", loaded)):
        holdfast.save_hub(tmp_path / name, tree)
        assert {one: array.size for one, array in written(tmp_path / name).items()} == {
            one: array.size for one, array in arrays.items()
        }
    back = holdfast.load_hub(tmp_path / "given", into=dict(arrays))
    assert same(back["mlp/w"], arrays["mlp/w"])


def test_an_object_store_is_a_place_too() -> None:
    place = "memory://hub-test/model"
    tree = {"w": np.arange(5 << 19, dtype=np.float32), "v": np.ones((2, 3))}
    holdfast.save_hub(place, tree, shard_bytes=1 << 20)
    loaded = holdfast.load_hub(place)
    assert same(loaded["w"], tree["w"])
    assert same(loaded["v"], tree["v"])
    with pytest.raises(UsageError, match="not empty"):
        holdfast.save_hub(place, tree)


@pytest.mark.parametrize("way", ["as installed", "without the library"])
@pytest.mark.parametrize("spec", [(), ("x",), (None, "y"), ("y", "x"), (("x", "y"),)], ids=str)
def test_large_tensors_at_odd_offsets_on_any_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: tuple[Any, ...], way: str
) -> None:
    """Several pieces, chunks and shards; runs that end within a piece, and one tensor in two leaves."""
    if way != "as installed":
        monkeypatch.setattr(copying, "library", None)
    tensors = {"w": noise("F32", (1032, 2056), 1), "b": noise("BF16", (1032, 4000), 2)}
    header: dict[str, Any] = {"odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    data = b"\x07"
    for name, one in tensors.items():
        word, end = {"w": "F32", "b": "BF16"}[name], len(data) + one.nbytes
        header[name] = {"dtype": word, "shape": list(one.shape), "data_offsets": [len(data), end]}
        data += one.tobytes()
    place = raw(tmp_path / "r", header, data)
    template = {name: described(one.shape, one.dtype, *spec) for name, one in tensors.items()}
    template["again"] = described(tensors["w"].shape, tensors["w"].dtype)
    read: list[int] = []
    names = NameMap([Rule("again", "w")], rest=True, ignore=["odd"])
    loaded = holdfast.load_hub(place, template, names, progress=read.append)
    for name, array in loaded.items():
        assert same(np.asarray(array), tensors["w" if name == "again" else name]), name
    assert max(read) == sum(one.nbytes for one in tensors.values()), "what is in two leaves is read once"


@pytest.mark.parametrize("way", ["as installed", "without the library"])
def test_a_file_that_becomes_shorter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way != "as installed":
        monkeypatch.setattr(copying, "library", None)
    tensor = noise("F32", (600, 1024), 3)
    header = {"w": {"dtype": "F32", "shape": [600, 1024], "data_offsets": [0, tensor.nbytes]}}
    place = Path(raw(tmp_path / "r", header, tensor.tobytes()))
    (file,) = [place] if place.is_file() else place.glob("*.safetensors")
    fill = HubLoad._fill

    def cut(self: HubLoad, *rest: Any) -> None:
        os.truncate(file, file.stat().st_size - 5000)
        fill(self, *rest)

    monkeypatch.setattr(HubLoad, "_fill", cut)
    with pytest.raises(FormatError, match="inside of the tensor 'w' that ends at"):
        holdfast.load_hub(place)
