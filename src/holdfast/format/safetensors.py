"""The safetensors header: u64 length, JSON, spaces; then the data section.

What is written here is legal by the letter of the safetensors format, with the one liberty it
leaves: trailing spaces, as many as make the data section start on a 4 KiB boundary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from holdfast.arrays.text import reason, show
from holdfast.errors import FormatError, UsageError
from holdfast.format.limits import MAX_HEADER, MAX_INT
from holdfast.format.packing import ALIGN

BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits per element of every dtype that safetensors 0.8 knows."""

METADATA: Final = "__metadata__"
"""The one header key that is not a tensor."""

_Int = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_MAX_WORD: Final = 2**64 - 1


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a file; `begin` and `end` count from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Info(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Int, ...]
    data_offsets: tuple[_Int, _Int]


def encode_header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes that precede the data section, a multiple of 4 KiB long.

    Raises FormatError where the tensors are not a legal file: wrong extents, holes, equal names.
    """
    ordered = sorted(tensors, key=lambda t: (t.begin, t.end))
    _check_tensors(ordered, ordered[-1].end if ordered else 0, "new part", 0)
    table: dict[str, Any] = {METADATA: dict(metadata)}
    for t in ordered:
        if t.name in table:
            raise FormatError(f"two tensors are called {show(t.name)}")
        table[t.name] = _Info(t.dtype, t.shape, (t.begin, t.end))
    try:
        text = msgspec.json.encode(table)
    except UnicodeEncodeError as error:
        raise UsageError(f"a tensor name or header entry is not Unicode text: {error}") from None
    end = -(-(8 + len(text)) // ALIGN) * ALIGN
    if end - 8 > MAX_HEADER:
        raise FormatError(
            f"a header of {end - 8} bytes, {len(ordered)} tensors; the limit is {MAX_HEADER}",
            hint="write fewer arrays per part",
        )
    return (end - 8).to_bytes(8, "little") + text.ljust(end - 8)


def decode_header(
    read: Callable[[int, int], bytes],
    file_size: int,
    *,
    name: str = "part",
    max_header: int = MAX_HEADER,
) -> tuple[dict[str, str], list[Tensor], int]:
    """The metadata, tensors (in file order) and data start of a safetensors file.

    `read(offset, length)` returns that byte range. Whatever the bytes are, this returns a valid
    file's content or raises FormatError; nothing is read or allocated beyond `max_header`.
    """
    text = _header_text(read, file_size, name, max_header)
    table = _header_table(text, name)
    metadata = _convert(table.pop(METADATA, {}), dict[str, str], name, METADATA)
    tensors = []
    for key, raw in table.items():
        info = _convert(raw, _Info, name, key)
        tensors.append(Tensor(key, info.dtype, info.shape, *info.data_offsets))
    tensors.sort(key=lambda t: (t.begin, t.end))
    data_start = 8 + len(text)
    _check_tensors(tensors, file_size - data_start, name, data_start)
    return metadata, tensors, data_start


def _header_text(read: Callable[[int, int], bytes], file_size: int, name: str, max_header: int) -> bytes:
    if file_size < 8:
        raise FormatError(f"{name}: {file_size} bytes is too short for a safetensors file")
    length = int.from_bytes(_read(read, 0, 8, name), "little")
    most = min(max_header, file_size - 8)
    if length > most:
        raise FormatError(
            f"{name}: offset 0 says the header is {length} bytes; at most {most} are possible in a "
            f"file of {file_size} bytes with a limit of {max_header}",
            hint="the file is truncated, damaged or not a safetensors file",
        )
    text = _read(read, 8, length, name)
    if text[:1] != b"{":
        raise FormatError(f"{name}: the header at offset 8 begins with {text[:8]!r}, not with '{{'")
    return text


def _read(read: Callable[[int, int], bytes], offset: int, length: int, name: str) -> bytes:
    data = bytes(read(offset, length))
    if len(data) != length:
        raise FormatError(
            f"{name}: wanted {length} bytes at offset {offset}, got {len(data)}",
            hint="the file is shorter than its size said; was it truncated?",
        )
    return data


def _header_table(text: bytes, name: str) -> dict[str, Any]:
    """The header as a dict of dicts. The standard parser, because only it shows equal keys."""
    try:
        # A first, typed pass refuses wrong structure before a tree of Python objects is made of it.
        msgspec.json.decode(text, type=dict[str, dict[str, str | list[int]]])
        table = json.loads(text.decode(), object_pairs_hook=_unique)
    except FormatError as error:
        raise FormatError(f"{name}: header at offset 8: {error.message}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{name}: header at offset 8 is not valid JSON: {reason(error)}") from None
    assert isinstance(table, dict)
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"the key {show(twice)} appears twice")
    return table


def _convert(raw: Any, kind: Any, name: str, key: str) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"{name}: header entry {show(key)}: {reason(error)}") from None


def _check_tensors(tensors: Sequence[Tensor], data_size: int, name: str, start: int) -> None:
    """FormatError unless the tensors (sorted by place) fill `data_size` bytes exactly, in order."""
    at = 0
    for t in tensors:
        nbytes = _nbytes(t, name)
        if t.end - t.begin != nbytes:
            raise FormatError(
                f"{name}: tensor {show(t.name)} ({t.dtype}{list(t.shape)}) is {nbytes} bytes, "
                f"but its extent [{t.begin}, {t.end}) has {t.end - t.begin}"
            )
        if t.begin != at:
            what = "overlaps the one before it" if t.begin < at else "leaves a hole before it"
            raise FormatError(
                f"{name}: tensor {show(t.name)} at offset {start + t.begin} {what}: "
                f"expected it at {start + at}"
            )
        at = t.end
    if at != data_size:
        raise FormatError(
            f"{name}: the tensors end at offset {start + at}, the file at {start + data_size}",
            hint="the file is truncated or has extra bytes",
        )


def _nbytes(t: Tensor, name: str) -> int:
    bits = BITS.get(t.dtype)
    if bits is None:
        raise FormatError(f"{name}: tensor {show(t.name)} has the unknown dtype {show(t.dtype)}")
    # Multiplied stepwise and cut off: a long shape could otherwise make a number of any length. safetensors
    # does it in 64 bits, and refuses what overflows on the way, also to nothing.
    size = 1
    for factor in (*t.shape, bits):
        size *= factor
        if not 0 <= size <= _MAX_WORD or factor < 0:
            raise FormatError(f"{name}: tensor {show(t.name)} has an impossible shape")
    bits = size
    if bits % 8:
        raise FormatError(f"{name}: tensor {show(t.name)} does not fill whole bytes")
    return bits // 8
