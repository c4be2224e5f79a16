"""What the tests share: eight virtual CPU devices, a checkpoint folder, and children that always end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports jax. Optimising the small programs of the tests costs more than running them.
_XLA = ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *_XLA])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell's background job ignores Ctrl-C, and so would every child of it, for ever: tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from holdfast import faults  # noqa: E402
from tests.checkpoint.children import Children  # noqa: E402


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint folder that does not exist yet."""
    return tmp_path / "ckpt"


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    """Starts child processes; all of them, and whatever they started, are ended afterwards."""
    monkeypatch.delenv(faults.ENV, raising=False)
    started = Children(tmp_path)
    # What the test process itself spawns (a vault) is found by the same mark.
    monkeypatch.setenv(*started.mark)
    try:
        yield started
    finally:
        started.end_all()


@pytest.fixture
def armed() -> Iterator[None]:
    """Turns the fault sites of this process off afterwards."""
    yield
    faults.disarm()
