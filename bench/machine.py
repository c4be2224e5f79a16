"""The machine under a benchmark: what it is, how busy it is, and how to make it forget."""

from __future__ import annotations

import ctypes
import datetime
import gc
import mmap
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from bench.report import Refused

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_libc = ctypes.CDLL(None)
_PASS_S = 3.0
"""Longer than a hypervisor waits before it takes more free pages."""


def versions(*distributions: str) -> dict[str, str]:
    """Versions of Python, the kernel and the distributions that are installed."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def description(folder: Path) -> str:
    """Cores, memory, disk, load and date, in one line."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (
        f"{os.cpu_count()} cores ({_cpu_model()}), {memory_bytes('MemTotal') / 2**30:.0f} GiB memory, "
        f"{_disk(folder)}, load average {os.getloadavg()[0]:.1f} at the start, {today}"
    )


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _disk(folder: Path) -> str:
    """The file system that holds a folder, with its device and the options that matter here."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            head, _, tail = line.partition(" - ")
            if head.split()[2] == number:
                kind, source, options = tail.split()[:3]
                discard = ", mounted with discard" if "discard" in options.split(",") else ""
                return f"{kind} on {os.path.basename(source)}{discard}"
    return "unknown disk"


def memory_bytes(field: str) -> int:
    """A field of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise KeyError(field)


def require_room(folder: Path, *, disk: int, memory: int) -> None:
    """Fails: Refused, before anything is written, if the disk or the memory is too small."""
    free = shutil.disk_usage(folder).free
    if free < disk:
        raise Refused(
            f"{folder} has {free / 2**30:.1f} GiB free, the benchmark needs {disk / 2**30:.1f} GiB; "
            "give another --dir or a smaller --size-gib"
        )
    available = memory_bytes("MemAvailable")
    if available < memory:
        raise Refused(
            f"{available / 2**30:.1f} GiB of memory are available, the benchmark needs "
            f"{memory / 2**30:.1f} GiB; give a smaller --size-gib"
        )


def forget_memory(ready_bytes: int) -> None:
    """Return freed memory to the system, so that the next subject starts with fresh pages.

    A hypervisor takes pages back that its guest leaves free (free page reporting); their next first touch was
    seen to take 20 times as long. So that no subject pays for that by chance, `ready_bytes` of free memory
    are touched and freed here. To a process they are as fresh as any: the kernel zeroes and maps them. Call
    it last: they are taken again, some every two seconds. Where the kernel counts how often, that is awaited
    first, so that a subject has what is left of the two seconds undisturbed.
    """
    gc.collect()
    with suppress(AttributeError):  # not glibc
        _libc.malloc_trim(0)
    if ready_bytes:
        _await_pass()
    with mmap.mmap(
        -1, max(ready_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as memory:
        for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            with suppress(OSError):  # a kernel without it
                memory.madvise(advice)


def _await_pass() -> None:
    """Wait until the hypervisor has taken some of what is free, or has nothing more to take."""
    ends, before = time.monotonic() + _PASS_S, _passes()
    while before is not None and _passes() == before and time.monotonic() < ends:
        time.sleep(0.005)


def _passes() -> int | None:
    try:
        return int(Path("/sys/module/page_reporting/parameters/passes").read_text())
    except OSError:  # most kernels do not tell
        return None


CAN_DROP = os.access("/proc/sys/vm/drop_caches", os.W_OK)
HOW_CACHES_ARE_DROPPED = (
    "sync and /proc/sys/vm/drop_caches" if CAN_DROP else "sync and posix_fadvise(DONTNEED) on every file"
)


def forget_files(folder: Path, *, gently: bool = False) -> None:
    """Write everything back and drop the page cache: all of it if allowed, else that of `folder`.

    `gently` leaves the rest of the machine its cache: a test suite must not slow its neighbours down.
    """
    os.sync()
    if CAN_DROP and not gently:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def discard(path: Path) -> None:
    """Remove a file or folder and let the file system finish with it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    os.sync()


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder of our own that is gone afterwards, however that comes about."""
    made = [path for path in (parent, *parent.parents) if not path.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-", dir=parent.resolve()))
    try:
        yield folder
    finally:
        discard(folder)
        for path in made:
            path.rmdir()
