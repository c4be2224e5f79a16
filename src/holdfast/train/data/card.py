"""The card of a token set: a small JSON file beside it, with what the published layout has no room for.

Sets of other tools have none; then the config says what is in it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import xxhash

from holdfast.errors import DataError

FORMAT: Final = "holdfast tokens"
VERSION: Final = 1
_MOST_BYTES: Final = 1 << 20
_CHUNK: Final = 8 << 20
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a token set was made, and digests of its two files."""

    format: str = FORMAT
    version: int = VERSION
    tokenizer: str
    """`byte`, or the file name of a tokenizer.json."""
    tokenizer_digest: str
    vocab_size: Annotated[int, msgspec.Meta(ge=1)]
    eod: int | None
    """The token behind each document, if there is one."""
    documents: _Count
    tokens: _Count
    tokens_digest: str
    """xxh3_128 of the .bin."""
    index_digest: str
    """xxh3_128 of the .idx."""


def encode_card(card: Card) -> bytes:
    """The bytes of the file."""
    return msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"


def read_card(path: str) -> Card | None:
    """The card at `path`, or None if there is none. Fails: DataError for a file that is no card."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", file=path, hint="check its mode") from error
    try:
        card = msgspec.json.decode(data, type=Card)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _refused(path, f"is not the card of a token set: {error}") from None
    if card.format != FORMAT or card.version != VERSION:
        raise _refused(path, f"is {card.format!r} version {card.version}; {FORMAT!r} {VERSION} can be read")
    return card


def _refused(path: str, what: str) -> DataError:
    hint = "make the set again; a set of another tool has no such file"
    return DataError(f"{path}, byte 0: {what}", file=path, offset=0, hint=hint)


def file_digest(path: str) -> str:
    """The xxh3_128 of a whole file."""
    running = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            running.update(chunk)
    return running.hexdigest()
