"""The arrays of one process's devices as staging sees them: single-device shards, addresses and bytes."""

from __future__ import annotations

import ctypes
import itertools
import operator
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from holdfast.arrays import Bytes1D, DeviceCopy, HostMemory
from holdfast.clock import Deadline
from holdfast.errors import StagingError, TreeError
from holdfast.jax.engine import Copy, CopyEngine

_PATTERN: Final = 1 << 20
_CHECK_S: Final = 60.0

Shards = dict[tuple[int, int], Any]
"""Single-device arrays, by leaf and ordinal."""
Arrays = Mapping[int, Any]
"""Arrays by leaf."""


def arrays_of(leaves: Sequence[Any], copies: Sequence[DeviceCopy]) -> dict[int, Any]:
    """The arrays that are copied, by leaf, as objects of our own; keys as their data."""
    found: dict[int, Any] = {}
    for copy in copies:
        if copy.leaf in found:
            continue
        array = leaves[copy.leaf]
        if not isinstance(array.dtype, np.dtype):  # a typed key
            array = jax.random.key_data(array)
        found[copy.leaf] = own(array)
    return found


def own(array: Any) -> Any:
    """Another object for an array that the program may delete. Fails: TreeError if it is gone already.

    JAX (0.10, 0.11) ends the process where one thread deletes an object and another asks it whether it is
    ready, for its layout or its shards, or waits for it. Ours is of the same memory and knows when that is
    gone, be it deleted or donated, but nobody empties it: what asks it then gets an exception.
    """
    # Both calls in one of C, where no other thread runs: an empty object may not be cloned either.
    found = next(zip(iter(array.is_deleted, True), map(operator.call, (array.clone,)), strict=False), None)
    if found is None:
        raise TreeError(
            "an array of the tree was donated or deleted",
            hint="save the state that the step returned, not the one that was passed to it",
        )
    return found[1]


def gone() -> TreeError:
    """What a save fails with if an array goes while it is copied."""
    return TreeError(
        "an array was donated or deleted while it was being saved",
        hint="call handle.fence() before the next donating call, or save without fenced=True",
    )


def shards_of(arrays: Arrays, copies: Sequence[DeviceCopy]) -> Shards:
    """The single-device arrays that are copied from, in row-major order. Fails: TreeError if one is gone."""
    shards: Shards = {}
    for copy in copies:
        key = (copy.leaf, copy.ordinal)
        if key not in shards:
            try:
                shard = arrays[copy.leaf].addressable_data(copy.ordinal)
            except (RuntimeError, TypeError) as error:  # the latter if it goes after JAX has looked
                raise gone() from error
            shards[key] = _row_major(shard)
    return shards


def _row_major(shard: Any) -> Any:
    """The shard, or a copy of it where a program asked for another order of dimensions."""
    layout = shard.format.layout
    if layout is None:
        raise gone()
    return shard if layout.major_to_minor == tuple(range(shard.ndim)) else jnp.copy(shard)


@lru_cache(maxsize=256)
def is_packed(dtype: Any) -> bool:
    """Whether a device keeps several elements of this type in a byte."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return dtype.itemsize == 1 and dtype != np.bool_ and info(dtype).bits < 8


def ordinal(device: Any) -> int:
    """The number by which the driver knows a device of this process."""
    return int(device.local_hardware_id or 0)


def flat(array: Any) -> Bytes1D:
    """The bytes of an array in host memory, copied there if need be."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def bytes_at(address: int, nbytes: int) -> Bytes1D:
    """The bytes at an address; who asks keeps them alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


def nobody(_count: int) -> None:
    """Tell nobody how far the copies are."""


def check_way(engine: CopyEngine, memory: HostMemory, device: Any) -> None:
    """Copy a known pattern from a device into memory, at both its ends. Fails: StagingError if it differs."""
    size = min(_PATTERN, memory.size // 2)
    pattern = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    source = jax.device_put(pattern, device)
    jax.block_until_ready(source)  # type: ignore[no-untyped-call]
    base = source.unsafe_buffer_pointer()
    # Odd places and sizes, as arrays have them.
    cuts = (0, size // 3 | 1, size)
    starts = (memory.address, memory.address + memory.size - size)
    for start in starts:
        ctypes.memset(start, 0, size)
        copies = [
            Copy(ordinal(device), base + begin, start + begin, end - begin)
            for begin, end in itertools.pairwise(cuts)
            if end > begin
        ]
        engine.run(copies, filled=nobody, stop=threading.Event(), deadline=Deadline(_CHECK_S), keep=source)
        if not np.array_equal(bytes_at(start, size), pattern):
            raise StagingError("a known pattern came through wrong")
