"""What a process publishes, and what several of them hold together.

A manifest says which arrays a process has: dtype, global shape, and the boxes of each that lie with it.
Nothing is moved before the manifests of all peers have been put together and compared with what the target
wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from holdfast.arrays import Adapter, ArrayLayout, Bytes1D, adapter_of, adapters, encode_scalar, flatten_tree
from holdfast.errors import HoldfastError, LayoutError, MismatchError, TreeError
from holdfast.transfer.shards import Shard

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


@final
class PublishedTree:
    """What is to be published: a manifest, and the memory of each box of each array in it.

    `shared` is a memory that all boxes lie in, and the sealed memfd that it maps, if there is one: it can be
    lent to targets on the same node.
    """

    def __init__(self, shared: tuple[int, Bytes1D] | None = None) -> None:
        self._arrays: list[tuple[ArrayInfo, list[Bytes1D]]] = []
        self._scalars: list[Scalar] = []
        self.shared = shared

    def add_array(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        boxes: Sequence[tuple[Box, Bytes1D]],
        *,
        kind: Literal["array", "key"] = "array",
        impl: str | None = None,
    ) -> None:
        """Add an array of which this process holds some boxes, each with its bytes, row by row."""
        info = ArrayInfo(name, dtype, shape, tuple(box for box, _ in boxes), kind, impl)
        self._arrays.append((info, [memory for _, memory in boxes]))

    def add_scalar(self, name: str, kind: str, value: str) -> None:
        """Add a Python scalar, as `arrays.encode_scalar` writes it."""
        self._scalars.append(Scalar(name, kind, value))

    def taken(self) -> tuple[Manifest, list[list[Bytes1D]]]:
        """The manifest, by name, and the memories in its order."""
        arrays = sorted(self._arrays, key=lambda pair: pair[0].name)
        scalars = sorted(self._scalars, key=lambda scalar: scalar.name)
        manifest = Manifest(tuple(info for info, _ in arrays), tuple(scalars))
        return manifest, [memories for _, memories in arrays]


def published(tree: Any, *, rank: int = 0, world: int = 1) -> PublishedTree:
    """A tree taken apart for publishing, once its arrays are computed. Fails: TreeError naming the leaf."""
    flat = flatten_tree(tree)
    known = adapters()
    found = PublishedTree()
    names = flat.names()
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TreeError(f"two leaves have the same name: {', '.join(twice[:5])}")
    leaves: list[tuple[str, Any, Shard | None, Adapter]] = []
    for name, leaf in zip(names, flat.leaves, strict=True):
        shard = leaf if isinstance(leaf, Shard) else None
        array = leaf if shard is None else shard.array
        try:
            adapter = adapter_of(array, known)
            if adapter is None:
                found.add_scalar(name, *encode_scalar(array))
            else:
                leaves.append((name, array, shard, adapter))
        except HoldfastError as error:
            raise TreeError(f"{name}: {error.message}", hint=error.hint) from error
    for adapter in {id(adapter): adapter for _, _, _, adapter in leaves}.values():
        adapter.ready([array for _, array, _, by in leaves if by is adapter])
    for name, array, shard, adapter in leaves:
        try:
            _add(found, name, array, shard, adapter, rank, world)
        except HoldfastError as error:
            raise TreeError(f"{name}: {error.message}", hint=error.hint) from error
    return found


def _add(
    found: PublishedTree, name: str, leaf: Any, shard: Shard | None, adapter: Adapter, rank: int, world: int
) -> None:
    described = adapter.describe(leaf, rank, world)
    layout, shape = described.layout, described.layout.shape
    boxes: list[tuple[Box, Bytes1D]] = []
    for box, ordinal in enumerate(described.local):
        if ordinal >= 0:
            extent = tuple((int(lo), int(hi)) for lo, hi in layout.boxes[box].tolist())
            boxes.append((extent, adapter.host(leaf, ordinal)))
    if shard is not None:
        if len(boxes) != 1:
            raise TreeError("a Shard holds one plain array", hint="publish a sharded array as it is")
        boxes, shape = [(shard.box, boxes[0][1])], shard.shape
    found.add_array(name, layout.dtype, shape, boxes, kind=described.kind, impl=described.impl)


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
            if len(box) != len(first.shape):
                raise LayoutError(f"{name}: {peers[peer]} has a slice {box} of an array {_shown(first)}")
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
