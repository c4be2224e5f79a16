"""Files that lie: each is refused with what is wrong and where, and none takes memory or hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.checkpoint.hub import Matched, NameMap, Repository
from holdfast.checkpoint.hub.loading import HubLoad
from holdfast.errors import FormatError, MissingPathError, UsageError
from tests.checkpoint.hub.repositories import raw, sharded, single


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        ({"a": entry(0, 8)}, b"1234", None, "truncated"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), None, "overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), None, "hole"),
        ({"a": entry(0, 8)}, bytes(9), None, "extra bytes"),
        ({"a": entry(0, 7)}, bytes(7), None, "is 8 bytes"),
        ({"a": entry(0, 8)}, bytes(8), 1 << 62, "header is 4611686018427387904 bytes"),
        ({"a": entry(0, 8, shape=[1 << 40, 1 << 40])}, bytes(8), None, "impossible shape"),
        ({"a": entry(0, 8, "F128")}, bytes(8), None, "unknown dtype"),
        ({"a": entry(0, 8, shape=[-2])}, bytes(8), None, "header entry"),
        (b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": {}}', b"1", None, "twice"),
        (b"[" * 100_000, b"", None, "not with"),
        (b"{" * 100_000, b"", None, "not valid JSON"),
        ({"a": entry(0, 1, "F4", [1])}, b"1", None, "whole bytes"),
    ],
)  # fmt: skip
def test_a_damaged_file(header: Any, data: bytes, length: int | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=says):
        holdfast.load_hub(raw(tmp_path, header, data, length=length))


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="too short"):
        holdfast.load_hub(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"{", "not JSON"),
        ({}, "weight_map"),
        ({"weight_map": {"a": "../x"}}, "not in its folder"),
        ({"weight_map": {"a": ""}}, "not in its folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "not there"),
        ({"weight_map": {"a": 3}}, "not JSON"),
        ({"weight_map": {"zzz": "model-00001-of-00002.safetensors"}}, "zzz in model-00001"),
    ],
)
def test_a_wrong_index(index: Any, says: str, tmp_path: Path) -> None:
    sharded(tmp_path, {"a": np.zeros(2)}, {"b": np.zeros(2)})
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(FormatError, match=says):
        holdfast.load_hub(tmp_path)


def test_a_tensor_in_two_files_is_the_one_of_the_index(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": np.zeros(2), "b": np.ones(1)}, {"a": np.ones(2)})
    np.testing.assert_array_equal(holdfast.load_hub(tmp_path)["a"], np.ones(2))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    single(tmp_path, {"a": np.zeros(1 << 16)})
    repository = Repository(tmp_path)
    template = {"a": np.zeros(1 << 16)}
    matched = Matched(repository, template, NameMap(rest=True), cast=False, strict=True, rank=0, world=1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(FormatError, match="inside of the tensor 'a'"):
        HubLoad(repository, matched, rank=0).run()


def test_places_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(MissingPathError, match="there is no folder"):
        holdfast.load_hub(tmp_path / "gone")
    with pytest.raises(UsageError, match="neither"):
        holdfast.load_hub(tmp_path)
    with pytest.raises(MissingPathError, match=r"gone\.safetensors"):
        holdfast.load_hub(tmp_path / "gone.safetensors")
