"""The dtype table against the real safetensors package, both ways."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy

from holdfast.arrays import TABLE, dtype, stored_shape
from holdfast.errors import TreeError


def _sample(name: str) -> npt.NDArray[Any]:
    entry = TABLE[name]
    if entry.name == "bool":
        return np.array([[True, False, True]])
    data = np.arange(6 * entry.itemsize, dtype=np.uint8)
    if not entry.native and entry.itemsize == 1:
        data %= 2  # int1 knows only two values
    return data.view(entry.numpy).reshape(2, 3)


@pytest.mark.parametrize("name", list(TABLE))
def test_entries_describe_numpy(name: str) -> None:
    entry = TABLE[name]
    assert entry.name == entry.numpy.name == name
    assert entry.itemsize == entry.numpy.itemsize
    assert dtype(name) is dtype(entry.numpy) is dtype(entry.numpy.type) is entry


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.native])
def test_safetensors_writes_the_word_we_expect(name: str) -> None:
    array = _sample(name)
    written = safetensors.numpy.save({"a": array})
    size = int.from_bytes(written[:8], "little")
    header = json.loads(written[8 : 8 + size])
    assert header["a"]["dtype"] == TABLE[name].stored
    assert tuple(header["a"]["shape"]) == stored_shape(name, array.shape)
    assert written[8 + size :] == array.tobytes()


@pytest.mark.parametrize("name", list(TABLE))
def test_safetensors_reads_what_we_store(name: str) -> None:
    entry, array = TABLE[name], _sample(name)
    shape, data = stored_shape(entry, array.shape), array.tobytes()
    info = {"dtype": entry.stored, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"a": info}).encode()
    content = len(header).to_bytes(8, "little") + header + data
    ((read_name, read),) = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    assert read_name == "a"
    assert (read["dtype"], tuple(read["shape"])) == (entry.stored, shape)
    back = np.frombuffer(bytes(read["data"]), entry.numpy).reshape(array.shape)
    assert back.tobytes() == data
    assert back.dtype == array.dtype


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if not entry.native])
def test_only_what_safetensors_refuses_is_stored_as_bytes(name: str) -> None:
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.save({"a": _sample(name)})
    assert TABLE[name].stored == "U8"


def test_every_ml_dtype_is_in_the_table() -> None:
    offered = {name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type)}
    assert offered - {"finfo", "iinfo"} <= set(TABLE)


def test_stored_shapes() -> None:
    assert stored_shape("complex128", (2, 3)) == (2, 3, 16)
    assert stored_shape("complex128", ()) == (16,)
    assert stored_shape("int4", (5,)) == (5,)
    assert stored_shape("bfloat16", [5]) == (5,)
    assert stored_shape(np.dtype("float32"), (0, 2)) == (0, 2)


def test_python_types_are_dtypes_too() -> None:
    assert dtype(float).name == "float64"
    assert dtype(ml_dtypes.bfloat16).stored == "BF16"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("float33", "unknown dtype 'float33'"),
        ("f4", "unknown dtype 'f4'"),
        (np.dtype([("a", "f4")]), "structured"),
        (np.dtype(("f4", (2,))), "structured"),
        (np.dtype(object), "object"),
        (np.dtype("U3"), "text"),
        (np.dtype("S3"), "text"),
        (np.dtype("datetime64[s]"), "unsupported dtype datetime64"),
        (np.dtype(np.longdouble), "unsupported"),
        (np.dtype(">f4"), "little-endian"),
        (dict, "object"),
    ],
    ids=str,
)
def test_other_dtypes_are_refused_clearly(spec: Any, problem: str) -> None:
    with pytest.raises(TreeError, match=problem) as caught:
        dtype(spec)
    assert "bfloat16" in str(caught.value), "the hint lists what is supported"
