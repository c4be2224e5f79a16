"""From a Holdfast step to a checkpoint that Orbax restores: OCDBT with zarr version 3, its newest layout.

All is made in a folder with Orbax's own mark of what is unfinished, read back, and renamed. States: being
made (`NAME.orbax-checkpoint-tmp`, locked) -> visible. A kill leaves the unfinished folder, which the next
export to the same place removes; Orbax ignores it. NAME is the target, or the new step that it is in.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from holdfast import faults
from holdfast.arrays import Rename
from holdfast.checkpoint.foreign.moving import LEAST_MEMORY, MEMORY, Bytes
from holdfast.checkpoint.foreign.orbax import tensorstore
from holdfast.checkpoint.foreign.orbax_layout import ExportTree, describe
from holdfast.checkpoint.foreign.orbax_tree import TEMPORARY
from holdfast.checkpoint.foreign.orbax_writer import OrbaxWriter
from holdfast.checkpoint.foreign.places import numbered
from holdfast.checkpoint.foreign.renaming import renaming
from holdfast.checkpoint.foreign.report import MovedArray, MoveReport
from holdfast.checkpoint.foreign.target import missing
from holdfast.checkpoint.step_reader import StepReader
from holdfast.checkpoint.steps import committed_steps, step_manifest
from holdfast.errors import LeaseError, NoCheckpointError, StorageError, UsageError
from holdfast.storage import Files, StoreOptions, is_url
from holdfast.storage import opened as opened_store

_LOCK: Final = "holdfast.lock"


def export_orbax(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    arrays: Sequence[str] | None = None,
    rename: Rename | None = None,
    empty: Sequence[str] = (),
    memory_limit: int = MEMORY,
    options: StoreOptions | None = None,
    progress: Bytes = lambda done, total: None,
) -> MoveReport:
    """Write a step as an Orbax checkpoint, for `StandardCheckpointer().restore(target)` and the like.

    `target` appears when every array has been read back and is equal; it must not be there before. For a
    `CheckpointManager`, let `target` be `ROOT/STEP/default`. Lists, tuples and dicts are not told apart in a
    Holdfast step: names that count from 0 become a list, so restore into a template to get your own types.
    What Orbax cannot hold (arrays without elements, bytes) is in the report's `skipped`.

    Args:
        source: the folder of a `Checkpointer`, or its URL.
        target: the folder to make, on a file system.
        step: which step; the newest if not given.
        empty: names of nodes without values, such as the `EmptyState` of an optax chain. A Holdfast step does
            not record them, but Orbax compares them with the template that it restores into.
        arrays, rename, memory_limit, options, progress: as of `import_checkpoint`.

    Blocks: until all is moved.
    Fails: NoCheckpointError, CorruptError naming the block, StorageError, UsageError; LeaseError while
    another export to the same place is under way.
    """
    if memory_limit < LEAST_MEMORY:
        raise UsageError(f"a memory limit of {memory_limit:,} bytes", hint=f"give at least {LEAST_MEMORY:,}")
    started = time.monotonic()
    library = tensorstore()
    store = opened_store(source, options)
    steps = committed_steps(store)
    if not steps and step is None:
        raise NoCheckpointError(
            f"there is no step in {store.root}", hint="holdfast ckpt ls shows what there is"
        )
    manifest = step_manifest(store, steps[-1] if step is None else step)
    path = _free(target)
    tree = ExportTree(library, manifest, arrays, renaming(rename), empty)
    total = 2 * sum(entry.nbytes for _, entry in tree.arrays)
    with _unfinished(path) as folder:
        writing = OrbaxWriter(library, folder, StepReader(store, manifest), memory_limit // 16)
        done = writing.write(tree, lambda count: progress(count, total))
        describe(folder, tree, manifest)
        digests = writing.check(tree, lambda count: progress(done + count, total))
        faults.site("export.written")
    return MoveReport(
        source=store.root,
        target=path,
        format="Orbax (OCDBT, zarr3)",
        step=manifest.save.step,
        arrays=tuple(
            MovedArray(name, entry.name, entry.dtype, entry.shape, entry.nbytes, digests[name])
            for name, entry in tree.arrays
        ),
        scalars=tuple(sorted(tree.scalars)),
        skipped=tuple(sorted(tree.skipped)),
        renamed=tuple(sorted(tree.renamed)),
        nbytes=total // 2,
        seconds=time.monotonic() - started,
    )


def _free(target: str | os.PathLike[str]) -> str:
    """The absolute path of a target that is not there. Fails: UsageError."""
    text = os.fspath(target)
    if is_url(text):
        raise UsageError(
            f"{text} is not on a file system", hint="export to a local disk, then copy the folder"
        )
    path = os.path.abspath(text)
    if os.path.lexists(path):
        raise UsageError(f"{path} is there already", hint="an export makes a new folder: give another name")
    return path


@contextmanager
def _unfinished(path: str) -> Iterator[str]:
    """A folder to fill that is `path` after the block; where that fails, it is removed again.

    Until then it, or the step that is new with it, has Orbax's mark in its name. The lock lies in it and is
    given up after the rename: an export that finds no lock takes what lies there for that of a killed one.
    """
    shown = _shown(path)
    folder, files, made = f"{shown}{TEMPORARY}", Files(), missing(os.path.dirname(shown))
    lock = os.path.join(folder, _LOCK)
    with _writing(folder):
        os.makedirs(folder, exist_ok=True)
        fd = files.create(lock)
    with files.opened(fd), _writing(folder):
        # Its last holder may have removed or moved it.
        if not (files.lock(fd) and files.is_at(fd, lock)):
            raise LeaseError(f"{folder} is being written by another process", hint="wait until it is done")
        try:
            _empty(folder)
            inner = os.path.join(folder, os.path.relpath(path, shown))
            os.makedirs(inner, exist_ok=True)
            yield os.path.normpath(inner)
            _sync(folder)
            os.rename(folder, shown)
        except BaseException:
            if files.is_at(fd, lock):
                with suppress(OSError):
                    _empty(folder)
                    os.unlink(lock)
                    for one in (folder, *made):
                        os.rmdir(one)
            raise
        os.unlink(os.path.join(shown, _LOCK))
        files.sync_folder(shown)
        files.sync_folder(os.path.dirname(shown))


def _shown(path: str) -> str:
    """What appears: the target, or the new step that it is in, which to Orbax is there with its folder."""
    parent = os.path.dirname(path)
    return path if numbered(parent) is None or os.path.lexists(parent) else parent


@contextmanager
def _writing(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError.from_os(error, doing="write", path=folder) from error


def _empty(folder: str) -> None:
    """Remove everything but the lock, which is held meanwhile."""
    with os.scandir(folder) as entries:
        found = list(entries)
    for one in found:
        if one.is_dir(follow_symlinks=False):
            shutil.rmtree(one.path)
        elif one.name != _LOCK:
            os.unlink(one.path)


def _sync(folder: str) -> None:
    """Make the entries of every folder below durable; tensorstore syncs the files it writes."""
    for path, _, _ in os.walk(folder):
        Files().sync_folder(path)
