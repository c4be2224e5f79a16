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


def block_hasher(seed: int) -> xxhash.xxh3_128:
    """An incremental `block_digest`: `update(buffer)` as often as needed, then `digest()`."""
    return xxhash.xxh3_128(seed=seed)


def digest(data: Buffer) -> str:
    """The unseeded digest of a small file as 32 hex characters."""
    return xxhash.xxh3_128_hexdigest(data)


class FileHasher:
    """Digests a part file fed in order, in buffers of any size."""

    def __init__(self, save: SaveId, part: int, file: int = 0) -> None:
        self.size = 0
        self._save, self._part, self._file = save, part, file
        self._digests: list[str] = []
        self._hasher = block_hasher(block_seed(save, part, 0, file))

    def update(self, data: Buffer) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            room = BLOCK - self.size % BLOCK
            piece, view = view[:room], view[room:]
            self._hasher.update(piece)
            self.size += len(piece)
            if self.size % BLOCK == 0:
                self._close_block()

    def hexdigests(self) -> str:
        """The digests of all blocks so far, 32 hex characters each, as in `PartFile.blocks`."""
        tail = self._hasher.hexdigest() if self.size % BLOCK else ""
        return "".join(self._digests) + tail

    def _close_block(self) -> None:
        self._digests.append(self._hasher.hexdigest())
        seed = block_seed(self._save, self._part, len(self._digests), self._file)
        self._hasher = block_hasher(seed)


def block_digests(data: Buffer, save: SaveId, part: int, file: int = 0) -> str:
    """The digests of all blocks of a whole part file, as in `PartFile.blocks`."""
    hasher = FileHasher(save, part, file)
    hasher.update(data)
    return hasher.hexdigests()


def block_range(block: int, size: int) -> tuple[int, int]:
    """The byte range [begin, end) of a block in a file of `size` bytes."""
    begin = block * BLOCK
    if not 0 <= begin < size:
        raise UsageError(f"block {block} lies outside a file of {size} bytes")
    return begin, min(begin + BLOCK, size)
