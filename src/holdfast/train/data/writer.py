"""Writes a token set: aside first, named at the end. Whoever looks sees the whole set, or none.

The `.idx` gets its name last, so a set that has one is complete. What a killed writer leaves has a name that
nothing reads, and goes when the same set is written again.
"""

from __future__ import annotations

import os
import uuid
from array import array
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, final

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import DataError, OutOfSpaceError, StorageError, UsageError
from holdfast.faults import site
from holdfast.storage import TEMPORARY, Files
from holdfast.train.data.card import Card, encode_card
from holdfast.train.data.layout import encode_index
from holdfast.train.data.tokenizer import Tokenizer

ENDS: Final = (".bin", ".json", ".idx")
"""In the order in which they get their names."""
_MOST_TOKENS: Final = 2**31 - 1
_BUFFER: Final = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What ids are stored as: 16 bits where they fit, as Megatron-LM decides it."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


@final
class TokenWriter:
    """Writes the set `path` while the `with` block lasts; one that leaves by an error leaves nothing.

    Fails: UsageError, if such files are there and `replace` is not given; StorageError from the file system.
    """

    def __init__(
        self, path: str, tokenizer: Tokenizer, *, with_eod: bool = True, replace: bool = False
    ) -> None:
        self.path = os.path.abspath(path)
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._eod = tokenizer.eod if with_eod else None
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._end = np.array([] if self._eod is None else [self._eod], self._dtype).tobytes()
        self._replace = replace
        self._lengths = array("i")
        self._running = xxhash.xxh3_128()
        self._files = Files()
        self._temporary: dict[str, str] = {}
        self._open: list[BinaryIO] = []

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def __enter__(self) -> Self:
        folder, name = os.path.split(self.path)
        try:
            os.makedirs(folder, exist_ok=True)
            self._check_free()
            self._sweep(folder, name)
            mark = uuid.uuid4().hex[:12]
            for end in ENDS:
                path = os.path.join(folder, f"{TEMPORARY}{mark}-{name}{end}")
                file = os.fdopen(self._files.create(path, exclusive=True), "wb", buffering=_BUFFER)
                self._temporary[end] = path
                self._open.append(file)
                # Held as long as the file is open: another writer's sweep lets it lie.
                self._files.lock(file.fileno())
        except OSError as error:
            self._abandon()
            raise self._refused(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append one document. The end of a document is put behind it."""
        length = len(tokens) + (self._eod is not None)
        if length > _MOST_TOKENS:
            raise DataError(
                f"document {self.num_documents:,} has {length:,} tokens; {_MOST_TOKENS:,} is the most",
                hint="cut it: --document paragraph or line",
            )
        data = tokens.astype(self._dtype, copy=False).tobytes() + self._end
        try:
            self._open[0].write(data)
            site("data.document")
        except OSError as error:
            raise self._refused(error) from error
        self._running.update(data)
        self._lengths.append(length)
        self.num_tokens += length

    def finish(self) -> Card:
        """Make the set visible; its card. Waits for the disk."""
        index = encode_index(self._dtype, np.frombuffer(self._lengths, np.int32))
        card = Card(
            tokenizer=self._tokenizer.name,
            tokenizer_digest=self._tokenizer.digest,
            vocab_size=self._tokenizer.vocab_size,
            eod=self._eod,
            documents=self.num_documents,
            tokens=self.num_tokens,
            tokens_digest=self._running.hexdigest(),
            index_digest=xxhash.xxh3_128_hexdigest(index),
        )
        try:
            self._open[1].write(encode_card(card))
            self._open[2].write(index)
            for file in self._open:
                file.flush()
                self._files.sync(file.fileno())
            self._publish()
        except OSError as error:
            raise self._refused(error) from error
        return card

    def _publish(self) -> None:
        folder = os.path.dirname(self.path)
        self._check_free()
        if self._replace:
            # An index beside tokens of another set would be believed. For a moment there is no set.
            with suppress(FileNotFoundError):
                self._files.unlink(f"{self.path}.idx")
            self._files.sync_folder(folder)
        for end in ENDS:
            self._files.rename(self._temporary.pop(end), self.path + end)
            self._files.sync_folder(folder)
            site("data.named")

    def _refused(self, error: OSError) -> StorageError:
        typed = StorageError.from_os(error, doing="write", path=self.path)
        if isinstance(typed, OutOfSpaceError):
            typed.hint = "make room, or write to another disk; nothing of the new set is left"
        return typed

    def _check_free(self) -> None:
        there = [self.path + end for end in ENDS if os.path.lexists(self.path + end)]
        if there and not self._replace:
            raise UsageError(
                f"{there[0]} is there already", hint="choose another name, or replace the set with --force"
            )

    def _sweep(self, folder: str, name: str) -> None:
        """Remove what killed writers of this set have left."""
        for found in self._files.names(folder):
            if found.startswith(TEMPORARY) and any(found.endswith(f"-{name}{end}") for end in ENDS):
                path = os.path.join(folder, found)
                with suppress(OSError), self._files.opened(self._files.open_read(path)) as fd:
                    if not self._files.locked(fd):
                        self._files.unlink(path)

    def _abandon(self) -> None:
        for path in self._temporary.values():
            with suppress(OSError):
                self._files.unlink(path)
        self._temporary.clear()
        for file in self._open:
            with suppress(OSError):  # a full disk has been reported by the write that met it
                file.close()
        self._open.clear()
