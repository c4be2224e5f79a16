"""The file of an executable: what is refused before anything is loaded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import BundleError, UsageError
from holdfast.xla import Bundle
from holdfast.xla.bundle import FORMAT, Header, Leaf, Place, check_key, digest

KEY = b"0123456789abcdef"
PLACE = Place("0.10.2", "0.10.2", "cpu", "cpu", "feed", 2, 1, "2", ("--xla_a=1",))


def bundle(payload: bytes = b"executable" * 20) -> Bundle:
    leaf = Leaf("['w']", (2, 3), "float32", "P('x')")
    header = Header(FORMAT, "f", "ab" * 32, PLACE, (leaf,), (leaf, leaf), (0,), len(payload), digest(payload))
    return Bundle(header, payload)


def test_what_was_sealed_is_opened() -> None:
    sealed = bundle().sealed(KEY)
    opened = Bundle.opened(sealed, KEY)
    assert opened.header == bundle().header
    assert opened.payload == bundle().payload
    opened.check("ab" * 32, PLACE)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(bundle().sealed(KEY)) - 1), bit=st.integers(0, 7))
def test_any_bit_that_is_not_as_it_was(place: int, bit: int) -> None:
    data = bytearray(bundle().sealed(KEY))
    data[place] ^= 1 << bit
    with pytest.raises(BundleError, match="its seal is not right"):
        Bundle.opened(bytes(data), KEY)


@pytest.mark.parametrize("size", [0, 1, 16, 47, 48, 100, -1])
def test_what_is_cut_off(size: int) -> None:
    with pytest.raises(BundleError, match="the bundle is refused"):
        Bundle.opened(bundle().sealed(KEY)[:size], KEY)


def test_another_key() -> None:
    with pytest.raises(BundleError, match="sealed with another key"):
        Bundle.opened(bundle().sealed(KEY), KEY + b"!")
    with pytest.raises(UsageError, match="a key of 3 bytes"):
        check_key(b"abc")


def test_a_well_sealed_header_that_lies() -> None:
    true = bundle()
    for change in ({"payload_bytes": 3}, {"payload_digest": "00"}):
        lying = Bundle(msgspec.structs.replace(true.header, **change), true.payload)
        with pytest.raises(BundleError, match="not the one that its header describes"):
            Bundle.opened(lying.sealed(KEY), KEY)
    newer = Bundle(msgspec.structs.replace(true.header, format=2), true.payload)
    with pytest.raises(BundleError, match="it has format 2, and this is 1"):
        Bundle.opened(newer.sealed(KEY), KEY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("jax", "0.11.0"),
        ("jaxlib", "0.11.0"),
        ("platform", "cuda"),
        ("device_kind", "H200"),
        ("host", "beef"),
        ("num_devices", 4),
        ("num_processes", 2),
        ("nproc", "8"),
        ("flags", ()),
    ],
)
def test_made_for_another_place(field: str, value: object) -> None:
    here = msgspec.structs.replace(PLACE, **{field: value})
    with pytest.raises(BundleError) as caught:
        bundle().check("ab" * 32, here)
    assert f"made for {field} {getattr(PLACE, field)!r}, and here it is {value!r}" in str(caught.value)


def test_all_reasons_at_once() -> None:
    here = msgspec.structs.replace(PLACE, nproc="1", jax="1.0")
    with pytest.raises(BundleError, match=r"another program; .*jax '0.10.2'.*; .*nproc '2'"):
        bundle().check("cd" * 32, here)
