"""safetensors headers: legal by the real library's judgement, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from holdfast import format as fmt
from holdfast.errors import FormatError, UsageError
from holdfast.format.part import tensor_name
from holdfast.format.safetensors import BITS
from tests.format.whole import deserialize

FIXED = settings(derandomize=True, deadline=None, max_examples=150)
whole_byte = sorted(word for word, bits in BITS.items() if bits % 8 == 0)


def decode(data: bytes, **limits: int) -> tuple[dict[str, str], list[fmt.Tensor], int]:
    return fmt.decode_header(lambda at, n: data[at : at + n], len(data), name="x", **limits)


def raw(header: object, data: bytes = b"") -> bytes:
    """A file with this header: an object to dump, or bytes as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def info(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@st.composite
def files(draw: st.DrawFn) -> tuple[list[fmt.Tensor], dict[str, str]]:
    names = draw(st.lists(st.text(max_size=20), max_size=6, unique=True))
    tensors, at = [], 0
    for name in names:
        if name == "__metadata__":
            continue
        word = draw(st.sampled_from(whole_byte))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = int(np.prod(shape, dtype=int)) * BITS[word] // 8
        tensors.append(fmt.Tensor(name, word, shape, at, at + size))
        at += size
    return tensors, draw(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))


@FIXED
@given(files())
def test_headers_round_trip_and_the_real_library_agrees(
    file: tuple[list[fmt.Tensor], dict[str, str]],
) -> None:
    tensors, metadata = file
    header = fmt.encode_header(tensors, metadata)
    assert len(header) % 4096 == 0
    end = max((t.end for t in tensors), default=0)
    data = header + bytes(i % 251 for i in range(end))
    assert decode(data) == (metadata, sorted(tensors, key=lambda t: (t.begin, t.end)), len(header))
    theirs = deserialize(data)
    assert len(theirs) == len(tensors)
    for t in tensors:
        assert theirs[t.name]["dtype"] == t.dtype
        assert tuple(theirs[t.name]["shape"]) == t.shape
        assert bytes(theirs[t.name]["data"]) == data[len(header) :][t.begin : t.end]


def test_the_real_library_opens_a_part_from_disk(tmp_path: Path) -> None:
    values = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(3).astype(ml_dtypes.bfloat16),
        "__metadata__": np.arange(5, dtype=np.int8),
    }
    pieces = [fmt.Piece(k, v.dtype.name, v.shape, (0,) * v.ndim, v.shape) for k, v in values.items()]
    layout = fmt.lay_out(3, pieces)
    data = layout.header + b"".join(values[pieces[i].name].tobytes() for i in layout.order)
    assert len(data) == layout.size
    path = tmp_path / fmt.data_name(3, "a")
    path.write_bytes(data)
    with safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["b", "w", "~__metadata__"]
        assert file.metadata() == {"holdfast": "1", "part": "3", "file": "0"}
        np.testing.assert_array_equal(file.get_tensor("w"), values["w"])
        np.testing.assert_array_equal(file.get_slice("w")[1:], values["w"][1:])
        np.testing.assert_array_equal(file.get_tensor("~__metadata__"), values["__metadata__"])


@pytest.mark.parametrize("metadata", [None, {"format": "np", "ü": "☃"}])
def test_our_parser_opens_what_the_real_library_wrote(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    values: dict[str, np.ndarray[Any, Any]] = {
        "z": np.arange(6, dtype=np.float64).reshape(2, 3),
        "empty": np.zeros((0, 4), np.int32),
        "scalar": np.array(True),
        "half": np.ones(3, np.float16),
        "c": np.ones(2, np.complex64),
    }
    save_file(values, tmp_path / "file", metadata=metadata)
    data = (tmp_path / "file").read_bytes()
    seen, tensors, start = decode(data)
    assert seen == (metadata or {})
    assert {t.name for t in tensors} == set(values)
    for t in tensors:
        assert t.shape == values[t.name].shape
        assert data[start + t.begin : start + t.end] == values[t.name].tobytes()


def test_an_empty_file_is_legal() -> None:
    header = fmt.encode_header([], {})
    assert decode(header) == ({}, [], 4096)
    assert deserialize(header) == {}


ONE = info("U8", [2], 0, 2)
BAD: dict[str, tuple[bytes, str]] = {
    "too short": (b"1234567", "7 bytes is too short"),
    "length beyond file": (raw({"a": ONE}, b"")[:20], "offset 0 says the header is"),
    "length 2**63": ((1 << 63).to_bytes(8, "little") + b"{}", "at most 2 are possible"),
    "no brace": (raw(b" {}"), "begins with b' {}'"),
    "empty header": (raw(b""), "begins with b''"),
    "not json": (raw(b"{]"), "not valid JSON"),
    "not utf-8": (raw(b'{"\xff":1}'), "not valid JSON"),
    "lone surrogate": (raw(b'{"\\ud800":{}}'), "not valid JSON"),
    "list": (raw({"a": [1]}), "not valid JSON"),
    "deep": (raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "not valid JSON"),
    "long number": (raw(b'{"a":{"shape":[' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    "nan": (raw(b'{"a":{"shape":[NaN]}}'), "not valid JSON"),
    "same tensor twice": (
        raw(b'{"a":%b,"a":%b}' % ((json.dumps(info("U8", [0], 0, 0)).encode(),) * 2)),
        "key 'a' appears twice",
    ),
    "same field twice": (
        raw(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "key 'dtype' appears twice",
    ),
    "missing field": (raw({"a": {"dtype": "U8", "shape": [0]}}), "header entry 'a'"),
    "extra field": (raw({"a": info("U8", [0], 0, 0) | {"x": "y"}}), "header entry 'a'"),
    "metadata not text": (raw({"__metadata__": {"a": [1]}}), "header entry '__metadata__'"),
    "unknown dtype": (raw({"a": info("C128", [0], 0, 0)}), "unknown dtype 'C128'"),
    "negative dim": (raw({"a": info("U8", [-1], 0, 0)}), "header entry 'a'"),
    "overflow": (raw({"a": info("U8", [2**40, 2**40], 0, 0)}), "impossible shape"),
    "very long shape": (raw({"a": info("U8", [2**62] * 10_000, 0, 0)}), "impossible shape"),
    "extent too small": (raw({"a": info("U16", [2], 0, 2)}, b"12"), r"extent \[0, 2\) has 2"),
    "extent reversed": (raw({"a": info("U8", [2], 2, 0)}, b"12"), "extent"),
    "half bytes": (raw({"a": info("F4", [3], 0, 1)}, b"1"), "whole bytes"),
    "hole": (raw({"a": ONE, "b": info("U8", [1], 3, 4)}, b"1234"), "leaves a hole"),
    "overlap": (raw({"a": ONE, "b": info("U8", [2], 1, 3)}, b"123"), "overlaps"),
    "beyond the file": (raw({"a": info("U8", [9], 0, 9)}, b"12"), "truncated or has extra"),
    "extra bytes": (raw({"a": ONE}, b"123"), "truncated or has extra"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers_are_refused_with_the_reason(case: str) -> None:
    data, text = BAD[case]
    with pytest.raises(FormatError, match=text) as caught:
        decode(data)
    assert str(caught.value).startswith("x: ")


def test_nothing_is_read_beyond_the_limit() -> None:
    asked = []

    def read(at: int, length: int) -> bytes:
        asked.append((at, length))
        return (50 << 20).to_bytes(8, "little")

    with pytest.raises(FormatError, match="with a limit of 1000"):
        fmt.decode_header(read, 1 << 40, max_header=1000)
    assert asked == [(0, 8)]


def test_a_short_read_is_refused() -> None:
    data = raw({"a": ONE}, b"12")
    with pytest.raises(FormatError, match="got 3"):
        fmt.decode_header(lambda at, n: data[at : at + min(n, 3)], len(data))


def test_the_writer_refuses_what_a_reader_would() -> None:
    a = fmt.Tensor("a", "U8", (2,), 0, 2)
    for tensors, text in [
        ([a, fmt.Tensor("a", "U8", (2,), 2, 4)], "two tensors are called 'a'"),
        ([fmt.Tensor("__metadata__", "U8", (2,), 0, 2)], "two tensors"),
        ([a, fmt.Tensor("b", "U8", (2,), 3, 5)], "hole"),
        ([fmt.Tensor("a", "int4", (2,), 0, 2)], "unknown dtype"),
        ([fmt.Tensor("a", "U8", (0, -1), 0, 0)], "impossible shape|has 0"),
    ]:
        with pytest.raises(FormatError, match=text):
            fmt.encode_header(tensors, {})
    with pytest.raises(UsageError, match="not Unicode text"):
        fmt.encode_header([fmt.Tensor("\ud800", "U8", (2,), 0, 2)], {})


def test_tensor_names_cannot_collide() -> None:
    assert tensor_name("a/b", (4, 2), (0, 0), (4, 2)) == "a/b"
    assert tensor_name("a/b", (4, 2), (0, 0), (2, 2)) == "a/b~[0:2,0:2]"
    assert tensor_name("", (), (), ()) == ""
    assert tensor_name("__metadata__", (2,), (1,), (2,)) == "~__metadata__~[1:2]"
