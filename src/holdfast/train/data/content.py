"""A digest of a token file that can be had at every start: of all of a small one, of samples of a large one.

What it is for: a set that was made again, with other text or another tokenizer, and has the same lengths by
chance or by padding. Such a one differs everywhere, so any sample shows it. A change of a few bytes in a
large file lies between the samples more likely than not: `holdfast data show --verify` reads all of it.
"""

from __future__ import annotations

import os
from typing import Final

import xxhash

WHOLE: Final = 32 << 20
"""Files of up to so many bytes are read whole."""
BLOCK: Final = 64 << 10
NUM_BLOCKS: Final = 32
"""Of larger ones: so many blocks, and the first and the last one."""


def content_digest(fd: int) -> str:
    """The digest of the file's size and content. Reads 32 MiB at most. Fails: OSError."""
    size = os.fstat(fd).st_size
    running = xxhash.xxh3_128(size.to_bytes(8, "little"))
    for start, stop in spans(size):
        for at in range(start, stop, 1 << 20):
            running.update(os.pread(fd, min(1 << 20, stop - at), at))
    return running.hexdigest()


def spans(size: int) -> list[tuple[int, int]]:
    """Which bytes of a file of this size are read: a first and an end for each stretch, in order."""
    if size <= WHOLE:
        return [(0, size)]
    found = [(0, BLOCK)]
    stride = (size - 2 * BLOCK) // NUM_BLOCKS
    for number in range(NUM_BLOCKS):
        # Somewhere in its part of the file: regular distances could meet what regularly stays the same.
        jitter = xxhash.xxh3_64_intdigest(f"{size} {number}".encode()) % (stride - BLOCK + 1)
        start = BLOCK + number * stride + jitter
        found.append((start, start + BLOCK))
    return [*found, (size - BLOCK, size)]
