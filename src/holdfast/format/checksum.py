"""Checksums of part files (by 8 MiB block, seeded) and of small files (whole, unseeded).

xxh3 finds damage; it does not stop someone who wants to deceive. A block's seed is made of the
save, part, file and block number, so that bytes from another save or place fail even where the
digests beside them were copied too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.format.ids import SaveId

Buffer = bytes | bytearray | memoryview

BLOCK: Final = 8 << 20
"""Bytes of a part file under one checksum."""

DIGEST_BYTES: Final = 16
DIGEST_CHARS: Final = 32


def num_blocks(size: int) -> int:
    """The number of blocks of a file of `size` bytes; an empty file has none."""
    return -(-size // BLOCK)


def block_seed(save: SaveId, part: int, block: int, file: int = 0) -> int:
    """The 64-bit seed of block number `block` of file number `file` of a part."""
    # A save id cannot contain "/" besides its own two, so this text is unambiguous.
    return xxhash.xxh3_64_intdigest(f"holdfast/1/{save}/{part}/{file}/{block}".encode())


def block_digest(data: Buffer, seed: int) -> bytes:
    """The 16-byte digest of one block's bytes; releases the GIL while hashing."""
    return xxhash.xxh3_128_digest(data, seed=seed)


def digest(data: Buffer) -> str:
    """The unseeded digest of a small file as 32 hex characters."""
    return xxhash.xxh3_128_hexdigest(data)


def block_range(block: int, size: int) -> tuple[int, int]:
    """The byte range [begin, end) of a block in a file of `size` bytes."""
    begin = block * BLOCK
    if not 0 <= begin < size:
        raise UsageError(f"block {block} lies outside a file of {size} bytes")
    return begin, min(begin + BLOCK, size)
