"""Reading torch's distributed checkpoints (`torch.distributed.checkpoint`), without torch.

A checkpoint is a `.metadata` pickle, written last, and `__RANK_N.distcp` files of records that `torch.save`
made. The metadata says for every tensor its dtype, shape and chunks, for every chunk its file and range, and
for every flat name the path in the nested dict it came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.arrays import ArrayLayout
from holdfast.arrays.text import show
from holdfast.checkpoint.foreign.boxes import extent, overlap, whole, within
from holdfast.checkpoint.foreign.pickles import Called, Global, Name, Pairs, RefusedError, interpreted
from holdfast.checkpoint.foreign.source import ForeignArray, ForeignStep, Scalar, Skipped
from holdfast.checkpoint.foreign.torchsave import DTYPES, Tensor, TensorReader, record, sizes
from holdfast.checkpoint.foreign.windows import Files, Window
from holdfast.checkpoint.step_reader import Box
from holdfast.errors import FormatError, LayoutError, StorageError

METADATA: Final = ".metadata"
SUFFIX: Final = ".distcp"
MAX_METADATA: Final = 4 << 30
"""Largest `.metadata` in bytes; it takes about 130 for each shard of each tensor."""

_SLAB: Final = 16 << 20
"""Bytes that are read at once of a tensor whose rows are not stored one after the other."""

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_OLD_MODULE: Final = "torch.distributed._shard.sharded_tensor.metadata"
_TENSOR: Final[Name] = (_MODULE, "TensorStorageMetadata")
_BYTES: Final[Name] = (_MODULE, "BytesStorageMetadata")
_CHUNK: Final[Name] = (_MODULE, "ChunkStorageMetadata")
_INDEX: Final[Name] = (_MODULE, "MetadataIndex")
_ALL: Final[Name] = (_MODULE, "Metadata")
_PLACE: Final[Name] = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_PROPERTIES: Final[tuple[Name, ...]] = ((_MODULE, "TensorProperties"), (_OLD_MODULE, "TensorProperties"))

KNOWN: Final[frozenset[Name]] = frozenset(
    {
        _ALL,
        _TENSOR,
        _BYTES,
        _CHUNK,
        _INDEX,
        _PLACE,
        *_PROPERTIES,
        (_MODULE, "StorageMeta"),
        (_MODULE, "_MEM_FORMAT_ENCODING"),
        (_OLD_MODULE, "MEM_FORMAT_ENCODING"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        *(("torch", name) for name in DTYPES),
    }
)

_Place = tuple[str, int, int]
"""File, begin and length of a record."""


def opened(path: str, *, step: int | None, check: bool = True) -> ForeignStep:
    """The checkpoint in a folder. Reads its metadata and its small objects, no array.

    `check` compares the bytes of tensors with the CRC-32 they were saved with. Fails: FormatError naming what
    is damaged, truncated or refused; MissingPathError; StorageError.
    """
    file = os.path.join(path, METADATA)
    found = interpreted(_contents(file), KNOWN, what=file)
    files = Files(path)
    try:
        reading = _Reading(found, files, file, check=check)
        reading.read()
    except BaseException:
        files.close()
        raise
    return ForeignStep(
        format="torch DCP",
        path=path,
        step=step,
        arrays=reading.arrays,
        scalars=reading.scalars,
        skipped=reading.skipped,
        close=files.close,
    )


def _contents(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_METADATA + 1)
    except OSError as error:
        raise StorageError.from_os(error, doing="read", path=path) from error
    if len(data) > MAX_METADATA:
        raise FormatError(f"{path}: more than {MAX_METADATA:,} bytes")
    return data


@final
class _Reading:
    """From the metadata to arrays and scalars; every record's range is checked against its file."""

    def __init__(self, found: Any, files: Files, what: str, *, check: bool) -> None:
        state = _state(found, (_ALL,), what)
        entries, places, paths = (
            state.get(name) for name in ("state_dict_metadata", "storage_data", "planner_data")
        )
        if not isinstance(entries, Pairs) or not isinstance(places, Pairs):
            raise FormatError(
                f"{what}: says nothing about where its tensors lie",
                hint="only checkpoints of torch's FileSystemWriter are read",
            )
        self._what = what
        self._files = files
        self._check = check
        self._entries = entries.items
        self._places = dict(map(self._place, places.items))
        self._paths = dict(self._path(*one) for one in paths.items) if isinstance(paths, Pairs) else {}
        self.arrays: list[ForeignArray] = []
        self.scalars: list[tuple[tuple[str, ...], Scalar]] = []
        self.skipped: list[Skipped] = []

    def read(self) -> None:
        for name, entry in self._entries:
            if type(name) is not str:
                raise FormatError(f"{self._what}: an entry without a name")
            keys = self._paths.get(name, (name,))
            if isinstance(entry, Called) and entry.of.name == _TENSOR:
                self._tensor(name, keys, entry)
            elif isinstance(entry, Called) and entry.of.name == _BYTES:
                self._object(name, keys)
            else:
                raise FormatError(f"{self._what}: {show(name)} is of an unknown kind")

    def _tensor(self, name: str, keys: tuple[str, ...], entry: Called) -> None:
        where = f"{self._what}: {show(name)}"
        state = _state(entry, (_TENSOR,), where)
        shape = sizes(state.get("size"), where)
        kind = self._dtype(state.get("properties"), where)
        if kind not in DTYPES:
            self.skipped.append(Skipped("/".join(keys), f"its dtype torch.{kind} has no counterpart"))
            return
        chunks: list[tuple[Box, Window]] = []
        for chunk in state.get("chunks") or ():
            found = _state(chunk, (_CHUNK,), where)
            offsets, lengths = sizes(found.get("offsets"), where), sizes(found.get("sizes"), where)
            if len(offsets) != len(shape) or len(lengths) != len(shape):
                raise FormatError(f"{where}: a chunk of another number of dimensions")
            box = tuple((lo, lo + size) for lo, size in zip(offsets, lengths, strict=True))
            # Uneven shards leave some writers with nothing; such chunks hold no bytes.
            if prod(lengths) or not prod(shape):
                chunks.append((box, self._window(name, offsets)))
        _check_cover(DTYPES[kind], shape, [box for box, _ in chunks], where)
        self.arrays.append(DcpArray(keys, name, DTYPES[kind], shape, chunks, check=self._check))

    def _dtype(self, properties: Any, where: str) -> str:
        if not isinstance(properties, Called) or properties.of.name not in _PROPERTIES:
            raise FormatError(f"{where}: a tensor without properties")
        state = properties.state
        kind = state[0] if isinstance(state, tuple) and state else None
        if isinstance(state, Pairs):  # older torch
            kind = state.get("dtype")
        if not isinstance(kind, Global) or kind.name[0] != "torch":
            raise FormatError(f"{where}: a tensor without a dtype")
        return kind.name[1]

    def _object(self, name: str, keys: tuple[str, ...]) -> None:
        """A pickled object: its numbers, text and tensors by their own paths; anything else is skipped."""
        try:
            found = record(self._window(name, None), name, check=self._check)
        except RefusedError as error:
            self.skipped.append(Skipped("/".join(keys), error.message))
            return
        for path, value in _leaves(found.value, keys):
            if isinstance(value, Tensor):
                box = whole(value.shape)
                self.arrays.append(
                    DcpArray(
                        path,
                        name,
                        value.dtype,
                        value.shape,
                        [(box, found.window)],
                        check=self._check,
                        tensor=value,
                    )
                )
            elif isinstance(value, Skipped):
                self.skipped.append(value)
            else:
                self.scalars.append((path, value))

    def _window(self, name: str, offsets: tuple[int, ...] | None) -> Window:
        place = self._places.get((name, offsets))
        if place is None and offsets is not None:
            place = self._places.get((name, None))
        if place is None:
            raise FormatError(f"{self._what}: does not say where {show(name)} at {offsets} lies")
        return self._files.window(*place)

    def _place(self, item: tuple[Any, Any]) -> tuple[tuple[str, tuple[int, ...] | None], _Place]:
        key, value = (
            _state(one, (name,), self._what) for one, name in zip(item, (_INDEX, _PLACE), strict=True)
        )
        name, offset = key.get("fqn"), key.get("offset")
        file, begin, length = (value.get(word) for word in ("relative_path", "offset", "length"))
        if (
            type(name) is not str
            or type(file) is not str
            or type(begin) is not int
            or type(length) is not int
        ):
            raise FormatError(f"{self._what}: an entry that names no file and range")
        if value.get("transform_descriptors"):
            raise FormatError(
                f"{self._what}: {show(name)} was written through an extension (compression or the like)",
                hint="load and save it with torch, without extensions",
            )
        return (name, None if offset is None else sizes(offset, self._what)), (file, begin, length)

    def _path(self, name: Any, path: Any) -> tuple[str, tuple[str, ...]]:
        if type(name) is not str or not isinstance(path, tuple):
            raise FormatError(f"{self._what}: a path that is no path")
        if not all(type(key) in (str, int) for key in path):
            raise FormatError(f"{self._what}: the path of {show(name)} has a key that is no text or number")
        return name, tuple(map(str, path))


def _state(found: Any, names: Sequence[Name], where: str) -> Pairs:
    """The fields of an object of one of these classes. Fails: FormatError."""
    if isinstance(found, Called) and found.of.name in names:
        # A dataclass with slots or a frozen one may carry (None, {...}).
        state = found.state[-1] if isinstance(found.state, tuple) and found.state else found.state
        if isinstance(state, Pairs):
            return state
        if state is None:
            return Pairs()
    seen = str(found.of) if isinstance(found, Called) else type(found).__name__
    raise FormatError(f"{where}: {seen} where {'.'.join(names[0])} belongs")


def _check_cover(kind: str, shape: tuple[int, ...], boxes: Sequence[Box], where: str) -> None:
    """FormatError unless the chunks are disjoint and make up the array."""
    if not prod(shape):
        return
    try:
        table = np.array(boxes, np.int64).reshape(len(boxes), len(shape), 2)
        ArrayLayout(kind, shape, table, tuple((0,) for _ in boxes))
    except LayoutError as error:
        raise FormatError(
            f"{where}: its chunks do not make up the tensor: {error.message}",
            hint="a writer of this checkpoint is missing; take another step",
        ) from None


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Scalar | Tensor | Skipped]]:
    """The scalars and tensors of an object, by path; what has no value is told as skipped."""
    if isinstance(value, Pairs):
        items = value.items
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif value is None:
        yield keys, Skipped("/".join(keys), "None is structure, not a value")
        return
    else:
        yield keys, value
        return
    if not items:
        yield keys, Skipped("/".join(keys), "an empty container is structure, not a value")
    for key, one in items:
        if type(key) not in (str, int):
            yield keys, Skipped("/".join(keys), f"has a key that is a {type(key).__name__}")
            continue
        yield from _leaves(one, (*keys, str(key)))


@final
class DcpArray(ForeignArray):
    """A tensor in chunks, each a record of its own. `tensor` is given where the record was read already."""

    def __init__(
        self,
        keys: tuple[str, ...],
        source_name: str,
        dtype: str,
        shape: tuple[int, ...],
        chunks: Sequence[tuple[Box, Window]],
        *,
        check: bool,
        tensor: Tensor | None = None,
    ) -> None:
        self.keys = keys
        self.source_name = source_name
        self.dtype = dtype
        self.shape = shape
        self.grain = (1,) * len(shape)
        self._chunks = chunks
        self._check = check
        self._tensor = tensor
        self._readers: dict[int, TensorReader] = {}
        bounds = np.array([box for box, _ in chunks], np.int64).reshape(len(chunks), len(shape), 2)
        self._low, self._high = bounds[:, :, 0], bounds[:, :, 1]

    def read_into(self, into: npt.NDArray[Any], box: Box) -> None:
        low, high = np.array(box, np.int64).reshape(-1, 2).T
        met = ((self._low < high) & (self._high > low)).all(axis=1)
        for number in np.flatnonzero(met).tolist():
            chunk = self._chunks[number][0]
            shared = overlap(chunk, box)
            if shared is None:
                continue
            inside = tuple((lo - base, hi - base) for (lo, hi), (base, _) in zip(shared, chunk, strict=True))
            view: npt.NDArray[Any] = into[within(shared, box)] if box else into
            self._reader(number).read_into(view, inside)

    def _reader(self, number: int) -> TensorReader:
        if number not in self._readers:
            box, window = self._chunks[number]
            what = f"{self.source_name} at {[lo for lo, _ in box]}"
            tensor = self._tensor or record(window, what, check=self._check).value
            if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (extent(box), self.dtype):
                seen = f"{tensor.dtype}{list(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor"
                raise FormatError(
                    f"{window.path}: {what} is {seen}, but the metadata says {self.dtype}{list(extent(box))}",
                    hint="the file is from another save than the metadata",
                )
            self._readers[number] = TensorReader(window, tensor, what=what, check=self._check, most=_SLAB)
        return self._readers[number]

    def release(self) -> None:
        for reader in self._readers.values():
            reader.finish()
        self._readers.clear()
