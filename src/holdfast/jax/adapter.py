"""JAX arrays in and out of devices.

Aliasing and donation. On CPU the bytes of a shard are read in place, by address, while the caller's reference
keeps them alive: `np.asarray` would cache a view on the array, and that view silently denies donation to
later steps. On load, memory that belongs to one array alone is handed to the runtime without a copy; a
donated alias is copied by the runtime, never written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from holdfast.arrays import ArrayLayout, Bytes1D, Description, FlatTree, Memory, Placement, join
from holdfast.arrays import dtype as dtype_of
from holdfast.arrays.copying import address_of
from holdfast.errors import TreeError
from holdfast.jax.landing import JaxLanding, runtime_pins
from holdfast.jax.placing import put
from holdfast.jax.shards import is_packed
from holdfast.jax.staging import DeviceStager, stager


@lru_cache(maxsize=4096)
def _layout(
    sharding: Sharding, shape: tuple[int, ...], dtype: str, world: int
) -> tuple[ArrayLayout, tuple[tuple[Any, ...], ...]]:
    """The layout of a sharded array over ranks, and the local devices of each box."""
    by_box: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, indices in sharding.devices_indices_map(shape).items():
        box = tuple(index.indices(dim)[:2] for index, dim in zip(indices, shape, strict=True))
        by_box.setdefault(box, []).append(device)
    # An array of this process alone, in a run of several, is taken as replicated, like a host array.
    alone = world > 1 and sharding.is_fully_addressable
    everyone = tuple(range(world))
    if 0 in shape:
        # Nothing to cut: all devices hold the one, empty, box.
        whole = tuple((0, dim) for dim in shape)
        by_box = {whole: [device for devices in by_box.values() for device in devices]}
    holders = tuple(
        everyone if alone or world == 1 else tuple(sorted({d.process_index for d in devices}))
        for devices in by_box.values()
    )
    boxes = np.array(list(by_box), dtype=np.int64).reshape(len(by_box), len(shape), 2)
    local = sharding.addressable_devices
    return ArrayLayout(dtype, shape, boxes, holders), tuple(
        tuple(device for device in devices if device in local) for devices in by_box.values()
    )


_WIDE = ("int64", "uint64", "float64", "complex128")
"""What JAX has only where it is told to."""


def _donated() -> TreeError:
    return TreeError(
        "an array of the tree was donated or deleted",
        hint="save the state that the step returned, not the one that was passed to it",
    )


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _logical_axes(sharding: Sharding, ndim: int) -> tuple[str | None, ...] | None:
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    axes = [
        None if axis is None else "+".join(axis) if isinstance(axis, tuple) else str(axis) for axis in spec
    ]
    return tuple((axes + [None] * ndim)[:ndim])


def _key_data_struct(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shape and dtype of the data of typed keys."""
    keys = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    return jax.eval_shape(jax.random.key_data, keys)


@final
class JaxSink:
    """Asks for a JAX array with the sharding of a template leaf.

    `committed` is whether it is to stay on its device whatever it is used with, as JAX calls it. A template's
    array that is not gives one that is not: else a program compiled for the one is compiled again for the
    other.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, sharding: Sharding, world: int, committed: bool = True
    ) -> None:
        self.committed = committed
        self._impl: str | None = None
        if _is_key(dtype):
            self._impl = _key_impl(dtype)
            sharding = _key_sharding(len(shape), sharding)
            data = _key_data_struct(shape, dtype)
            shape, dtype = tuple(data.shape), data.dtype
        elif np.dtype(dtype).name in _WIDE and not getattr(jax.config, "jax_enable_x64", True):
            # JAX would make the next narrower dtype of it, and of large numbers others, without a word.
            raise TreeError(
                f"JAX keeps no {np.dtype(dtype).name} arrays as it is set up",
                hint="jax.config.update('jax_enable_x64', True), or a narrower template and cast=True",
            )
        self._sharding = sharding
        layout, self._devices = _layout(sharding, shape, dtype_of(np.dtype(dtype)).name, world)
        self._together = (
            len(self._devices) == 1
            and sharding.is_fully_addressable
            and not isinstance(sharding, SingleDeviceSharding)
        )
        """Whether all devices have the same bytes: JAX makes such an array in one call, shards and all."""
        self.at_home = committed and all(device.platform == "cpu" for device in self.devices)
        """Whether its devices use the host's memory: such an array is made in one call, shards and all."""
        self._box_of = {tuple(map(tuple, box)): number for number, box in enumerate(layout.boxes.tolist())}
        local = tuple(0 if devices else -1 for devices in self._devices)
        self.description = Description(
            layout, local, kind="key" if self._impl is not None else "array", impl=self._impl
        )

    @property
    def devices(self) -> list[Any]:
        """The local devices that the array goes to."""
        return [device for devices in self._devices for device in devices]

    @cached_property
    def _shard_shape(self) -> tuple[int, ...]:
        layout = self.description.layout
        if len(self._box_of) == 1 and layout.nbytes:  # JAX takes ten microseconds to say so
            return layout.shape
        return self._sharding.shard_shape(layout.shape)

    def hosts(self, boxes: dict[int, Bytes1D]) -> list[tuple[Any, Any]]:
        """The host array for each local device; one with the sharding, if all have the same."""
        layout = self.description.layout
        numpy_dtype = dtype_of(layout.dtype).numpy
        if self._together:
            return [(data.view(numpy_dtype).reshape(layout.shape), self._sharding) for data in boxes.values()]
        found: list[tuple[Any, Any]] = []
        for box, data in boxes.items():
            # An empty array is described as one box, but its devices have shards all the same.
            empty = 0 in layout.shape
            extents = layout.boxes[box, :, 1] - layout.boxes[box, :, 0]
            shape = self._shard_shape if empty else extents.tolist()
            host = data.view(numpy_dtype).reshape(shape)
            found += [(host, device) for device in self._devices[box]]
        return found

    def made(self, boxes: dict[int, Bytes1D], *, alias: bool) -> Any:
        """The array out of host memory, which it keeps if `alias` says that it may.

        Measured for eight shards: 0.18 ms, where a `device_put` of each takes 0.6 ms.
        """
        layout = self.description.layout
        numpy_dtype = dtype_of(layout.dtype).numpy
        hosts = {box: data.view(numpy_dtype).reshape(self._shard_shape) for box, data in boxes.items()}
        if not alias:
            hosts = {box: host.copy() for box, host in hosts.items()}

        def shard(index: tuple[slice, ...] | None) -> Any:
            if len(hosts) == 1:  # on all devices; also an empty array, which is described as one box
                return next(iter(hosts.values()))
            assert index is not None
            pairs = zip(index, layout.shape, strict=True)
            return hosts[self._box_of[tuple(one.indices(dim)[:2] for one, dim in pairs)]]

        return self._wrapped(jax.make_array_from_callback(layout.shape, self._sharding, shard))

    def assembled(self, shards: Sequence[Any]) -> Any:
        """The array out of what was made of its hosts."""
        array = shards[0]
        if not self._together and not isinstance(self._sharding, SingleDeviceSharding):
            shape = self.description.layout.shape
            array = jax.make_array_from_single_device_arrays(shape, self._sharding, list(shards))
        return self._wrapped(array)

    def _wrapped(self, array: Any) -> Any:
        return array if self._impl is None else jax.random.wrap_key_data(array, impl=self._impl)


@lru_cache(maxsize=4096)
def _sink(shape: tuple[int, ...], dtype: Any, sharding: Sharding, world: int, committed: bool) -> JaxSink:
    # A model repeats few shapes many times; sinks hold nothing of a single load.
    return JaxSink(shape, dtype, sharding, world, committed)


@lru_cache(maxsize=1)
def _default_sharding() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def _key_impl(dtype: Any) -> str:
    name: str = dtype._impl.name  # the only way to it for a ShapeDtypeStruct
    return name


def _key_sharding(ndim: int, sharding: Sharding) -> Sharding:
    """The sharding of the key data: that of the keys, with the trailing dimension whole."""
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return sharding
    mesh = sharding.mesh  # type: ignore[attr-defined]
    padded = (*spec, *[None] * (ndim - len(spec)), None)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*padded))  # type: ignore[no-untyped-call]


@final
class JaxAdapter:
    """JAX arrays, typed keys and ShapeDtypeStructs; devices of platforms in `hosts` use the host's memory."""

    def __init__(self, *, hosts: frozenset[str] = frozenset({"cpu"})) -> None:
        self._hosts = hosts

    def identity(self) -> tuple[int, int]:
        # Asking for the process index starts the backends, and with them takes the devices.
        if not jax.distributed.is_initialized():
            return 0, 1
        return jax.process_index(), jax.process_count()

    def claims(self, leaf: Any) -> bool:
        return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)

    def flatten(self, tree: Any) -> FlatTree:
        leaves, structure = jax.tree_util.tree_flatten(tree)

        def names() -> list[str]:
            paths, _ = jax.tree_util.tree_flatten_with_path(tree)
            return [join(_key_text(key) for key in path) for path, _ in paths]

        return FlatTree(leaves, structure, names, lambda new: jax.tree_util.tree_unflatten(structure, new))

    def signature(self, leaf: Any) -> Hashable:
        return leaf.shape, leaf.dtype, leaf.sharding

    def describe(self, leaf: Any, rank: int, world: int) -> Description:
        if not isinstance(leaf, jax.Array):
            raise TreeError(
                "is the description of an array, not an array",
                hint="descriptions are for load(into=...); save what they describe",
            )
        if leaf.is_deleted():
            raise _donated()
        impl = str(jax.random.key_impl(leaf)) if _is_key(leaf.dtype) else None
        data = jax.random.key_data(leaf) if impl is not None else leaf
        dtype = dtype_of(np.dtype(data.dtype)).name
        layout, devices = _layout(data.sharding, tuple(data.shape), dtype, world)
        ordinals = {shard.device: at for at, shard in enumerate(data.addressable_shards)}
        local = tuple(ordinals[mine[0]] if mine else -1 for mine in devices)
        return Description(
            layout,
            local,
            kind="key" if impl is not None else "array",
            impl=impl,
            axes=_logical_axes(data.sharding, data.ndim),
        )

    def ready(self, leaves: Sequence[Any]) -> None:
        try:
            jax.block_until_ready(leaves)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if any(leaf.is_deleted() for leaf in leaves):
                raise _donated() from error
            raise

    def memory(self, leaf: Any, ordinal: int) -> Memory:
        if not isinstance(leaf.dtype, np.dtype):  # a typed key; issubdtype would cost microseconds
            leaf = jax.random.key_data(leaf)
        if num_devices := _in_host_memory(leaf):
            # The view of a shard costs five microseconds, and a state has thousands of arrays.
            shard = leaf if num_devices == 1 else leaf.addressable_data(ordinal)
            return Memory(shard.unsafe_buffer_pointer(), shard)
        host = np.ascontiguousarray(np.asarray(leaf.addressable_data(ordinal)))
        return Memory(address_of(host), host)

    def host(self, leaf: Any, ordinal: int) -> Bytes1D:
        if not isinstance(leaf.dtype, np.dtype):
            leaf = jax.random.key_data(leaf)
        shard = leaf.addressable_data(ordinal)
        if not _num_cpus(leaf.sharding) and not is_packed(leaf.dtype):
            shard = _pinned(shard)
        # A view through the array protocol: on CPU, and on pinned memory, it is no copy, and while it lives
        # the runtime copies instead of reusing the memory when the array is donated.
        return np.ascontiguousarray(np.asarray(shard)).reshape(-1).view(np.uint8)

    def sink(self, leaf: Any, rank: int, world: int) -> JaxSink:
        sharding = getattr(leaf, "sharding", None) or _default_sharding()
        committed = getattr(leaf, "committed", True) or sharding != _default_sharding()
        return _sink(leaf.shape, leaf.dtype, sharding, world, committed)

    def place(self, batch: Sequence[Placement]) -> list[Any]:
        return put(batch, [], kept=False)

    def landing(self, sinks: Sequence[JaxSink]) -> JaxLanding | None:
        device = self._elsewhere(sinks)
        return None if device is None else JaxLanding(device)

    def pin(self, memory: Bytes1D, sinks: Sequence[JaxSink]) -> Callable[[], None] | None:
        device = self._elsewhere(sinks)
        if device is None:
            return None
        pins = runtime_pins()
        pins.pin(memory, device)
        return partial(pins.unpin, memory)

    def _elsewhere(self, sinks: Sequence[JaxSink]) -> Any:
        """One of the devices, if all of them have memory of their own, else None."""
        some = None
        for sink in set(sinks):  # a model has few of them, many times
            for some in sink.devices:
                if some.platform in self._hosts:
                    return None
        return some

    def stager(self) -> DeviceStager:
        return stager()


_ROW_MAJOR = [tuple(range(ndim)) for ndim in range(65)]


@lru_cache(maxsize=4096)
def _num_cpus(sharding: Sharding) -> int:
    """How many devices an array is on, if they use the host's memory, else 0.

    One question, not two: to look a sharding up takes longer than to find the bytes.
    """
    devices: Any = sharding.device_set
    return len(devices) if next(iter(devices)).platform == "cpu" else 0


def _in_host_memory(leaf: Any) -> int:
    """On how many devices an array is, if the bytes of its shards can be read by address: on CPU, unpacked,
    row-major; else 0."""
    found = _num_cpus(leaf.sharding)
    if not found or is_packed(leaf.dtype):
        return 0
    if leaf.ndim < 2:
        return found
    # A program may ask for any dimension order; reading by address is only right for the default one.
    order: tuple[int, ...] = leaf.format.layout.major_to_minor
    return found if order == _ROW_MAJOR[leaf.ndim] else 0


def _pinned(shard: Any) -> Any:
    """A copy in page-locked host memory, made by the device's copy engine; itself where that fails."""
    try:
        return jax.device_put(shard, shard.sharding.with_memory_kind("pinned_host"))
    except (ValueError, NotImplementedError, RuntimeError):
        return shard


def _key_text(key: Any) -> str:
    match key:
        case jax.tree_util.DictKey(key=value):
            return str(value)
        case jax.tree_util.GetAttrKey(name=name):
            return str(name)
        case jax.tree_util.SequenceKey(idx=index):
            return str(index)
        case jax.tree_util.FlattenedIndexKey(key=value):
            return str(value)
        case _:
            return str(key)


ADAPTER = JaxAdapter()
