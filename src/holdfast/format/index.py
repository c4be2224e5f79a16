"""The part index: which slice of which array lies where in the files of one part.

The manifest holds the digest of each part index; the index holds the digests of the blocks. So
every byte of a step hangs on the manifest's root.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import gt, sub
from typing import Annotated, Final

import msgspec

from holdfast.arrays.text import reason, show, text_problem
from holdfast.errors import CorruptError, FormatError, VersionError
from holdfast.format import checksum
from holdfast.format.checksum import DIGEST_CHARS
from holdfast.format.ids import SaveId, data_name, index_name
from holdfast.format.limits import MAX_DIMS, MAX_FILES, MAX_INDEX, MAX_INT, MAX_PARTS

VERSION: Final = 1
"""The format version that this code writes, and the newest that it reads."""

UPGRADE: Final = "upgrade holdfast to read it; the files are not harmed"

_HEX = re.compile(r"[0-9a-f]*")
_Int = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]


# A reader may hold a million of them and they cannot form a cycle: nothing for the collector to walk.
class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A block of an array, in C order, at an absolute byte offset of one of the part's files."""

    name: str
    start: tuple[_Int, ...]
    stop: tuple[_Int, ...]
    file: _Int
    offset: _Int
    nbytes: _Int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))


class PartFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data file: its exact size, and the digests of its blocks, 32 hex characters each."""

    name: str
    size: _Int
    blocks: str

    def block(self, number: int) -> bytes:
        """The expected digest of block `number`."""
        at = number * DIGEST_CHARS
        return bytes.fromhex(self.blocks[at : at + DIGEST_CHARS])


class PartIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one writer wrote in one save."""

    version: int
    save: SaveId
    part: _Int
    files: tuple[PartFile, ...]
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of array data in this part."""
        return sum(piece.nbytes for piece in self.slices)


class _Head(msgspec.Struct):
    version: int


def encode_index(index: PartIndex) -> bytes:
    """The bytes of a part index; FormatError if a reader would refuse them."""
    _check_index(index, "new part index")
    data = msgspec.json.encode(index) + b"\n"
    if len(data) > MAX_INDEX:
        raise FormatError(
            f"an index of {len(data)} bytes, {len(index.slices)} slices; the limit is {MAX_INDEX}",
            hint="write fewer arrays per part",
        )
    return data


def decode_index(
    data: bytes,
    *,
    digest: str | None = None,
    size: int | None = None,
    save: SaveId | None = None,
    part: int | None = None,
    max_bytes: int = MAX_INDEX,
    slices: bool = True,
) -> PartIndex:
    """The part index in `data`, valid in itself and equal to what the manifest says of it.

    Raises CorruptError where size or digest differ, VersionError for a newer format, and
    FormatError for everything else; never returns part of an index. Without `slices` they are left to
    `check_slice`: whoever reads a few arrays out of thousands of parts checks what it uses.
    """
    where = "part index"
    if save is not None and part is not None:
        where = index_name(part, save.attempt)
    if size is not None and len(data) != size:
        raise CorruptError(
            f"{where}: {len(data)} bytes, but the manifest says {size}",
            hint="the index is truncated or from another save",
            file=where,
        )
    if len(data) > max_bytes:
        raise FormatError(f"{where}: {len(data)} bytes; the limit is {max_bytes}")
    if digest is not None and (seen := checksum.digest(data)) != digest:
        raise CorruptError(
            f"{where}: digest {seen}, but the manifest says {digest}",
            hint="the index is damaged or from another save",
            file=where,
        )
    index = _decode(data, where)
    if save is not None and index.save != save:
        raise FormatError(f"{where}: belongs to save {index.save}, expected {save}")
    if part is not None and index.part != part:
        raise FormatError(f"{where}: is part {index.part}, expected part {part}")
    _check_index(index, where, slices=slices)
    return index


def check_slice(index: PartIndex, piece: Slice, stop: Sequence[int], itemsize: int) -> None:
    """FormatError unless a slice of the index ends at `stop`, has the right size and lies in its file.

    It was looked up by a name that is in the manifest, so that is one.
    """
    problem = _place_problem(piece, index.files)
    if problem is None and (piece.stop != tuple(stop) or piece.nbytes != math.prod(piece.shape) * itemsize):
        problem = f"of {piece.nbytes} bytes ends at {show(piece.stop)}, the manifest says {show(tuple(stop))}"
    if problem is not None:
        where = index_name(index.part, index.save.attempt)
        raise FormatError(f"{where}: slice of {show(piece.name)} {problem}")


def check_block(index: PartIndex, file: int, block: int, data: checksum.Buffer) -> None:
    """CorruptError, naming file, block and arrays, unless `data` is what the part holds there."""
    seed = checksum.block_seed(index.save, index.part, block, file)
    check_digest(index, file, block, checksum.block_digest(data, seed))


def check_digest(index: PartIndex, file: int, block: int, seen: bytes) -> None:
    """The same for a block whose digest is `seen`."""
    entry = index.files[file]
    expected = entry.block(block)
    if seen == expected:
        return
    begin, end = checksum.block_range(block, entry.size)
    names = arrays_in(index, file, begin, end)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise CorruptError(
        f"{entry.name}: block {block} (bytes {begin} to {end}) is damaged: digest {seen.hex()}, "
        f"expected {expected.hex()}; it holds {shown or 'no array data'}",
        hint="load another copy or an earlier step; the damage is confined to these arrays",
        file=entry.name,
        block=block,
        arrays=names,
    )


def arrays_in(index: PartIndex, file: int, begin: int, end: int) -> list[str]:
    """The names of the arrays with bytes in [begin, end) of a file, in file order, each once."""
    hits = sorted(
        (piece.offset, piece.name)
        for piece in index.slices
        if piece.file == file and piece.nbytes and piece.offset < end and piece.offset + piece.nbytes > begin
    )
    return list(dict.fromkeys(name for _, name in hits))


def check_version(version: int, where: str) -> None:
    """VersionError for a newer format version, FormatError for one that never was."""
    if version > VERSION:
        raise VersionError(
            f"{where}: format version {show(version)}, this Holdfast reads up to {VERSION}",
            hint=UPGRADE,
        )
    if version != VERSION:
        raise FormatError(f"{where}: there is no format version {show(version)}")


def _decode(data: bytes, where: str) -> PartIndex:
    try:
        return msgspec.json.decode(data, type=PartIndex)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            # A newer format is not a damaged one.
            check_version(msgspec.json.decode(data, type=_Head).version, where)
        raise FormatError(f"{where}: not a part index: {reason(error)}") from None


def _check_index(index: PartIndex, where: str, *, slices: bool = True) -> None:
    check_version(index.version, where)
    if index.part >= MAX_PARTS or len(index.files) > MAX_FILES:
        raise FormatError(f"{where}: part {index.part} with {len(index.files)} files is too large")
    for number, file in enumerate(index.files):
        _check_file(file, data_name(index.part, index.save.attempt, number), where)
    if not slices:
        return
    for piece in index.slices:
        if problem := _slice_problem(piece, index.files):
            raise FormatError(f"{where}: slice of {show(piece.name)} {problem}")
    _check_overlap(index.slices, where)


def _check_file(file: PartFile, name: str, where: str) -> None:
    if file.name != name:
        raise FormatError(f"{where}: lists the file {show(file.name)} where {name} belongs")
    blocks, odd = divmod(len(file.blocks), DIGEST_CHARS)
    if odd or blocks != checksum.num_blocks(file.size) or not _HEX.fullmatch(file.blocks):
        raise FormatError(
            f"{where}: {name} of {file.size} bytes needs {checksum.num_blocks(file.size)} digests "
            f"of {DIGEST_CHARS} hex digits, found {len(file.blocks)} characters"
        )


def _slice_problem(piece: Slice, files: tuple[PartFile, ...]) -> str | None:
    return text_problem(piece.name) or _place_problem(piece, files)


def _place_problem(piece: Slice, files: tuple[PartFile, ...]) -> str | None:
    if len(piece.start) != len(piece.stop) or len(piece.start) > MAX_DIMS:
        return f"has {len(piece.start)} starts and {len(piece.stop)} stops"
    if any(map(gt, piece.start, piece.stop)):
        return f"ends at {show(piece.stop)}, before its start {show(piece.start)}"
    if piece.file >= len(files):
        return f"lies in file {piece.file}; there are {len(files)}"
    size = files[piece.file].size
    if piece.offset + piece.nbytes > size:
        return f"ends at byte {piece.offset + piece.nbytes} of a file of {size} bytes"
    return None


def _check_overlap(slices: Iterable[Slice], where: str) -> None:
    ordered = sorted(slices, key=lambda s: (s.file, s.offset, s.offset + s.nbytes))
    for one, two in pairwise(ordered):
        if one.file == two.file and one.offset + one.nbytes > two.offset:
            raise FormatError(
                f"{where}: slices of {show(one.name)} and {show(two.name)} overlap at byte "
                f"{two.offset} of file {two.file}"
            )
    if len({(s.name, s.start, s.stop) for s in ordered}) != len(ordered):
        raise FormatError(f"{where}: the same slice of an array is listed twice")
