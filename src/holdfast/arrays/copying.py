"""Copies into memory that is there: past the cache, where the package was built with a C compiler.

Fresh memory is better copied into as usual: the lines that the kernel has just zeroed are in the cache
(measured: a load takes a quarter more CPU time when it writes past it).

These take addresses and look at nothing: who calls them has checked that the memory is there, and keeps it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

LIBRARY: Final = Path(__file__).with_name("_native.so")
"""Made from the C files of this folder when the package is installed (hatch_build.py)."""

Copy = Callable[[int, int, int], object]
"""(target, source, nbytes): addresses of memory that does not overlap. It does not hold the GIL."""
Numbers = npt.NDArray[np.uint64]

DIGEST_BYTES: Final = 16
"""Of the digests that native code makes (xxh3_128)."""
_MANY: Final = ("holdfast_stream_all", "holdfast_copy_all", "holdfast_same_all")


def load(path: Path = LIBRARY) -> ctypes.CDLL | None:
    """What is written in C; None where the package has none of it."""
    try:
        found = ctypes.CDLL(str(path))
        one, many = found.holdfast_stream, [getattr(found, name) for name in _MANY]
        scatter, hashed = found.holdfast_scatter, found.holdfast_copy_hashed
        size, begin, move = found.holdfast_passage_bytes, found.holdfast_passage, found.holdfast_pass
        passed, width = found.holdfast_passed, found.holdfast_width
    except (OSError, AttributeError):  # not built, or built for another machine or from other sources
        return None
    one.argtypes, one.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    for function in many:
        function.argtypes, function.restype = [*[ctypes.c_void_p] * 4, ctypes.c_size_t], ctypes.c_int
    number, address = ctypes.c_uint64, ctypes.c_void_p
    scatter.argtypes = [
        ctypes.c_int, number, number, address, number, address, number, number, address, address,
    ]  # fmt: skip
    scatter.restype = move.restype = ctypes.c_int64
    hashed.argtypes = [*[address] * 5, ctypes.c_size_t, ctypes.c_int, address, address]
    size.restype = ctypes.c_size_t
    begin.argtypes, begin.restype = [address, address, number, number, number], None
    move.argtypes, passed.argtypes = [address, ctypes.c_int, ctypes.c_int], [address]
    width.argtypes = [ctypes.c_int]
    return found


library = load()
_libc: Final = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

copy_bytes: Final[Copy] = ctypes.memmove if library is None else library.holdfast_stream
"""The fastest copy of many bytes that there is here."""


@final
class Batch:
    """Many copies, of which any stretch is made by one call.

    Number i is of `sizes[i]` bytes, from the address `sources[i]` to `target + offsets[i]`.
    """

    def __init__(self, target: int, offsets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        self.target = target
        self.columns = tuple(np.ascontiguousarray(one, np.uint64) for one in (offsets, sources, sizes))
        self._addresses = tuple(address_of(column) for column in self.columns)

    def stream(self, begin: int, end: int) -> None:
        """Copy past the cache."""
        if library is None:
            self.copy(begin, end)
        else:
            library.holdfast_stream_all(*self._arguments(begin, end))

    def copy(self, begin: int, end: int) -> None:
        """Copy, and leave it in the cache for who looks at it next."""
        if library is not None:
            library.holdfast_copy_all(*self._arguments(begin, end))
            return
        for target, source, size in self._rows(begin, end):
            ctypes.memmove(target, source, size)

    def copy_hashed(self, ends: Sequence[int], *, compared: bool) -> list[tuple[bytes, bool]] | None:
        """Copy all; for each group the xxh3_128 of what is at its targets then, and whether both sides are
        the same.

        Those of group i end before number `ends[i]`. Sides are compared only if asked for. None where there
        is no library, or too few bytes for a digest.
        """
        if library is None:
            return None
        bounds, size = np.array(ends, np.uint64), DIGEST_BYTES
        digests, same = np.empty(size * len(ends), np.uint8), np.empty(len(ends), np.uint8)
        before, behind = (address_of(bounds), len(ends)), (address_of(digests), address_of(same))
        if library.holdfast_copy_hashed(self.target, *self._addresses, *before, compared, *behind) < 0:
            return None
        found = digests.tobytes()
        each = (found[at : at + size] for at in range(0, len(found), size))
        return list(zip(each, map(bool, same), strict=True))

    def same(self, begin: int, end: int) -> bool:
        """Whether both sides have the same bytes."""
        if library is not None:
            return bool(library.holdfast_same_all(*self._arguments(begin, end)))
        return all(_libc.memcmp(*row) == 0 for row in self._rows(begin, end))

    def _arguments(self, begin: int, end: int) -> tuple[int, ...]:
        offsets, sources, sizes = self._addresses
        skipped = 8 * begin
        return self.target, offsets + skipped, sources + skipped, sizes + skipped, end - begin

    def _rows(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        offsets, sources, sizes = (column[begin:end].tolist() for column in self.columns)
        return [(self.target + at, *rest) for at, *rest in zip(offsets, sources, sizes, strict=True)]


def address_of(buffer: npt.NDArray[Any]) -> int:
    """Where the first element lies."""
    address: int = buffer.__array_interface__["data"][0]
    return address
