"""What the machine itself can do: one memory copy, direct writes, direct reads."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.checkpoint.state import Array

BLOCK = 8 << 20
THREADS = 4
_PAGE = 4096
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15


def rounded(nbytes: int) -> int:
    """A size that direct I/O accepts."""
    return -(-nbytes // _PAGE) * _PAGE


def _fresh(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Memcpy:
    """One warm copy of the state: one thread, into memory that is already faulted in."""

    def __init__(self, sources: Sequence[Array]) -> None:
        self._buffer = np.frombuffer(_fresh(sum(a.nbytes for a in sources) + _PAGE), np.uint8)
        self._buffer[:] = 0
        self._sources = sources  # keeps the addresses below valid
        self._moves: list[tuple[int, int, int]] = []
        target = self._buffer.__array_interface__["data"][0]
        for array in sources:
            self._moves.append((target, array.__array_interface__["data"][0], array.nbytes))
            target += array.nbytes

    def seconds(self) -> float:
        """The time of one copy."""
        memmove = ctypes.memmove
        started = time.perf_counter()
        for target, source, count in self._moves:
            memmove(target, source, count)
        return time.perf_counter() - started

    @property
    def random_data(self) -> memoryview:
        """What was copied last: data for the write probe."""
        return self._buffer.data


def write_probe(path: Path, data: memoryview, nbytes: int) -> float:
    """Seconds to write a new file: fallocate, O_DIRECT from several threads, fsync."""
    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _direct(path.parent))
    try:
        os.posix_fallocate(fd, 0, nbytes)

        def write(begin: int, end: int) -> None:
            while begin < end:
                begin += os.pwrite(fd, data[begin:end], begin)

        _on_threads(write, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - started


def read_probe(path: Path, nbytes: int, *, huge: bool) -> float:
    """Seconds to read a file with O_DIRECT from several threads into memory never touched before."""
    started = time.perf_counter()
    memory = _fresh(nbytes)
    memory.madvise(_MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)
    view = memoryview(memory)
    fd = os.open(path, os.O_RDONLY | _direct(path.parent))
    try:

        def read(begin: int, end: int) -> None:
            while begin < end:
                got = os.preadv(fd, [view[begin:end]], begin)
                if not got:
                    raise OSError("the probe's file is shorter than it was written")
                begin += got

        _on_threads(read, nbytes)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - started
    view.release()
    memory.close()
    return seconds


def _on_threads(work: Callable[[int, int], None], nbytes: int) -> None:
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for begin in range(0, nbytes, BLOCK):
        todo.put(begin)
    failed: list[BaseException] = []

    def loop() -> None:
        try:
            while not failed:
                begin = todo.get_nowait()
                work(begin, min(begin + BLOCK, nbytes))
        except queue.Empty:
            return
        except BaseException as error:  # handed to the caller below
            failed.append(error)

    threads = [threading.Thread(target=loop) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _direct(folder: Path) -> int:
    """O_DIRECT where the file system has it."""
    return os.O_DIRECT if supports_direct(folder) else 0


_known: dict[Path, bool] = {}


def supports_direct(folder: Path) -> bool:
    """Whether files in a folder can be opened for direct I/O; asked once."""
    if folder not in _known:
        path = folder / ".direct"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
            _known[folder] = True
        except OSError:
            _known[folder] = False
        path.unlink(missing_ok=True)
    return _known[folder]
