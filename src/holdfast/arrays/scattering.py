"""Bytes of a file brought to where they belong, and hashed on the way, without the interpreter.

Where the package was built without a C compiler there is none of this: who scatters then reads a whole
block, copies by `Move.apply`, and hashes.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterable
from typing import Final, NamedTuple, final

import numpy as np

from holdfast.arrays import copying
from holdfast.arrays.copying import DIGEST_BYTES, address_of
from holdfast.arrays.protocols import Bytes1D
from holdfast.arrays.strided import Move
from holdfast.errors import LayoutError, UsageError

SHORTEST: Final = 241
"""Stretches of fewer bytes are not hashed here: xxHash treats them in other ways."""


class Scattered(NamedTuple):
    """What became of a stretch: how many bytes there were, their digest, the processor time of hashing."""

    nbytes: int
    digest: bytes
    hash_s: float


@final
class Scatter:
    """Copies out of a stretch of a file into memory, any number of them; their offsets are the file's."""

    def __init__(self, copies: Iterable[tuple[Move, Bytes1D]]) -> None:
        """Fails: LayoutError if one leads beyond its target, UsageError for a target of another kind."""
        self._targets: list[Bytes1D] = []
        rows: list[tuple[int, ...]] = []
        for move, target in copies:
            _check_plain(target)
            if not 0 <= move.target <= move.target_span()[1] <= target.size or move.source < 0:
                raise LayoutError(
                    f"{move} does not lie within a target of {target.size:,} bytes",
                    hint="the plan was made for another layout: plan again",
                )
            dims = itertools.chain.from_iterable(move.dims)
            rows.append((move.source, address_of(target) + move.target, move.run, len(move.dims), *dims))
            self._targets.append(target)
        self._num_rows = len(rows)
        self._table = np.fromiter(itertools.chain.from_iterable(rows), np.uint64)

    def read(self, fd: int, offset: int, nbytes: int, room: Bytes1D, seed: int | None) -> Scattered:
        """Scatter the bytes from `offset` on as they are read into `room`, piece by piece.

        `room` and `offset` are such as the descriptor takes. Fewer bytes only at the end of the file; then
        some were copied all the same, and there is no digest; nor is there one without a seed. Fails:
        OSError.
        """
        _check_plain(room)
        if fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if not room.size or offset < 0 or nbytes < 0:
            raise UsageError(f"{nbytes} bytes from {offset} on cannot be read through {room.size} bytes")
        return self._made(fd, offset, nbytes, room, seed)

    def take(self, data: Bytes1D, offset: int, seed: int | None) -> Scattered:
        """Scatter bytes that are there, which are those of the file from `offset` on."""
        return self._made(-1, offset, data.size, data, seed)

    def _made(self, fd: int, offset: int, nbytes: int, room: Bytes1D, seed: int | None) -> Scattered:
        assert copying.library is not None
        digest = ctypes.create_string_buffer(DIGEST_BYTES)
        hash_s = ctypes.c_double()
        done = copying.library.holdfast_scatter(
            fd, offset, nbytes, address_of(room), room.size, address_of(self._table), self._num_rows,
            seed or 0, None if seed is None else digest, ctypes.addressof(hash_s),
        )  # fmt: skip
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        whole = done == nbytes and seed is not None
        return Scattered(done, digest.raw if whole else b"", hash_s.value)


def _check_plain(memory: Bytes1D) -> None:
    if memory.dtype != np.uint8 or not memory.flags.c_contiguous or not memory.flags.writeable:
        raise UsageError(
            "memory that is written to must be a contiguous, writeable uint8 array",
            hint="use array.reshape(-1).view(np.uint8) of one that may be written",
        )


def scatters(nbytes: int) -> bool:
    """Whether stretches of that size are scattered here."""
    return copying.library is not None and nbytes >= SHORTEST
