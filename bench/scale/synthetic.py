"""A checkpoint of ten thousand writers without its array bytes: the files that they would have committed.

A dense transformer with Adam on a mesh of `data` × `tensor` ranks, in the three layouts that large runs
mix: master weights sharded over `tensor` and replicated over `data` (few writers each, chosen by the engine),
first moments cut along both axes (as FSDP with tensor parallelism does), second moments cut along their first
dim over all ranks (as plain FSDP does). Norms and a counter are held by everybody and written by one rank.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.arrays import ArrayLayout, Layout, cuts, spread
from holdfast.format import (
    MANIFEST,
    VERSION,
    ArrayEntry,
    Manifest,
    PartEntry,
    PartFile,
    PartIndex,
    Piece,
    SaveId,
    ScalarEntry,
    data_name,
    digest,
    encode_index,
    encode_manifest,
    encode_owners,
    index_name,
    lay_out,
    num_blocks,
    step_folder,
)

STEP: Final = 1_200
_DIGEST_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0 to data × tensor - 1, `tensor` innermost."""

    data: int
    tensor: int

    @property
    def world(self) -> int:
        return self.data * self.tensor


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a dense transformer. Three arrays per weight: master, first and second moment."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    kv: int

    def weights(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Name, shape and the dim that tensor parallelism cuts (-1 for none)."""
        hidden, ffn = self.hidden, self.ffn
        for layer in range(self.layers):
            at = f"layers/{layer}"
            yield f"{at}/attn/q", (hidden, hidden), 1
            yield f"{at}/attn/k", (hidden, self.kv), 1
            yield f"{at}/attn/v", (hidden, self.kv), 1
            yield f"{at}/attn/o", (hidden, hidden), 0
            yield f"{at}/mlp/gate", (hidden, ffn), 1
            yield f"{at}/mlp/up", (hidden, ffn), 1
            yield f"{at}/mlp/down", (ffn, hidden), 0
            yield f"{at}/norm/attn", (hidden,), -1
            yield f"{at}/norm/mlp", (hidden,), -1
        yield "embed", (self.vocab, hidden), 0
        yield "head", (hidden, self.vocab), 1
        for name in ("final", "embed", "head"):
            yield f"norm/{name}", (hidden,), -1
        for name in ("q", "k", "v", "o"):
            yield f"gain/{name}", (self.layers, hidden), -1


TEN_TB: Final = Model(layers=36, hidden=40_000, ffn=160_000, vocab=160_000, kv=10_000)
"""1,000 arrays of 0.85 T parameters, 12 bytes each."""
TEN_THOUSAND: Final = Mesh(data=1_250, tensor=8)
SMALL: Final = Model(layers=2, hidden=640, ffn=2_560, vocab=2_560, kv=160)


def layouts(model: Model, mesh: Mesh) -> Layout:
    """Where each rank of a run on `mesh` holds its part of the state; that is the same for any mesh."""
    make = _Layouts(mesh)
    found: list[tuple[str, ArrayLayout]] = []
    for name, shape, dim in model.weights():
        if dim < 0:
            whole = ArrayLayout.whole("float32", shape, make.everybody)
            found += [(f"{tree}/{name}", whole) for tree in ("params", "opt/mu", "opt/nu")]
            continue
        found.append((f"params/{name}", make.tensor(shape, dim)))
        found.append((f"opt/mu/{name}", make.both(shape, dim)))
        found.append((f"opt/nu/{name}", make.flat(shape)))
    found.append(("opt/count", ArrayLayout.whole("int32", (), make.everybody)))
    return Layout(found)


class _Layouts:
    """The layouts of one mesh, each made once."""

    def __init__(self, mesh: Mesh) -> None:
        self._ranks = np.arange(mesh.world).reshape(mesh.data, mesh.tensor)
        self._mesh = mesh
        self._made: dict[tuple[Any, ...], ArrayLayout] = {}
        self.everybody = tuple(range(mesh.world))

    def tensor(self, shape: tuple[int, ...], dim: int) -> ArrayLayout:
        """Cut along `dim` over the tensor axis, replicated over the data axis."""
        grid = [_even(size, self._mesh.tensor if at == dim else 1) for at, size in enumerate(shape)]
        held = tuple(map(tuple, self._ranks.T.tolist()))
        return self._kept(("tensor", shape, dim), shape, grid, held)

    def both(self, shape: tuple[int, ...], dim: int) -> ArrayLayout:
        """Cut along `dim` over the tensor axis and along the other dim over the data axis."""
        grid = [_even(s, self._mesh.tensor if at == dim else self._mesh.data) for at, s in enumerate(shape)]
        ranks = self._ranks if dim == 1 else self._ranks.T
        return self._kept(("both", shape, dim), shape, grid, _alone(ranks, grid))

    def flat(self, shape: tuple[int, ...]) -> ArrayLayout:
        """Cut along the first dim over all ranks."""
        grid = [_even(shape[0], self._mesh.world), *((0, size) for size in shape[1:])]
        return self._kept(("flat", shape), shape, grid, _alone(self._ranks.reshape(-1, 1), grid))

    def _kept(
        self, key: tuple[Any, ...], shape: tuple[int, ...], grid: Any, held: tuple[tuple[int, ...], ...]
    ) -> ArrayLayout:
        if key not in self._made:
            self._made[key] = ArrayLayout.grid("float32", shape, grid, held)
        return self._made[key]


def _even(size: int, pieces: int) -> tuple[int, ...]:
    """Cut points as frameworks choose them: equal pieces, the last ones shorter or missing."""
    piece = -(-size // pieces)
    return (*range(0, size, piece), size)


def _alone(ranks: Any, grid: Any) -> tuple[tuple[int, ...], ...]:
    rows, columns = len(grid[0]) - 1, len(grid[1]) - 1
    return tuple((rank,) for rank in ranks[:rows, :columns].reshape(-1).tolist())


@dataclass(frozen=True, slots=True)
class Part:
    """What one writer commits: its index, and the size of its data file."""

    entry: PartEntry
    index: bytes
    size: int


class Writers:
    """What every writer of one save hands in, made by the format's own writers."""

    def __init__(self, model: Model, mesh: Mesh, *, step: int = STEP) -> None:
        self.world = mesh.world
        self.save = SaveId("synthetic", step, "a1")
        self.folder = step_folder(step)
        self._written = spread(layouts(model, mesh))
        self._names = sorted(self._written)  # as a save orders them
        self.arrays = tuple(_entry(name, self._written[name]) for name in self._names)
        self._owned = [_by_owner(self._written[name]) for name in self._names]

    def at(self, step: int) -> Writers:
        """The same writers, saving another step."""
        other = copy.copy(self)
        other.save, other.folder = SaveId(self.save.run, step, self.save.attempt), step_folder(step)
        return other

    def part(self, rank: int) -> Part:
        """The part of one writer; the block digests are made up, everything else is what a save makes."""
        pieces: list[Piece] = []
        for name, owned in zip(self._names, self._owned, strict=True):
            array = self._written[name]
            for box in owned.get(rank, ()):
                rows = array.boxes[box].tolist()
                start, stop = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
                pieces.append(Piece(name, array.dtype, array.shape, start, stop))
        laid = lay_out(rank, pieces)
        blocks = digest(f"{rank}".encode()) * num_blocks(laid.size)
        name = data_name(rank, self.save.attempt)
        index = encode_index(
            PartIndex(
                version=VERSION,
                save=self.save,
                part=rank,
                files=(PartFile(name=name, size=laid.size, blocks=blocks),),
                slices=laid.slices,
            )
        )
        entry = PartEntry(
            part=rank,
            index=index_name(rank, self.save.attempt),
            size=len(index),
            digest=digest(index),
            nbytes=sum(piece.nbytes for piece in laid.slices),
        )
        return Part(entry, index, laid.size)

    def manifest(self, parts: list[PartEntry]) -> bytes:
        """The manifest that the commit creates from all parts."""
        return encode_manifest(
            Manifest(
                save=self.save,
                created=1_700_000_000.0 + self.save.step,
                nbytes=sum(part.nbytes for part in parts),
                writer={"holdfast": "synthetic"},
                meta={"samples": self.save.step * 4_096, "metrics": {"loss": 2.0}},
                parts=tuple(parts),
                scalars=(ScalarEntry("step", "int", str(self.save.step)),),
                arrays=self.arrays,
            )
        )


def _entry(name: str, written: ArrayLayout) -> ArrayEntry:
    grid = cuts(written)
    assert grid is not None
    return ArrayEntry(
        name=name,
        dtype=written.dtype,
        shape=written.shape,
        cuts=grid,
        owners=encode_owners(written.table.ids.tolist()),
    )


def _by_owner(written: ArrayLayout) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for box, owner in enumerate(written.table.ids.tolist()):
        found.setdefault(owner, []).append(box)
    return found


def write_part(place: Path, writers: Writers, rank: int) -> PartEntry:
    """Write what one writer does into the step's folder; its data file is a hole of the right size."""
    part = writers.part(rank)
    (place / part.entry.index).write_bytes(part.index)
    with open(place / data_name(rank, writers.save.attempt), "wb") as data:
        os.truncate(data.fileno(), part.size)
    return part.entry


def write_step(folder: Path, writers: Writers) -> None:
    """Write a whole step below `folder`."""
    place = folder / writers.folder
    place.mkdir(parents=True)
    entries = [write_part(place, writers, rank) for rank in range(writers.world)]
    (place / MANIFEST).write_bytes(writers.manifest(entries))


def reader_layouts(model: Model, mesh: Mesh) -> Layout:
    """What the ranks of another run want of the state: all of it in shares, whoever wrote it."""
    make = _Layouts(mesh)
    found: list[tuple[str, ArrayLayout]] = []
    for name, shape, dim in model.weights():
        if dim < 0:
            whole = ArrayLayout.whole("float32", shape, make.everybody)
            found += [(f"{tree}/{name}", whole) for tree in ("params", "opt/mu", "opt/nu")]
            continue
        found += [(f"{tree}/{name}", make.both(shape, dim)) for tree in ("params", "opt/mu")]
        found.append((f"opt/nu/{name}", make.flat(shape)))
    found.append(("opt/count", ArrayLayout.whole("int32", (), make.everybody)))
    return Layout(found)
