"""Token sets open for reading: a pair of `.bin` and `.idx` files, or the built-in corpus.

Tokens are read by `pread` and not through a map of the file: a file that shrinks or fails under a map kills
the process without a word; here it is a DataError that names file and offset. The page cache serves both
alike.
"""

from __future__ import annotations

import os
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import DataError
from holdfast.train.data.card import Card, file_digest, read_card
from holdfast.train.data.config import TINY
from holdfast.train.data.content import content_digest
from holdfast.train.data.corpus import tiny_documents
from holdfast.train.data.layout import Index, Offsets, missing, read_index
from holdfast.train.data.tokenizer import ByteTokenizer

Tokens = npt.NDArray[Any]
_DAMAGED: Final = "the file is damaged, or was made with another tokenizer or vocab_size"


class TokenSet(Protocol):
    """Documents of tokens, laid end to end."""

    path: str
    fingerprint: str
    """Of the index: the same for copies of a set."""
    content: str
    """Of the tokens, as `content_digest` has it; empty: the fingerprint is of them."""
    documents: Offsets
    """The first token of each document, and the end of the last."""

    @property
    def card(self) -> Card | None:
        """What is known of how it was made."""
        ...

    def window(self, start: int, out: Tokens) -> None:
        """Fill `out` with the tokens from `start` on. Fails: DataError."""
        ...

    def place(self, token: int) -> tuple[str, int]:
        """The file and the byte in it where a token lies."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens as they are stored."""
        ...

    def close(self) -> None: ...


@final
class TokenFiles:
    """The set whose files begin with `path`. Opens and validates them; fails: DataError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.card = read_card(f"{path}.json")
        # Before the tokens: a set that is being replaced has no index for a moment.
        self._index: Index = read_index(f"{path}.idx", f"{path}.bin")
        self.documents = self._index.documents
        self.fingerprint = file_digest(f"{path}.idx")
        if self.card is not None:
            self._check_card(self.card)
        try:
            self._fd = os.open(f"{path}.bin", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise missing(f"{path}.bin", error) from error
        try:
            self.content = content_digest(self._fd)
        except OSError as error:
            self.close()
            raise missing(f"{path}.bin", error) from error

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._index.dtype

    def _check_card(self, card: Card) -> None:
        index = self._index
        said = (card.index_digest, card.documents, card.tokens)
        if said != (self.fingerprint, index.num_documents, index.num_tokens):
            raise DataError(
                f"{self.path}.idx, byte 0: {index.num_documents:,} documents, {index.num_tokens:,} tokens "
                f"and digest {self.fingerprint}; {self.path}.json has {card.documents:,}, {card.tokens:,} "
                f"and {card.index_digest}",
                file=f"{self.path}.idx",
                offset=0,
                hint="one of the two is damaged or from another set; make it again",
            )

    def window(self, start: int, out: Tokens) -> None:
        offset = start * out.itemsize
        try:
            got = os.preadv(self._fd, [out.view(np.uint8).data], offset)
        except OSError as error:
            raise DataError(
                f"{self.path}.bin, byte {offset:,}: cannot be read: {error.strerror}",
                file=f"{self.path}.bin",
                offset=offset,
                hint="look at the disk, or at the server that the file lies on",
            ) from error
        if got != out.nbytes:
            raise DataError(
                f"{self.path}.bin, byte {offset + got:,}: ends early, {out.nbytes - got:,} bytes are missing",
                file=f"{self.path}.bin",
                offset=offset + got,
                hint="the file was cut off while in use",
            )

    def place(self, token: int) -> tuple[str, int]:
        return f"{self.path}.bin", token * self.dtype.itemsize

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@final
class BuiltinTokens:
    """The corpus that comes with the package, as bytes."""

    def __init__(self) -> None:
        tokenizer = ByteTokenizer()
        eod = np.array([tokenizer.eod], np.uint16)
        documents = tokenizer.encode(tiny_documents())
        self.path = TINY
        self._tokens = np.concatenate([part for tokens in documents for part in (tokens, eod)])
        self.documents = np.cumsum([0, *(len(tokens) + 1 for tokens in documents)], dtype=np.int64)
        digest = xxhash.xxh3_128_hexdigest(self._tokens.tobytes())
        self.fingerprint, self.content = digest, ""
        self.card = Card(
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            documents=len(documents),
            tokens=len(self._tokens),
            tokens_digest=digest,
            index_digest=digest,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._tokens.dtype

    def window(self, start: int, out: Tokens) -> None:
        out[:] = self._tokens[start : start + len(out)]

    def place(self, token: int) -> tuple[str, int]:
        return self.path, token

    def close(self) -> None:
        pass


def opened(path: str) -> TokenSet:
    """The token set of a source. Fails: DataError."""
    return BuiltinTokens() if path == TINY else TokenFiles(path)


def check_ids(tokens: TokenSet, window: Tokens, start: int, vocab_size: int) -> None:
    """Refuse a window with an id that is not below `vocab_size`. Fails: DataError with file and offset."""
    low, high = int(window.min()), int(window.max())
    if low >= 0 and high < vocab_size:
        return
    at = int(((window < 0) | (window >= vocab_size)).argmax())
    file, offset = tokens.place(start + at)
    raise DataError(
        f"{file}, byte {offset:,}: token id {int(window[at]):,}, in a vocabulary of {vocab_size:,}",
        file=file,
        offset=offset,
        hint=_DAMAGED,
    )
