"""Trees in .npz and .safetensors files: what is written comes back, and nothing is half there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holdfast.arrays import TABLE, flatten
from holdfast.cli import treefile
from holdfast.errors import FormatError, StorageError, UsageError


def read(path: Path) -> dict[str, Any]:
    told: list[int] = []
    tree = treefile.read(str(path), told.append)
    assert told == sorted(told)
    assert told[-1] == path.stat().st_size
    return dict(flatten(tree)[0])


def save_npz(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


TREE: dict[str, Any] = {
    "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "file": np.ones(2, np.int8)},
    "step": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float16),
}


@pytest.mark.parametrize("kind", treefile.KINDS)
def test_what_is_written_comes_back(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"tree{kind}"
    treefile.write(str(path), TREE)
    found, sent = read(path), dict(flatten(TREE)[0])
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_others_read_and_write_the_same_files(tmp_path: Path) -> None:
    treefile.write(str(tmp_path / "a.safetensors"), TREE)
    np.testing.assert_array_equal(load_file(tmp_path / "a.safetensors")["params/w"], TREE["params"]["w"])
    save_file({"model.w": np.ones(3, ml_dtypes.bfloat16)}, tmp_path / "b.safetensors")
    assert read(tmp_path / "b.safetensors")["model.w"].dtype == ml_dtypes.bfloat16
    treefile.write(str(tmp_path / "a.npz"), TREE)
    with np.load(tmp_path / "a.npz") as found:
        assert set(found.files) == {"params/w", "params/file", "step", "empty"}
    save_npz(tmp_path / "b.npz", {"x/y": np.ones(2)})
    assert set(read(tmp_path / "b.npz")) == {"x/y"}


def test_names_that_are_no_paths_are_single_keys(tmp_path: Path) -> None:
    save_npz(tmp_path / "a.npz", {"x": np.ones(2), "x/y": np.ones(2)})
    tree = treefile.read(str(tmp_path / "a.npz"), lambda _: None)
    assert set(tree) == {"x", "x/y"}


def test_dtypes_that_npz_lacks_are_refused_and_safetensors_takes_them(tmp_path: Path) -> None:
    tree = {"b": np.ones(3, ml_dtypes.bfloat16)}
    with pytest.raises(UsageError, match="bfloat16"):
        treefile.write(str(tmp_path / "a.npz"), tree)
    assert list(tmp_path.iterdir()) == []
    treefile.write(str(tmp_path / "a.safetensors"), tree)
    assert read(tmp_path / "a.safetensors")["b"].dtype == ml_dtypes.bfloat16


def test_dtypes_that_safetensors_lacks_come_back_too(tmp_path: Path) -> None:
    """To others they are bytes; an entry of the header says what they were."""
    odd = [one for one in TABLE.values() if not one.native]
    sent: dict[str, Any] = {one.name: np.arange(6).reshape(2, 3).astype(one.numpy) for one in odd}
    sent |= {
        "scalar": np.array(1 + 2j),
        "plain": np.arange(4, dtype=np.uint8),
        "none": np.zeros((0, 2), complex),
    }
    treefile.write(str(tmp_path / "a.safetensors"), sent)
    found = read(tmp_path / "a.safetensors")
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    assert load_file(tmp_path / "a.safetensors")["complex128"].shape == (2, 3, 16)


@pytest.mark.parametrize(
    "entry",
    ["nonsense", "[]", '{"a": 3}', '{"a": "int5"}', '{"b": "int4"}', '{"a": "complex128"}', '{"a": "int8"}'],
)
def test_an_entry_about_dtypes_that_does_not_fit_is_refused(entry: str, tmp_path: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.uint8)}, tmp_path / "a.safetensors", {"holdfast.dtypes": entry})
    with pytest.raises(FormatError, match=r"holdfast\.dtypes"):
        read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", treefile.KINDS)
@pytest.mark.parametrize(
    "content", [b"", b"nonsense", bytes(64), b"PK\x03\x04" + bytes(60)], ids=["empty", "text", "zeros", "zip"]
)
def test_damaged_files_are_refused(kind: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / f"a{kind}").write_bytes(content)
    with pytest.raises(FormatError, match=f"a{kind}"):
        treefile.read(str(tmp_path / f"a{kind}"), lambda _: None)


def test_no_file_is_an_error_of_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        treefile.read(str(tmp_path / "a.npz"), lambda _: None)


def test_only_new_files_with_a_known_ending_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    for name, said in (("a.npz", "exists"), ("a.bin", "no .npz"), ("no/a.npz", "no folder")):
        with pytest.raises(UsageError, match=said):
            treefile.check_new(str(tmp_path / name))
    treefile.check_new(str(tmp_path / "b.npz"))
