"""Memory for flat trees: memfds of our own, those that peers lent, and the words that say what is valid.

Nobody writes another's memory. Every bank has a word in the header page of its owner: the *epoch* of what
lies in it, 0 while it is being written. A notice names bank and epoch; whoever reads checks the word after
reading. So a reader that was left behind (its generation is over, the bank is in use again) learns that what
it read is void, and no sum is ever made of it. Stores and loads of a word are single and, on the processors
that this runs on, in the order of the program as far as another process can tell (x86; on ARM the system
calls in between).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.arrays import Bytes1D
from holdfast.arrays.pages import SEALS, mapped, memfd
from holdfast.errors import ReduceError
from holdfast.reduce.layout import Block

HEADER_BYTES: Final = 4096
MAX_BANKS: Final = HEADER_BYTES // 8
_F_SEAL_FUTURE_WRITE: Final = 0x10
_HINT: Final = "reduce fewer or smaller arrays, or run fewer replicas on this node"


@final
class Flat:
    """A flat memory seen block by block, each in its dtype."""

    def __init__(self, memory: Bytes1D, blocks: Sequence[Block]) -> None:
        self.memory = memory
        self.blocks: list[npt.NDArray[Any]] = [memory[one.lo : one.hi].view(one.dtype) for one in blocks]


def private(nbytes: int, blocks: Sequence[Block]) -> Flat:
    """Memory that is not shared; whole pages, of which only those that are used are taken."""
    memory = np.frombuffer(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), mmap.MAP_PRIVATE), np.uint8)
    return Flat(memory, blocks)


@final
class Mirrors:
    """Memory for the sums of members on other nodes; kept, since fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._made: list[Flat] = []
        self._used = 0

    def reset(self) -> None:
        """All of it is free again: nothing is on its way into it any more."""
        self._used = 0

    def take(self, nbytes: int, blocks: Sequence[Block]) -> Flat:
        """One more, for the same layout as all before."""
        if self._used == len(self._made):
            self._made.append(private(nbytes, blocks))
        self._used += 1
        return self._made[self._used - 1]


@final
class Words:
    """The epochs of an owner's banks."""

    def __init__(self, memory: Bytes1D) -> None:
        self._words = memory[:HEADER_BYTES].view(np.uint64)

    def epoch(self, bank: int) -> int:
        return int(self._words[bank])

    def set(self, bank: int, epoch: int) -> None:
        self._words[bank] = epoch

    def drop(self) -> None:
        """Look at the page no more; every bank reads as void."""
        self._words = np.zeros(MAX_BANKS, np.uint64)


@final
class Bank:
    """A flat memory of ours that peers on this node can read."""

    def __init__(self, number: int, nbytes: int, blocks: Sequence[Block], words: Words) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd, memory = _memfd(nbytes)
        self.flat = Flat(memory, blocks)
        self._words = words
        self._next = 0

    @property
    def epoch(self) -> int:
        """Of what lies here now; 0: nothing that may be read."""
        return self._words.epoch(self.number)

    def void(self) -> None:
        """Before it is written: what was read of it and not checked yet is void."""
        self._words.set(self.number, 0)

    def seal(self) -> int:
        """It is whole: a new epoch begins. Not twice for the same contents."""
        if self.epoch == 0:
            self._next += 1
            self._words.set(self.number, self._next)
        return self.epoch

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last view."""
        os.close(self.fd)


@final
class Header:
    """The page of words of this member."""

    def __init__(self) -> None:
        self.fd, memory = _memfd(HEADER_BYTES)
        self.words = Words(memory)

    def close(self) -> None:
        os.close(self.fd)
        self.words.drop()


def _memfd(nbytes: int) -> tuple[int, Bytes1D]:
    """A memfd whose pages are there (running out of memory later would be a signal), and its mapping."""
    there = available()
    if there is not None and nbytes > there:
        raise ReduceError(
            f"a buffer of {nbytes:,} bytes does not fit: {there:,} bytes of memory are available",
            hint=_HINT,
        )
    try:
        fd, mapping = memfd("holdfast-reduce", max(nbytes, mmap.PAGESIZE))
        # A peer that maps it must not be able to write it.
        with contextlib.suppress(OSError):  # a kernel before 5.1
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except (OSError, ValueError) as error:
        raise ReduceError(
            f"cannot take {nbytes:,} bytes of memory for a buffer: {error}", hint=_HINT
        ) from error
    return fd, mapping.array()


def adopted(fd: int, nbytes: int) -> Bytes1D:
    """The memory behind a descriptor that a peer lent, to read. Takes the descriptor. Fails: ReduceError."""
    try:
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size:
            raise ReduceError(f"a buffer of {nbytes:,} bytes was announced, it has {size:,}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ReduceError("the buffer could be made smaller while it is read; it must be sealed")
        return mapped(fd, size, writable=False).array()
    except (OSError, ValueError) as error:
        raise ReduceError(f"what was lent is no buffer: {error}") from error
    finally:
        os.close(fd)


def available() -> int | None:
    """The bytes that can be taken without swapping, as the kernel estimates them."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return None
