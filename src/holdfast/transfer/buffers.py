"""Memory that transfers arrive in: flat regions, used in turn, never while an array made from one is alive.

A region is a memfd, so the same memory serves every transport: the socket writes into it, or a peer on the
same node to whom the descriptor was lent. It has no name, so nothing can leak.

The arrays that are handed out are views of a region, without a copy. So that they never change under their
owner, a region is free again only when the last of them is gone: each run makes a fresh root array, of which
they are all views, and its end is what frees the region. numpy views and JAX arrays that alias host memory
both keep the root alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from holdfast.arrays import Bytes1D
from holdfast.arrays.copying import address_of
from holdfast.arrays.pages import SEALS, Mapped, mapped, memfd, populate
from holdfast.errors import TransferError

ALIGN: Final = 64
"""What placing an array without a copy asks for."""
_PAGE: Final = mmap.PAGESIZE
_HINT: Final = "drop trees of earlier versions, or transfer less in one plan"


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


@final
class BufferSet:
    """A region that holds all that one run of a plan brings."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        self.fd, self._mapped = _memfd(self.nbytes)
        self.memory = self._mapped.array()
        self.busy = False
        self.in_run = False
        self.pinned: list[Callable[[], None]] = []
        """What undoes its being pinned, for each framework that pinned it."""

    def root(self) -> Bytes1D:
        """A fresh array over the region; when it and all its views are gone, the region is free."""
        root = self._mapped.array()
        # Runs in whatever thread drops the last view, perhaps inside a lock: it only sets a flag.
        weakref.finalize(root, setattr, self, "busy", False).atexit = False
        return root

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last view."""
        for undo in self.pinned:
            undo()
        os.close(self.fd)


def _memfd(nbytes: int) -> tuple[int, Mapped]:
    """Memory for a buffer, and its descriptor. Fails: TransferError."""
    available = _available()
    if available is not None and nbytes > available:
        raise TransferError(
            f"a buffer of {nbytes:,} bytes does not fit: {available:,} bytes of memory are available",
            hint=_HINT,
        )
    try:
        return memfd("holdfast-transfer", nbytes)
    except (OSError, ValueError) as error:
        raise TransferError(
            f"cannot take {nbytes:,} bytes of memory for a buffer: {error}", hint=_HINT
        ) from error


def _available() -> int | None:
    """The bytes that can be taken without swapping, as the kernel estimates them."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def adopted(fd: int, nbytes: int) -> Bytes1D:
    """The memory behind a descriptor that a target lent. Takes the descriptor. Fails: TransferError."""
    try:
        _check_lent(fd, nbytes)
        memory = mapped(fd, os.fstat(fd).st_size).array()
        if failed := populate(address_of(memory), memory.size):
            raise OSError(failed, os.strerror(failed))
    except (OSError, ValueError) as error:
        raise TransferError(f"what was lent is no buffer: {error}") from error
    else:
        return memory
    finally:
        os.close(fd)


def is_sealed(fd: int) -> bool:
    """Whether nobody can make this memfd smaller, which would kill who reads it. Fails: OSError."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS


def lendable(fd: int) -> int:
    """A descriptor of the same memory for reading, so that no mistake of a reader writes it.

    It keeps nobody of the same user from opening it again for writing. Fails: OSError.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def borrowed(fd: int, nbytes: int) -> Bytes1D:
    """The memory behind a descriptor that a source lent, for reading. Takes it. Fails: TransferError."""
    try:
        _check_lent(fd, nbytes)
        return mapped(fd, nbytes, writable=False).array()
    except (OSError, ValueError) as error:
        raise TransferError(f"what was lent cannot be read: {error}") from error
    finally:
        os.close(fd)


def _check_lent(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if not 0 < nbytes <= size:
        raise TransferError(f"a buffer of {nbytes:,} bytes was announced, it has {size:,}")
    if not is_sealed(fd):
        raise TransferError("the buffer could be made smaller while it is used; it must be sealed")


Pin = Callable[[Bytes1D], Iterable[Callable[[], None]]]
"""Pins memory for the frameworks that make arrays of it; returns what undoes that."""


@final
class BufferSets:
    """The buffers of one plan. Kept between runs: two, one of which has the current version."""

    def __init__(self, nbytes: int, keep: int = 2, pin: Pin = lambda _memory: ()) -> None:
        self._nbytes = nbytes
        self._keep = keep
        self._pin = pin
        self._lock = threading.Lock()
        self._sets: list[BufferSet] = []
        self._made = 0
        self._closed = False

    @property
    def made(self) -> int:
        """How many were allocated so far."""
        return self._made

    def take(self) -> tuple[BufferSet, list[int]]:
        """A buffer that nobody uses, and the numbers of those that were given up. Fails: TransferError."""
        with self._lock:
            if self._closed:
                raise TransferError("the plan is closed")
            free = [one for one in self._sets if not one.busy]
            surplus = free[1:] if len(self._sets) > self._keep else []
            gone = [self._drop(one) for one in surplus[: len(self._sets) - self._keep]]
            if free:
                free[0].busy = free[0].in_run = True
                return free[0], gone
            fresh = BufferSet(self._made, self._nbytes)
            try:
                fresh.pinned += self._pin(fresh.memory)
            except BaseException:
                fresh.close()
                raise
            fresh.busy = fresh.in_run = True
            self._made += 1
            self._sets.append(fresh)
            return fresh, gone

    def give_back(self, one: BufferSet) -> None:
        """Nothing was handed out of it, and nobody writes it any more."""
        one.busy = False
        self._let_go(one)

    @contextlib.contextmanager
    def handed_out(self, one: BufferSet) -> Iterator[Bytes1D]:
        """The root of what is made of it; the buffer is free when the last view of that is gone.

        What is made must have arrived where it goes by the end of the block.
        """
        try:
            yield one.root()
        except BaseException:
            # Some of it may be on its way to a device: the memory stays pinned for good.
            one.pinned.clear()
            raise
        finally:
            self._let_go(one)

    def discard(self, one: BufferSet) -> None:
        """Somebody may still write it: it is never used again."""
        with self._lock:
            if one in self._sets:
                self._drop(one)

    def _let_go(self, one: BufferSet) -> None:
        """Its run needs the descriptor no more."""
        one.in_run = False
        # Without the lock, which an allocation holds for long: `close` sets the one flag before it looks at
        # the other, we do it the other way round, so that one of us sees both.
        if self._closed:
            self.discard(one)

    def _drop(self, one: BufferSet) -> int:
        self._sets.remove(one)
        one.close()
        return one.number

    def close(self) -> None:
        """Give all up; arrays that were handed out stay valid.

        The descriptors of runs under way stay until these let go of them: one that is closed while it is lent
        to a peer costs the connection, or lends whatever has the number then.
        """
        with self._lock:
            self._closed = True
            for one in list(self._sets):
                if not one.in_run:
                    self._drop(one)
