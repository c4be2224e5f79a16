"""Manifest and part index: round trips, the root, and every structural rule with its message."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import format as fmt
from holdfast.arrays import decode_scalar, encode_scalar
from holdfast.errors import CorruptError, FormatError, TreeError, VersionError
from holdfast.format.manifest import check_part, owned_cells
from tests.format.make_golden import (
    Array,
    golden_arrays,
    golden_step,
    make_step,
    reroot,
)
from tests.format.test_ids import saves

FIXED = settings(derandomize=True, deadline=None, max_examples=100)
GOOD = golden_step()
TOP = json.loads(GOOD[fmt.MANIFEST])
INDEX_NAME = fmt.index_name(0, "a1")
INDEX = json.loads(GOOD[INDEX_NAME])

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**1023), 2**1023)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
metas = st.dictionaries(st.text(max_size=8), json_values, max_size=4)
scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**300), 2**300) | st.floats()
    | st.complex_numbers() | st.text(max_size=20) | st.binary(max_size=20)
)  # fmt: skip


def manifest_bytes(top: dict[str, Any]) -> bytes:
    """The file of a manifest given as JSON, with the right root."""
    body = {key: value for key, value in top.items() if key != "root"}
    return reroot(json.dumps(body).encode()[1:])


def changed(source: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(source))
    change(copy)
    return copy


@FIXED
@given(saves, metas, st.dictionaries(st.text(max_size=12), scalars, max_size=5))
def test_manifests_round_trip(save: fmt.SaveId, meta: Any, values: dict[str, Any]) -> None:
    arrays = {"~0array": golden_arrays()["params/w"]}
    values.pop("~0array", None)
    data = make_step(save, arrays, values, meta)[fmt.MANIFEST]
    manifest = fmt.decode_manifest(data)
    assert manifest.save == save
    assert repr(manifest.meta) == repr(meta)
    back = {s.name: decode_scalar(s.type, s.value) for s in manifest.scalars}
    assert repr(back) == repr(values)
    assert fmt.encode_manifest(manifest) == data


def test_the_root_covers_every_byte_after_the_prefix() -> None:
    data = GOOD[fmt.MANIFEST]
    assert data.startswith(b'{"root":"')
    assert json.loads(data)["root"] == fmt.digest(data[43:])
    for at in range(len(data)):
        with pytest.raises(FormatError, match=r"^manifest.json: ") as caught:
            fmt.decode_manifest(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        assert isinstance(caught.value, CorruptError) == (9 <= at < 41 or at >= 43)
    for cut in (data[:-1], data[:20], b"", data + b" "):
        with pytest.raises(FormatError):
            fmt.decode_manifest(cut)


def test_size_is_checked_first() -> None:
    with pytest.raises(FormatError, match="the limit is 100"):
        fmt.decode_manifest(GOOD[fmt.MANIFEST], max_bytes=100)
    with pytest.raises(FormatError, match="the limit is 100"):
        fmt.decode_index(GOOD[INDEX_NAME], max_bytes=100)


def test_a_newer_version_may_look_different_and_is_named() -> None:
    data = reroot(b'"format":"holdfast","version":17,"surprise":[]}')
    with pytest.raises(VersionError, match="version 17, this Holdfast reads up to 1") as caught:
        fmt.decode_manifest(data)
    assert caught.value.hint
    assert "upgrade" in caught.value.hint
    with pytest.raises(VersionError):
        fmt.decode_index(b'{"version":2}')


def _set(*path: Any) -> Callable[[Any], object]:
    """A change that sets the value at a path: all but the last item lead to it."""
    *keys, last, value = path

    def change(top: Any) -> None:
        for key in keys:
            top = top[key]
        top[last] = value

    return change


W, GRID, EMPTY, KEY = 0, 1, 9, 11
BAD_MANIFESTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "version 0": (_set("version", 0), "no format version 0"),
    "unknown field": (_set("extra", 1), "unknown field `extra`"),
    "missing field": (lambda t: t.pop("save"), "missing required field `save`"),
    "bad attempt": (_set("save", "attempt", "../x"), "cannot be part of a file name"),
    "meta not an object": (_set("meta", [1]), "Expected `object`"),
    "meta too deep": (_set("meta", "a", json.loads("[" * 99 + "]" * 99)), "nested deeper"),
    "same name twice": (lambda t: t["arrays"].append(t["arrays"][W]), "'params/w' appears twice"),
    "scalar named like array": (_set("scalars", 0, "name", "mask"), "'mask' appears twice"),
    "name too long": (_set("arrays", W, "name", "x" * 5000), "has 5000 characters"),
    "unknown dtype": (_set("arrays", W, "dtype", "float33"), "unknown dtype 'float33'"),
    "negative dim": (_set("arrays", W, "shape", [-8, 6]), "Expected `int` >= 0"),
    "huge shape": (_set("arrays", W, "shape", [2**60, 2**60]), "impossible shape"),
    "many dims": (_set("arrays", W, "shape", [1] * 65), "impossible shape"),
    "cuts of another rank": (_set("arrays", W, "cuts", [[0, 8]]), "cuts 1 dimensions"),
    "cuts not from 0": (_set("arrays", W, "cuts", 0, [1, 4, 8]), "cuts dimension 0"),
    "cuts not to the end": (_set("arrays", W, "cuts", 0, [0, 4, 7]), "cuts dimension 0"),
    "cuts equal": (_set("arrays", W, "cuts", 0, [0, 8, 8]), "cuts dimension 0"),
    "cuts falling": (_set("arrays", W, "cuts", 0, [0, 9, 8]), "cuts dimension 0"),
    "no cuts": (_set("arrays", W, "cuts", 0, []), "cuts dimension 0"),
    "empty dim uncut": (_set("arrays", EMPTY, "cuts", 0, [0]), "cuts dimension 0 of size 0"),
    "owners too few": (_set("arrays", W, "owners", [[0, 0, 1]]), "given for 1 of 2 cells"),
    "owners too many": (_set("arrays", W, "owners", [[0, 0, 3]]), "does not fit 2 cells"),
    "owner bomb": (_set("arrays", W, "owners", [[0, 0, 2**62]]), "does not fit 2 cells"),
    "run of zero": (_set("arrays", W, "owners", [[0, 0, 0], [0, 1, 2]]), "does not fit"),
    "owner negative": (_set("arrays", W, "owners", [[0, -1, 2]]), "does not fit"),
    "owner unknown": (_set("arrays", W, "owners", [[0, 2, 2]]), "names a part that is not there"),
    "key without impl": (_set("arrays", KEY, "impl", None), "exactly if it is a PRNG key"),
    "impl without key": (_set("arrays", W, "impl", "rbg"), "exactly if it is a PRNG key"),
    "unknown kind": (_set("arrays", W, "kind", "pickle"), "Invalid enum value"),
    "axes of another rank": (_set("arrays", W, "axes", ["a"]), "1 logical axes for 2"),
    "same part twice": (_set("parts", 1, "part", 0), "part numbers repeat"),
    "part number": (_set("parts", 1, "part", 1 << 40), "part numbers repeat or reach"),
    "index elsewhere": (_set("parts", 0, "index", "../../etc/passwd"), "has index '../../etc"),
    "index of another attempt": (
        _set("parts", 0, "index", "part-00000.b2.index.json"), "not part-00000.a1.index.json"),
    "index too large": (_set("parts", 0, "size", 1 << 40), "the limit is"),
    "digest": (_set("parts", 0, "digest", "xyz"), "Expected `str` matching"),
    "part bytes": (_set("parts", 0, "nbytes", 1), "arrays have"),
    "total bytes": (_set("nbytes", 1), "the manifest says 1"),
    "scalar type": (_set("scalars", 0, "type", "pickle"), "is not a 'pickle' scalar"),
    "scalar value": (_set("scalars", 0, "value", "12x"), "'12x' is not a 'int' scalar"),
    "scalar spelling": (_set("scalars", 0, "value", "007"), "'007' is not a 'int' scalar"),
    "writer": (_set("writer", {"a": 1}), "Expected `str`"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_bad_manifests_are_refused_with_the_reason(case: str) -> None:
    change, text = BAD_MANIFESTS[case]
    with pytest.raises(FormatError) as caught:
        fmt.decode_manifest(manifest_bytes(changed(TOP, change)))
    assert text in str(caught.value)
    assert str(caught.value).startswith("manifest.json: ")


def test_a_grid_bomb_is_refused_before_it_grows() -> None:
    points = list(range(3001))
    top = changed(TOP, _set("arrays", W, "shape", [3000] * 4))
    top["arrays"][W] |= {"cuts": [points] * 4, "owners": [[0, 0, 3000**4]], "axes": None}
    with pytest.raises(FormatError, match="shard grid of 81000000000000 cells"):
        fmt.decode_manifest(manifest_bytes(top))


BAD_INDEXES: dict[str, tuple[Callable[[Any], object], str]] = {
    "version 0": (_set("version", 0), "no format version 0"),
    "unknown field": (_set("extra", 1), "unknown field"),
    "file elsewhere": (_set("files", 0, "name", "/etc/passwd"), "lists the file '/etc/passwd'"),
    "file of another part": (_set("part", 1), "lists the file 'part-00000.a1.safetensors'"),
    "too few digests": (_set("files", 0, "blocks", ""), "needs 1 digests"),
    "not hex": (_set("files", 0, "blocks", "Z" * 32), "needs 1 digests"),
    "size": (_set("files", 0, "size", 9 << 20), "needs 2 digests"),
    "huge size": (_set("files", 0, "size", 2**62), "digests"),
    "slice of no file": (_set("slices", 0, 3, 1), "lies in file 1; there are 1"),
    "slice beyond file": (_set("slices", 0, 4, 4267), "ends at byte"),
    "slice too long": (_set("slices", 0, 5, 2**62), "ends at byte"),
    "negative offset": (_set("slices", 0, 4, -1), "Expected `int` >= 0"),
    "slice reversed": (_set("slices", 0, 1, [5, 0]), "before its start"),
    "ranks differ": (_set("slices", 0, 1, [0]), "1 starts and 2 stops"),
    "extra item": (lambda t: t["slices"][0].append(1), "Expected `array`"),
    "same slice twice": (lambda t: t["slices"].append(t["slices"][0]), "overlap"),
    "overlap": (lambda t: t["slices"].append(["x", [0], [1], 0, 4096, 1]), "overlap at byte"),
    "long name": (_set("slices", 0, 0, "x" * 5000), "has 5000 characters"),
}


@pytest.mark.parametrize("case", BAD_INDEXES)
def test_bad_indexes_are_refused_with_the_reason(case: str) -> None:
    change, text = BAD_INDEXES[case]
    with pytest.raises(FormatError) as caught:
        fmt.decode_index(json.dumps(changed(INDEX, change)).encode())
    assert text in str(caught.value)


def test_an_index_is_what_the_manifest_expects() -> None:
    data = GOOD[INDEX_NAME]
    save = fmt.SaveId("golden", 1200, "a1")
    index = fmt.decode_index(data, digest=fmt.digest(data), size=len(data), save=save, part=0)
    assert fmt.encode_index(index) == data
    with pytest.raises(CorruptError, match="but the manifest says 5"):
        fmt.decode_index(data, size=5)
    with pytest.raises(CorruptError, match="but the manifest says 00"):
        fmt.decode_index(data, digest="00")
    with pytest.raises(FormatError, match="belongs to save golden/1200/a1, expected golden/1/a1"):
        fmt.decode_index(data, save=fmt.SaveId("golden", 1, "a1"))
    with pytest.raises(FormatError, match="is part 0, expected part 1"):
        fmt.decode_index(data, save=save, part=1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda i: i["slices"].pop(), "lacks slice"),
        (_set("slices", 0, 2, [3, 6]), "lacks slice (0, 0) to (4, 6) of 'params/w'"),
        (_set("slices", 0, 5, 95), "is 95 bytes, not those of float32[4, 6]"),
        (lambda i: i["slices"].append(["x", [], [], 0, 0, 0]), "the manifest gives it"),
    ],
)
def test_an_index_holds_exactly_the_cells_of_its_part(change: Callable[[Any], object], text: str) -> None:
    manifest = fmt.decode_manifest(GOOD[fmt.MANIFEST])
    index = fmt.decode_index(json.dumps(changed(INDEX, change)).encode())
    with pytest.raises(FormatError) as caught:
        check_part(manifest, index)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({"a": {"b": [1, float("nan")]}}, "meta['a']['b'][1] is nan"),
        ({"a": float("-inf")}, "meta['a'] is -inf"),
        ({"a": {1: 2}}, "a key of meta['a'], 1, is int, not a string"),
        ({"a": object()}, "meta['a'] is a object"),
        ({"a": b"x"}, "meta['a'] is a bytes"),
        ({"a": "\ud800"}, "meta['a'] has a lone surrogate"),
        ({"\ud800": 1}, "lone surrogate"),
        ({"a": 1 << 2000}, "meta['a'] is an int of 2001 bits"),
        ([1], "meta must be a dict, not list"),
    ],
)
def test_meta_that_json_cannot_hold_is_refused_with_its_path(meta: Any, text: str) -> None:
    with pytest.raises(TreeError) as caught:
        fmt.check_meta(meta)
    assert text in str(caught.value)
    manifest = msgspec.structs.replace(fmt.decode_manifest(GOOD[fmt.MANIFEST]), meta=meta)
    with pytest.raises(TreeError):
        fmt.encode_manifest(manifest)


def test_a_table_of_arrays_serves_every_save_of_a_tree() -> None:
    manifest = fmt.decode_manifest(GOOD[fmt.MANIFEST])
    table = fmt.ArrayTable(manifest.arrays)
    for created in (1.0, 2.0):
        one = msgspec.structs.replace(manifest, created=created)
        assert fmt.encode_manifest(one, table) == fmt.encode_manifest(one)
        assert fmt.decode_manifest(fmt.encode_manifest(one, table)) == one
    assert fmt.ArrayTable((*manifest.arrays,)).digest == table.digest
    assert fmt.ArrayTable(manifest.arrays[1:]).digest != table.digest


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parts": ()}, "names a part that is not there"),
        ({"nbytes": 5}, "the manifest says 5"),
        ({"created": math.nan}, "created at nan"),
        ({"scalars": (fmt.ScalarEntry("params/w", "int", "1"),)}, "appears twice"),
    ],
)
def test_a_table_does_not_spare_the_rest_its_checks(changes: dict[str, Any], text: str) -> None:
    manifest = fmt.decode_manifest(GOOD[fmt.MANIFEST])
    table = fmt.ArrayTable(manifest.arrays)
    with pytest.raises(FormatError, match=text):
        fmt.encode_manifest(msgspec.structs.replace(manifest, **changes), table)


def test_a_table_is_of_the_very_arrays_of_the_manifest() -> None:
    manifest = fmt.decode_manifest(GOOD[fmt.MANIFEST])
    other = fmt.ArrayTable(manifest.arrays[1:])
    with pytest.raises(FormatError, match="not that of its arrays"):
        fmt.encode_manifest(manifest, other)


def test_a_table_of_wrong_arrays_is_refused() -> None:
    first, *rest = fmt.decode_manifest(GOOD[fmt.MANIFEST]).arrays
    with pytest.raises(FormatError, match="appears twice"):
        fmt.ArrayTable((first, first, *rest))
    with pytest.raises(FormatError, match="unknown dtype"):
        fmt.ArrayTable((msgspec.structs.replace(first, dtype="float3"), *rest))
    with pytest.raises(TreeError, match="lone surrogate"):
        fmt.ArrayTable((msgspec.structs.replace(first, name="\ud800"), *rest))


def test_meta_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(TreeError, match="nested deeper than 64"):
        fmt.check_meta(loop)


def test_names_with_lone_surrogates_are_refused() -> None:
    with pytest.raises(TreeError, match="lone surrogate"):
        make_step(fmt.SaveId("r", 1, "a"), {}, {"\udc00": 1}, {})


@FIXED
@given(scalars)
def test_scalars_round_trip_exactly(value: Any) -> None:
    kind, text = encode_scalar(value)
    back = decode_scalar(kind, text)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_scalars_of_any_size_and_sign() -> None:
    for value in (10**5000, -(10**5000), 2**63, -(2**63), -0.0, math.inf, 5e-324, 1e308):
        kind, text = encode_scalar(value)
        back = decode_scalar(kind, text)
        assert back == value
    assert repr(decode_scalar(*encode_scalar(-0.0))) == "-0.0"
    assert math.isnan(decode_scalar("float", "nan"))  # type: ignore[arg-type]


def test_other_scalars_are_refused() -> None:
    for value in ([], object(), "\ud800", "x" * (1 << 21), 1 << (1 << 23), np.float64(1)):
        with pytest.raises(TreeError, match="cannot store a"):
            encode_scalar(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("int", "0x10"), ("int", "+1"), ("int", "-0"), ("int", "1_0"), ("int", "9" * 5000),
     ("float", "1.5"), ("float", "0x1p0"), ("float", "0x1.0p+99999"), ("float", "NaN"),
     ("bool", "True"), ("none", "x"), ("complex", "1"), ("bytes", "0"), ("bytes", "00 00"),
     ("str", "\ud800"), ("list", ""), ("", ""), ("str", "x" * (1 << 21))],
)  # fmt: skip
def test_other_spellings_are_refused(kind: str, text: str) -> None:
    with pytest.raises(FormatError):
        decode_scalar(kind, text)


@FIXED
@given(st.lists(st.integers(0, 5), max_size=40))
def test_owners_round_trip(owners: list[int]) -> None:
    runs = fmt.encode_owners(owners)
    assert fmt.decode_owners(runs, len(owners)) == owners
    for part in range(6):
        entry = fmt.ArrayEntry(
            name="a", dtype="int8", shape=(len(owners),),
            cuts=(tuple(range(len(owners) + 1)),), owners=runs,
        )  # fmt: skip
        assert [start[0] for start, _ in owned_cells(entry, part)] == [
            cell for cell, owner in enumerate(owners) if owner == part
        ]


def test_owner_runs_are_short_for_regular_grids() -> None:
    assert fmt.encode_owners(list(range(512))) == ((0, 1, 512),)
    assert fmt.encode_owners([7] * 99) == ((7, 0, 99),)
    assert fmt.encode_owners(list(range(0, 16, 2)) * 2) == ((0, 2, 8), (0, 2, 8))
    assert fmt.encode_owners([]) == ()
    for runs, count in (([(0, 1, 3)], 2), ([(0, 0, 1 << 60)], 1 << 60), ([(1, -1, 3)], 3)):
        with pytest.raises(FormatError):
            fmt.decode_owners(runs, count)


def test_cells_are_row_major() -> None:
    cuts = ((0, 2, 4), (0, 3))
    assert list(fmt.cells(cuts)) == [((0, 0), (2, 3)), ((2, 0), (4, 3))]
    assert fmt.num_cells(cuts) == 2
    assert list(fmt.cells(())) == [((), ())]
    assert fmt.num_cells(()) == 1
    array = golden_arrays()["params/grid"]
    assert isinstance(array, Array)
    entry = next(e for e in fmt.decode_manifest(GOOD[fmt.MANIFEST]).arrays if e.name == "params/grid")
    both = sorted([*owned_cells(entry, 0), *owned_cells(entry, 1)])
    assert both == sorted(fmt.cells(entry.cuts))


def test_a_large_manifest_is_quick() -> None:
    arrays = tuple(
        fmt.ArrayEntry(
            name=f"layer{i}/w", dtype="bfloat16", shape=(512 * 8, 64),
            cuts=(tuple(range(0, 512 * 8 + 1, 8)), (0, 64)), owners=((0, 1, 512),),
        )
        for i in range(1000)
    )  # fmt: skip
    total = sum(entry.nbytes for entry in arrays)
    parts = tuple(
        fmt.PartEntry(part=p, index=fmt.index_name(p, "a"), size=9, digest="0" * 32, nbytes=total // 512)
        for p in range(512)
    )
    manifest = fmt.Manifest(
        save=fmt.SaveId("r", 1, "a"), created=0.0, nbytes=total, parts=parts, arrays=arrays
    )
    data = fmt.encode_manifest(manifest)
    begin = time.perf_counter()
    assert fmt.decode_manifest(data) == manifest
    assert time.perf_counter() - begin < 2  # measured 0.1 s
