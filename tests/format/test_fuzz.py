"""Fuzzers of the three parsers: a valid value or FormatError; nothing else, and never for long.

Each case is a function of one seed; a failure names the seed, and `case(random.Random(seed))`
repeats it.
"""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from holdfast import format as fmt
from holdfast.arrays import decode_scalar
from holdfast.errors import FormatError
from holdfast.format.manifest import check_part
from tests.format.make_golden import SAVE, golden_step, reroot
from tests.format.whole import deserialize, verify

GOOD = golden_step()
MANIFEST = GOOD[fmt.MANIFEST]
INDEX_NAME = fmt.index_name(0, SAVE.attempt)
INDEX = GOOD[INDEX_NAME]
PART = GOOD[fmt.data_name(1, SAVE.attempt)]

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30,
    0.5, -0.0, 1e308, "", "0", "nan", "a/../b", "..", "\x00", "☃", "x" * 5000, [], [[]], [0],
    [0, 0], [0, 1], [-1], [2**62] * 70, {}, {"a": []}, "int", "float", "int4", "U8", "F4", "BF16",
    "key", [[0, 0, 2**60]], [[0, 1, 2]], [["x", [], [], 0, 0, 0]], "part-00000.a1.safetensors",
]  # fmt: skip

Case = Callable[[random.Random], None]


def garble(rng: random.Random, data: bytes) -> bytes:
    """`data` after one to four random flips, cuts, insertions, repeats and moves of bytes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 2, 8, 64, 4096)))
        match rng.randrange(6):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + rng.randbytes(rng.choice((1, 2, 8, 100))) + data[at:]
            case 3:
                data = data[:end] + data[at:end] + data[end:]
            case 4:
                data = data[:at] + data[end:]
            case _:
                data = data[:at] + rng.choice(b'{}[]",:0-9e.\\u \x00').to_bytes(1, "big") + data[end:]
    return data


def edit(rng: random.Random, tree: Any) -> Any:
    """A copy of a JSON value with one to three random edits of its structure."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        spots = list(places(tree))
        if not spots:
            return tree
        holder, key = rng.choice(spots)
        match rng.randrange(7):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
            case 2 if isinstance(holder, dict):
                holder[rng.choice(("a", "root", "version", "name", "\u2603"))] = copy.deepcopy(holder[key])
            case 3 if isinstance(holder[key], int):
                holder[key] += rng.choice((-1, 1, 2, -(2**32), 2**62))
            case 4:
                other, at = rng.choice(spots)
                holder[key] = copy.deepcopy(other[at])
            case _:
                holder[key] = copy.deepcopy(rng.choice(NASTY))
    return tree


def places(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def attempt(parse: Callable[[], Any]) -> Any:
    """What `parse` returned, or None after FormatError; any other exception is the failure."""
    begin = time.perf_counter()
    message, value = "", None
    try:
        value = parse()
    except FormatError as error:
        message = str(error)
    assert time.perf_counter() - begin < 5, "took too long"
    assert len(message) < 5000, "an error message must not carry the file"
    return value


def manifest_bytes(rng: random.Random) -> None:
    data = garble(rng, MANIFEST)
    assert (attempt(lambda: fmt.decode_manifest(data)) is None) == (data != MANIFEST)


def manifest_body(rng: random.Random) -> None:
    """Random bytes under a right root: as bad as it gets, since the root hides nothing."""
    data = reroot(garble(rng, MANIFEST[43:]))
    check_manifest(attempt(lambda: fmt.decode_manifest(data)))


def manifest_structure(rng: random.Random) -> None:
    tree = json.loads(b"{" + MANIFEST[43:])
    data = reroot(json.dumps(edit(rng, tree)).encode()[1:])
    check_manifest(attempt(lambda: fmt.decode_manifest(data)))


def check_manifest(manifest: fmt.Manifest | None) -> None:
    if manifest is None:
        return
    again = fmt.decode_manifest(fmt.encode_manifest(manifest))
    assert repr(again) == repr(manifest)
    for entry in manifest.arrays:
        owners = fmt.decode_owners(entry.owners, fmt.num_cells(entry.cuts))
        assert set(owners) <= {part.part for part in manifest.parts}
    attempt(lambda: check_part(manifest, fmt.decode_index(INDEX)))


def index_bytes(rng: random.Random) -> None:
    data = garble(rng, INDEX)
    bound = attempt(lambda: fmt.decode_index(data, digest=fmt.digest(INDEX), size=len(INDEX)))
    assert (bound is None) == (data != INDEX)
    check_index(attempt(lambda: fmt.decode_index(data)))


def index_structure(rng: random.Random) -> None:
    data = json.dumps(edit(rng, json.loads(INDEX))).encode()
    check_index(attempt(lambda: fmt.decode_index(data)))


def check_index(index: fmt.PartIndex | None) -> None:
    if index is None:
        return
    assert fmt.decode_index(fmt.encode_index(index)) == index
    for piece in index.slices:
        assert piece.offset + piece.nbytes <= index.files[piece.file].size
        assert fmt.parse_file_name(index.files[piece.file].name)
    manifest = fmt.decode_manifest(MANIFEST)
    if index.save == manifest.save and index.part in (0, 1):
        attempt(lambda: check_part(manifest, index))


def header_bytes(rng: random.Random) -> None:
    # Most of the header is padding: half of the cases aim at the text before it.
    cut = PART.index(b"}}") + 2 if rng.randrange(2) else len(PART)
    check_header(garble(rng, PART[:cut]) + PART[cut:])


def header_structure(rng: random.Random) -> None:
    length = int.from_bytes(PART[:8], "little")
    text = json.dumps(edit(rng, json.loads(PART[8 : 8 + length]))).encode()
    text = text.ljust(rng.choice((length, len(text))))
    check_header(len(text).to_bytes(8, "little") + text + PART[8 + length :])


def check_header(data: bytes) -> None:
    def read(at: int, length: int) -> bytes:
        assert 0 <= at <= at + length <= len(data), "read outside the file"
        return data[at : at + length]

    found = attempt(lambda: fmt.decode_header(read, len(data), name="x"))
    if found is None:
        return
    _, tensors, start = found
    assert sum(t.end - t.begin for t in tensors) == len(data) - start
    theirs = deserialize(data)  # what we accept, the real library accepts, and reads the same
    for t in tensors:
        assert bytes(theirs[t.name]["data"]) == data[start + t.begin : start + t.end]
        assert (theirs[t.name]["dtype"], tuple(theirs[t.name]["shape"])) == (t.dtype, t.shape)


def any_file(rng: random.Random) -> None:
    """Any change of any file of a step is caught."""
    name = rng.choice(sorted(GOOD))
    data = garble(rng, GOOD[name])
    files = GOOD | {name: data}
    assert (attempt(lambda: verify(files.__getitem__)) is None) == (data != GOOD[name])


CASES: list[Case] = [
    manifest_bytes,
    manifest_body,
    manifest_structure,
    index_bytes,
    index_structure,
    header_bytes,
    header_structure,
    any_file,
]


def campaign(case: Case, seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            case(random.Random(seed))
        except BaseException as error:
            raise AssertionError(f"{case.__name__} failed with seed {seed}: {error!r}") from error


@pytest.mark.parametrize("case", CASES)
def test_parsers_return_a_valid_value_or_format_error(case: Case) -> None:
    campaign(case, range(600))


def test_seeds_that_failed_once() -> None:
    """A shape that is empty, but whose dims before the 0 overflow 64 bits: safetensors refuses it."""
    campaign(header_structure, [155450111787])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_parsers_survive_a_long_campaign(case: Case) -> None:
    begin = random.SystemRandom().randrange(2**40)
    campaign(case, range(begin, begin + 60_000))


def test_every_single_bit_of_a_step_is_guarded() -> None:
    """All bits of index and manifest, and a sample of those of the parts."""
    rng = random.Random(0)
    for name, data in GOOD.items():
        bits = range(8 * len(data))
        for bit in bits if name.endswith(".json") and len(data) < 500 else rng.sample(bits, 300):
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            files = GOOD | {name: bytes(bad)}
            with pytest.raises(FormatError, match=name):
                verify(files.__getitem__)


def bombs() -> dict[str, Callable[[], object]]:
    """Small files that ask for much."""
    top = json.loads(b"{" + MANIFEST[43:])

    def manifest(**array: Any) -> Callable[[], object]:
        arrays = [top["arrays"][0] | {"axes": None} | array]
        data = reroot(json.dumps(top | {"arrays": arrays}).encode()[1:])
        return lambda: fmt.decode_manifest(data)

    points = list(range(2000))
    deep = reroot(b'"format":"holdfast","version":1,"meta":' + b'{"a":' * 10**6 + b"1" + b"}" * 10**6)
    index = json.loads(INDEX)
    index["files"][0]["size"] = 2**62
    big = json.dumps(index).encode()
    header = b'{"a":{"dtype":"U8","shape":[%b],"data_offsets":[0,0]}}' % b",".join([b"9" * 18] * 10**5)
    file = len(header).to_bytes(8, "little") + header
    long_key = json.dumps(top | {"k" * 10**6: 1}).encode()[1:]
    return {
        "long key": lambda: fmt.decode_manifest(reroot(long_key)),
        "owner count": manifest(owners=[[0, 0, 2**62]]),
        "grid": manifest(shape=[1999] * 3, cuts=[points] * 3, owners=[[0, 0, 1999**3]]),
        "shape": manifest(shape=[2**62] * 60),
        "deep meta": lambda: fmt.decode_manifest(deep),
        "file size": lambda: fmt.decode_index(big),
        "header length": lambda: fmt.decode_header(lambda _, n: b"\xff" * n, 1 << 60),
        "shape product": lambda: fmt.decode_header(lambda at, n: file[at : at + n], len(file)),
        "scalar": lambda: decode_scalar("int", "9" * 10**6),
    }


@pytest.mark.parametrize("name", sorted(bombs()))
def test_small_files_cannot_take_much_time_or_memory(name: str) -> None:
    bomb = bombs()[name]
    tracemalloc.start()
    begin = time.perf_counter()
    try:
        with pytest.raises(FormatError) as caught:
            bomb()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 5
    assert peak < 64 << 20
    assert len(str(caught.value)) < 5000
