"""128 bits for every array of a tree, computed where it lies. Equal on any mesh, in any order of adding.

Each element gives four 32-bit words, mixed from its bits and its place in the whole array; the words of all
elements are added modulo 2^32. Such a sum is exact and does not care who adds what first, so however an array
is split it has one fingerprint, and the compiler may reduce it as it likes. Mixing is murmur3's finaliser: a
changed bit, two elements that have changed places, and a shard of zeros all show. It finds damage; it does
not stop someone who wants to deceive.

The four words are computed in one loop over the array: memory is read once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from holdfast.arrays import flatten_tree

_SEEDS: Final = np.array([0x9E3779B9, 0x7F4A7C15, 0xC2B2AE3D, 0x27D4EB4F], np.uint32)
_STRIDES: Final = np.array([0x85EBCA6B, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09], np.uint32)
_MIXERS: Final = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
_WORDS: Final = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprint(tree: Any) -> dict[str, jax.Array]:
    """The fingerprint of every JAX array, by name: uint32[4] each. Jittable; all that hold a part join."""
    flat = flatten_tree(tree)
    return {name: _summed(_bits(leaf)) for name, leaf in zip(flat.names(), flat.leaves, strict=True)}


_jitted: Final = jax.jit(fingerprint)


def fingerprints(tree: Any) -> dict[str, str]:
    """The fingerprint of every array and number of a tree, 32 hex digits each. Blocks: while computing.

    What lies on devices is worked on there. What lies on the host is not brought to a device, where 64-bit
    numbers would lose half their bits.
    """
    flat = flatten_tree(tree)
    leaves = dict(zip(flat.names(), flat.leaves, strict=True))
    there = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    found = {
        name: _text(_summed_here(np.asarray(leaf))) for name, leaf in leaves.items() if name not in there
    }
    computed = jax.device_get(_jitted(list(there.values())))
    found |= {name: _text(computed[str(at)]) for at, name in enumerate(there)}
    return {name: found[name] for name in leaves}


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The names of the arrays that differ, or that only one side has, in the order of `mine`."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [name for name in names if mine.get(name) != theirs.get(name)]


def _text(words: Any) -> str:
    return "".join(f"{int(word):08x}" for word in words)


def _mixed(words: Any, place: Any) -> Any:
    x = (words[..., None] + _SEEDS) ^ (place[..., None] * _STRIDES)
    x = (x ^ (x >> np.uint32(16))) * _MIXERS[0]
    x = (x ^ (x >> np.uint32(13))) * _MIXERS[1]
    return x ^ (x >> np.uint32(16))


def _summed(words: jax.Array) -> jax.Array:
    mixed = _mixed(words, _places(words.shape))
    return jnp.sum(mixed, axis=tuple(range(words.ndim)), dtype=jnp.uint32)


def _summed_here(array: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The same on the host."""
    size = min(array.dtype.itemsize, 4)
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{size}").astype(np.uint32)
    mixed = _mixed(words, np.arange(words.size, dtype=np.uint32))
    total: npt.NDArray[np.uint32] = mixed.sum(axis=0, dtype=np.uint32)
    return total


def _bits(leaf: Any) -> jax.Array:
    """The bits of the elements as uint32, two words for an element of eight bytes."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_ or array.dtype in (jnp.int8, jnp.uint8, jnp.int4, jnp.uint4):
        return array.astype(jnp.uint8).astype(jnp.uint32)
    return lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """The place of each element in the whole array, row-major, modulo 2^32."""
    place = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % (1 << 32)
        place = place + lax.broadcasted_iota(jnp.uint32, shape, dim) * np.uint32(stride)
    return place
