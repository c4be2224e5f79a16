"""One file of an export, block by block."""

from __future__ import annotations

from typing import final

from holdfast.arrays import Bytes1D
from holdfast.arrays.pages import region
from holdfast.format import BLOCK
from holdfast.storage import PartWriter


@final
class Stream:
    """Blocks of a file, filled from the front. Elements are aligned to themselves: none lies across two."""

    def __init__(self, writer: PartWriter, *, reuse: bool) -> None:
        self._writer = writer
        self._reuse = reuse
        self._block = region(BLOCK)
        self._filled = 0
        self._offset = 0

    @property
    def room(self) -> int:
        """Bytes left in the block; never none."""
        if self._filled == BLOCK:
            self._flush()
        return BLOCK - self._filled

    def space(self, nbytes: int) -> Bytes1D:
        """The next bytes of the file, to be filled."""
        found = self._block[self._filled : self._filled + nbytes]
        self._filled += nbytes
        return found

    def write(self, data: Bytes1D) -> None:
        """Append bytes."""
        while data.size:
            count = min(data.size, self.room)
            self.space(count)[:] = data[:count]
            data = data[count:]

    def _flush(self) -> None:
        self._writer.write(self._block[: self._filled].data, self._offset)
        self._offset += self._filled
        self._filled = 0
        if not self._reuse:  # an object store may still be sending the last one
            self._block = region(BLOCK)

    def close(self) -> None:
        """Write what is left."""
        if self._filled:
            self._flush()
