"""Trees in files: what `holdfast transfer` publishes and where it puts what it pulled."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.arrays import TABLE, DType, flatten, stored_shape, unflatten
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.text import reason, show
from holdfast.errors import FormatError, StorageError, TreeError, UsageError
from holdfast.format import Tensor, decode_header, encode_header

KINDS: Final = (".npz", ".safetensors")
_READ: Final = 64 << 20
_DTYPES: Final = {one.stored: one for one in TABLE.values() if one.native}
_ODD: Final = "holdfast.dtypes"
"""The header entry with the dtypes that safetensors lacks, by name: there those arrays are bytes."""


def is_treefile(path: str) -> bool:
    """Whether the name says that it holds a tree."""
    return path.endswith(KINDS)


def read(path: str, advance: Callable[[int], None]) -> Any:
    """The tree in an .npz or .safetensors file; told to `advance` over its bytes.

    Names are taken as paths, so `params/w` is array `w` in `params`. Fails: StorageError, FormatError.
    """
    try:
        arrays = _npz(path) if path.endswith(".npz") else _safetensors(path, advance)
    except OSError as error:
        raise StorageError.from_os(error, doing="read", path=path) from error
    advance(os.path.getsize(path))
    try:
        return unflatten(arrays)
    except TreeError:
        return arrays  # names of another making, which are no paths: each is one key


def _npz(path: str) -> dict[str, NDArray[Any]]:
    try:
        # Opened here: numpy leaves a file that is no archive open.
        with open(path, "rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise FormatError(f"{path}: no readable .npz file: {error}") from error


def _safetensors(path: str, advance: Callable[[int], None]) -> dict[str, NDArray[Any]]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size

        def read_range(offset: int, length: int) -> bytes:
            return os.pread(file.fileno(), length, offset)

        metadata, tensors, start = decode_header(read_range, size, name=path)
        odd = _odd_dtypes(path, metadata.get(_ODD, "{}"), tensors)
        unknown = sorted({one.dtype for one in tensors if one.dtype not in _DTYPES})
        if unknown:
            raise FormatError(
                f"{path}: no array here can hold {', '.join(unknown)}", hint="convert these tensors first"
            )
        data = np.empty(size - start, np.uint8)
        view = data.data
        got = 0
        while got < len(view):
            more = os.preadv(file.fileno(), [view[got : got + _READ]], start + got)
            if not more:
                raise FormatError(
                    f"{path}: it became shorter while it was read", hint="wait until nobody writes to it"
                )
            got += more
            advance(got)
    found = {}
    for one in tensors:
        kind = odd.get(one.name, _DTYPES[one.dtype])
        shape = one.shape[: len(one.shape) - len(stored_shape(kind, ()))]
        found[one.name] = data[one.begin : one.end].view(kind.numpy).reshape(shape)
    return found


def _odd_dtypes(path: str, text: str, tensors: Sequence[Tensor]) -> dict[str, DType]:
    """The dtypes that an entry of the header gives to arrays of bytes. Fails: FormatError."""
    try:
        words = msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path}: its entry {_ODD} is damaged: {reason(error)}") from None
    by_name, found = {one.name: one for one in tensors}, {}
    for name, word in words.items():
        one, kind = by_name.get(name), TABLE.get(word)
        tail = () if kind is None else stored_shape(kind, ())
        if (
            one is None
            or kind is None
            or one.dtype != kind.stored
            or one.shape[len(one.shape) - len(tail) :] != tail
        ):
            raise FormatError(f"{path}: {show(name)} cannot be {show(word)}, which its entry {_ODD} says")
        found[name] = kind
    return found


def check_new(path: str) -> None:
    """Raise UsageError unless a tree can be written to a new file of this name."""
    if not is_treefile(path):
        raise UsageError(
            f"{path} is no {' or '.join(KINDS)} file", hint=f"give a name that ends in {KINDS[1]}"
        )
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already", hint="remove it, or give another name")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"there is no folder {os.path.dirname(path)}", hint="make it first")


def write(path: str, tree: Any) -> None:
    """Write a tree to a new file: all of it, or nothing is there. Scalars become arrays without dimensions.

    Fails: StorageError, FormatError, TreeError; UsageError if .npz cannot hold a dtype.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in flatten(tree)[0]}
    if path.endswith(".npz"):
        for name, array in arrays.items():
            if array.dtype.isbuiltin != 1:
                raise UsageError(
                    f"{name}: .npz has no {array.dtype}", hint=f"write a {KINDS[1]} file instead"
                )
    try:
        with _new_file(path) as file:
            if path.endswith(".npz"):
                _write_npz(file, arrays)
            else:
                _write_safetensors(file, arrays)
    except OSError as error:
        raise StorageError.from_os(error, doing="write", path=path) from error


def _write_npz(file: BinaryIO, arrays: dict[str, NDArray[Any]]) -> None:
    """As np.savez does, for any name: `file` is not one that it could take."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _write_safetensors(file: BinaryIO, arrays: dict[str, NDArray[Any]]) -> None:
    tensors, odd, at = [], {}, 0
    for name, array in arrays.items():
        known = dtype_of(array.dtype)
        if not known.native:
            odd[name] = known.name
        end = at + array.nbytes
        tensors.append(Tensor(name, known.stored, stored_shape(known, array.shape), at, end))
        at = end
    file.write(encode_header(tensors, {_ODD: msgspec.json.encode(odd).decode()} if odd else {}))
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """A file that gets its name once it is written and synced; its name must still be free then."""
    new = Path(f"{path}.{os.getpid()}.new")
    try:
        with new.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
