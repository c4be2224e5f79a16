"""A repository of safetensors files: which tensors it has, in which file, and where in it.

Everything is known from headers and the index; what does not agree there is refused before any data is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, final

import msgspec

from holdfast.arrays import DType
from holdfast.checkpoint.hub.packed import WORDS
from holdfast.errors import FormatError, HoldfastError, MissingPathError, UsageError
from holdfast.format import Tensor, decode_header
from holdfast.storage import LocalStore, PartReader, Store, StoreOptions, is_url, opened

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAX_JSON: Final = 1 << 28
_SHOWN: Final = 8
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHARD: Final = re.compile(r".*-[0-9]+-of-0*([1-9][0-9]*)\.safetensors")
"""One of several files; the group says of how many."""
_READ: Final = 8 << 20


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its file, the offset of its first byte there, and what it is."""

    file: str
    offset: int
    tensor: Tensor
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.tensor.end - self.tensor.begin


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: Any = None


def read_json(
    place: str | os.PathLike[str], name: str, options: StoreOptions | None = None
) -> dict[str, Any]:
    """A JSON object beside the weights, such as `config.json`. Fails: UsageError, FormatError."""
    found: dict[str, Any] = _decoded(os.fspath(place), name, dict[str, Any], options)
    return found


def _decoded(place: str, name: str, kind: Any, options: StoreOptions | None) -> Any:
    store, own = _store(place, name, options)
    if not store.exists(own):
        raise UsageError(f"{place}/{name} is not there", hint="give the folder of a downloaded repository")
    try:
        return msgspec.json.decode(store.read(own, max_bytes=_MAX_JSON), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{place}/{name} is not JSON of the right kind: {error}") from None


def _store(place: str, name: str, options: StoreOptions | None) -> tuple[Store, str]:
    if is_url(place):
        return opened(place, options), name
    # A Hugging Face cache keeps its files elsewhere, under links; stores of checkpoints follow none.
    folder, name = os.path.split(os.path.realpath(os.path.join(place, name)))
    return LocalStore(folder), name


@final
class Repository:
    """The tensors of a folder, of an object store's prefix, or of one safetensors file.

    Links are followed, as those of a Hugging Face cache must be. A file that is named is loaded alone, also
    one of several. Fails: MissingPathError or UsageError where there is no repository, FormatError where
    files and index do not make sense, or where files of several are there without their index.
    """

    def __init__(self, place: str | os.PathLike[str], options: StoreOptions | None = None) -> None:
        self.place = os.fspath(place)
        self._options = options
        self._single = ""
        if self.place.endswith(_SUFFIX):
            head, _, self._single = self.place.rpartition("/")
            self.place = head or "."
        self.metadata: dict[str, str] = {}
        self.files, index = self._listed()
        self.tensors: dict[str, Entry] = {}
        for name in self.files:
            self._read_header(name, index)
        if index is not None:
            self._check_index(index)

    # ---- files

    def store(self, name: str) -> tuple[Store, str]:
        """The store that holds a file, and the file's name there."""
        return _store(self.place, name, self._options)

    @property
    def at_once(self) -> int:
        """How many ranges it pays to have under way: those from far away are waited for, not worked on."""
        return opened(self.place, self._options).at_once

    def reader(self, name: str) -> PartReader:
        """A reader of one of the files; `close` it."""
        store, own = self.store(name)
        return store.open_part(own)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        store, own = self.store(name)
        return store.exists(own)

    def _listed(self) -> tuple[list[str], dict[str, str] | None]:
        """The files of the repository, and the index if it has one."""
        if self._single:
            return [self._single], None
        if self.has(SINGLE):
            return [SINGLE], None
        index = INDEX if self.has(INDEX) else self._only(_INDEX_SUFFIX)
        if index is None:
            single = self._only(_SUFFIX)
            if single is None:
                raise self._none()
            return [single], None
        found = _decoded(self.place, index, _Index, self._options).weight_map
        for name in dict.fromkeys(found.values()):
            # The index is somebody else's: it names files of its own folder and no others.
            if not name or "/" in name or "\0" in name or name in (".", ".."):
                raise FormatError(f"{self.place}/{index} names {name!r}, which is not in its folder")
            if not self.has(name):
                raise FormatError(
                    f"{self.place}/{index} names {name}, which is not there", hint="download the file"
                )
        return sorted(set(found.values())), found

    def _only(self, suffix: str) -> str | None:
        if is_url(self.place):
            names = opened(self.place, self._options).names()
        else:
            names = sorted(os.listdir(self.place)) if os.path.isdir(self.place) else []
        found = [name for name in names if name.endswith(suffix)]
        shards = [name for name in found if (of := _SHARD.fullmatch(name)) is not None and of[1] != "1"]
        if shards:
            raise FormatError(
                f"{self.place} has {', '.join(shards[:_SHOWN])}{' ...' if len(shards) > _SHOWN else ''} "
                f"and no {INDEX}: it is a part of a repository",
                hint="an export or a download was cut off; run it again, or name one file to load it alone",
            )
        if len(found) > 1:
            raise UsageError(
                f"{self.place} has {len(found)} files *{suffix} and neither {SINGLE} nor {INDEX}",
                hint=f"give one of them: {self.place}/{found[0]}",
            )
        return found[0] if found else None

    def _none(self) -> HoldfastError:
        if not is_url(self.place) and os.path.isfile(self.place):
            return UsageError(
                f"{self.place} is a file, and its name does not end in .safetensors",
                hint="give the folder of a downloaded repository, or one .safetensors file",
            )
        if not is_url(self.place) and not os.path.isdir(self.place):
            return MissingPathError(
                f"there is no folder {self.place}",
                path=self.place,
                hint="give the folder of a downloaded repository",
            )
        return UsageError(
            f"{self.place} has neither {SINGLE} nor {INDEX}", hint="give a downloaded repository"
        )

    # ---- tensors

    def _read_header(self, name: str, index: dict[str, str] | None) -> None:
        with closing(self.reader(name)) as reader:
            where = f"{self.place}/{name}"
            metadata, tensors, start = decode_header(reader.read, reader.size, name=where)
        self.metadata |= metadata
        for one in tensors:
            if index is not None and index.get(one.name, name) != name:
                continue  # the index says that another file's is meant
            if one.name in self.tensors:
                raise FormatError(
                    f"{where} has the tensor {one.name!r}, and so has {self.tensors[one.name].file}"
                )
            if one.dtype not in WORDS:
                raise FormatError(
                    f"{where}: tensor {one.name!r} has the dtype {one.dtype}, which is not known"
                )
            self.tensors[one.name] = Entry(name, start + one.begin, one, WORDS[one.dtype])

    def _check_index(self, index: dict[str, str]) -> None:
        lost = [f"{name} in {file}" for name, file in index.items() if name not in self.tensors]
        if lost:
            more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            raise FormatError(
                f"the index of {self.place} names tensors that its files lack: "
                f"{', '.join(lost[:_SHOWN])}{more}",
                hint="files and index are of different versions; download both again",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, None if there is none."""
        entry = self.tensors.get(name)
        return None if entry is None else entry.tensor.shape

    def damaged(self, progress: Callable[[int], None] | None = None) -> Iterator[str]:
        """The files that are not what their names say; reads all that can be verified.

        safetensors has no checksums. But a Hugging Face cache names a file by its SHA-256; other files are
        passed over. Fails: StorageError.
        """
        done = 0
        for name in self.files:
            store, own = self.store(name)
            if not _SHA256.fullmatch(own):
                continue
            total = hashlib.sha256()
            with closing(store.open_part(own)) as reader:
                for at in range(0, reader.size, _READ):
                    total.update(reader.read(at, _READ))
                    done += _READ
                    if progress is not None:
                        progress(done)
            if total.hexdigest() != own:
                yield f"{name}: its SHA-256 is {total.hexdigest()}, and the cache has it as {own}"

    @property
    def num_verifiable(self) -> int:
        """How many files `damaged` can verify."""
        return sum(bool(_SHA256.fullmatch(self.store(name)[1])) for name in self.files)
