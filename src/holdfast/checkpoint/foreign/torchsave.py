"""Records that `torch.save` wrote: a zip of one pickle and the raw bytes of its storages.

Nothing is unpickled by Python: see `pickles`. A tensor is a storage, an offset into it, a size and strides;
its bytes are read by range, so that a tensor of any size needs no memory of its own.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.arrays import Bytes1D
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.text import show
from holdfast.checkpoint.foreign.boxes import extent
from holdfast.checkpoint.foreign.pickles import (
    Called,
    Global,
    Name,
    Pairs,
    Persistent,
    RefusedError,
    interpreted,
)
from holdfast.checkpoint.foreign.windows import Window
from holdfast.checkpoint.step_reader import Box
from holdfast.errors import CorruptError, FormatError

DTYPES: Final = {
    "bool": "bool", "uint8": "uint8", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint16": "uint16", "uint32": "uint32", "uint64": "uint64", "float16": "float16", "float32": "float32",
    "float64": "float64", "bfloat16": "bfloat16", "complex64": "complex64", "complex128": "complex128",
    "complex32": "complex32", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}  # fmt: skip
"""torch's name of a dtype, and ours. Packed and quantized ones are not arrays of elements."""

_STORAGES: Final = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "FloatStorage": "float32",
    "DoubleStorage": "float64", "BFloat16Storage": "bfloat16", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip

_TENSOR: Final[tuple[Name, ...]] = (
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
)
_PARAMETER: Final[Name] = ("torch._utils", "_rebuild_parameter")
_ORDERED: Final[Name] = ("collections", "OrderedDict")
_ENCODE: Final[Name] = ("_codecs", "encode")
_SIZE: Final[Name] = ("torch", "Size")

KNOWN: Final[frozenset[Name]] = frozenset(
    {
        *_TENSOR,
        _PARAMETER,
        _ORDERED,
        _ENCODE,
        _SIZE,
        ("torch.storage", "UntypedStorage"),
        *(("torch", name) for name in (*DTYPES, *_STORAGES)),
    }
)

MAX_PICKLE: Final = 1 << 30
"""Bytes of one record's pickle."""
MAX_VALUES: Final = 1 << 20
"""Values of one record: shared references can describe more than there is memory."""
_MAX_MEMBERS: Final = 1 << 20
_CRC_HINT: Final = (
    "the file is damaged: take another copy or step; if it was saved with torch.serialization."
    "set_crc32_options(False), which stores no true CRC-32, check_source=False (--no-check-source) leaves "
    "this out"
)
_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")


@dataclass(slots=True)
class Storage:
    """Where the bytes of a storage lie in the window of its record, and what their CRC-32 should be.

    Tensors of a record may share it; `checked` says that one of them has compared all of it.
    """

    offset: int
    nbytes: int
    crc: int
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """A strided view of a storage; `offset` and `strides` count elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A record's value: scalars, lists, tuples, `Pairs` and tensors; and the window that tensors lie in."""

    value: Any
    window: Window


def record(window: Window, what: str, *, check: bool = True) -> Record:
    """The record in a window; `what` is its name in messages. `check` compares the pickle with its CRC-32.

    Fails: RefusedError for a class that is not data, with its name; FormatError for whatever is not such a
    record.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            members = {_short(info.filename): info for info in archive.infolist()[:_MAX_MEMBERS]}
    except (zipfile.BadZipFile, ValueError, OSError, struct.error, NotImplementedError, EOFError) as error:
        raise FormatError(
            f"{what}: not a record of torch.save: {show(str(error))}",
            hint="the file is damaged or truncated, or was written with an extension such as compression",
        ) from None
    decoder = _Decoder(window, members, what)
    if "byteorder" in members and decoder.member("byteorder", 16, check=check) != b"little":
        raise FormatError(f"{what}: saved on a machine that is not little-endian")
    described = decoder.member("data.pkl", MAX_PICKLE, check=check)
    return Record(decoder.value(interpreted(described, KNOWN, what=what), 0), window)


def _short(name: str) -> str:
    """The name of a member without the folder that all of them lie in."""
    return name.partition("/")[2]


@final
class _Decoder:
    """From what a pickle describes to values."""

    def __init__(self, window: Window, members: dict[str, zipfile.ZipInfo], what: str) -> None:
        self._window = window
        self._members = members
        self._what = what
        self._left = MAX_VALUES
        self._found: dict[str, Storage] = {}

    def value(self, found: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > 64:
            raise FormatError(
                f"{self._what}: more than {MAX_VALUES:,} values, or nested deeper than 64 levels"
            )
        if found is None or isinstance(found, bool | int | float | str | bytes):
            return found
        if isinstance(found, list | tuple):
            return type(found)(self.value(one, depth + 1) for one in found)
        if isinstance(found, Pairs):
            return Pairs([(key, self.value(value, depth + 1)) for key, value in found.items])
        if isinstance(found, Called):
            return self._called(found, depth)
        if isinstance(found, Global):
            raise RefusedError(f"{self._what}: holds {found} itself, which is no value")
        raise FormatError(f"{self._what}: a storage where a value belongs")

    def _called(self, found: Called, depth: int) -> Any:
        name, args = found.of.name, found.args
        if name in _TENSOR:
            return self._tensor(args)
        if name == _PARAMETER and args and isinstance(args[0], Called):
            return self.value(args[0], depth + 1)
        if name == _SIZE and len(args) == 1:
            return self.value(args[0], depth + 1)
        if name == _ORDERED and not args:
            return self.value(found.state if isinstance(found.state, Pairs) else Pairs(), depth + 1)
        if name == _ENCODE and len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1":
            try:
                return args[0].encode("latin1")
            except UnicodeEncodeError:
                raise FormatError(f"{self._what}: bytes that are not bytes") from None
        raise RefusedError(f"{self._what}: {found.of} is called in a way that is not known")

    def _tensor(self, args: tuple[Any, ...]) -> Tensor:
        if len(args) < 6 or not isinstance(args[0], Persistent):
            raise FormatError(f"{self._what}: a tensor that is described in an unknown way")
        kind, storage = self._storage(args[0].id)
        if len(args) > 6 and isinstance(args[6], Global):  # v3: a dtype that has no storage class of its own
            kind = DTYPES.get(args[6].name[1], "")
        if not kind:
            raise FormatError(f"{self._what}: a tensor whose dtype is not known")
        offset, shape, strides = args[1], sizes(args[2], self._what), sizes(args[3], self._what)
        itemsize = dtype_of(kind).itemsize
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False))
        if type(offset) is not int or offset < 0 or len(shape) != len(strides) or len(shape) > 64:
            raise FormatError(f"{self._what}: a tensor of impossible shape")
        # DCP clones what shares elements (strides of 0), so a tensor never has more bytes than its storage.
        if prod(shape) and max(offset + last + 1, prod(shape)) * itemsize > storage.nbytes:
            raise FormatError(f"{self._what}: a tensor that is larger than its storage")
        return Tensor(storage, kind, offset, shape, strides)

    def _storage(self, id_: Any) -> tuple[str, Storage]:
        """Dtype ("" if untyped) and place of a persistent id: ("storage", type, key, device, n)."""
        known = (
            isinstance(id_, tuple) and len(id_) == 5 and id_[0] == "storage" and isinstance(id_[1], Global)
        )
        if not known or not isinstance(id_[2], str):
            raise FormatError(f"{self._what}: a storage that is named in an unknown way")
        return _STORAGES.get(id_[1].name[1], ""), self._place(f"data/{id_[2]}")

    def member(self, name: str, most: int, *, check: bool) -> bytes:
        """The bytes of a small member. Fails: FormatError, CorruptError."""
        place = self._place(name)
        if place.nbytes > most:
            raise FormatError(f"{self._what}: its {name} has {place.nbytes:,} bytes")
        data = bytearray(place.nbytes)
        self._window.read_at(memoryview(data), place.offset)
        if check and zlib.crc32(data) != place.crc:
            raise CorruptError(
                f"{self._window.path}: {name} of {self._what} has CRC-32 {zlib.crc32(data):08x}, but "
                f"{place.crc:08x} was saved with it",
                hint=_CRC_HINT,
                file=self._window.path,
            )
        return bytes(data)

    def _place(self, name: str) -> Storage:
        """Where a member lies: behind its own header, whose length only that header says."""
        if name in self._found:
            return self._found[name]
        info = self._members.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise FormatError(f"{self._what}: its {show(name)} is missing or compressed")
        header = bytearray(_LOCAL_HEADER.size)
        self._window.read_at(memoryview(header), info.header_offset)
        signature, *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
        begin = info.header_offset + _LOCAL_HEADER.size + name_size + extra_size
        if signature != b"PK\x03\x04" or begin + info.file_size > self._window.length:
            raise FormatError(f"{self._what}: its {show(name)} lies outside of the record")
        self._found[name] = Storage(begin, info.file_size, info.CRC)
        return self._found[name]


def sizes(found: Any, what: str) -> tuple[int, ...]:
    """A `torch.Size` or a tuple of counts. Fails: FormatError."""
    if isinstance(found, Called) and found.of.name == _SIZE and len(found.args) == 1:
        found = found.args[0]
    if not isinstance(found, tuple | list) or not all(type(one) is int and 0 <= one < 2**63 for one in found):
        raise FormatError(f"{what}: sizes that are no counts")
    return tuple(found)


@final
class TensorReader:
    """Reads boxes of one tensor, and compares the CRC-32 of its storage.

    Bytes that pass by in order are counted on the way; `finish` reads the others once more.
    """

    def __init__(self, window: Window, tensor: Tensor, *, what: str, check: bool, most: int) -> None:
        self._window = window
        self._tensor = tensor
        self._what = what
        self._most = most
        self._dtype = dtype_of(tensor.dtype).numpy
        self._next = 0 if check else -1
        self._crc = 0

    def read_into(self, into: npt.NDArray[Any], box: Box) -> None:
        """Fill `into`, which has the box's shape. Fails: FormatError, CorruptError, StorageError."""
        strides = self._tensor.strides
        first = self._tensor.offset + sum(lo * stride for (lo, _), stride in zip(box, strides, strict=True))
        shape = extent(box)
        if not prod(shape):
            return
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        # A tensor that is not stored row by row is read in slabs along its widest stride: each is one range.
        dims = [dim for dim, size in enumerate(shape) if size > 1]
        if span * self._dtype.itemsize > max(self._most, into.nbytes) and dims:
            dim = max(dims, key=lambda one: strides[one])
            middle = shape[dim] // 2
            lo, hi = box[dim]
            cut = (slice(None),) * dim
            self.read_into(into[(*cut, slice(middle))], (*box[:dim], (lo, lo + middle), *box[dim + 1 :]))
            self.read_into(
                into[(*cut, slice(middle, None))], (*box[:dim], (lo + middle, hi), *box[dim + 1 :])
            )
            return
        data = self._range(first, span)
        byte_strides = tuple(stride * self._dtype.itemsize for stride in strides)
        np.copyto(into, np.lib.stride_tricks.as_strided(data, shape, byte_strides, writeable=False))

    def _range(self, first: int, count: int) -> npt.NDArray[Any]:
        begin, storage = first * self._dtype.itemsize, self._tensor.storage
        data: Bytes1D = np.empty(count * self._dtype.itemsize, np.uint8)
        self._window.read_at(data.data, storage.offset + begin)
        if begin == self._next:
            self._pass(data)
        return data.view(self._dtype)

    def finish(self) -> None:
        """Compare what did not pass by in order, now that all was read. Fails: CorruptError, StorageError."""
        storage = self._tensor.storage
        while 0 <= self._next < storage.nbytes and not storage.checked:
            data: Bytes1D = np.empty(min(self._most, storage.nbytes - self._next), np.uint8)
            self._window.read_at(data.data, storage.offset + self._next)
            self._pass(data)

    def _pass(self, data: Bytes1D) -> None:
        """Count the next bytes of the storage. Fails: CorruptError after the last."""
        storage = self._tensor.storage
        self._crc = zlib.crc32(data.data, self._crc)
        self._next += data.size
        if self._next < storage.nbytes:
            return
        if self._crc != storage.crc:
            raise CorruptError(
                f"{self._window.path}: the bytes of {self._what} have CRC-32 {self._crc:08x}, but "
                f"{storage.crc:08x} was saved with them",
                hint=_CRC_HINT,
                file=self._window.path,
            )
        storage.checked = True
