"""Token sets from text: which files, which documents in them, and their tokens."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple, cast, final

import msgspec

from holdfast.errors import DataError, StorageError, UsageError
from holdfast.train.data.card import Card
from holdfast.train.data.tokenizer import make_tokenizer
from holdfast.train.data.writer import TokenWriter

KINDS: Final = ("file", "line", "paragraph")
_TEXT: Final = (".txt", ".text", ".md")
_LINES: Final = (".jsonl", ".ndjson")
_GZIP: Final = ".gz"
_ENDS: Final = ", ".join((*_TEXT, *_LINES))
_MOST_LINE: Final = 1 << 30
_MOST_BATCH: Final = 256
_BATCH_BYTES: Final = 4 << 20
_TELL_BYTES: Final = 1 << 20

Progress = Callable[[int], None]
"""Told the bytes read so far, of the files as they lie on disk."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How text becomes tokens."""

    tokenizer: str = "byte"
    """`byte`, or the path of a tokenizer.json."""
    field: str = "text"
    """The member of each JSON line that has the text; dots go inside: `data.body`."""
    document: str = "file"
    """What is a document of a text file: the file, a line, or a paragraph (blank lines are between them)."""
    eod: str | None = None
    """The token that ends a document, where the tokenizer has an unusual one."""
    with_eod: bool = True
    """Whether documents end with that token."""


class Built(NamedTuple):
    """What came of it."""

    card: Card
    files: int
    empty: int
    """Documents without text, left out."""


class Document(NamedTuple):
    """Text, and where it was found."""

    text: bytes
    file: str
    offset: int


def input_files(paths: Sequence[str]) -> list[str]:
    """The files that `paths` stand for: files themselves, and all text and JSON lines below folders, by name.

    Fails: UsageError for a path that is not there, or a folder without any; StorageError for a folder in one
    that may not be read.
    """
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            inside = sorted(_below(path))
            if not inside:
                raise UsageError(
                    f"{path} has no text in it", hint=f"files are {_ENDS}, each also with {_GZIP}"
                )
            found += inside
        elif os.path.isfile(path):
            if not _is_text(path):
                raise UsageError(
                    f"{path} is neither text nor JSON lines, by its name",
                    hint=f"files are {_ENDS}, each also with {_GZIP}; rename it if it is one of them",
                )
            found.append(path)
        else:
            raise UsageError(f"{path} is not there", hint="name text files, JSON lines, or folders of them")
    twice = {path for path in found if found.count(path) > 1} if len(found) < 10_000 else set()
    if twice:
        raise UsageError(f"{min(twice)} is given more than once", hint="name each file once")
    return found


def build(
    paths: Sequence[str], out: str, recipe: Recipe, *, replace: bool = False, progress: Progress | None = None
) -> Built:
    """Write the token set `out` from the text at `paths`, in their order.

    Nothing of it is visible before all of it is. Fails: UsageError; DataError for text that cannot be read,
    with file and offset; StorageError.
    """
    files = input_files(paths)
    tokenizer = make_tokenizer(recipe.tokenizer, eod=recipe.eod)
    if recipe.with_eod and tokenizer.eod is None:
        raise UsageError(
            f"{recipe.tokenizer} has no token that is known to end documents",
            hint="name it with --eod TOKEN, or write none with --no-eod",
        )
    empty = 0
    with TokenWriter(out, tokenizer, with_eod=recipe.with_eod, replace=replace) as writer:
        for batch in _batches(_documents(files, recipe, progress or (lambda done: None))):
            full = [document for document in batch if document.text]
            empty += len(batch) - len(full)
            try:
                encoded = tokenizer.encode([document.text for document in full])
            except DataError:
                raise _not_text(full) from None
            for tokens in encoded:
                writer.add(tokens)
        if not writer.num_documents:
            raise UsageError(f"no text in {', '.join(map(str, paths))}", hint="is --field the right one?")
        return Built(writer.finish(), len(files), empty)


def _below(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise StorageError.from_os(error, doing="read", path=error.filename) from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and _is_text(name):
                yield os.path.join(place, name)


def _is_text(name: str) -> bool:
    return name.removesuffix(_GZIP).endswith((*_TEXT, *_LINES))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Some documents at a time: enough to keep a tokenizer's threads busy, few enough to hold."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) >= _MOST_BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(files: list[str], recipe: Recipe, progress: Progress) -> Iterator[Document]:
    before = told = 0
    for path in files:
        try:
            with open(path, "rb") as raw:
                for document in _file_documents(path, raw, recipe):
                    if before + raw.tell() - told >= _TELL_BYTES:
                        told = before + raw.tell()
                        progress(told)
                    yield document
            before += os.path.getsize(path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{path} is not a whole gzip file: {error}", file=path, hint="copy it again"
            ) from error
        except OSError as error:
            hint = "check that it is there and may be read"
            raise DataError(f"cannot read {path}: {error.strerror}", file=path, hint=hint) from error
    progress(before)


def _file_documents(path: str, raw: BinaryIO, recipe: Recipe) -> Iterator[Document]:
    plain = path.removesuffix(_GZIP)
    file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.endswith(_GZIP) else raw
    if plain.endswith(_LINES):
        return _json_lines(path, file, recipe.field.split("."))
    if recipe.document == "line":
        return (Document(line.rstrip(b"\r\n"), path, at) for at, line in _lines(path, file))
    if recipe.document == "paragraph":
        return _paragraphs(path, file)
    return iter([Document(file.read(), path, 0)])


def _lines(path: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    at = 0
    while line := file.readline(_MOST_LINE):
        if len(line) == _MOST_LINE:
            hint = "is it text? JSON lines have one document each"
            raise DataError(f"{path}, byte {at:,}: a line beyond 1 GiB", file=path, offset=at, hint=hint)
        yield at, line
        at += len(line)


def _paragraphs(path: str, file: BinaryIO) -> Iterator[Document]:
    lines: list[bytes] = []
    begin = 0
    for at, line in _lines(path, file):
        if line.strip():
            begin = begin if lines else at
            lines.append(line)
        elif lines:
            yield Document(b"".join(lines).rstrip(), path, begin)
            lines = []
    if lines:
        yield Document(b"".join(lines).rstrip(), path, begin)


def _json_lines(path: str, file: BinaryIO, field: list[str]) -> Iterator[Document]:
    for number, (at, line) in enumerate(_lines(path, file), 1):
        if not line.strip():
            continue
        try:
            told: Any = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _bad_line(path, at, number, f"not JSON: {error}", "each line is one JSON object") from None
        text = told
        for name in field:
            text = text.get(name) if isinstance(text, dict) else None
        if not isinstance(text, str):
            raise _bad_line(path, at, number, *_no_text(told, text, field))
        yield Document(text.encode(errors="surrogatepass"), path, at)


def _no_text(told: Any, text: Any, field: list[str]) -> tuple[str, str]:
    """What is wrong with a line that has no text, and what to do."""
    seen = "nothing" if text is None else f"a {type(text).__name__}"
    hint = "--field says which member has the text"
    if isinstance(told, dict) and told:
        members = ", ".join(sorted(told)[:8])
        hint += f"; this line has {members if len(members) <= 80 else members[:77] + '...'}"
    return f"{seen} where the text {'.'.join(field)!r} is expected", hint


def _bad_line(path: str, at: int, number: int, what: str, hint: str) -> DataError:
    return DataError(f"{path}, line {number:,}, byte {at:,}: {what}", file=path, offset=at, hint=hint)


def _not_text(documents: list[Document]) -> DataError:
    """The error for the first document that is not UTF-8."""
    for document in documents:
        try:
            document.text.decode()
        except UnicodeDecodeError as error:
            at = document.offset + error.start
            message = f"{document.file}, byte {at:,}: {document.text[error.start]:#04x} is not UTF-8"
            hint = "convert the file, e.g. with iconv, or use the byte tokenizer"
            return DataError(message, file=document.file, offset=at, hint=hint)
    raise AssertionError("a tokenizer refused UTF-8 text")
