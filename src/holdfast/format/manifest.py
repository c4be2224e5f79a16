"""The manifest: what a step holds. Creating it is the commit.

The file begins with `{"root":"<32 hex>",` and the root is the digest of every byte after that
prefix. No canonical form is needed, and an edit anywhere is seen before anything is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, final

import msgspec

from holdfast.arrays.dtypes import dtype
from holdfast.arrays.scalars import MAX_SCALAR, decode_scalar
from holdfast.arrays.text import reason, show, text_problem
from holdfast.errors import CorruptError, FormatError, TreeError, UsageError
from holdfast.format import checksum
from holdfast.format.ids import MANIFEST, SaveId, index_name
from holdfast.format.index import VERSION, PartIndex, check_version, decode_index
from holdfast.format.limits import (
    MAX_DIMS,
    MAX_INDEX,
    MAX_INT,
    MAX_MANIFEST,
    MAX_PARTS,
)
from holdfast.format.meta import check_meta
from holdfast.format.owners import (
    Cell,
    Cuts,
    Run,
    cell,
    check_owners,
    cuts_problem,
    num_cells,
    owned,
)

FORMAT: Final = "holdfast"
PREFIX: Final = 43
"""Bytes before those under the root: `{"root":"`, 32 hex digits, `",`."""

HEAD: Final = 512
"""The first bytes of a manifest hold its save id, as long as that may be."""

_OPEN: Final = b'{"root":"'
_NEW: Final = "new manifest"
_Int = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class ScalarEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Python scalar of the saved tree: `type` says how to read `value`."""

    name: str
    type: str
    value: str


class ArrayEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One array: what it is, how it was cut, and which part wrote each cell.

    A typed PRNG key has kind "key" and the name of its implementation; dtype and shape are then
    those of its key data. `axes` are the logical names of the dimensions, where known.
    """

    name: str
    dtype: str
    shape: tuple[_Int, ...]
    kind: Literal["array", "key"] = "array"
    impl: str | None = None
    axes: tuple[str | None, ...] | None = None
    cuts: Cuts
    owners: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * dtype(self.dtype).itemsize


class PartEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One writer's part: its index file with exact size and digest, and its array bytes."""

    part: _Int
    index: str
    size: _Int
    digest: _Digest
    nbytes: _Int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a step but its bytes. `created` is in seconds since 1970."""

    format: str = FORMAT
    version: int = VERSION
    save: SaveId
    created: float
    nbytes: _Int
    writer: dict[str, str] = {}
    meta: dict[str, Any] = {}
    parts: tuple[PartEntry, ...]
    scalars: tuple[ScalarEntry, ...] = ()
    arrays: tuple[ArrayEntry, ...]


class _Head(msgspec.Struct):
    format: str
    version: int


class _RawArray(ArrayEntry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An array whose grid is still text: that of ten thousand cells takes megabytes once it is decoded."""

    cuts: msgspec.Raw  # type: ignore[assignment]
    owners: msgspec.Raw  # type: ignore[assignment]


class _RawManifest(Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    arrays: tuple[_RawArray, ...]


_COMMON: Final = tuple(field for field in Manifest.__struct_fields__ if field != "arrays")
_CUTS: Final = msgspec.json.Decoder(Cuts)
_OWNERS: Final = msgspec.json.Decoder(tuple[Run, ...])


@final
class ArrayTable:
    """The arrays of a step, checked and encoded: all saves of a tree have it in common, so it is made once.

    `text` is their JSON, and `digest` that of it. Fails: TreeError for names that cannot be stored,
    FormatError for what no reader would accept.
    """

    def __init__(self, entries: tuple[ArrayEntry, ...]) -> None:
        _check_names(entries)
        found = _check_arrays(entries, _NEW)
        alike = {grid: name for name, grid in found.grids.items()}
        self.found = found._replace(grids={name: grid for grid, name in alike.items()})
        self.entries = entries
        self.text = msgspec.json.encode(entries)
        self.digest = checksum.digest(self.text)


class _Composed(Manifest, frozen=True, kw_only=True):
    """A manifest whose arrays are text already."""

    arrays: msgspec.Raw  # type: ignore[assignment]


def encode_manifest(manifest: Manifest, table: ArrayTable | None = None) -> bytes:
    """The bytes of manifest.json; `table` is that of its arrays, where it is known.

    Raises TreeError for metadata or names that cannot be stored, FormatError for a manifest that
    no reader would accept.
    """
    table = ArrayTable(manifest.arrays) if table is None else table
    if table.entries is not manifest.arrays:
        raise FormatError(
            f"{_NEW}: the table of arrays that was given is not that of its arrays",
            hint="this is a defect in Holdfast: give the table that was made of the manifest's own arrays",
        )
    known = {field: getattr(manifest, field) for field in _COMMON}
    composed = _Composed(**known | {"meta": check_meta(manifest.meta)}, arrays=msgspec.Raw(table.text))
    _check_names(manifest.scalars)
    _check_head_of(composed, _NEW)
    _check_rest(composed, table.found, _NEW)
    body = msgspec.json.encode(composed)[1:] + b"\n"
    if PREFIX + len(body) > MAX_MANIFEST:
        raise FormatError(f"a manifest of {len(body)} bytes; the limit is {MAX_MANIFEST}")
    return _OPEN + checksum.digest(body).encode() + b'",' + body


def _check_names(entries: Iterable[ArrayEntry | ScalarEntry]) -> None:
    for entry in entries:
        if problem := text_problem(entry.name):
            raise TreeError(f"the name {show(entry.name)} {problem}")


def decode_manifest(data: bytes, *, max_bytes: int = MAX_MANIFEST) -> Manifest:
    """The manifest in `data`, checked in this order: size, root, version, structure.

    Raises CorruptError where the root does not match, VersionError for a newer format, FormatError
    for everything else.
    """
    if len(data) > max_bytes:
        raise FormatError(f"{MANIFEST}: {len(data)} bytes; the limit is {max_bytes}")
    body = _rooted(bytes(data))
    try:
        manifest = _decoded(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _check_head(body)  # a newer format is not a damaged one
        raise FormatError(f"{MANIFEST}: not a manifest: {reason(error)}") from None
    _check_head_of(manifest, MANIFEST)
    _check_rest(manifest, _check_arrays(manifest.arrays, MANIFEST), MANIFEST)
    return manifest


def _decoded(body: bytes) -> Manifest:
    """The manifest in JSON. Arrays that are cut alike share their cuts, those written alike their owners."""
    raw = msgspec.json.decode(body, type=_RawManifest)
    cuts: dict[bytes, Cuts] = {}
    owners: dict[bytes, tuple[Run, ...]] = {}
    arrays: list[ArrayEntry] = []
    for entry in raw.arrays:
        grid, written = bytes(entry.cuts), bytes(entry.owners)
        if grid not in cuts:
            cuts[grid] = _CUTS.decode(grid)
        if written not in owners:
            owners[written] = _OWNERS.decode(written)
        arrays.append(
            ArrayEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                kind=entry.kind,
                impl=entry.impl,
                axes=entry.axes,
                cuts=cuts[grid],
                owners=owners[written],
            )
        )
    return Manifest(**{field: getattr(raw, field) for field in _COMMON}, arrays=tuple(arrays))


def _check_head(body: bytes) -> None:
    """VersionError for a newer format, FormatError for another one; both are readable in every version."""
    try:
        head = msgspec.json.decode(body, type=_Head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    if head.format != FORMAT:
        raise FormatError(f"{MANIFEST}: format {show(head.format)}, expected {FORMAT!r}")
    check_version(head.version, MANIFEST)


def part_index(manifest: Manifest, part: int, data: bytes) -> PartIndex:
    """The index of a part, decoded, and checked against everything the manifest says of it."""
    entry = next((entry for entry in manifest.parts if entry.part == part), None)
    if entry is None:
        raise FormatError(f"{MANIFEST}: there is no part {part}")
    index = decode_index(data, digest=entry.digest, size=entry.size, save=manifest.save, part=part)
    check_part(manifest, index)
    return index


def saved_by(head: bytes) -> SaveId | None:
    """The save that a manifest is of, from its first `HEAD` bytes; None if they are not those of one.

    Nothing is verified: for those who know that the save was decided, and only ask whether it is there.
    """
    _, found, rest = head.partition(b',"save":')
    end = rest.find(b"}") + 1
    if not found or not head.startswith(_OPEN) or not end:
        return None
    try:
        return msgspec.json.decode(rest[:end], type=SaveId)
    except (msgspec.MsgspecError, UsageError):
        return None


def some_index(manifest: Manifest, entry: PartEntry, data: bytes) -> PartIndex:
    """The index of a part for whoever reads some of its slices, and checks those (`check_slice`)."""
    return decode_index(
        data, digest=entry.digest, size=entry.size, save=manifest.save, part=entry.part, slices=False
    )


def check_part(manifest: Manifest, index: PartIndex) -> None:
    """FormatError unless the slices of `index` are exactly the cells its part owns."""
    where = index_name(index.part, index.save.attempt)
    slices = {(piece.name, piece.start, piece.stop): piece for piece in index.slices}
    expected = 0
    for entry in manifest.arrays:
        itemsize = dtype(entry.dtype).itemsize
        for start, stop in owned_cells(entry, index.part):
            expected += 1
            piece = slices.get((entry.name, start, stop))
            if piece is None:
                raise FormatError(
                    f"{where}: lacks slice {start} to {stop} of {show(entry.name)}, "
                    f"which the manifest says is in part {index.part}"
                )
            if piece.nbytes != math.prod(piece.shape) * itemsize:
                raise FormatError(
                    f"{where}: slice {start} to {stop} of {show(entry.name)} is {piece.nbytes} "
                    f"bytes, not those of {entry.dtype}{list(piece.shape)}"
                )
    if expected != len(slices):
        raise FormatError(f"{where}: has {len(slices)} slices, the manifest gives it {expected}")
    nbytes = next(entry.nbytes for entry in manifest.parts if entry.part == index.part)
    if index.nbytes != nbytes:
        raise FormatError(f"{where}: holds {index.nbytes} bytes, the manifest says {nbytes}")


def owned_cells(entry: ArrayEntry, part: int) -> list[Cell]:
    """The (start, stop) of each cell of an array that `part` wrote, in row-major order."""
    return [cell(entry.cuts, number) for number in owned(entry.owners, part)]


def _rooted(data: bytes) -> bytes:
    """The JSON object without its root, after the root was found right."""
    root = data[len(_OPEN) : PREFIX - 2]
    if len(data) < PREFIX or not data.startswith(_OPEN) or data[PREFIX - 2 : PREFIX] != b'",':
        raise FormatError(
            f"{MANIFEST}: begins with {show(data[:PREFIX])}, not with a root digest",
            hint="the file is damaged or not a Holdfast manifest",
        )
    seen = checksum.digest(memoryview(data)[PREFIX:])
    if root != seen.encode():
        raise CorruptError(
            f"{MANIFEST}: the root says {show(root.decode('latin-1'))}, the bytes give '{seen}'",
            hint="the manifest was damaged or edited; use another copy or an earlier step",
            file=MANIFEST,
        )
    return b"{" + data[PREFIX:]


class _Found(NamedTuple):
    """What all arrays have together; `grids` are those that differ, by the name of one that has it."""

    names: set[str]
    nbytes: int
    grids: dict[str, tuple[tuple[Run, ...], int]]


def _check_arrays(arrays: Iterable[ArrayEntry], where: str) -> _Found:
    """FormatError unless each array is right in itself."""
    names: set[str] = set()
    nbytes = 0
    grids: dict[str, tuple[tuple[Run, ...], int]] = {}
    seen: set[tuple[object, ...]] = set()
    for array in arrays:
        _check_name(array.name, names, where)
        problem = _array_problem(array)
        # Decoded arrays share equal cuts and owners: what was found right once is right again.
        grid = (id(array.cuts), id(array.owners), array.shape)
        if problem is None and grid not in seen:
            problem = cuts_problem(array.cuts, array.shape)
            seen.add(grid)
            grids[array.name] = array.owners, num_cells(array.cuts)
        if problem is not None:
            raise FormatError(f"{where}: array {show(array.name)}: {problem}")
        nbytes += array.nbytes
    return _Found(names, nbytes, grids)


def _check_head_of(manifest: Manifest, where: str) -> None:
    if manifest.format != FORMAT:
        raise FormatError(f"{where}: format {show(manifest.format)}, expected {FORMAT!r}")
    check_version(manifest.version, where)


def _check_rest(manifest: Manifest, arrays: _Found, where: str) -> None:
    """FormatError unless all but the arrays is right, and fits to what was found of them."""
    if not math.isfinite(manifest.created):
        raise FormatError(f"{where}: created at {manifest.created}")
    try:
        check_meta(manifest.meta)
    except TreeError as error:
        raise FormatError(f"{where}: {error.message}") from None
    for key, value in manifest.writer.items():
        if problem := text_problem(key) or text_problem(value):
            raise FormatError(f"{where}: writer entry {show(key)} {problem}")
    names = set(arrays.names)
    for scalar in manifest.scalars:
        _check_name(scalar.name, names, where)
        _check_scalar(scalar, where)
    known = _check_parts(manifest, where)
    for name, (owners, cells) in arrays.grids.items():
        try:
            check_owners(owners, cells, known)
        except FormatError as error:
            raise FormatError(f"{where}: array {show(name)}: {error.message}") from None
    written = sum(part.nbytes for part in manifest.parts)
    if not arrays.nbytes == written == manifest.nbytes:
        raise FormatError(
            f"{where}: arrays have {arrays.nbytes} bytes, parts {written}, "
            f"the manifest says {manifest.nbytes}"
        )


def _check_parts(manifest: Manifest, where: str) -> bytes:
    """A table of which part numbers exist, after checking them."""
    numbers = [entry.part for entry in manifest.parts]
    if max(numbers, default=0) >= MAX_PARTS or len(set(numbers)) != len(numbers):
        raise FormatError(f"{where}: part numbers repeat or reach {MAX_PARTS}")
    known = bytearray(max(numbers, default=-1) + 1)
    for entry in manifest.parts:
        name = index_name(entry.part, manifest.save.attempt)
        if entry.index != name:
            raise FormatError(f"{where}: part {entry.part} has index {show(entry.index)}, not {name}")
        if entry.size > MAX_INDEX:
            raise FormatError(f"{where}: {name} of {entry.size} bytes; the limit is {MAX_INDEX}")
        known[entry.part] = 1
    return bytes(known)


def _check_name(name: str, seen: set[str], where: str) -> None:
    if problem := text_problem(name):
        raise FormatError(f"{where}: the name {show(name)} {problem}")
    if name in seen:
        raise FormatError(f"{where}: the name {show(name)} appears twice")
    seen.add(name)


def _check_scalar(scalar: ScalarEntry, where: str) -> None:
    if len(scalar.value) > MAX_SCALAR:
        raise FormatError(f"{where}: scalar {show(scalar.name)} is too long")
    try:
        decode_scalar(scalar.type, scalar.value)
    except FormatError as error:
        raise FormatError(f"{where}: scalar {show(scalar.name)}: {error.message}") from None


def _array_problem(entry: ArrayEntry) -> str | None:
    try:
        itemsize = dtype(entry.dtype).itemsize
    except TreeError:
        return f"has the unknown dtype {show(entry.dtype)}"
    if len(entry.shape) > MAX_DIMS or math.prod(entry.shape) * itemsize > MAX_INT:
        return f"has the impossible shape {show(entry.shape)}"
    if (entry.kind == "key") != (entry.impl is not None):
        return "needs an implementation name exactly if it is a PRNG key"
    words: Sequence[str | None] = (entry.impl, *(entry.axes or ()))
    for word in words:
        if word is not None and (problem := text_problem(word)):
            return f"has a name that {problem}"
    if entry.axes is not None and len(entry.axes) != len(entry.shape):
        return f"has {len(entry.axes)} logical axes for {len(entry.shape)} dimensions"
    return None
