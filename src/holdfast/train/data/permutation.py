"""Permutations of any size that need no memory: a Feistel network keyed by numbers, walked until it lands
inside.

Element r of the permutation is computed alone, in constant time, so that a cursor can jump anywhere. Black
and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), have the construction; the round function is the
finalizer of splitmix64, which scatters well and is no cipher: orders here are to look random, not to be
secret.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.errors import UsageError

Words = npt.NDArray[np.uint64]

ROUNDS: Final = 6
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_ONE: Final = np.uint64(0xBF58476D1CE4E5B9)
_TWO: Final = np.uint64(0x94D049BB133111EB)
_MOST: Final = 1 << 62


def mixed(words: Words) -> Words:
    """A bijection of 64-bit words that leaves no trace of their order."""
    # x = (x ^ x >> 30) * ONE; x = (x ^ x >> 27) * TWO; x ^ x >> 31, with two arrays in all.
    out = words >> np.uint64(30)
    out ^= words
    out *= _ONE
    high = out >> np.uint64(27)
    out ^= high
    out *= _TWO
    np.right_shift(out, np.uint64(31), out=high)
    out ^= high
    return out


def permuted(ranks: Words, size: int, keys: Words) -> Words:
    """Where each of `ranks` (below `size`) lies in the permutation of `size` elements that its key stands
    for.

    For each key this is a bijection of 0..size-1. Expected time is constant per element: fewer than two in
    four steps of the walk land outside.
    """
    if not 1 <= size <= _MOST:
        raise UsageError(f"no permutation of {size} elements", hint="1 to 2**62")
    low_bits = np.uint64(((size - 1).bit_length() + 1) // 2)
    high_bits = np.uint64((size - 1).bit_length() // 2)
    out = _network(ranks, low_bits, high_bits, keys)
    outside = np.flatnonzero(out >= np.uint64(size))
    while outside.size:
        out[outside] = _network(out[outside], low_bits, high_bits, keys[outside])
        outside = outside[out[outside] >= np.uint64(size)]
    return out


def _network(values: Words, low_bits: np.uint64, high_bits: np.uint64, keys: Words) -> Words:
    """One pass over low_bits + high_bits bits; with an odd number of bits the halves differ by one."""
    one = np.uint64(1)
    masks = ((one << low_bits) - one, (one << high_bits) - one)
    low, high = values & masks[0], values >> low_bits
    for number in range(ROUNDS):
        keys = keys + _STEP
        # Each half in turn is changed by a function of the other: undone by the same, whatever the widths.
        if number % 2 == 0:
            high = high ^ (mixed(low + keys) & masks[1])
        else:
            low = low ^ (mixed(high + keys) & masks[0])
    return (high << low_bits) | low
