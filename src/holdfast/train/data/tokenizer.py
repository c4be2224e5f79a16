"""Tokenizers: bytes as they are, or a `tokenizer.json` of Hugging Face's `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import DataError, UsageError

BYTE: Final = "byte"
_ENDS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|end|>",
    "[EOS]",
    "[SEP]",
)
"""What families of models put behind a document; the first that is known is taken."""


class Tokenizer(Protocol):
    """Text in, ids out."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """Of everything that decides how text is cut."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eod(self) -> int | None:
        """The id that ends a document, if there is one."""
        ...

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        """The ids of each document, without an end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """About the text of `ids`, for people."""
        ...


@final
class ByteTokenizer:
    """Each byte is its own token; 256 ends a document."""

    name = BYTE
    digest = "byte-1"
    vocab_size = 257
    eod = 256

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        return [np.frombuffer(document, np.uint8).astype(np.uint16) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without ends; bytes that are no text are replaced."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


@final
class FileTokenizer:
    """A tokenizer.json. `eod` names the token that ends a document; None finds it by the usual names.

    Fails: UsageError, if `tokenizers` is not installed, the file is none, or there is no such token.
    """

    def __init__(self, path: str, *, eod: str | None = None) -> None:
        self.name = os.path.basename(path)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise UsageError(
                f"cannot read the tokenizer {path}: {error.strerror}",
                hint="give `byte`, or the path of a tokenizer.json",
            ) from error
        self.digest = xxhash.xxh3_128_hexdigest(data)
        self._inner = _loaded(path, data)
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # Not the number of entries: added tokens may leave holes.
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.eod = _end(path, vocabulary, eod)

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any]]:
        texts = [_text(document) for document in documents]
        kind = np.uint16 if self.vocab_size < 65500 else np.int32
        # A batch is spread over all cores, outside of the GIL.
        found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, kind) for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))


def make_tokenizer(name: str, *, eod: str | None = None) -> Tokenizer:
    """`byte`, or the tokenizer in a file. Fails: UsageError."""
    if name != BYTE:
        return FileTokenizer(name, eod=eod)
    if eod is not None:
        raise UsageError(
            f"the byte tokenizer ends documents with id 256, not with {eod!r}", hint="leave it out"
        )
    return ByteTokenizer()


def _loaded(path: str, data: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as error:
        raise UsageError(
            f"{path} needs the package `tokenizers`, which is not installed",
            hint="pip install 'holdfast[data]', or use the byte tokenizer",
        ) from error
    try:
        return Inner.from_buffer(data)
    except Exception as error:  # it raises Exception itself
        hint = "it is the file that `tokenizer.save(path)` of tokenizers or transformers writes"
        raise UsageError(f"{path} is not a tokenizer.json: {error}", hint=hint) from error


def _end(path: str, vocabulary: dict[str, int], name: str | None) -> int | None:
    if name is None:
        return next((vocabulary[one] for one in _ENDS if one in vocabulary), None)
    if name not in vocabulary:
        raise UsageError(f"{path} has no token {name!r}", hint="name one that the tokenizer has")
    return vocabulary[name]


def _text(document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        message = f"a document is not UTF-8: byte {document[error.start]:#04x} at {error.start:,}"
        raise DataError(message, offset=error.start, hint="convert the file, e.g. with iconv") from error
