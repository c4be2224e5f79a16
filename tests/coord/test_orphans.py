"""A coordinator ends without its agent only if it knows that there is none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from holdfast.coord import orphans
from holdfast.coord.orphans import OrphanWatch, is_held

SOON_S = 10.0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_lease_that_cannot_be_opened_may_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "lease"
    assert not is_held(str(path))
    path.touch()
    assert not is_held(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert is_held(str(path))


def test_only_looks_that_found_it_free_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent lives; for longer than the coordinator would wait nothing can be opened."""
    path = tmp_path / "lease"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    ended, looked = threading.Event(), threading.Semaphore(0)
    real = os.open

    def full(name: str, *rest: int) -> int:
        if name != str(path):
            return real(name, *rest)
        looked.release()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "kill", lambda _, number: ended.set() if number == signal.SIGTERM else None)
    monkeypatch.setattr(orphans, "_LOOK_S", 0.001)
    monkeypatch.setattr(os, "open", full)
    watch = OrphanWatch(str(path), 0.005)
    for _ in range(20):
        assert looked.acquire(timeout=SOON_S)
    assert not ended.is_set()
    monkeypatch.setattr(os, "open", real)
    os.close(fd)  # now it is gone
    assert ended.wait(SOON_S)
    watch.close()
