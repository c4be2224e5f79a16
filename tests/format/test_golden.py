"""Version 1 as it lies on users' disks: the bytes may never change, the damage must be seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast import format as fmt
from holdfast.arrays import decode_scalar
from holdfast.errors import FormatError
from tests.format.make_golden import (
    GOLDEN,
    META,
    SAVE,
    STEP,
    damaged_steps,
    golden_arrays,
    golden_files,
    golden_scalars,
)
from tests.format.whole import deserialize, verify

EXPECTED = json.loads((GOLDEN / "damaged/expected.json").read_text())


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_script_makes_the_same_bytes() -> None:
    on_disk = {
        str(path.relative_to(GOLDEN)): path.read_bytes()
        for path in sorted(GOLDEN.rglob("*"))
        if path.is_file()
    }
    made = golden_files()
    assert sorted(on_disk) == sorted(made)
    for name, data in made.items():
        assert on_disk[name] == data, name


def test_the_golden_step_holds_these_values() -> None:
    files = read_folder(GOLDEN / STEP)
    arrays = verify(files.__getitem__)
    wanted = golden_arrays()
    assert list(arrays) == list(wanted)
    for name, array in arrays.items():
        assert array.dtype == wanted[name].value.dtype
        assert array.shape == wanted[name].value.shape
        assert array.tobytes() == wanted[name].value.tobytes(), name


def test_the_golden_manifest_says_this() -> None:
    manifest = fmt.decode_manifest((GOLDEN / STEP / fmt.MANIFEST).read_bytes())
    assert manifest.save == SAVE
    assert manifest.meta == META
    scalars = {s.name: decode_scalar(s.type, s.value) for s in manifest.scalars}
    assert repr(scalars) == repr(golden_scalars())  # repr: tells -0.0 from 0.0, and nan is nan
    by_name = {entry.name: entry for entry in manifest.arrays}
    assert (by_name["rng"].kind, by_name["rng"].impl) == ("key", "threefry2x32")
    assert by_name["params/w"].axes == ("embed", "mlp")
    assert by_name["params/q"].dtype == "int4"


def test_any_safetensors_reader_opens_the_golden_parts() -> None:
    files = read_folder(GOLDEN / STEP)
    wanted = golden_arrays()
    zero = deserialize(files[fmt.data_name(0, SAVE.attempt)])
    one = deserialize(files[fmt.data_name(1, SAVE.attempt)])
    upper, lower = zero["params/w~[0:4,0:6]"], one["params/w~[4:8,0:6]"]
    assert (upper["dtype"], upper["shape"]) == ("F32", [4, 6])
    assert bytes(upper["data"] + lower["data"]) == wanted["params/w"].value.tobytes()
    # What safetensors has no word for is bytes.
    assert (one["params/wide"]["dtype"], one["params/wide"]["shape"]) == ("U8", [2, 16])
    assert bytes(one["params/wide"]["data"]) == wanted["params/wide"].value.tobytes()
    assert (zero["params/b"]["dtype"], zero["params/b"]["shape"]) == ("BF16", [7])
    assert len(zero) + len(one) == len(wanted) + 4  # w is in two slices, grid in four


@pytest.mark.parametrize("case", sorted(EXPECTED))
def test_damage_is_caught_and_named(case: str) -> None:
    expected = EXPECTED[case]
    files = read_folder(GOLDEN / STEP)
    if (GOLDEN / "damaged" / case).exists():
        files |= read_folder(GOLDEN / "damaged" / case)
    for name in expected["missing"]:
        del files[name]
    with pytest.raises(FormatError) as caught:
        verify(files.__getitem__)
    assert type(caught.value).__name__ == expected["error"]
    assert expected["text"] in str(caught.value)


def test_every_damage_has_its_golden_case() -> None:
    assert sorted(damaged_steps()) == sorted(EXPECTED)


def test_a_damaged_block_names_its_arrays() -> None:
    files = read_folder(GOLDEN / STEP)
    index = fmt.decode_index(files[fmt.index_name(1, SAVE.attempt)])
    data = files[index.files[0].name]
    fmt.check_block(index, 0, 0, data)
    with pytest.raises(FormatError, match="it holds params/page, params/w, ") as caught:
        fmt.check_block(index, 0, 0, data[:-1] + b"\x7f")
    assert getattr(caught.value, "block", None) == 0
    assert "params/q" in getattr(caught.value, "arrays", ())
