"""The dtypes of safetensors, those included that pack several elements into a byte.

F4 and the F6 types are packed in files and one element per byte in memory. Elements follow each other from
the lowest bit up: the first of two F4 elements is the low nibble, as in PyTorch's `float4_e2m1fn_x2`. For F6
no library sets an example; the same order is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from holdfast.arrays import TABLE, Bytes1D, DType

PACKED: Final[Mapping[str, int]] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of the words that pack."""

_PACKED_NAMES: Final = {"F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn"}

WORDS: Final[Mapping[str, DType]] = {entry.stored: entry for entry in TABLE.values() if entry.native} | {
    word: TABLE[name] for word, name in _PACKED_NAMES.items() if name in TABLE
}
"""What each word of safetensors is in memory."""

WORD_OF: Final[Mapping[str, str]] = {entry.name: word for word, entry in WORDS.items()}
"""The word for each dtype that has one."""

STEP: Final = 8
"""A packed tensor may be cut at multiples of so many elements: there bytes end too."""


def file_bytes(word: str, num_elements: int) -> int:
    """How many bytes of a file so many elements are."""
    bits = PACKED.get(word, 8 * WORDS[word].itemsize)
    return -(-num_elements * bits // 8)


def unpacked(word: str, data: Bytes1D, num_elements: int) -> Bytes1D:
    """One byte per element."""
    bits = PACKED[word]
    single = np.unpackbits(data, bitorder="little", count=num_elements * bits).reshape(num_elements, bits)
    found: Bytes1D = np.packbits(single, axis=1, bitorder="little").reshape(-1)
    return found


def packed(word: str, data: Bytes1D) -> Bytes1D:
    """The bytes of a file for elements of one byte each."""
    bits = PACKED[word]
    single = np.unpackbits(data.reshape(-1, 1), axis=1, bitorder="little")[:, :bits]
    found: Bytes1D = np.packbits(single.reshape(-1), bitorder="little")
    return found
