"""From a tree, or from a checkpoint, to a repository: the mapping of a load read backwards.

Tensor by tensor: the plan of a load says which strided copies would fill each box of a leaf from the tensor;
run from right to left they make the tensor. It streams into the file in blocks of 8 MiB. On a file system the
repository is made in a folder beside its own and renamed when all of it is durable; on an object store the
index, or the one file, comes last, and nothing loads without it. What a killed export left there is removed
by the next one to the same place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from holdfast.arrays import Bytes1D, match
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.pages import region
from holdfast.checkpoint.hub.copying import copy
from holdfast.checkpoint.hub.mapping import NameMap
from holdfast.checkpoint.hub.packed import PACKED, packed
from holdfast.checkpoint.hub.places import Target, check_free, target
from holdfast.checkpoint.hub.repository import INDEX
from holdfast.checkpoint.hub.sources import Piece, Source, Stored, live_source
from holdfast.checkpoint.hub.streams import Stream
from holdfast.checkpoint.hub.tensors import Described, Export, Made, Shard, sharded, weight_map
from holdfast.checkpoint.step_reader import StepReader
from holdfast.checkpoint.steps import committed_steps, step_manifest
from holdfast.errors import MismatchError, NoCheckpointError, UsageError
from holdfast.format import encode_header
from holdfast.storage import LocalStore, Store, StoreOptions, opened

SHARD_BYTES: Final = 5 << 30
"""The most bytes of tensors in one file: what `transformers` writes."""


def save_hub(
    place: str | os.PathLike[str],
    tree: Any,
    mapping: NameMap | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    options: StoreOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the arrays of a tree as a repository of safetensors files, with an index if there are several.

    `mapping` is the one that `load_hub` takes; `dtype` what all values are converted to; `files` more files,
    such as config.json. The place must not exist, or be empty, or hold what a killed export left, which is
    removed; nothing loads from there until all of it is written.

    Called by: one process, which has all of the tree. Blocks: while writing. Takes, beside the tree, 8 MiB of
    memory, and where devices are not the host one leaf. Fails: MismatchError with everything that cannot be
    written, before anything is; LeaseError while another export writes there; UsageError, StorageError.
    """
    check_free(place, options)
    export, live = live_source(tree, mapping or NameMap(rest=True), dtype)
    _write(place, export, live, shard_bytes, files or {}, options, progress)


def export_hub(
    place: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    mapping: NameMap | None = None,
    *,
    step: int | None = None,
    part: str = "",
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
    options: StoreOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write a step of a checkpoint folder (the newest, unless `step` says) as a repository; returns the step.

    `part` is the branch of the tree that is exported, such as "params"; leaves are named from there on. What
    is read is verified. Everything else is as for `save_hub`. Takes 80 MiB and what the largest tensor takes.
    Fails: NoCheckpointError, CorruptError, and as `save_hub` does.
    """
    check_free(place, options)
    store = opened(checkpoint, options)
    steps = committed_steps(store)
    if step is None and not steps:
        raise NoCheckpointError(
            f"there is no step in {store.root}", hint="give the folder of step-... folders"
        )
    chosen = steps[-1] if step is None else step
    manifest = step_manifest(store, chosen)
    entries = [one for one in manifest.arrays if not part or match(part, one.name)]
    if not entries or any(one.kind == "key" for one in entries):
        raise UsageError(
            f"step {chosen} has {'PRNG keys' if entries else 'no arrays'} under {part!r}",
            hint="part= names the branch of the tree with the weights, such as params",
        )
    head = f"{part}/" if part else ""
    leaves = [Described(one.name.removeprefix(head), dtype_of(one.dtype), one.shape) for one in entries]
    export = Export(leaves, mapping or NameMap(rest=True), dtype)
    source = Stored(export, StepReader(store, manifest), entries)
    _write(place, export, source, shard_bytes, files or {}, options, progress)
    return chosen


def _write(
    place: str | os.PathLike[str],
    export: Export,
    source: Source,
    shard_bytes: int,
    files: Mapping[str, bytes],
    options: StoreOptions | None,
    progress: Callable[[int], None] | None,
) -> None:
    shards = sharded(export.tensors.values(), shard_bytes)
    source.begin([made for shard in shards for made in shard.tensors])
    last = {}
    if len(shards) > 1:
        total = sum(made.nbytes for made in export.tensors.values())
        told = {"metadata": {"total_size": total}, "weight_map": weight_map(shards)}
        last = {INDEX: msgspec.json.format(msgspec.json.encode(told), indent=1)}
    clash = sorted({*files} & {INDEX, *(shard.name for shard in shards)})
    if clash:
        raise UsageError(f"files= has {', '.join(clash)}, which the export writes itself")
    names = [*files, *(shard.name for shard in shards), *last]
    with target(place, names, options) as made:
        for name, data in files.items():
            _create(made, name, data)
        written = 0
        for shard in shards:
            made.begin(shard.name)
            written = _write_shard(made.store, shard, source, written, progress)
        for name, data in last.items():
            _create(made, name, data)


def _create(made: Target, name: str, data: bytes) -> None:
    made.begin(name)
    if not made.store.create(name, data=data):
        made.names.pop()  # not ours to remove
        raise UsageError(
            f"{made.store.path(name)} is there by now",
            hint="another export goes to the same place; give another",
        )


def _write_shard(
    store: Store, shard: Shard, source: Source, before: int, progress: Callable[[int], None] | None
) -> int:
    """Write one file durably; the bytes written so far."""
    entries = shard.entries()
    header = encode_header(entries, {"format": "pt"})
    size = len(header) + (entries[-1].end if entries else 0)
    writer = store.write_part(shard.name, size=size)
    try:
        stream = Stream(writer, reuse=isinstance(store, LocalStore))
        stream.write(np.frombuffer(header, np.uint8))
        for made in shard.tensors:
            _write_tensor(stream, made, source)
            source.done(made)
            before += made.nbytes
            if progress is not None:
                progress(before)
        stream.close()
        writer.sync()
    finally:
        writer.close()
    return before


def _write_tensor(stream: Stream, made: Made, source: Source) -> None:
    pieces, twice = source.pieces(made, made.given), [source.pieces(made, [one]) for one in made.tied]
    if made.word in PACKED:
        whole = region(made.num_elements)[: made.num_elements]
        _gather(pieces, made, 0, made.num_elements, whole)
        _check_tied(twice, made, 0, made.num_elements, whole)
        stream.write(packed(made.word, whole))
        return
    size, at = made.dtype.itemsize, 0
    while at < made.num_elements:
        count = min(made.num_elements - at, stream.room // size)
        space = stream.space(count * size)
        _gather(pieces, made, at, at + count, space)
        _check_tied(twice, made, at, at + count, space)
        at += count


def _check_tied(twice: Sequence[Sequence[Piece]], made: Made, lo: int, hi: int, have: Bytes1D) -> None:
    """MismatchError unless every leaf that is tied makes the same elements [lo, hi) of a tensor."""
    for pieces, given in zip(twice, made.tied, strict=True):
        other = region(have.size)[: have.size]
        _gather(pieces, made, lo, hi, other)
        if not np.array_equal(other, have):
            raise MismatchError(
                [f"{made.name}: another leaf than {given.rule.leaf} makes it, with other values"],
                source="tree",
                hint="leaves that are tied must be equal; give each a tensor of its own",
            )


def _gather(pieces: Sequence[Piece], made: Made, lo: int, hi: int, into: Bytes1D) -> None:
    """Put the elements [lo, hi) of a tensor together."""
    for move, data, kind in pieces:
        for part in move.clip(lo, hi):
            copy(part.shifted(source=-lo), into, made.dtype, data, kind, back=True)
