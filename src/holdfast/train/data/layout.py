"""The published layout of an `.idx` file, as Megatron-LM writes it, and every check on one.

    9 bytes  "MMIDIDX\\0\\0"            8  version, 1             1  dtype code
    8  sequences n                    8  document bounds m
    int32[n] lengths in tokens        int64[n] first bytes in the .bin      int64[m] document bounds, 0..n
    int8[n] modes, only in multimodal sets; all little-endian, nothing aligned

Sequences follow each other in the `.bin` without gaps, as every writer of it leaves them, so each number here
says what another must be: a changed one is found.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.errors import DataError

MAGIC: Final = b"MMIDIDX\0\0"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
CODES: Final[dict[int, str]] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS: Final = {6: "float64", 7: "float32"}
_VERSION_AT, _CODE_AT, _NUM_AT, _BOUNDS_AT = 9, 17, 18, 26
_PIECE: Final = 1 << 20
_DAMAGED: Final = "the file is damaged or was not written completely; make it again"

Offsets = npt.NDArray[np.int64]


class Index(NamedTuple):
    """What a valid index says."""

    dtype: np.dtype[Any]
    num_sequences: int
    documents: Offsets
    """The first token of each document, and the end of the last."""

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.documents[-1])


def code_of(dtype: np.dtype[Any]) -> int:
    """The code of a dtype in the header."""
    return next(code for code, name in CODES.items() if name == dtype.name)


def encode_index(dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> bytes:
    """The bytes of an index of documents of one sequence each, `lengths` long."""
    num = len(lengths)
    pointers = np.zeros(num, "<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    parts = (
        HEADER.pack(MAGIC, VERSION, code_of(dtype), num, num + 1),
        lengths.astype("<i4").tobytes(),
        (pointers * dtype.itemsize).astype("<i8").tobytes(),
        np.arange(num + 1, dtype="<i8").tobytes(),
    )
    return b"".join(parts)


def read_index(path: str, tokens_path: str) -> Index:
    """The index at `path`, every field of it checked against the others and the size of its token file.

    Fails: DataError with file and offset, before anything the index says is believed.
    """
    data = _mapped(path)
    dtype, num, bounds = _header(path, data)
    lengths_at = HEADER.size
    pointers_at = lengths_at + 4 * num
    bounds_at = pointers_at + 8 * num
    end = bounds_at + 8 * bounds
    _check_size(path, data, num, bounds, end)
    lengths = np.frombuffer(data, "<i4", num, lengths_at)
    pointers = np.frombuffer(data, "<i8", num, pointers_at)
    nbytes = _check_sequences(path, lengths, pointers, dtype.itemsize)
    documents = np.frombuffer(data, "<i8", bounds, bounds_at)
    _check_documents(path, documents, num, bounds_at)
    _check_tokens_size(path, tokens_path, nbytes, dtype, num)
    starts = np.append(pointers // dtype.itemsize, nbytes // dtype.itemsize)[documents]
    return Index(dtype, num, starts.astype(np.int64, copy=False))


def _mapped(path: str) -> npt.NDArray[np.uint8]:
    try:
        size = os.path.getsize(path)
        if size < HEADER.size:
            _refuse(path, size, f"ends after {size} bytes, within the header of {HEADER.size}")
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise missing(path, error) from error


def missing(path: str, error: OSError) -> DataError:
    """The error for a token file that cannot be opened."""
    reason = error.strerror or str(error)
    hint = "check the path; `holdfast data build` makes token files"
    return DataError(f"cannot read {path}: {reason}", file=path, hint=hint)


def _refuse(path: str, offset: int, what: str, hint: str = _DAMAGED) -> NoReturn:
    raise DataError(f"{path}, byte {offset:,}: {what}", file=path, offset=offset, hint=hint)


def _header(path: str, data: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    magic, version, code, num, bounds = HEADER.unpack(data[: HEADER.size].tobytes())
    if magic != MAGIC:
        _refuse(path, 0, f"begins with {magic!r}, not {MAGIC!r}", "is it an .idx file of an indexed dataset?")
    if version != VERSION:
        _refuse(path, _VERSION_AT, f"has version {version}; {VERSION} is what can be read")
    if code in _FLOATS:
        _refuse(
            path, _CODE_AT, f"has {_FLOATS[code]} elements, which are no tokens", "give a set of token ids"
        )
    if code not in CODES:
        _refuse(path, _CODE_AT, f"has dtype code {code}; {sorted(CODES)} are known")
    if bounds < 1:
        _refuse(path, _BOUNDS_AT, "has no document bounds; even an empty set has one")
    return np.dtype(CODES[code]).newbyteorder("<"), num, bounds


def _check_size(path: str, data: npt.NDArray[np.uint8], num: int, bounds: int, end: int) -> None:
    size = len(data)
    # Python's integers: a header that claims 2**63 sequences overflows nothing and allocates nothing.
    if size not in (end, end + num):
        wrong = "ends early" if size < end else "has bytes behind its end"
        message = (
            f"{wrong}: {num:,} sequences and {bounds:,} document bounds take {end:,} bytes, it has {size:,}"
        )
        _refuse(path, min(size, end), message)
    if size != end:
        modes = data[end:]
        if modes.any():
            at = int(modes.argmax())
            _refuse(
                path, end + at, f"sequence {at:,} has mode {modes[at]}: not text", "give a set of text alone"
            )


def _check_sequences(path: str, lengths: npt.NDArray[Any], pointers: npt.NDArray[Any], itemsize: int) -> int:
    """Check that sequences are not negative and follow each other; the bytes of all of them."""
    num, at_byte = len(lengths), 0
    for first in range(0, num, _PIECE):
        some = lengths[first : first + _PIECE].astype(np.int64)
        if (some < 0).any():
            at = first + int((some < 0).argmax())
            _refuse(path, HEADER.size + 4 * at, f"sequence {at:,} has {lengths[at]:,} tokens")
        ends = at_byte + np.cumsum(some) * itemsize
        begins = np.append(at_byte, ends[:-1])
        wrong = pointers[first : first + _PIECE] != begins
        if wrong.any():
            at = first + int(wrong.argmax())
            message = f"sequence {at:,} begins at byte {pointers[at]:,} of the .bin; those before it end at "
            _refuse(path, HEADER.size + 4 * num + 8 * at, f"{message}{begins[at - first]:,}")
        at_byte = int(ends[-1])
    return at_byte


def _check_documents(path: str, documents: npt.NDArray[Any], num: int, begins: int) -> None:
    if documents[0] != 0:
        _refuse(path, begins, f"the first document begins at sequence {documents[0]:,}, not 0")
    if documents[-1] != num:
        at = begins + 8 * (len(documents) - 1)
        _refuse(path, at, f"the last document ends at sequence {documents[-1]:,} of {num:,}")
    falling = documents[1:] < documents[:-1]
    if falling.any():
        at = int(falling.argmax()) + 1
        message = f"document {at:,} begins at sequence {documents[at]:,}, before the one before it"
        _refuse(path, begins + 8 * at, message)


def _check_tokens_size(path: str, tokens_path: str, nbytes: int, dtype: np.dtype[Any], num: int) -> None:
    try:
        size = os.path.getsize(tokens_path)
    except OSError as error:
        raise missing(tokens_path, error) from error
    if size != nbytes:
        wrong = "ends early" if size < nbytes else "has bytes behind its end"
        message = (
            f"{wrong}: the {num:,} sequences of {path} ({dtype.name}) take {nbytes:,} bytes, it has {size:,}"
        )
        _refuse(
            tokens_path, min(size, nbytes), message, "the two files do not belong together, or one is damaged"
        )
