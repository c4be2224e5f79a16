"""Memory for staged state: memfds that are faulted in once and reused for ever.

A slot has no name, so nothing can leak: it is gone when the last process that holds it is. The vault makes
it and passes the descriptor on; if the vault dies, the trainer still holds the bytes and can hand them to
the next one. First-touch page faults, not copying, are what staging would otherwise cost.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, final

from holdfast.arrays.pages import SEALS, mapped, populate, populate_shared
from holdfast.errors import VaultError

PAGE: Final = mmap.PAGESIZE
_CHUNK: Final = 64 << 20

_HELD: Final[list[object]] = []
"""Memory that a device may still write to: better lost than reused."""


@final
class Slot:
    """One stretch of shared memory that can hold a staged part file."""

    def __init__(self, fd: int, size: int, *, fresh: bool = False) -> None:
        self.fd = fd
        self.size = size
        self._fresh = fresh
        self._map, start, nbytes = mapped(fd, max(size, PAGE))
        self._anchor = ctypes.c_char.from_buffer(self._map, start)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self._map)[start : start + nbytes]
        self._farewells: list[Callable[[], bool]] = []
        about = os.fstat(fd)
        self.memory_id = (about.st_dev, about.st_ino)
        """The same for every slot of the same memory, whoever passed the descriptor on."""

    @staticmethod
    def make(size: int) -> Slot:
        """A new slot of at least `size` bytes, not yet faulted in."""
        rounded = max(PAGE, -(-size // PAGE) * PAGE)
        fd = -1
        try:
            fd = os.memfd_create("holdfast-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, rounded)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return Slot(fd, rounded, fresh=True)
        except (OSError, OverflowError, ValueError) as error:
            if fd >= 0:
                os.close(fd)
            raise VaultError(
                f"cannot make an arena slot of {rounded:,} bytes: {error}",
                hint="the host is short of memory; save fewer arrays per process or use fewer slots",
            ) from error

    @staticmethod
    def adopt(fd: int, size: int) -> Slot:
        """A slot that another process made, received as a descriptor."""
        actual = os.fstat(fd).st_size
        if actual < size:
            os.close(fd)
            raise VaultError(f"the slot received has {actual:,} bytes, {size:,} were announced")
        return Slot(fd, size)

    def populate(self, threads: int = 2) -> None:
        """Fault every page in, so that staging never pays for first touch. Releases the GIL."""
        # Pages that another process has made are only mapped: huge or not, they are what it could get.
        fault, self._fresh = populate_shared if self._fresh else populate, False
        starts = range(0, self.size, _CHUNK)
        with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-fault") as pool:
            lengths = (min(_CHUNK, self.size - start) for start in starts)
            for failed in pool.map(fault, (self.address + start for start in starts), lengths):
                if failed:
                    raise VaultError(
                        f"cannot fault in {self.size:,} bytes of arena: {os.strerror(failed)}",
                        hint="the host is short of memory; use fewer slots or a smaller state",
                    )

    def before_unmap(self, act: Callable[[], bool]) -> None:
        """Have `act` called before the memory goes; it stays mapped for good where that says False.

        A device may write to memory that was registered with its driver: what registered it ends that first.
        """
        self._farewells.append(act)

    def close(self) -> None:
        """Release the descriptor and unmap the memory, the latter once nobody looks at it any more."""
        os.close(self.fd)
        for act in self._farewells:
            if not act():
                _HELD.append(self._anchor)
        del self._anchor
        with suppress(BufferError):  # somebody does; the mapping goes with the last view
            self.view.release()
            self._map.close()
