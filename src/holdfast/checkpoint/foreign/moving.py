"""From other libraries' checkpoints into a Holdfast folder."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final

from holdfast.arrays import Rename, encode_scalar, join, match
from holdfast.checkpoint.foreign import places
from holdfast.checkpoint.foreign.plan import Planned, planned
from holdfast.checkpoint.foreign.renaming import renaming
from holdfast.checkpoint.foreign.report import MovedArray, MoveReport, Renamed
from holdfast.checkpoint.foreign.source import ForeignStep, Scalar, Skipped
from holdfast.checkpoint.foreign.target import Progress, StepTarget
from holdfast.errors import TreeError, UsageError
from holdfast.format import BLOCK, check_meta
from holdfast.storage import StoreOptions
from holdfast.storage import opened as opened_store

MEMORY: Final = 1 << 30
"""Bytes that a move may take, if nothing else is said."""

LEAST_MEMORY: Final = 256 << 20
_THREADS: Final = 4
_BLOCKS: Final = (2 * _THREADS + 2) * BLOCK
"""Of the blocks that are under way."""

Bytes = Callable[[int, int], None]
"""Told the bytes done, and of how many."""


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    arrays: Sequence[str] | None = None,
    rename: Rename | None = None,
    item: str | None = None,
    overwrite: bool = False,
    check_source: bool = True,
    memory_limit: int = MEMORY,
    options: StoreOptions | None = None,
    progress: Bytes = lambda done, total: None,
) -> MoveReport:
    """Bring a checkpoint of Orbax or of torch's `torch.distributed.checkpoint` into a Holdfast folder.

    The step is committed when every array has been read back and its bytes are those that were read from the
    source; until then nothing of it is visible. What has no place in a Holdfast step is in the report's
    `skipped`, with the reason. Blocks: until all is moved. torch is not needed, and nothing is unpickled.

    Args:
        source: an Orbax checkpoint, item or step, a torch checkpoint, or a folder of such steps.
        target: the folder of a `Checkpointer`, or its URL; made if it is not there.
        step: of several steps in `source`, which to take (the newest if not given); of a single checkpoint,
            the number to give it, if not the one in its folder's name.
        arrays: patterns of names (see `holdfast.arrays.match`); what matches none of them is skipped.
        rename: rules from a source name, or the beginning of one, to a new one, with `*` for a component;
            or a function from name to name. Patterns in `arrays` are about the names before.
        item: of the items of an Orbax step, the one to take.
        overwrite: replace a step that is there.
        check_source: compare torch tensors with the CRC-32 that was saved with them.
        memory_limit: bytes to take at most, as far as the source allows: a chunk of Orbax is decoded whole.
        options: how to reach an object store.
        progress: told bytes done and bytes to do; each byte counts twice, written and read back.

    Fails: FormatError, CorruptError and StorageError naming the file; UsageError and MissingPathError for a
    source that is none; StepExistsError; LeaseError while a run writes to the folder.
    """
    if memory_limit < LEAST_MEMORY:
        raise UsageError(f"a memory limit of {memory_limit:,} bytes", hint=f"give at least {LEAST_MEMORY:,}")
    started = time.monotonic()
    place = places.found(os.fspath(source), step)
    rule = renaming(rename)
    store = opened_store(target, options)
    with closing(places.opened(place, item=item, check_source=check_source)) as foreign:
        number = _number(foreign, step)
        chosen = _Chosen(foreign, arrays, rule)
        # A tile is there as its source returns it and as it is handed over, and what it was decoded from.
        tile = max(BLOCK, (memory_limit - _BLOCKS) // 4)
        plan = [planned(one, name, tile_bytes=tile) for name, one in sorted(chosen.arrays.items())]
        total = 2 * sum(one.entry.nbytes for one in plan)
        meta = check_meta({**foreign.meta, "imported": {"from": foreign.path, "format": foreign.format}})
        with StepTarget(store, number, overwrite=overwrite, threads=_THREADS) as step_target:
            digests = step_target.write(plan, chosen.scalars, meta, _bounded(progress, total))
    return MoveReport(
        source=foreign.path,
        target=store.root,
        format=foreign.format,
        step=number,
        arrays=tuple(_moved(one, digests[one.name]) for one in plan),
        scalars=tuple(sorted(chosen.scalars)),
        skipped=tuple(sorted(chosen.skipped)),
        renamed=tuple(sorted(chosen.renamed)),
        nbytes=total // 2,
        seconds=time.monotonic() - started,
    )


def _bounded(progress: Bytes, total: int) -> Progress:
    return lambda done: progress(min(done, total), total)


def _moved(one: Planned, digest: str) -> MovedArray:
    entry = one.entry
    return MovedArray(one.name, one.array.source_name, entry.dtype, entry.shape, entry.nbytes, digest)


def _number(foreign: ForeignStep, step: int | None) -> int:
    number = foreign.step if step is None else step
    if number is None:
        raise UsageError(
            f"{foreign.path}: neither the name of the folder nor its metadata says which step it is",
            hint="give one: step=1200 (--step 1200)",
        )
    return number


class _Chosen:
    """What of a checkpoint is moved, under which names. Fails: UsageError where two get the same one."""

    def __init__(
        self, foreign: ForeignStep, patterns: Sequence[str] | None, rename: Callable[[str], str]
    ) -> None:
        self.skipped = list(foreign.skipped)
        self.renamed: list[Renamed] = []
        self._patterns = patterns
        self._rename = rename
        named = [(self._name(one.keys), one) for one in foreign.arrays]
        values = [(self._name(keys), value) for keys, value in foreign.scalars]
        self.arrays = {name: one for name, one in named if name is not None}
        self.scalars: dict[str, Scalar] = {
            name: value for name, value in values if name is not None and self._storable(name, value)
        }
        counts = Counter(name for name, _ in [*named, *values] if name is not None)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise UsageError(
                f"{len(twice)} names would be given twice, such as {twice[0]}",
                hint="change the rules of --map so that names stay apart",
            )
        if not self.arrays and not self.scalars:
            raise UsageError(
                f"{foreign.path}: nothing in it is to be moved",
                hint="its arrays match none of the patterns" if patterns else "it holds no array",
            )

    def _name(self, keys: tuple[str, ...]) -> str | None:
        path = join(keys)
        if self._patterns is not None and not match(self._patterns, path):
            self.skipped.append(Skipped(path, "matches none of the patterns that were given"))
            return None
        name = self._rename(path)
        if name != path:
            self.renamed.append(Renamed(path, name))
        return name

    def _storable(self, name: str, value: Any) -> bool:
        try:
            encode_scalar(value)
        except TreeError as error:
            self.skipped.append(Skipped(name, error.message))
            return False
        return True
