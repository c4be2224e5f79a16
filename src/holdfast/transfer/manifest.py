"""What a process publishes, and what several of them hold together.

A manifest says which arrays a process has: dtype, global shape, and the boxes of each that lie with it.
Nothing is moved before the manifests of all peers have been put together and compared with what the target
wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from holdfast.arrays import Adapter, ArrayLayout, FlatTree, adapter_of, adapters, encode_scalar, flatten_tree
from holdfast.errors import HoldfastError, LayoutError, MismatchError, TreeError

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""


class ArrayInfo(Struct, frozen=True, array_like=True):
    """An array, and the boxes of it that one process holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    kind: Literal["array", "key"] = "array"
    impl: str | None = None


class Scalar(Struct, frozen=True, array_like=True):
    """A Python scalar of the tree. Its value belongs to a version, not to the plan."""

    name: str
    type: str
    value: str


class Manifest(Struct, frozen=True, array_like=True):
    """What one process holds of one version of a published tree."""

    arrays: tuple[ArrayInfo, ...]
    scalars: tuple[Scalar, ...]

    def digest(self) -> str:
        """Equal for versions that the same plan can move."""
        named = [(scalar.name, scalar.type) for scalar in self.scalars]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((self.arrays, named)))


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of one box of one leaf of a published tree."""

    adapter: Adapter
    leaf: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class Published:
    """A tree taken apart for publishing. `held[i][j]` is box j of array i of the manifest."""

    manifest: Manifest
    held: tuple[tuple[Held, ...], ...]
    flat: FlatTree


def published(tree: Any, *, rank: int = 0, world: int = 1) -> Published:
    """The manifest of a tree, and where its bytes are. Fails: TreeError naming the leaf."""
    flat = flatten_tree(tree)
    known = adapters()
    arrays: list[tuple[ArrayInfo, tuple[Held, ...]]] = []
    scalars: list[Scalar] = []
    names = flat.names()
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TreeError(f"two leaves have the same name: {', '.join(twice[:5])}")
    for at, (name, leaf) in enumerate(zip(names, flat.leaves, strict=True)):
        try:
            adapter = adapter_of(leaf, known)
            if adapter is None:
                scalars.append(Scalar(name, *encode_scalar(leaf)))
            else:
                arrays.append(_described(name, at, leaf, adapter, rank, world))
        except HoldfastError as error:
            raise TreeError(f"{name}: {error.message}", hint=error.hint) from error
    arrays.sort(key=lambda pair: pair[0].name)
    scalars.sort(key=lambda scalar: scalar.name)
    manifest = Manifest(tuple(info for info, _ in arrays), tuple(scalars))
    return Published(manifest, tuple(held for _, held in arrays), flat)


def _described(
    name: str, at: int, leaf: Any, adapter: Adapter, rank: int, world: int
) -> tuple[ArrayInfo, tuple[Held, ...]]:
    found = adapter.describe(leaf, rank, world)
    layout = found.layout
    boxes: list[Box] = []
    held: list[Held] = []
    for box, ordinal in enumerate(found.local):
        if ordinal >= 0:
            boxes.append(tuple((int(lo), int(hi)) for lo, hi in layout.boxes[box].tolist()))
            held.append(Held(adapter, at, ordinal))
    info = ArrayInfo(name, layout.dtype, layout.shape, tuple(boxes), found.kind, found.impl)
    return info, tuple(held)


@dataclass(frozen=True, slots=True)
class JointArray:
    """An array over several peers, who are the holders of `layout`.

    `places[box, peer]` is (array, box) in the manifest of that peer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["array", "key"]
    impl: str | None
    layout: ArrayLayout
    places: dict[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Joint:
    """What several peers hold together."""

    arrays: dict[str, JointArray]
    scalars: dict[str, Scalar]


def joint(manifests: Sequence[Manifest], peers: Sequence[str]) -> Joint:
    """The manifests of several peers put together.

    Fails: MismatchError listing every array that does not fit.
    """
    problems: list[str] = []
    found: dict[str, list[tuple[int, int, ArrayInfo]]] = {}
    scalars: dict[str, Scalar] = {}
    for peer, manifest in enumerate(manifests):
        for at, info in enumerate(manifest.arrays):
            found.setdefault(info.name, []).append((peer, at, info))
        for scalar in manifest.scalars:
            other = scalars.setdefault(scalar.name, scalar)
            if other != scalar:
                problems.append(f"{scalar.name}: {peers[peer]} has {scalar.value}, another {other.value}")
    arrays: dict[str, JointArray] = {}
    for name, mine in found.items():
        try:
            arrays[name] = _joint_array(name, mine, peers)
        except LayoutError as error:
            problems.append(error.message)
    problems += [f"{name}: an array here and a scalar there" for name in arrays.keys() & scalars.keys()]
    if problems:
        raise MismatchError(
            problems,
            source="peers",
            hint="all peers must publish slices of the same version of the same tree",
        )
    return Joint(arrays, scalars)


def _joint_array(name: str, found: list[tuple[int, int, ArrayInfo]], peers: Sequence[str]) -> JointArray:
    _, _, first = found[0]
    for peer, _, info in found[1:]:
        if (info.dtype, info.shape, info.kind, info.impl) != (
            first.dtype,
            first.shape,
            first.kind,
            first.impl,
        ):
            other = peers[found[0][0]]
            raise LayoutError(f"{name}: {peers[peer]} has {_shown(info)}, {other} has {_shown(first)}")
    boxes: dict[Box, dict[int, tuple[int, int]]] = {}
    for peer, at, info in found:
        for number, box in enumerate(info.boxes):
            boxes.setdefault(box, {})[peer] = (at, number)
    ordered = sorted(boxes)
    holders = tuple(tuple(sorted(boxes[box])) for box in ordered)
    table = np.array(ordered, np.int64).reshape(len(ordered), len(first.shape), 2)
    try:
        layout = ArrayLayout(first.dtype, first.shape, table, holders)
    except LayoutError as error:
        raise LayoutError(f"{name}: the peers' slices do not make up the array: {error.message}") from error
    places = {(n, peer): place for n, box in enumerate(ordered) for peer, place in boxes[box].items()}
    return JointArray(name, first.dtype, first.shape, first.kind, first.impl, layout, places)


def _shown(info: ArrayInfo) -> str:
    return f"{info.dtype}{list(info.shape)}"
