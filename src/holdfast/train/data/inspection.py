"""What people want to know of a token set, and a check of all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import xxhash

from holdfast.errors import DataError
from holdfast.train.data.tokenizer import BYTE, Tokenizer, make_tokenizer
from holdfast.train.data.tokens import TokenSet, check_ids, opened

_WINDOW: Final = 1 << 20
_BEGINNING: Final = 24
_CHARACTERS: Final = 72


class Overview(NamedTuple):
    """A set at a glance."""

    path: str
    documents: int
    tokens: int
    dtype: str
    nbytes: int
    shortest: int
    longest: int
    median: int
    tokenizer: str | None
    vocab_size: int | None
    eod: int | None
    fingerprint: str


def overview(path: str) -> Overview:
    """What the set `path` holds. Validates its index; fails: DataError."""
    tokens = opened(path)
    try:
        lengths = np.diff(tokens.documents)
        total, card = int(tokens.documents[-1]), tokens.card
        return Overview(
            path=path,
            documents=len(lengths),
            tokens=total,
            dtype=tokens.dtype.name,
            nbytes=total * tokens.dtype.itemsize,
            shortest=int(lengths.min(initial=total)),
            longest=int(lengths.max(initial=0)),
            median=int(np.median(lengths)) if len(lengths) else 0,
            tokenizer=card.tokenizer if card else None,
            vocab_size=card.vocab_size if card else None,
            eod=card.eod if card else None,
            fingerprint=tokens.fingerprint,
        )
    finally:
        tokens.close()


def verify(path: str, *, progress: Callable[[int], None] = lambda done: None) -> None:
    """Read every token of the set. Fails: DataError for an id outside of the vocabulary, or another
    digest."""
    tokens = opened(path)
    try:
        digest = _digest(tokens, progress)
    finally:
        tokens.close()
    if tokens.card is not None and digest != tokens.card.tokens_digest:
        file, _ = tokens.place(0)
        raise DataError(
            f"{file}, byte 0: the digest of all tokens is {digest}; written was {tokens.card.tokens_digest}",
            file=file,
            offset=0,
            hint="the file is damaged; make the set again",
        )


def _digest(tokens: TokenSet, progress: Callable[[int], None]) -> str:
    running = xxhash.xxh3_128()
    total = int(tokens.documents[-1])
    vocab_size = tokens.card.vocab_size if tokens.card else 2**31
    for start in range(0, total, _WINDOW):
        window = np.empty(min(_WINDOW, total - start), tokens.dtype)
        tokens.window(start, window)
        check_ids(tokens, window, start, vocab_size)
        running.update(window.tobytes())
        progress((start + len(window)) * window.itemsize)
    return running.hexdigest()


def beginnings(path: str, number: int, *, tokenizer: str | None = None) -> list[tuple[int, str]]:
    """The first `number` documents and what they begin with, as the tokenizer reads it; without one, ids.

    Sets of bytes need none to be named. Fails: UsageError; DataError for a tokenizer that did not make it.
    """
    tokens = opened(path)
    try:
        reader = _reader(tokens, tokenizer)
        return [(at, _beginning(tokens, at, reader)) for at in range(min(number, len(tokens.documents) - 1))]
    finally:
        tokens.close()


def _reader(tokens: TokenSet, name: str | None) -> Tokenizer | None:
    card = tokens.card
    if name is None and card is not None and card.tokenizer == BYTE:
        name = BYTE
    if name is None:
        return None
    reader = make_tokenizer(name)
    if card is not None and card.tokenizer_digest != reader.digest:
        message = f"{tokens.path} was made with {card.tokenizer!r}, not with {name!r}"
        raise DataError(message, file=tokens.path, hint="name the tokenizer that made it")
    return reader


def _beginning(tokens: TokenSet, document: int, reader: Tokenizer | None) -> str:
    start, end = tokens.documents[document : document + 2].tolist()
    window = np.empty(min(end - start, _BEGINNING if reader is None else _CHARACTERS), tokens.dtype)
    tokens.window(start, window)
    if reader is None:
        return " ".join(map(str, window.tolist())) + (" ..." if end - start > len(window) else "")
    return repr(reader.decode(window.tolist())[:_CHARACTERS])
