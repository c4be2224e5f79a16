"""One committed step on its way to a mirror: parts, their indexes, and last the manifest, created if absent.

Blocks are verified as they are read, so that damage here never becomes damage there. What a mirror has whole
(the index of a part is there, byte for byte) is not sent again.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Final, final

from holdfast import faults
from holdfast.errors import (
    FormatError,
    HoldfastError,
    MissingPathError,
    StepExistsError,
    StorageError,
    VersionError,
)
from holdfast.format import (
    BLOCK,
    MANIFEST,
    MAX_INDEX,
    MAX_MANIFEST,
    Manifest,
    PartIndex,
    SaveId,
    block_range,
    check_block,
    check_size,
    data_name,
    decode_manifest,
    index_name,
    num_blocks,
    parse_file_name,
    part_index,
    step_folder,
)
from holdfast.storage import PartReader, PartWriter, Store, Version
from holdfast.vault.crew import Crew
from holdfast.vault.intents import Intent, announce, claim
from holdfast.vault.mirror_plan import Known, own_parts, standing

_BLOCK_S: Final = 600.0
"""The longest that reading and sending one block may take; the stores give up long before."""


class SourceGoneError(HoldfastError):
    """A file of the step that is to be copied is not there (any more)."""


Gate = Callable[[int], None]
"""Called before so many bytes are read and sent: it may wait, or raise to stop the copy."""


@final
class StepCopy:
    """The copy of one save, as far as one rank makes it.

    Fails: SourceGoneError, FormatError for damage here, StepExistsError, StorageError.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        step: int,
        *,
        rank: int,
        world: int,
        crew: Crew,
        width: int,
        gate: Gate,
    ) -> None:
        """`crew` sends at most `width` blocks at once."""
        self._source = source
        self._target = target
        self._folder = step_folder(step)
        with _from_source():
            self._data = source.read(self._folder, MANIFEST, max_bytes=MAX_MANIFEST)
        self.manifest: Manifest = decode_manifest(self._data)
        self._rank = rank
        self._world = world
        self._crew = crew
        self._width = width
        self._gate = gate

    @property
    def _known(self) -> Known:
        return Known(self.manifest.save, self.manifest.created)

    def is_whole(self) -> bool:
        """Whether the mirror has exactly this save. Fails: StepExistsError if it has one that must stay."""
        return standing(self._known, self._theirs()) == "whole"

    def _theirs(self) -> Known | None:
        if not self._target.exists(self._folder, MANIFEST):
            return None
        data = self._target.read(self._folder, MANIFEST, max_bytes=MAX_MANIFEST)
        try:
            found = decode_manifest(data)
        except VersionError:
            raise  # a newer Holdfast wrote it: not ours to replace
        except FormatError:
            mine = self.manifest.save  # damaged: nobody can load it
            return Known(SaveId(mine.run, mine.step, "damaged"), -math.inf)
        return Known(found.save, found.created)

    # ---- parts

    def announce(self) -> Intent:
        """Tell whoever cleans up there that this save is on its way, until the intent is closed."""
        return announce(self._target, self.manifest.save, self._rank, copied=True)

    def give(self) -> int:
        """Send this rank's parts, each with its index after it; the bytes that had to be sent."""
        self._target.make_folder(self._folder)
        there = set(self._target.names(self._folder))
        numbers = own_parts((entry.part for entry in self.manifest.parts), self._rank, self._world)
        return sum(self._give_part(part, there) for part in numbers)

    def _give_part(self, part: int, there: set[str]) -> int:
        name = index_name(part, self.manifest.save.attempt)
        with _from_source():
            data = self._source.read(self._folder, name, max_bytes=MAX_INDEX)
        index = part_index(self.manifest, part, data)
        if name in there and self._has(index, name, data, there):
            return 0
        sent = sum(self._give_file(index, number) for number in range(len(index.files)))
        faults.site("mirror.part")
        self._target.replace(self._folder, name, data=data)
        return sent + len(data)

    def _has(self, index: PartIndex, name: str, data: bytes, there: set[str]) -> bool:
        """Whether the mirror has a part whole: its index was written after its files were synced."""
        sizes = [self._target.size(self._folder, file.name) for file in index.files if file.name in there]
        if sizes != [file.size for file in index.files]:
            return False
        return self._target.read(self._folder, name, max_bytes=MAX_INDEX) == data

    def _give_file(self, index: PartIndex, number: int) -> int:
        entry = index.files[number]
        with _from_source():
            opened = self._source.open_part(self._folder, entry.name)
        with closing(opened) as reader:
            check_size(entry.name, reader.size, entry.size)
            with closing(self._target.write_part(self._folder, entry.name, size=entry.size)) as writer:
                self._give_blocks(index, number, reader, writer)
                writer.sync()
        return entry.size

    def _give_blocks(self, index: PartIndex, number: int, reader: PartReader, writer: PartWriter) -> None:
        running: deque[Future[None]] = deque()
        try:
            for block in range(num_blocks(index.files[number].size)):
                begin, end = block_range(block, index.files[number].size)
                self._gate(end - begin)
                while len(running) >= self._width:
                    running.popleft().result(_BLOCK_S)
                running.append(self._crew.submit(self._give_block, index, number, block, reader, writer))
            while running:
                running.popleft().result(_BLOCK_S)
        finally:
            # No thread may touch the files once the copy is given up.
            for future in running:
                future.cancel()
            for future in running:
                if not future.cancelled():
                    future.exception(_BLOCK_S)

    def _give_block(
        self, index: PartIndex, number: int, block: int, reader: PartReader, writer: PartWriter
    ) -> None:
        begin, end = block_range(block, index.files[number].size)
        # Memory of its own, page-aligned for direct writes: a store may go on reading it after `write`.
        buffer = memoryview(mmap.mmap(-1, BLOCK))
        got = reader.read_into(buffer, begin)
        data = buffer[: min(got, end - begin)]
        check_block(index, number, block, data)
        writer.write(data, begin)
        faults.site("mirror.block")

    # ---- the commit

    def is_complete(self) -> bool:
        """Whether every rank's parts are there."""
        self._target.make_folder(self._folder)
        there = set(self._target.names(self._folder))
        attempt = self.manifest.save.attempt
        # An index comes after its data, but whoever cleans up may have taken the one and not the other.
        return all(
            entry.index in there and data_name(entry.part, attempt) in there for entry in self.manifest.parts
        )

    def check_own(self) -> None:
        """Fails: StorageError if parts that this rank has sent are not there."""
        self._target.make_folder(self._folder)
        there = set(self._target.names(self._folder))
        numbers = own_parts((entry.part for entry in self.manifest.parts), self._rank, self._world)
        gone = [part for part in numbers if index_name(part, self.manifest.save.attempt) not in there]
        if gone:
            raise StorageError(
                f"parts {gone} of step {self.manifest.save.step} vanished from the mirror",
                path=self._target.path(self._folder),
                hint="does another process remove files there? they are sent again",
            )

    def commit(self) -> None:
        """Create the manifest: from here on the step is on the mirror. Only rank 0 calls this.

        Fails: AgreementError if another process took this copy for dead and cleaned up after it.
        """
        faults.site("mirror.complete")
        version = self._target.version(self._folder, MANIFEST)  # before it is read, so that no change is lost
        theirs = self._theirs()
        verdict = standing(self._known, theirs)
        if verdict != "whole":
            claim(self._target, self.manifest.save)
        match verdict:
            case "create":
                if not self._target.create(self._folder, MANIFEST, data=self._data) and not self.is_whole():
                    raise StepExistsError(
                        f"another process put its own step {self.manifest.save.step} on the mirror meanwhile",
                        hint="do two runs have the same mirror? give each its own",
                    )
            case "replace":
                assert theirs is not None
                self._replace(version, theirs.save.attempt)
            case "whole":
                pass
        self._target.sync_folder(self._folder)
        self._target.sync_folder()
        if not self.is_complete():
            # Somebody cleaned up between the look and the commit; a step that lacks a part is none.
            self._target.remove(self._folder, MANIFEST)
            raise StorageError(
                f"parts of step {self.manifest.save.step} vanished from the mirror as it was committed",
                path=self._target.path(self._folder),
                hint="does another process remove files there?",
            )
        faults.site("mirror.manifest")

    def _replace(self, version: Version | None, old: str) -> None:
        """Put this manifest over that of an earlier save of the step, whose parts then go."""
        if not self._target.replace(self._folder, MANIFEST, data=self._data, expected=version):
            raise StorageError(
                f"the manifest of step {self.manifest.save.step} on the mirror changed as it was replaced",
                path=self._target.path(self._folder, MANIFEST),
                hint="it is tried again",
            )
        for name in self._target.names(self._folder):
            parsed = parse_file_name(name)
            # Those of further attempts are left to the sweep, which knows whether somebody is at them.
            if parsed is not None and parsed.kind != "manifest" and parsed.attempt == old:
                self._target.remove(self._folder, name)


@contextmanager
def _from_source() -> Iterator[None]:
    try:
        yield
    except MissingPathError as error:
        raise SourceGoneError(error.message, hint=error.hint) from error


def attempt_of(store: Store, step: int) -> str | None:
    """The attempt that the manifest of a committed step names; None if there is none that can be read."""
    folder = step_folder(step)
    try:
        return decode_manifest(store.read(folder, MANIFEST, max_bytes=MAX_MANIFEST)).save.attempt
    except HoldfastError:
        return None
