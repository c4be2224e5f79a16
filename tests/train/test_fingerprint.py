"""Fingerprints: equal wherever an array lies, different for every damage; and which replica is wrong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from holdfast.train.divergence import Report, reports_of, verdict
from holdfast.train.fingerprint import differences, fingerprints

RNG = np.random.default_rng(3)
TREE: dict[str, Any] = {
    "w": RNG.standard_normal((16, 24)).astype(np.float32),
    "half": jnp.asarray(RNG.standard_normal((8, 8)), jnp.bfloat16),
    "norm": np.ones(32, np.float32),
    "count": np.int32(7),
    "samples": np.asarray(1 << 40, np.int64),
    "ledger": np.asarray([1, 1 << 63], np.uint64),
    "key": jax.random.key(5),
    "flags": np.asarray([True, False]),
    "complex": np.asarray([1 + 2j], np.complex64),
    "empty": np.zeros((0, 3), np.float32),
}


def reference(array: Any) -> str:
    """The same in plain numpy, from the module's words."""
    value = np.asarray(
        jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    )
    size = 4 if value.dtype.itemsize > 4 else value.dtype.itemsize
    words = np.ascontiguousarray(value).reshape(-1).view(f"u{size}").astype(np.uint64)
    place = np.arange(words.size, dtype=np.uint64)
    found = ""
    for seed, stride in zip(
        (0x9E3779B9, 0x7F4A7C15, 0xC2B2AE3D, 0x27D4EB4F),
        (0x85EBCA6B, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09),
        strict=True,
    ):
        low = np.uint64(0xFFFFFFFF)
        x = ((words + np.uint64(seed)) & low) ^ (place * np.uint64(stride) & low)
        x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & low
        x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & low
        x = x ^ (x >> np.uint64(16))
        found += f"{int(x.sum() & low):08x}"
    return found


def test_it_is_the_stated_sum() -> None:
    assert fingerprints(TREE) == {name: reference(leaf) for name, leaf in TREE.items()}


def test_devices_and_host_agree_on_every_array() -> None:
    tree = {f"array {at}": np.arange(3, dtype=np.float32) + at for at in range(12)}
    assert fingerprints({name: jnp.asarray(one) for name, one in tree.items()}) == fingerprints(tree)


def test_it_is_equal_on_every_mesh() -> None:
    expected = fingerprints({"w": TREE["w"], "half": TREE["half"]})
    for shape, spec in [
        ((8, 1), ("a",)),
        ((4, 2), (None, "b")),
        ((2, 4), (("a", "b"),)),
        ((2, 4), ("b", "a")),
    ]:
        mesh = jax.make_mesh(shape, ("a", "b"))
        sharding = NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]
        placed = jax.device_put({"w": TREE["w"], "half": TREE["half"]}, sharding)
        assert fingerprints(placed) == expected, (shape, spec)


@pytest.mark.parametrize("name", ["w", "half", "norm", "samples", "ledger"])
def test_every_damage_shows_and_is_named(name: str) -> None:
    good = fingerprints(TREE)
    for damage in ("bit", "swap", "zero"):
        value = np.array(TREE[name])
        flat = value.reshape(-1)
        if damage == "bit":
            flat.view(np.uint8)[1] ^= 4
        elif damage == "swap" and flat.size > 1 and flat[0] != flat[1]:
            flat[[0, 1]] = flat[[1, 0]]
        elif damage == "zero":
            flat[0] = 0
        else:
            continue
        bad = fingerprints({**TREE, name: value})
        assert differences(good, bad) == [name], damage


def test_arrays_that_one_side_lacks_differ() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ["a", "c"]


GOOD = {"w": "00", "b": "11"}
BAD = {"w": "00", "b": "ff"}


def test_a_majority_names_the_replica_and_its_arrays() -> None:
    found = verdict({0: GOOD, 1: BAD, 2: GOOD})
    assert found is not None
    assert found.corrupt == {1: ["b"]}
    assert str(found) == "slot 1 differs in b"
    assert verdict({0: GOOD, 1: GOOD}) is None
    assert verdict({}) is None


def test_two_that_differ_are_both_named() -> None:
    found = verdict({0: GOOD, 1: BAD})
    assert found is not None
    assert not found.corrupt
    assert found.arrays == ["b"]
    assert str(found) == "slots 0 and slots 1 differ in b, and no majority says which is right"
    half = verdict({0: GOOD, 1: BAD, 2: GOOD, 3: BAD})
    assert half is not None
    assert not half.corrupt


def test_a_report_keeps_the_two_latest_checks() -> None:
    report = Report({})
    for step in (10, 20, 30):
        report = report.with_step(step, GOOD)
    words = {0: report.encoded(), 1: Report({20: BAD}).encoded(), 2: Report({}).encoded()}
    assert reports_of(words, 20) == {0: GOOD, 1: BAD}
    assert reports_of(words, 10) == {}
