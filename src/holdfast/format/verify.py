"""Whether every byte of a committed step is what was written.

Reads through the small protocol below, so that it runs on any storage and on a model of a crashed disk.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from holdfast.errors import CorruptError, HoldfastError
from holdfast.format.checksum import BLOCK, block_range, num_blocks
from holdfast.format.ids import MANIFEST, index_name, step_folder
from holdfast.format.index import PartIndex, check_block
from holdfast.format.limits import MAX_INDEX, MAX_MANIFEST
from holdfast.format.manifest import Manifest, PartEntry, decode_manifest, part_index, some_index
from holdfast.format.safetensors import decode_header


class PartBytes(Protocol):
    """An open part file."""

    size: int

    def read(self, offset: int, length: int) -> bytes: ...
    def read_into(self, buffer: memoryview, offset: int) -> int: ...
    def close(self) -> None: ...


class StepFiles(Protocol):
    """Where step folders are read from."""

    def read(self, *names: str, max_bytes: int) -> bytes: ...
    def open_part(self, *names: str) -> PartBytes: ...


class Problem(NamedTuple):
    """One thing that is wrong with a step."""

    file: str
    block: int | None
    arrays: tuple[str, ...]
    message: str
    cause: HoldfastError | None = None
    """What was met: a store may be in trouble and the step be whole."""


def read_manifest(files: StepFiles, folder: str) -> Manifest:
    """The manifest of a step, verified against its root."""
    return decode_manifest(files.read(folder, MANIFEST, max_bytes=MAX_MANIFEST))


def read_index(files: StepFiles, folder: str, manifest: Manifest, part: int) -> PartIndex:
    """The index of one part, verified against the manifest."""
    name = index_name(part, manifest.save.attempt)
    return part_index(manifest, part, files.read(folder, name, max_bytes=MAX_INDEX))


def read_some(files: StepFiles, folder: str, manifest: Manifest, entry: PartEntry) -> PartIndex:
    """The index of one part, verified against the manifest but for its slices (`check_slice`)."""
    return some_index(manifest, entry, files.read(folder, entry.index, max_bytes=MAX_INDEX))


def check_size(name: str, seen: int, expected: int) -> None:
    """CorruptError unless a part file has exactly the size that its index states."""
    if seen != expected:
        raise CorruptError(
            f"{name}: {seen:,} bytes, but its index says {expected:,}",
            hint="the file is truncated, extended or from another save",
            file=name,
        )


def verify_step(
    files: StepFiles, folder: str, *, progress: Callable[[int], None] | None = None
) -> Iterator[Problem]:
    """Every problem of a step, found as the bytes are read; none means whole and verified.

    `progress` is told the bytes verified so far.
    """
    try:
        manifest = read_manifest(files, folder)
    except HoldfastError as error:
        yield _problem(MANIFEST, error)
        return
    if folder != step_folder(manifest.save.step):
        text = f"{folder}: its manifest is that of step {manifest.save.step}; the folder was renamed"
        yield Problem(MANIFEST, None, (), text)
    done = 0
    for entry in manifest.parts:
        try:
            index = read_index(files, folder, manifest, entry.part)
        except HoldfastError as error:
            yield _problem(entry.index, error)
            continue
        for number, part_file in enumerate(index.files):
            try:
                part = files.open_part(folder, part_file.name)
            except HoldfastError as error:
                yield _problem(part_file.name, error)
                continue
            try:
                for nbytes, problem in _verify_file(index, number, part):
                    done += nbytes
                    if progress is not None:
                        progress(done)
                    if problem is not None:
                        yield problem
            finally:
                part.close()


def _verify_file(index: PartIndex, number: int, part: PartBytes) -> Iterator[tuple[int, Problem | None]]:
    entry = index.files[number]
    try:
        check_size(entry.name, part.size, entry.size)
        decode_header(part.read, part.size, name=entry.name)
    except HoldfastError as error:
        yield 0, _problem(entry.name, error)
    buffer = memoryview(mmap.mmap(-1, BLOCK))  # page-aligned, as direct reads need
    for block in range(num_blocks(entry.size)):
        begin, end = block_range(block, entry.size)
        try:
            got = part.read_into(buffer, begin)
            check_block(index, number, block, buffer[: min(got, end - begin)])
        except HoldfastError as error:
            yield end - begin, _problem(entry.name, error, block)
        else:
            yield end - begin, None


def _problem(file: str, error: HoldfastError, block: int | None = None) -> Problem:
    if isinstance(error, CorruptError):
        return Problem(error.file or file, error.block, error.arrays, error.message, error)
    return Problem(file, block, (), error.message, error)
